"""What a plug-in stands on in somebody else's package, and which of it the installed version lacks.

A version number says who tested what; whether a plug-in runs is decided by the functions it calls, by what
happens inside those it overrides, and by the settings it reads. A plug-in keeps these in tables
(`trl_seam`, `verl.seam`); here they are asked of what is installed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tether.errors import MissingDependencyError, warn

#: Functions that are called or overridden, as "module:name", and their parameters. A last "..." lets others
#: follow.
Signatures = Mapping[str, list[str]]
#: What happens inside functions: what it is, where, and lines that say so, spaces apart.
Sources = Iterable[tuple[str, str, list[str]]]
#: Fields that are read from configurations.
Fields = Mapping[str, set[str]]


@dataclass(frozen=True)
class Tested:
    """The versions of a package between which a plug-in is tested."""

    __test__ = False  # for pytest: no test, whatever the name begins with

    package: str
    oldest: str
    newest: str

    def covers(self, version: str) -> bool:
        """Whether it lies between them.

        Example:
            >>> tested = Tested("trl", "1.14.0", "1.16.0")
            >>> [tested.covers(version) for version in ("1.9.2", "1.15.0", "1.16.0", "1.16.1")]
            [False, True, True, False]
        """
        from packaging.version import InvalidVersion, Version

        try:
            return Version(self.oldest) <= Version(version) <= Version(self.newest)
        except InvalidVersion:  # a build of one's own, whose name says nothing
            return False

    def __str__(self) -> str:
        more = f" to {self.newest}" if self.newest != self.oldest else ""
        return f"{self.package} {self.oldest}{more}"


def require(plugin: str, tested: Tested, version: str, troubles: list[str]) -> None:
    """Refuse a version in which something moved; warn of one nobody tested in which nothing did.

    Raises:
        MissingDependencyError: with what moved, and the command that installs a tested version.

    Example:
        >>> require("a plug-in", Tested("trl", "1.14.0", "1.16.0"), "1.15.0", [])
    """
    known = f"{plugin} is tested with {tested}, and this is {version}"
    if troubles:
        raise MissingDependencyError(
            f"{known}. It differs where the plug-in stands on it:\n  - " + "\n  - ".join(troubles) + "\n"
            f"Install a tested one with: pip install '{tested.package}=={tested.newest}'"
        )
    if not tested.covers(version):
        warn(f"{known}. Everything the plug-in stands on is where it was, but nobody has trained with it.")


def moved(signatures: Signatures, sources: Sources, fields: Fields) -> list[str]:
    """What the installed package does not have, or does otherwise."""
    return [*_signatures(signatures), *_sources(sources), *_fields(fields)]


def find(place: str) -> Any:
    """The object at "module:name", or None.

    Example:
        >>> find("torch:Tensor.add") is not None, find("torch:Tensor.never"), find("nowhere:at_all")
        (True, None, None)
    """
    module, _, path = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        return functools.reduce(getattr, path.split("."), found)
    except (ImportError, AttributeError):
        return None


def _signatures(signatures: Signatures) -> list[str]:
    troubles = []
    for place, expected in signatures.items():
        function = find(place)
        found = None if function is None else list(inspect.signature(function).parameters)
        if found is None or not _fits(found, expected):
            troubles.append(f"{place} takes {_listed(expected)}; found {_listed(found)}")
    return troubles


def _sources(sources: Sources) -> list[str]:
    troubles = []
    for fact, place, lines in sources:
        source = _source(find(place))
        if source is None:
            troubles.append(
                f"{place}: {fact}; whether it does cannot be read: it was replaced or has no file"
            )
            continue
        gone = [line for line in lines if _one_line(line) not in source]
        if gone:
            troubles.append(f"{place}: {fact}; gone: {'; '.join(gone)}")
    return troubles


def _source(function: Any) -> str | None:
    """What a function does, in one line; empty if there is none, None if it was made without a file."""
    try:
        return "" if function is None else _one_line(inspect.getsource(function))
    except OSError:
        return None


def _fields(fields: Fields) -> list[str]:
    troubles = []
    for place, expected in fields.items():
        missing = expected - set(getattr(find(place), "__dataclass_fields__", ()))
        if missing:
            troubles.append(f"{place} has no field {', '.join(sorted(missing))}")
    return troubles


def _fits(found: list[str], expected: list[str]) -> bool:
    if expected[-1:] == ["..."]:
        return found[: len(expected) - 1] == expected[:-1]
    return found == expected


def _listed(names: list[str] | None) -> str:
    return "nothing of that name" if names is None else f"({', '.join(names)})"


def _one_line(text: str) -> str:
    return " ".join(text.split())
