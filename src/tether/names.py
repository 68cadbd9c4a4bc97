"""Names of losses, algorithms, presets and environments: built in, or your own as "package.module:name"."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tether.errors import ConfigError, did_you_mean

_MOST_NAMED = 40
"""Most known names in a message, those nearest to what was given: of robots there are twice as many."""


def look_up(name: str, table: Mapping[str, Any], what: str) -> Any:
    """The object a name stands for: the table's, or what "package.module:name" imports.

    Args:
        name: an entry of the table, or where to import from.
        table: name -> the object itself, or "package.module:name".
        what: "algorithm", "preset", ...: for messages.

    Raises:
        ConfigError: an unknown name, a module that cannot be imported or lacks the name.

    >>> look_up("half", {"half": 0.5}, "fraction")
    0.5
    >>> look_up("math:pi", {}, "number") > 3
    True
    """
    found = table.get(name, name)
    if name not in table and not re.fullmatch(r"[\w.]+:\w+", name):
        raise unknown(name, table, what)
    if not isinstance(found, str):
        return found
    module_name, _, attribute = found.partition(":")
    module = import_module(module_name, name)
    if not hasattr(module, attribute):
        raise ConfigError(
            f"{name!r}: {module_name} has no {attribute!r}.{did_you_mean(attribute, dir(module))}"
        )
    return getattr(module, attribute)


def import_module(module: str, name: str) -> ModuleType:
    """The module that `name`, "package.module:name", begins with; of a script that is running, itself.

    Raises:
        ConfigError: it is not installed, or imports something that is not.
    """
    main = sys.modules["__main__"]
    if Path(getattr(main, "__file__", None) or "").stem == module:
        return main  # imported once more, its classes would be others
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name!r}: the module {module!r} cannot be imported ({error}). Is it installed, or its folder "
            "on PYTHONPATH?"
        ) from error


def unknown(name: str, known: Iterable[str], what: str) -> ConfigError:
    """The error for a name that is neither known nor imported.

    >>> print(unknown("half", ["halve", "third"], "fraction"))
    Unknown fraction 'half'. Did you mean 'halve'? Known: halve, third. Your own: 'package.module:name'.
    """
    known = sorted(known)
    nearest = sorted(difflib.get_close_matches(name, known, n=_MOST_NAMED, cutoff=0.0))
    more = f" and {len(known) - len(nearest)} more" if len(known) > len(nearest) else ""
    return ConfigError(
        f"Unknown {what} {name!r}.{did_you_mean(name, known)} Known: {', '.join(nearest)}{more}. "
        "Your own: 'package.module:name'."
    )
