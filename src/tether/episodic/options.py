"""What can be chosen for the `tether episodic` commands, and what presets mean for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tether.episodic.config import (
    Algorithm,
    EpisodicConfig,
    PolicyInput,
    Precision,
    TrustRegionConfig,
    UpdateConfig,
)
from tether.episodic.critic import CriticConfig
from tether.episodic.policy import PolicyConfig
from tether.episodic.presets import PRESETS, preset
from tether.episodic.prodmp import ProDMPConfig
from tether.episodic.render import Film
from tether.errors import ConfigError

DEFAULT_PRESET = "hopper-jump-quick"
_METAWORLD = "tether/MetaWorld-"


@dataclass(frozen=True)
class TrainConfig:
    """Train an episodic policy. A preset gives every setting; options typed besides it override it."""

    env: str
    """Environment, e.g. "tether/HopperJump-v0"; its paper preset gives the settings unless --preset does."""

    preset: str | None = None
    """Vetted settings, a name of tether.episodic.presets.PRESETS, e.g. "metaworld-quick:reach-v3"."""

    algo: Algorithm = "tce"
    """"tce": credit by segments. "bbrl": credit by whole episodes; takes the preset's own variant for it."""

    seed: int = 0
    """Of networks, exploration and the stream of episodes."""

    iterations: int = 200
    """Policy updates; the schedules end with the last."""

    episodes: int = 16
    """Episodes sampled for each of them."""

    workers: int = 2
    """Simulator processes; 0 simulates in the training process. Does not change any result."""

    output: Path | None = None
    """Folder of the run; by default runs/ with the preset's or environment's name, algorithm and seed."""

    label: str | None = None
    """The run's name in legends; the algorithm's by default."""

    resume: bool = False
    """Continue the run in the output folder from its last checkpoint."""

    film: bool = True
    """Write figures/motion.mp4 at the end, the untrained motion beside the trained one."""

    tensorboard: bool = False
    """Mirror metrics into TensorBoard files."""

    env_options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Keywords of the environment."""

    policy_input: PolicyInput = "observation"
    """What the policy sees before the motion: the whole first observation, or only its task context."""

    precision: Precision = "float32"
    """Of the networks."""

    motion: ProDMPConfig = field(default_factory=ProDMPConfig)
    """The movement primitive."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """Network and exploration."""

    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic."""

    trust_region: TrustRegionConfig = field(default_factory=TrustRegionConfig)
    """How far an iteration may move the policy."""

    update: UpdateConfig = field(default_factory=UpdateConfig)
    """How an iteration improves it."""

    evaluate_every: int = 10
    """Iterations between deterministic evaluations."""

    evaluation_episodes: int = 16
    """Episodes of an evaluation."""

    checkpoint_every: int = 10
    """Iterations between checkpoints."""

    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""

    def episodic_config(self) -> EpisodicConfig:
        """The run's configuration."""
        shared = {f.name: getattr(self, f.name) for f in fields(EpisodicConfig) if hasattr(self, f.name)}
        return EpisodicConfig(**shared | {"env_id": self.env, "num_workers": self.workers})

    def folder(self) -> Path:
        """Where the run goes."""
        if self.output is not None:
            return self.output
        name = (self.preset or self.env.removeprefix("tether/")).replace(":", "-").replace("/", "-")
        algo = "" if self.algo in name.split("-") else f"-{self.algo}"
        return Path("runs") / f"{name}{algo}-seed{self.seed}"


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

    def __post_init__(self) -> None:
        """Refuse an evaluation of nothing."""
        _at_least_one("episodes", self.episodes)


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
class CompareConfig:
    """Train several algorithms with several seeds, each with its own vetted settings, into one report."""

    output: Path = Path("runs/episodic-compare")
    """Folder for the runs and the report."""

    preset: str | None = None
    """Vetted settings; the other algorithms take the preset's variant for them."""

    env: str | None = None
    """Environment instead of a preset."""

    algos: tuple[Algorithm, ...] = ("tce", "bbrl")
    """Which algorithms."""

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

    def __post_init__(self) -> None:
        """Refuse an empty comparison."""
        if not self.algos or not self.seeds:
            raise ConfigError("A comparison needs at least one algorithm and one seed.")
        if len(set(self.algos)) != len(self.algos) or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"algos={self.algos} and seeds={self.seeds} must not repeat themselves.")
        if self.jobs is not None:
            _at_least_one("jobs", self.jobs)


