"""From a `CompareConfig` to its cells: one training run for each method, point of the grid and seed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from tether.errors import ConfigError, InvalidInputError, did_you_mean
from tether.llm.choices import Choice, option_names
from tether.llm.compare_config import CompareConfig
from tether.llm.config import TrainConfig
from tether.llm.estimators import Estimator, find_estimator
from tether.llm.methods import find_method, method_names
from tether.llm.setting_types import of_its_type, types_of

Value = int | float | bool | str | None

# What the grid itself decides for each run.
_OF_THE_GRID = frozenset({"output", "method", "seed", "threads", "resume", "name", "start_evaluations"})
_FIELDS = frozenset(field.name for field in fields(TrainConfig)) - _OF_THE_GRID

# What `batches` decides for each run (`_lengths`).
_OF_BATCHES = frozenset({"steps", "eval_every", "save_every"})

# How the grid's own axes are written in names of folders and in labels.
_SHORT = {
    "estimator": ("", "{}"),
    "updates_per_rollout": ("u", "{} updates"),
    "learning_rate": ("lr", "lr {}"),
}


@dataclass(frozen=True)
class Cell:
    """One training run of a comparison."""

    method: str
    """As it stands in `CompareConfig.methods`."""
    point: tuple[tuple[str, Value], ...]
    """Where it is in the grid: the settings that vary, besides method and seed."""
    train: TrainConfig
    """The run, without its threads."""

    @property
    def name(self) -> str:
        """The run's name, of which a grid has each once."""
        return self.train.output.name

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.train.seed

    @property
    def point_label(self) -> str:
        """The point in words; empty where nothing but the method varies."""
        return ", ".join(_axis_label(name, value) for name, value in self.point)

    @property
    def method_label(self) -> str:
        """The method in words."""
        return _method_label(self.method, self.train)


def cells(config: CompareConfig) -> list[Cell]:
    """All runs, those first that say most: every method once, at every point, before any second seed.

    Raises:
        ConfigError: naming the run whose settings do not go together, or two spellings of one method.

    Example:
        >>> config = CompareConfig(methods=("troll", "troll:alpha=5"), learning_rates=(1e-4,))
        >>> [cell.train.output.name for cell in cells(config)]
        ['troll-lr0.0001-seed0', 'troll-alpha5-lr0.0001-seed0']
    """
    methods = {method: parse_method(method) for method in config.methods}
    made = [
        _cell(config, method, methods[method], point, seed)
        for seed in config.seeds
        for point in _points(config)
        for method in config.methods
    ]
    by_name: dict[str, Cell] = {}
    for cell in made:
        other = by_name.setdefault(cell.name, cell)
        if other is not cell:
            raise ConfigError(
                f"The runs {other.train.label!r} and {cell.train.label!r} would be in one folder, "
                f"{cell.name}, since '/', ':' and ',' of a setting are '-' there. Compare them in two output "
                "folders."
            )
    by_label: dict[tuple[str, str, int], Cell] = {}
    for cell in made:
        other = by_label.setdefault((cell.method_label, cell.point_label, cell.seed), cell)
        if other is not cell:
            raise ConfigError(
                f"The methods {other.method!r} and {cell.method!r} are both {cell.method_label}. Leave one "
                "out."
            )
    return made


def parse_method(text: str) -> tuple[str, dict[str, Value]]:
    """Name and settings of a method such as ``troll:kl_bound=0.2,alpha=5``.

    Example:
        >>> parse_method("dppo:divergence=top-k-kl,ratio_cap=5")
        ('dppo', {'divergence': 'top-k-kl', 'ratio_cap': 5})
        >>> parse_method("my_losses:square:beta=2")
        ('my_losses:square', {'beta': 2})
    """
    name, _, rest = text.partition(":")
    function, _, after = rest.partition(":")
    if (
        name not in method_names() and function and "=" not in function
    ):  # package.module:function, and its settings after another colon
        name, rest = f"{name}:{function}", after
    settings: dict[str, Value] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key or not value:
            raise ConfigError(
                f"The method {text!r} must be a name, or name:setting=value,setting=value; {part!r} is not."
            )
        if key in settings:
            raise ConfigError(f"The method {text!r} sets {key} twice. Leave one out.")
        settings[key] = parse_value(value)
    return name, settings


def parse_value(text: str) -> Value:
    """A number, true, false, none, or a word.

    Example:
        >>> [parse_value(text) for text in ("8", "3e-4", "true", "none", "bucket")]
        [8, 0.0003, True, None, 'bucket']
    """
    words: dict[str, Value] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _points(config: CompareConfig) -> Iterator[tuple[tuple[str, Value], ...]]:
    axes: list[tuple[str, tuple[Value, ...]]] = [
        ("estimator", config.estimators),
        ("updates_per_rollout", config.updates_per_rollout),
        ("learning_rate", config.learning_rates),
        *map(_axis, config.axes),
    ]
    axes = [axis for axis in axes if axis[1]]
    names = [name for name, _ in axes]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"The grid has the axis {name} twice. Give all its values in one.")
        if config.batches is not None and name in _OF_BATCHES:
            raise ConfigError(
                f"The grid has the axis {name}, which batches={config.batches} decides. Leave one out."
            )
    yield from itertools.product(*([(name, value) for value in values] for name, values in axes))


