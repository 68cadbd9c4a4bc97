"""What can be chosen when methods are compared: a grid of training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from tether.errors import ConfigError, check_at_least_one
from tether.experiments.study_table import check_table_path
from tether.llm.choices import refuse_former
from tether.llm.config import TrainConfig


@dataclass(frozen=True)
class CompareConfig:
    """Several methods, trained on the same work, in one report.

    Every method is trained at every point of the grid with every seed.
    """

    output: Path = Path("runs/compare")
    """Folder for the runs and the report; finished runs there must have the settings asked for."""
    methods: tuple[str, ...] = ("troll", "clip")
    """Which methods, by name or with settings of their own as in troll:kl_bound=0.2,alpha=5 or
    dppo:divergence=top-k-kl (options of the method, or any setting of a training run that neither an axis
    nor batches decides)."""
    estimators: tuple[str, ...] = ()
    """Which estimators, by name; by default that of train."""
    updates_per_rollout: tuple[int, ...] = ()
    """How often each batch of responses is used; needs batches."""
    learning_rates: tuple[float, ...] = ()
    """Which learning rates; by default that of train."""
    axes: tuple[str, ...] = ()
    """Any other setting of a training run and its values, as in lora_rank=4,16 or
    method.kl_bound=0.02,0.05."""
    seeds: tuple[int, ...] = (0,)
    """Which seeds; five or more give a comparison its certainty."""
    batches: int | None = None
    """Batches of responses each run learns from; its steps follow from updates_per_rollout."""
    evaluations: int = 4
    """With batches: evaluations over a run, besides the one before it, evenly spaced."""
    baseline: str | None = None
    """The method all others are tested against, as written in methods; by default clip, or the last."""
    jobs: int | None = None
    """Runs at a time; by default one a core, each with an equal share of the cores."""
    minutes: float | None = None
    """Stop, with checkpoints, after this long; the same command goes on from there."""
    results: Path | None = None
    """Table (a .csv file) that keeps the numbers of each finished run; runs found there are not trained
    again. Of each run that is trained for it, checkpoints, trained model and TensorBoard files are deleted
    as soon as the run is finished."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """What all runs share; its output, method, seed, threads and whatever the grid varies are set for
    each."""

    former_names: ClassVar[Mapping[str, str]] = {"trust_regions": "methods"}

    @classmethod
    def from_options(cls, arguments: Sequence[str]) -> tuple[CompareConfig, list[str]]:
        """As `TrainConfig.from_options`, of the run that all share."""
        refuse_former(arguments, cls.former_names)
        train, left = TrainConfig.from_options(arguments, "train.")
        return cls(train=train), left

    def __post_init__(self) -> None:
        """Refuse an empty or ambiguous comparison."""
        if not self.methods or not self.seeds:
            raise ConfigError("A comparison needs at least one method and one seed.")
        for name in ("methods", "estimators", "updates_per_rollout", "learning_rates", "axes", "seeds"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ConfigError(f"{name}={values} must not repeat themselves.")
        if self.results is not None:
            check_table_path(self.results, "results")
        for name in ("jobs", "batches", "evaluations"):
            check_at_least_one(name, getattr(self, name))
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"minutes must be positive, got {self.minutes}.")
        if self.updates_per_rollout and self.batches is None:
            raise ConfigError(
                f"updates_per_rollout={self.updates_per_rollout} at the same number of steps would compare "
                "runs that saw different numbers of responses. Set batches, how many each run learns from."
            )
        if self.baseline is not None and self.baseline not in self.methods:
            raise ConfigError(
                f"baseline={self.baseline!r} is none of methods={self.methods}; it must be "
                "written as it is there."
            )
