"""From a `CompareConfig` to its cells: one training run for each method, point of the grid and seed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from tether.errors import ConfigError, InvalidInputError, did_you_mean
from tether.llm.choices import option_names
from tether.llm.compare_config import CompareConfig
from tether.llm.config import TrainConfig
from tether.llm.estimators import find_estimator
from tether.llm.methods import find_method, method_names

Value = int | float | bool | str | None

# What the grid itself decides for each run.
_OF_THE_GRID = frozenset({"output", "method", "seed", "threads", "resume", "name"})
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
        ConfigError: naming the run whose settings do not go together.

    Example:
        >>> config = CompareConfig(methods=("troll", "troll:alpha=5"), learning_rates=(1e-4,))
        >>> [cell.train.output.name for cell in cells(config)]
        ['troll-lr0.0001-seed0', 'troll-alpha5-lr0.0001-seed0']
    """
    methods = {method: parse_method(method) for method in config.methods}
    return [
        _cell(config, method, methods[method], point, seed)
        for seed in config.seeds
        for point in _points(config)
        for method in config.methods
    ]


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
    name, settings = parsed
    changes: dict[str, Any] = {key: value for key, value in point if "." not in key}
    settings = {**{key: value for key, value in point if "." in key}, **settings}
    base, kind = config.train.method, find_method(name)
    options = base.options() if base.name == name else {}
    estimator = config.train.estimator
    if changes.get("estimator", estimator.name) != estimator.name:
        estimator = find_estimator(changes["estimator"])()
    own, more = option_names(kind), option_names(type(estimator))
    of_estimator: dict[str, Any] = {}
    for key, value in settings.items():
        where, _, option = key.rpartition(".")
        if where in ("", "method") and option in own:  # before the fields: TRM's kl_bound is not TROLL's
            options[option] = value
        elif key in _FIELDS:
            changes[key] = value
        elif where in ("", "estimator") and option in more:
            of_estimator[option] = value
        else:
            raise ConfigError(
                f"The method {method!r} sets {key!r}, which is no setting of a training run or option of "
                f"{name} ({', '.join(own)}).{did_you_mean(key, [*_FIELDS, *own])}"
            )
    folder = "-".join([_slug(method), *(_axis_slug(*place) for place in point), f"seed{seed}"])
    folder = folder.replace("/", "-")  # of a model's name: one folder, whose own name tells runs apart
    changes |= _lengths(config, changes)
    changes |= {
        "estimator": replace(estimator, **of_estimator),
        "output": config.output / folder,
        "seed": seed,
        "resume": True,
    }
    try:
        train = replace(config.train, method=kind(**options), **changes)
    except (ConfigError, InvalidInputError) as error:
        raise ConfigError(f"The run {folder}: {error}") from error
    cell = Cell(method, point, train)
    if point or settings:  # otherwise the method's own label is clear
        label = ", ".join(filter(None, (cell.method_label, cell.point_label)))
        cell = replace(cell, train=replace(train, name=label))
    return cell


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