def _axis(text: str) -> tuple[str, tuple[Value, ...]]:
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise ConfigError(f"An axis is written as setting=value,value; got {text!r}.")
    if name not in _FIELDS and not name.startswith(("method.", "estimator.")):
        raise ConfigError(
            f"The axis {text!r} names no setting of a training run that a grid can vary."
            f"{did_you_mean(name, _FIELDS)}"
        )
    parsed = tuple(parse_value(value) for value in values.split(","))
    if len(set(parsed)) < len(parsed):
        raise ConfigError(f"The axis {text!r} has a value twice. Leave one of them out.")
    return name, parsed


def _cell(
    config: CompareConfig,
    method: str,
    parsed: tuple[str, dict[str, Value]],
    point: tuple[tuple[str, Value], ...],
    seed: int,
) -> Cell:
    folder = "-".join([_slug(method), *(_axis_slug(*place) for place in point), f"seed{seed}"])
    folder = folder.replace("/", "-")  # of a model's name: one folder, whose own name tells runs apart
    kind, estimator = find_method(parsed[0]), _estimator(config, parsed[1], point)
    placed = _placed(config, method, parsed, point, type(estimator))
    base = config.train.method
    options = base.options() if base.name == parsed[0] else {}
    try:
        changes = _of_their_types(placed, "", TrainConfig)
        train = replace(
            config.train,
            **changes | _lengths(config, changes),
            method=kind(**options | _of_their_types(placed, "method.", kind)),
            estimator=replace(estimator, **_of_their_types(placed, "estimator.", type(estimator))),
            output=config.output / folder, seed=seed, resume=True,
        )  # fmt: skip
    except (ConfigError, InvalidInputError) as error:
        raise ConfigError(f"The run {folder}: {error}") from error
    cell = Cell(method, point, train)
    if point or parsed[1]:  # otherwise the method's own label is clear
        label = ", ".join(filter(None, (cell.method_label, cell.point_label)))
        cell = replace(cell, train=replace(train, name=label))
    return cell


def _estimator(
    config: CompareConfig, settings: dict[str, Value], point: tuple[tuple[str, Value], ...]
) -> Estimator:
    """Whose options the rest may set: the estimator of the point, of the method or of all."""
    own = config.train.estimator
    name = {"estimator": own.name, **dict(point), **settings}["estimator"]
    return own if name == own.name else find_estimator(str(name))()


def _placed(
    config: CompareConfig,
    method: str,
    parsed: tuple[str, dict[str, Value]],
    point: tuple[tuple[str, Value], ...],
    estimator: type[Choice],
) -> dict[str, Value]:
    """What the point and the method set, by where it goes: a field, ``method.option``, ``estimator.option``.

    Raises:
        ConfigError: a setting that there is not, or that the grid itself decides.
    """
    name, settings = parsed
    own, more = option_names(find_method(name)), option_names(estimator)

    def place(key: str) -> str:
        where, _, option = key.rpartition(".")
        if where in ("", "method") and option in own:  # before the fields: TRM's kl_bound is not TROLL's
            return f"method.{option}"
        if key in _FIELDS:
            return key
        if where in ("", "estimator") and option in more:
            return f"estimator.{option}"
        raise ConfigError(
            f"The method {method!r} sets {key!r}, which is no setting of a training run or option of "
            f"{name} ({', '.join(own)}).{did_you_mean(key, [*_FIELDS, *own])}"
        )

    varied = {place(key) if "." in key else key: value for key, value in point}
    fixed: dict[str, Value] = {}
    for key, value in settings.items():
        placed = place(key)
        if placed in fixed:
            raise ConfigError(f"The method {method!r} sets {placed} twice, once as {key}. Leave one out.")
        fixed[placed] = value
    decided = dict.fromkeys(varied, "an axis of the grid")
    if config.batches is not None:
        decided |= dict.fromkeys(_OF_BATCHES, f"batches={config.batches}")
    for key in fixed.keys() & decided.keys():
        raise ConfigError(f"The method {method!r} sets {key}, which {decided[key]} decides. Leave one out.")
    return {key: value for key, value in (varied | fixed).items() if key != "estimator"}


def _of_their_types(placed: dict[str, Value], prefix: str, kind: type) -> dict[str, Any]:
    """The settings that go to one place, by their names there."""
    found = {key.removeprefix(prefix): value for key, value in placed.items() if key.startswith(prefix)}
    types = types_of(kind)
    return {key: of_its_type(key, value, types[key]) for key, value in found.items() if "." not in key}


def _lengths(config: CompareConfig, changes: dict[str, Any]) -> dict[str, int]:
    """Steps and evaluations of a run that is to see `batches` batches of responses."""
    if config.batches is None:
        return {}
    updates = int(changes.get("updates_per_rollout", config.train.updates_per_rollout))
    if config.batches % config.evaluations:
        raise ConfigError(
            f"evaluations={config.evaluations} must divide batches={config.batches}, so that they are evenly "
            "spaced."
        )
    between = config.batches // config.evaluations * updates
    return {"steps": config.batches * updates, "eval_every": between, "save_every": between}


def _method_label(method: str, train: TrainConfig) -> str:
    _, settings = parse_method(method)
    label = type(train.method)().label
    return " ".join([label, ", ".join(f"{key}={value}" for key, value in settings.items())]).strip()


def _slug(method: str) -> str:
    return method.replace(":", "-").replace(",", "-").replace("=", "")


def _axis_slug(name: str, value: Value) -> str:
    return f"{_SHORT[name][0] if name in _SHORT else name}{value}"


def _axis_label(name: str, value: Value) -> str:
    return _SHORT[name][1].format(value) if name in _SHORT else f"{name}={value}"
