"""The exceptions and warnings Tether raises, and what their messages share.

Every error subclasses `TetherError` and the standard exception a caller would expect, so both
``except tether.TetherError`` and ``except ValueError`` work. A message names the cause, the actual
value and the remedy.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import NoReturn


class TetherError(Exception):
    """Base of every error Tether raises on purpose."""


class InvalidInputError(TetherError, ValueError):
    """A tensor or argument that cannot be worked with: wrong shape, NaN, out of range."""


class ConfigError(TetherError, ValueError):
    """A setting, or a combination of settings, that is not supported or makes no sense."""


class DataError(TetherError, ValueError):
    """A dataset, or a row of one, that lacks what the task needs."""


class CheckpointError(TetherError, RuntimeError):
    """A checkpoint or run folder that is missing, damaged or belongs to something else."""


class TrainingStoppedError(TetherError, RuntimeError):
    """Training ran out of memory, disk or finite numbers; says at which step and what is left."""


class MissingDependencyError(TetherError, ImportError):
    """An optional dependency is not installed; the message says which extra brings it."""


class SimulationError(TetherError, RuntimeError):
    """A simulator or one of its worker processes failed or returned something impossible."""


class MotionLimitError(TetherError, ValueError):
    """A motion that a robot's limits forbid; says which joint, and what would mend it."""


class StaleSamplerError(TetherError, RuntimeError):
    """A sampler does not have the weights it was given: its log-probabilities are those of others."""


class EngineError(TetherError, RuntimeError):
    """An inference engine, or the process that talks to it, is gone, stuck or cannot do what it is asked."""


class SandboxError(TetherError, RuntimeError):
    """The sandbox could not start a program, or was used while closed; never the program's own failure."""


class JudgeFailedError(TetherError, RuntimeError):
    """A check gave no verdict: the function raised an exception, or its process ended."""


class JudgeTimeoutError(TetherError, TimeoutError):
    """A check was stopped at its time limit."""


class TetherWarning(UserWarning):
    """Something is allowed but very likely not what the user meant."""


# What stands between a user's line and ours.
_IN_BETWEEN = frozenset({"tether", "trl", "transformers", "accelerate", "torch", "contextlib", "importlib"})


def warn(message: str) -> None:
    """Warn of what is very likely not meant (`TetherWarning`), at the user's own line that led to it."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _IN_BETWEEN:
        frame = frame.f_back
    shown = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__")
    warnings.warn_explicit(
        message, TetherWarning, frame.f_code.co_filename, frame.f_lineno, module, registry=shown
    )


def check_at_least_one(name: str, value: int | None) -> None:
    """Refuse a count below 1; None is one that was left out.

    Raises:
        ConfigError: naming it and the value.

    >>> check_at_least_one("batch", 1)
    """
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}.")


def check_option(name: str, value: object, known: Collection[str]) -> None:
    """Refuse a setting that is none of the words known.

    Raises:
        ConfigError: naming it, the words and the value.

    >>> check_option("activation", "tanh", ("relu", "tanh"))
    """
    if value not in known:
        raise ConfigError(f"{name} is one of {', '.join(known)}; got {value!r}.")


def did_you_mean(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The end of a message on an unknown name: the known one nearest to it, if one is near.

    Args:
        name: what was given.
        known: what could have been.
        likeness: the least share of letters in common, in their order.

    >>> did_you_mean("kl_bond", ["kl_bound", "alpha"]), did_you_mean("gamma", ["kl_bound"])
    (" Did you mean 'kl_bound'?", '')
    """
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return f" Did you mean {found[0]!r}?" if found else ""


def replaced(module: str, **names: str) -> Callable[[str], NoReturn]:
    """A `__getattr__` of a module that says what took the place of a name it had.

    >>> replaced("tether.demo", CriticTrainer="the keyword estimator")("CriticTrainer")
    Traceback (most recent call last):
    ...
    ImportError: tether.demo has no CriticTrainer any more: use the keyword estimator.
    """

    def find(name: str) -> NoReturn:
        if name in names:
            raise ImportError(f"{module} has no {name} any more: use {names[name]}.")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find
