"""What can be typed after the `tether episodic` commands, and what presets mean for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from tether.episodic.config import EpisodicConfig, typed_keywords
from tether.episodic.plans import MotionLimits, OnViolation
from tether.episodic.presets import choose
from tether.episodic.render import Film
from tether.errors import ConfigError, check_at_least_one
from tether.experiments.study_table import check_table_path
from tether.experiments.trackers import TrackerName


@dataclass(frozen=True)
class TrainConfig:
    """Train an episodic policy. A preset gives every setting; options typed besides it override it."""

    settings: Annotated[EpisodicConfig, tyro.conf.arg(name="")]
    """The run; the options are those of the algorithm's own class of settings."""

    preset: str | None = None
    """Vetted settings to start from, e.g. "metaworld-quick:reach-v3", or "package.module:function"."""

    output: Path | None = None
    """Folder of the run; by default runs/ with the preset's or environment's name, algorithm and seed."""

    label: str | None = None
    """The run's name in legends; the algorithm's by default."""

    resume: bool = False
    """Continue the run in the output folder from its last checkpoint; begin it where there is none."""

    until: int | None = None
    """Stop after this iteration, to be resumed; the schedules still end with the last one."""

    branch_from: Path | None = None
    """Checkpoint of another run to begin with, e.g. runs/jump/checkpoints/step-000050: other settings may
    count from there on. Iterations, schedules and random numbers go on from its own."""

    film: bool = True
    """Write figures/motion.mp4 at the end, the untrained motion beside the trained one."""

    tensorboard: bool = False
    """The same as --report-to tensorboard."""

    report_to: tuple[TrackerName, ...] = ()
    """Trackers that get the run's numbers."""

    def __post_init__(self) -> None:
        """Refuse a run without an iteration, which would leave no checkpoint."""
        check_at_least_one("until", self.until)

    def end(self) -> int:
        """Iteration to stop after."""
        return self.until or self.settings.iterations

    def folder(self) -> Path:
        """Where the run goes."""
        if self.output is not None:
            return self.output
        name = _file_name((self.preset or self.settings.env_id).removeprefix("tether/"))
        algo = self.settings.algo
        algo = "" if algo in name.split("-") else f"-{_file_name(algo)}"
        return Path("runs") / f"{name}{algo}-seed{self.settings.seed}"


@dataclass(frozen=True)
class EvalConfig:
    """Measure the policy of a run, by its mean and by samples, on the fixed evaluation episodes."""

    run: Path
    """Folder of an episodic run."""

    episodes: int = 64
    """Episodes of each of the two evaluations."""

    step: int | None = None
    """Iteration of the checkpoint; the latest by default."""

    workers: int = 0
    """Simulator processes; 0 simulates in this one."""

    output: Path | None = None
    """JSON file for the numbers; by default evaluation.json in the run's folder."""

    each: Path | None = None
    """CSV file for a row of each episode: what it began with and what became of it."""

    limits: MotionLimits = field(default_factory=MotionLimits)
    """A robot's limits, within which the simulated one keeps its motions."""

    on_violation: OnViolation = "scale"
    """Run motions that are too fast for the limits slower, or refuse them."""

    def __post_init__(self) -> None:
        """Refuse an evaluation of nothing."""
        check_at_least_one("episodes", self.episodes)


@dataclass(frozen=True)
class RenderConfig:
    """Film the motion a run has learned, beside the untrained one."""

    run: Path
    """Folder of an episodic run."""

    output: Path | None = None
    """.mp4 or .gif file; by default figures/motion.mp4 in the run's folder."""

    step: int | None = None
    """Iteration of the checkpoint; the latest by default."""

    episode: int = 0
    """Which of the evaluation episodes."""

    film: Film = field(default_factory=Film)
    """Size, rate and speed."""

    def __post_init__(self) -> None:
        """Refuse an episode that does not exist."""
        if self.episode < 0:
            raise ConfigError(f"episode counts from 0, got {self.episode}.")


@dataclass(frozen=True)
class ExportConfig:
    """Write what a run has learned as files for a robot: observation to motion, and motions as tables."""

    run: Path
    """Folder of an episodic run."""

    output: Path | None = None
    """Folder for the files; by default export/ in the run's folder."""

    step: int | None = None
    """Iteration of the checkpoint; the latest by default."""

    formats: tuple[Literal["torch", "onnx"], ...] = ("torch", "onnx")
    """torch.export's motion.pt2, and motion.onnx."""

    motions: int = 1
    """CSV files of motions to write, for the first of the evaluation episodes."""

    limits: MotionLimits = field(default_factory=MotionLimits)
    """The robot's limits, for the motions and the description."""

    on_violation: OnViolation = "scale"
    """Run motions that are too fast for the limits slower, or refuse them."""

    def __post_init__(self) -> None:
        """Refuse what would write nothing, or twice."""
        if self.motions < 0:
            raise ConfigError(f"motions must be 0 or more, got {self.motions}.")
        if len(set(self.formats)) != len(self.formats) or not (self.formats or self.motions):
            raise ConfigError(f"formats={self.formats} must name each format once, and at least one file.")


