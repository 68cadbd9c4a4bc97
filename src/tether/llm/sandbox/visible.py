"""Which of the host's files a program sees: the interpreter and what it needs, nothing that was installed."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_LIBRARIES = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64")
_PACKAGES = ("site-packages", "dist-packages")
_TETHER = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class Visible:
    """Folders and files of the host, as absolute paths, in the order in which they are shown and hidden."""

    readable: list[str]
    """Shown read-only; none lies in another."""
    hidden: list[str]
    """Folders among those that are shown empty: where packages are installed."""
    added: list[str]
    """Shown read-only over all that, because the sandbox was told to."""


def visible(added: Sequence[str | Path] = ()) -> Visible:
    """What programs see, given what the sandbox was told to show besides."""
    readable = _default_readable()
    hidden = _hidden()
    wanted = without_nested(os.path.realpath(path) for path in added)
    return Visible(
        readable=list(readable),
        hidden=list(hidden),
        added=[path for path in wanted if not _within(path, readable) or _within(path, hidden)],
    )


@functools.cache
def interpreter() -> str:
    """The interpreter underneath any virtual environment, as a real path."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def without_nested(paths: Iterable[str]) -> list[str]:
    """Drop paths that lie in another one, keeping links, which are made again rather than mounted.

    >>> without_nested(["/usr/lib/python3", "/usr/lib", "/opt/x"])
    ['/opt/x', '/usr/lib']
    """
    kept: list[str] = []
    for path in sorted(set(paths)):
        if not _within(path, kept):
            kept.append(path)
    return kept


@functools.cache
def _default_readable() -> tuple[str, ...]:
    """The interpreter, its standard library, and the folders of shared libraries."""
    wanted = ["/etc/ld.so.cache", interpreter(), *map(os.path.realpath, _standard_library())]
    for folder in _LIBRARIES:
        wanted += _of_this_architecture(folder)
    if sys.base_prefix != "/usr":
        wanted.append(os.path.realpath(f"{sys.base_prefix}/lib"))
    if interpreter().startswith("/nix/store/"):
        asked = ["nix-store", "--query", "--requisites", interpreter()]
        wanted += subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    return tuple(without_nested(path for path in wanted if os.path.lexists(path)))


def _standard_library() -> list[str]:
    base = {"installed_base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    return [sysconfig.get_path("stdlib", vars=base), sysconfig.get_path("platstdlib", vars=base)]


def _of_this_architecture(folder: str) -> list[str]:
    """Of a folder of libraries, the part with shared ones, where the distribution keeps them apart."""
    own = f"{folder}/{sysconfig.get_config_var('MULTIARCH')}"
    if os.path.islink(folder) or not os.path.isdir(own):
        return [folder]
    return [own, f"{folder}/locale"]


@functools.cache
def _hidden() -> tuple[str, ...]:
    """Folders of packages in what is readable: those so named, and those that this process imports from."""
    readable = _default_readable()
    found = {os.path.realpath(path) for root in readable for path in _folders_of_packages(root)}
    library = [os.path.realpath(path) for path in _standard_library()]
    for entry in {*map(os.path.realpath, filter(None, sys.path)), _TETHER}:
        of_library = entry in library or os.path.basename(entry) == "lib-dynload"
        if os.path.isdir(entry) and not of_library and not any(_within(path, [entry]) for path in library):
            found.add(entry)
    return tuple(without_nested(path for path in found if _within(path, readable)))


def _folders_of_packages(folder: str) -> Iterator[str]:
    if os.path.islink(folder) or not os.path.isdir(folder):
        return
    try:
        entries = list(os.scandir(folder))
    except PermissionError:  # closed to the program as well, which has no more rights
        return
    for entry in entries:
        if entry.name in _PACKAGES:
            yield entry.path
        elif entry.is_dir(follow_symlinks=False):
            yield from _folders_of_packages(entry.path)


def _within(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