# Settings.


def preset_for(name: str, algo: Algorithm) -> str:
    """The variant of a preset for an algorithm.

    Raises:
        ConfigError: no such preset, or none for the algorithm.

    >>> preset_for("hopper-jump-quick", "bbrl"), preset_for("metaworld-bbrl:reach-v3", "tce")
    ('hopper-jump-bbrl-quick', 'metaworld-paper:reach-v3')
    """
    if preset(name).algo == algo:
        return name
    base, colon, task = name.partition(":")
    size = next((size for size in ("-quick", "-long") if base.endswith(size)), "")
    stem = base.removesuffix(size).removesuffix("-paper").removesuffix("-bbrl")
    ending = f"-bbrl{size}" if algo == "bbrl" else size or "-paper"
    if stem + ending not in PRESETS:
        raise ConfigError(f"No preset of {algo} beside {name!r}. Known: {', '.join(sorted(PRESETS))}.")
    return f"{stem}{ending}{colon}{task}"


def train_config(
    preset_name: str | None = None, env: str | None = None, algo: Algorithm | None = None
) -> TrainConfig:
    """The settings of a preset, or of an environment by its paper preset, before others are typed.

    An environment without a preset gets the defaults of `EpisodicConfig`. Without either it is the quick
    demo, `DEFAULT_PRESET`.

    Raises:
        ConfigError: an unknown preset or algorithm, or an environment that is not the preset's.

    >>> train_config("hopper-jump-quick", algo="bbrl").preset
    'hopper-jump-bbrl-quick'
    >>> train_config(env="tether/MetaWorld-reach-v3").preset
    'metaworld-paper:reach-v3'
    """
    if algo not in (None, "tce", "bbrl"):
        raise ConfigError(f"algo is one of ('tce', 'bbrl'); got {algo!r}.")
    if preset_name is None:
        preset_name = DEFAULT_PRESET if env is None else _paper_preset(env)
    if preset_name is not None and algo is not None:
        preset_name = preset_for(preset_name, algo)
    if preset_name is None:
        assert env is not None
        config = EpisodicConfig(env, algo=algo or "tce")
    else:
        config = preset(preset_name)
    if env is not None and config.env_id != env:
        raise ConfigError(
            f"The preset {preset_name!r} is for {config.env_id}, not for {env}. Give only one of the two."
        )
    shared = {f.name: getattr(config, f.name) for f in fields(TrainConfig) if hasattr(config, f.name)}
    return TrainConfig(**shared | {"env": config.env_id, "workers": config.num_workers}, preset=preset_name)


def defaults_for(arguments: Sequence[str]) -> TrainConfig:
    """What the options --preset, --env and --algo among others mean for all settings not typed.

    >>> defaults_for(["--seed", "3", "--preset=hopper-jump-paper"]).episodes
    64
    """
    typed: dict[str, str] = {}
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--preset", "--env", "--algo"):
            following = arguments[place + 1] if place + 1 < len(arguments) else "None"
            typed[name] = value if equals else following
    found: dict[str, Any] = {name: None if value == "None" else value for name, value in typed.items()}
    return train_config(found.get("--preset"), found.get("--env"), found.get("--algo"))


def _paper_preset(env: str) -> str | None:
    if env.startswith(_METAWORLD):
        return f"metaworld-paper:{env.removeprefix(_METAWORLD)}"
    return next((n for n in PRESETS if n.endswith("-paper") and PRESETS[n]().env_id == env), None)


def comparison_runs(config: CompareConfig) -> list[TrainConfig]:
    """The runs of a comparison."""
    changes: dict[str, Any] = {
        name: getattr(config, name)
        for name in ("iterations", "episodes", "evaluate_every")
        if getattr(config, name) is not None
    }
    return [
        replace(
            train_config(config.preset, config.env, algo),
            output=config.output / f"{algo}-seed{seed}",
            seed=seed,
            resume=True,
            film=config.film,
            **changes,
        )
        for algo in config.algos
        for seed in config.seeds
    ]


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}.")