# What the studies of a queue say themselves, so that no option may.
_OF_STUDIES = ("preset", "env", "algos", "seeds", "iterations", "episodes", "evaluate_every", "film")


@dataclass(frozen=True)
class CompareConfig:
    """Train several algorithms with several seeds, each with its own vetted settings, into one report."""

    output: Path = Path("runs/episodic-compare")
    """Folder for the runs and the report."""

    queue: Path | None = None
    """YAML file with a list of studies (`tether.episodic.queue.Study`) to train, instead of the one
    that the options below describe; but for `jobs`, none of them goes with it."""

    minutes: float | None = None
    """Stop, with checkpoints, after this long; the same command goes on from there."""

    results: Path | None = None
    """With a queue: table (a .csv file) that keeps what its runs have measured so far."""

    preset: str | None = None
    """Vetted settings; each algorithm takes the preset's variant for it, if there is one."""

    env: str | None = None
    """Environment instead of a preset."""

    algos: tuple[str, ...] = ("tce", "bbrl")
    """Algorithms: names, or "package.module:Class"."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Which seeds; several give intervals over them."""

    iterations: int | None = None
    """Policy updates; the preset's by default."""

    episodes: int | None = None
    """Episodes an iteration; the preset's by default."""

    evaluate_every: int | None = None
    """Iterations between evaluations; the preset's by default."""

    jobs: int | None = None
    """Runs at a time; by default one a core, each with an equal share of the cores."""

    film: bool = False
    """Film every run's motion, too."""

    report_to: tuple[TrackerName, ...] = ()
    """Trackers that get every run's numbers."""

    def __post_init__(self) -> None:
        """Refuse an empty comparison, and options that a queue leaves no room for."""
        if not self.algos or not self.seeds:
            raise ConfigError("A comparison needs at least one algorithm and one seed.")
        if len(set(self.algos)) != len(self.algos) or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"algos={self.algos} and seeds={self.seeds} must not repeat themselves.")
        check_at_least_one("jobs", self.jobs)
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"minutes must be positive, got {self.minutes}.")
        if self.results is not None:
            check_table_path(self.results, "results")
            if self.queue is None:
                raise ConfigError(
                    "results is for the runs of a queue; tether collect makes tables of others."
                )
        beside = [name for name in _OF_STUDIES if getattr(self, name) != getattr(CompareConfig, name)]
        if self.queue is not None and beside:
            raise ConfigError(
                f"queue={self.queue} says what is trained; {', '.join(beside)} would be ignored beside it. "
                "Leave them out, or write them into its studies."
            )


def train_config(
    preset_name: str | None = None, env: str | None = None, algo: str | None = None
) -> TrainConfig:
    """The options that `presets.choose` means, before others are typed."""
    preset_name, settings = choose(preset_name, env, algo)
    return TrainConfig(settings, preset=preset_name)


def defaults_for(arguments: Sequence[str]) -> TrainConfig:
    """What the options --preset, --env and --algo among others mean for all settings not typed.

    >>> defaults_for(["--seed", "3", "--preset=hopper-jump-paper"]).settings.episodes
    64
    """
    chosen: dict[str, str | None] = {"--preset": None, "--env": None, "--algo": None}
    for argument, following in pairwise([*arguments, "None"]):
        option, equals, value = argument.partition("=")
        option = option.replace("_", "-")  # the parser takes either
        option = "--env" if option == "--env-id" else option
        if option in chosen:
            value = value if equals else following
            # Another option is no value, which the parser says.
            chosen[option] = None if value == "None" or value.startswith("--") else value
    return train_config(*chosen.values())


def env_options_of(defaults: TrainConfig, written: Sequence[str]) -> list[str]:
    """A preset's options of its environment as they are typed, beside which those of the command line count.

    Args:
        defaults: what the preset means.
        written: options of a settings file; one that has options of the environment has all of them.

    >>> env_options_of(train_config("hopper-jump-sparse-long"), ["--seed", "3"])
    ['--env-options', 'show_memory', 'True']
    """
    keywords = typed_keywords(defaults.settings.env_options)
    if not keywords or any(word.replace("_", "-").startswith("--env-options") for word in written):
        return []
    return ["--env-options", *(word for pair in keywords.items() for word in pair)]


def comparison_runs(config: CompareConfig) -> list[TrainConfig]:
    """The runs of a comparison."""
    changes: dict[str, Any] = {
        name: getattr(config, name)
        for name in ("iterations", "episodes", "evaluate_every")
        if getattr(config, name) is not None
    }
    runs = []
    for algo in config.algos:
        options = train_config(config.preset, config.env, algo)
        for seed in config.seeds:
            settings = replace(options.settings, seed=seed, **changes)
            output = config.output / f"{_file_name(algo)}-seed{seed}"
            runs.append(replace(options, settings=settings, output=output, resume=True, film=config.film))
    return runs


def _file_name(name: str) -> str:
    return name.replace(":", "-").replace("/", "-")
