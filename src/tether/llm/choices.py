"""A setting that is one of several things, each with options of its own: by name, typed, checked.

`method` and `estimator` of a training run are such settings. In Python they are objects
(``TROLL(kl_bound=0.1)``) or names, in YAML a name or a mapping (``{name: dppo, divergence: top-k-kl}``), on
the command line ``--method dppo --method.divergence top-k-kl``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Annotated, Any, TypeVar

from typing_extensions import Doc

from tether.errors import ConfigError
from tether.signatures import Option, check_known


@dataclass(frozen=True)
class Choice:
    """One of several things, with its options as further fields."""

    name: str = field(default="", init=False)
    """Which; without .name for short."""

    def options(self) -> dict[str, Any]:
        """The options, without the name."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.init}

    def changed(self) -> dict[str, Any]:
        """The options that are not at their defaults.

        >>> from tether.llm.methods import Clip
        >>> Clip(clip_high=0.28).changed()
        {'clip_high': 0.28}
        """
        defaults = {one.name: one.default for one in fields(self)}
        return {name: value for name, value in self.options().items() if value != defaults[name]}


Kind = TypeVar("Kind", bound=Choice)


def option_names(kind: type[Choice]) -> tuple[str, ...]:
    """The names of a kind's options."""
    return tuple(one.name for one in fields(kind) if one.init)


def kind_of(name: str, bases: tuple[type[Any], ...], options: Iterable[Option] = ()) -> Any:
    """A subclass of `Choice` with a name and, besides its bases', these options."""
    declared = [(o.name, Annotated[o.type, Doc(o.help)], field(default=o.default)) for o in options]
    own = ("name", str, field(default=name, init=False))
    return make_dataclass(name, [own, *declared], bases=bases, frozen=True)


def chosen(value: Kind | str | Mapping[str, Any], find: Callable[[str], type[Kind]]) -> Kind:
    """What a name, a mapping with the name and options, or an object stands for.

    Raises:
        ConfigError: an unknown name or option, or a value out of range.

    >>> from tether.llm.methods import find_method
    >>> chosen({"name": "troll", "kl_bound": 0.1}, find_method).changed()
    {'kl_bound': 0.1}
    """
    if isinstance(value, Choice):
        return value
    options: dict[str, Any] = {"name": value} if isinstance(value, str) else dict(value)
    name = str(options.pop("name"))
    kind = find(name)
    check_known(name, options, option_names(kind))
    return kind(**options)


def refuse_former(arguments: Sequence[str], former: Mapping[str, str], prefix: str = "") -> None:
    """Say what an option is called now, where it is given by its former name.

    Raises:
        ConfigError: with both names.

    >>> refuse_former(["--kl-bound", "0.1"], {"kl_bound": "method.kl_bound"})
    Traceback (most recent call last):
    ...
    tether.errors.ConfigError: --kl-bound is --method.kl-bound now.
    """
    for word in arguments:
        flag = word.partition("=")[0]
        now = former.get(flag.removeprefix(f"--{prefix}").replace("-", "_"))
        if now is not None and flag.startswith(f"--{prefix}"):
            raise ConfigError(f"{flag} is --{prefix}{now.replace('_', '-')} now.")


def split_choices(
    arguments: Sequence[str], settings: Collection[str], prefix: str = ""
) -> tuple[dict[str, str], list[str]]:
    """The names chosen for some settings on a command line, and the arguments without them.

    The last name counts; options typed before it belonged to another and go with that.

    >>> typed = ["--method", "clip", "--method.clip-low", "0.1", "--method=dppo", "--steps", "8"]
    >>> split_choices(typed, ["method"])
    ({'method': 'dppo'}, ['--steps', '8'])
    """
    names: dict[str, str] = {}
    left: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        path = flag.removeprefix("--" + prefix).removesuffix(".name")
        if not flag.startswith("--" + prefix) or path not in settings:
            left.append(word)
            continue
        name = value if equals else next(words, "")
        if not name or name.startswith("--"):
            raise ConfigError(f"{flag} needs a name after it.")
        if names.get(path, name) != name:
            left = _without(left, f"--{prefix}{path}.")
        names[path] = name
    return names, left


def _without(arguments: list[str], prefix: str) -> list[str]:
    """Less the options that begin so, with their values."""
    left: list[str] = []
    dropping = False
    for word in arguments:
        if word.startswith("--"):
            dropping = word.startswith(prefix)
        if not dropping:
            left.append(word)
    return left
