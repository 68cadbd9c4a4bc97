"""Settings in YAML files, read as if they had been typed as options.

A file goes through the same parser as the command line, so a misspelt key, a wrong type or a value out
of range gets the same message in both, and an option typed besides the file overrides it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tether.errors import ConfigError, MissingDependencyError
from tether.experiments.files import atomic_write_text

# As the parser tells an option from a value: -5, or a dash and a space, begins a value.
_OPTION = re.compile(r"-+[A-Za-z]")

OptionValue = int | float | bool | str
"""The values of free-form options, such as a task's."""


def options_from_file(path: str | Path) -> list[str]:
    """The options a YAML file of nested settings stands for.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w+", suffix=".yaml") as file:
    ...     _ = file.write("seeds: [0, 1]\\ntrain: {steps: 5, resume: false}\\n"); file.flush()
    ...     options_from_file(file.name)
    ['--seeds', '0', '1', '--train.steps', '5', '--train.no-resume']
    """
    settings = load_yaml(Path(path))
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"The settings file {path} must map option names to values, as in 'steps: 100'; it holds "
            f"{type(settings).__name__}."
        )
    return list(_options(settings, ""))


def merged_mappings(arguments: Sequence[str]) -> list[str]:
    """Arguments with each free-form mapping (an option --...-options) given once, with all of its keys.

    The last value of a key counts; without any key after it the option takes back those before.

    >>> merged_mappings(["--a-options", "x", "1", "y", "2", "--steps", "8", "--a_options", "x", "3"])
    ['--steps', '8', '--a-options', 'x', '3', 'y', '2']
    """
    others: list[str] = []
    mappings: dict[str, dict[str, str]] = {}
    for option, *values in _grouped(arguments):
        flag, equals, first = option.partition("=")
        if not flag.endswith(("-options", "_options")):
            others += [option, *values]
            continue
        values = [first, *values] if equals else values
        if len(values) % 2:
            return list(arguments)  # which the parser refuses
        mapping = mappings.setdefault(flag.replace("_", "-"), {})
        if not values:
            mapping.clear()
        mapping |= zip(values[::2], values[1::2], strict=True)
    return others + [word for flag, mapping in mappings.items() for word in (flag, *chain(*mapping.items()))]


def read_option(word: str) -> OptionValue:
    """The number or truth that is written so, or else the word itself.

    >>> [read_option(word) for word in ("8", "0.1", "True", "1e5", "007", "2024_01_15", "data")]
    [8, 0.1, True, '1e5', '007', '2024_01_15', 'data']
    """
    for kind in (int, float):
        try:
            number = kind(word)
        except ValueError:
            continue
        if str(number) == word:
            return number
    return {"True": True, "False": False}.get(word, word)


def as_truth(value: Any) -> Any:
    """A truth for "true" and "false" in whatever case, as they are typed; other values as they are.

    >>> as_truth("false"), as_truth("FALSE"), as_truth("no"), as_truth(0)
    (False, False, 'no', 0)
    """
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _grouped(arguments: Sequence[str]) -> list[list[str]]:
    """Each option with its values."""
    groups: list[list[str]] = []
    for word in arguments:
        if not groups or _OPTION.match(word):
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def write_settings(path: str | Path, config: Any) -> Path:
    """Write a config dataclass as a YAML file that `options_from_file` turns back into it."""
    return atomic_write_text(path, yaml_text(_plain(config)))


def yaml_text(value: object) -> str:
    """Nested settings as YAML, in their own order."""
    yaml = _yaml()

    class Dumper(yaml.SafeDumper):  # type: ignore[name-defined]
        def ignore_aliases(self, data: object) -> bool:
            """What occurs twice is written twice."""
            return True

    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, width=110))


def load_yaml(path: Path) -> Any:
    """The content of a YAML file."""
    yaml = _yaml()
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_loader(yaml))
    except OSError as error:
        raise ConfigError(f"The settings file {path} cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: other bytes, or a date that does not exist
        raise ConfigError(f"The settings file {path} is not valid YAML in UTF-8: {error}") from error


def _loader(yaml: Any) -> Any:
    """YAML's, which refuses a key that a mapping has twice; by itself the last value would silently count."""

    # libyaml, where it was built in, reads what takes seconds in a tenth of that.
    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            known: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in known:
                    found = f"{key.value!r} is there twice"
                    raise yaml.constructor.ConstructorError(None, None, found, key.start_mark)
                known.add(str(key.value))
            return super().construct_mapping(node, deep)

    return Loader


def _options(settings: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in settings.items():
        name = str(key).replace("_", "-")
        if isinstance(value, Mapping | None) and name.endswith("-options"):
            # A free-form mapping is one option with keys and values in turn, of which null is none.
            yield f"--{prefix}{name}"
            for inner, setting in (value or {}).items():
                if setting is not None:
                    yield from (str(inner), str(setting))
        elif isinstance(value, Mapping):
            yield from _options(value, f"{prefix}{name}.")
        elif isinstance(value, bool):
            yield f"--{prefix}{name}" if value else f"--{prefix}no-{name}"
        elif isinstance(value, list):
            yield f"--{prefix}{name}"
            yield from map(str, value)
        elif str(value).startswith("-"):
            yield f"--{prefix}{name}={value}"  # else the parser would take the value for an option
        else:
            yield from (f"--{prefix}{name}", str(value))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    # YAML's null would come back as the word "null", its infinity as ".inf".
    return str(value) if value is None or isinstance(value, float) else value


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise MissingDependencyError("Settings files need PyYAML: pip install 'tether-rl[cli]'.") from error
    return yaml
