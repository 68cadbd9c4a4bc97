"""What `tether episodic train`, `eval`, `render` and `compare` do, and what can be chosen for them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from tether.episodic.config import (
    Algorithm,
    EpisodicConfig,
    PolicyInput,
    Precision,
    TrustRegionConfig,
    UpdateConfig,
)
from tether.episodic.critic import CriticConfig
from tether.episodic.evaluate import Evaluation, evaluate_agent, evaluation_seeds
from tether.episodic.figures import sample_motions, save_exploration
from tether.episodic.policy import PolicyConfig
from tether.episodic.presets import PRESETS, preset
from tether.episodic.prodmp import ProDMPConfig
from tether.episodic.render import Film, render_motions
from tether.episodic.sampler import EpisodeSampler
from tether.episodic.train import build_agent, load_agent, load_config, train
from tether.errors import CheckpointError, ConfigError, MissingDependencyError, SimulationError
from tether.experiments import RunFolder
from tether.experiments.files import atomic_write_json
from tether.experiments.jobs import Job, run_jobs
from tether.experiments.progress import TrainingProgress
from tether.experiments.settings_file import write_settings
from tether.experiments.statistics import bootstrap_interval, interquartile_mean, proportion_interval

DEFAULT_PRESET = "hopper-jump-quick"
_METAWORLD = "tether/MetaWorld-"
_DRAWN_MOTIONS = 24


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
    quick = base.endswith("-quick")
    stem = base.removesuffix("-quick").removesuffix("-paper").removesuffix("-bbrl")
    ending = ("-bbrl-quick" if quick else "-bbrl") if algo == "bbrl" else ("-quick" if quick else "-paper")
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


# Commands.


def train_command(config: TrainConfig) -> RunFolder:
    """Train with a progress display; picture and film the result into the run's figures.

    A computer that cannot take pictures still gets its run: the display says what is missing.

    Raises:
        ConfigError: settings that do not fit, an unknown environment.
        CheckpointError: the output folder holds another run.
        SimulationError: a simulator failed while training.
    """
    settings, out = config.episodic_config(), config.folder()
    label = config.label or config.algo
    done = _done(out) if config.resume else 0
    with TrainingProgress(settings.iterations, f"{label}, seed {config.seed}", done=done) as progress:
        run = train(
            settings, out, label=label, resume=config.resume, tensorboard=config.tensorboard,
            report=lambda step, numbers: progress.update(step, **shown_numbers(out, numbers)),
        )  # fmt: skip
        draw_exploration(out)
        if config.film:
            try:
                film_run(RenderConfig(out))
            except (MissingDependencyError, SimulationError, ConfigError) as error:
                progress.message(f"No film of this run: {error}")
    return run


def shown_numbers(run: Path, numbers: dict[str, float]) -> dict[str, float]:
    """The numbers worth showing while training: without success where the task is judged by another one.

    Such tasks (Hopper Jump) may define no success at all, and 0 % would look like a failure.
    """
    if RunFolder.open(run).config.settings["headline"] == "success":
        return numbers
    return {name: value for name, value in numbers.items() if name not in ("success", "success_greedy")}


def draw_exploration(run: Path) -> Path:
    """Picture the motions a run's policy tried before training and tries after it.

    Raises:
        CheckpointError: not an episodic run, or one without a checkpoint.
    """
    config = load_config(run)
    with EpisodeSampler(config.env_id, 0, 0, config.env_options) as sampler:
        start = sampler.reset(seeds=evaluation_seeds(1))
        before, after = build_agent(config, sampler.spec), load_agent(run, sampler.spec)
    rows = [
        (name, sample_motions(agent, start, _DRAWN_MOTIONS))
        for name, agent in (("before training", before), ("after training", after))
    ]
    label = RunFolder.open(run).config.label
    title = f"{label}, seed {config.seed}: motions drawn from the policy, and its mean"
    return save_exploration(rows, run / "figures" / "exploration.png", title=title)


def film_run(config: RenderConfig) -> Path:
    """Film the mean motion of a run's untrained and trained policy, side by side from one start.

    Raises:
        CheckpointError: not an episodic run, or no such checkpoint.
        ConfigError: another file format, or an environment without pictures.
        MissingDependencyError: no OpenGL that works without a screen.
        SimulationError: the process that takes the pictures failed.
    """
    settings = load_config(config.run)
    seeds = evaluation_seeds(config.episode + 1)[-1:]
    with EpisodeSampler(settings.env_id, 0, 0, settings.env_options) as sampler:
        start = sampler.reset(seeds=seeds)
        agents = {
            "untrained": build_agent(settings, sampler.spec),
            "trained": load_agent(config.run, sampler.spec, config.step),
        }
    plans = {name: agent.plan(start, deterministic=True) for name, agent in agents.items()}
    return render_motions(
        settings.env_id,
        {name: (plan.positions[0], plan.velocities[0]) for name, plan in plans.items()},
        seeds[0],
        config.output or config.run / "figures" / "motion.mp4",
        film=config.film,
        env_options=settings.env_options,
    )


def eval_command(config: EvalConfig) -> dict[str, Any]:
    """Measure a run's policy, deterministic and stochastic, and write the numbers as JSON.

    Returns:
        What the file holds: for "deterministic" and "stochastic", for each measure its mean, its
        interquartile mean and their 95 % intervals over the episodes.

    Raises:
        CheckpointError: not an episodic run, or no such checkpoint.
        SimulationError: a simulator failed.
    """
    settings = load_config(config.run)
    with EpisodeSampler(settings.env_id, config.workers, 0, settings.env_options) as sampler:
        agent = load_agent(config.run, sampler.spec, config.step)
        results = {
            name: evaluate_agent(agent, sampler, config.episodes, deterministic=deterministic)
            for name, deterministic in (("deterministic", True), ("stochastic", False))
        }
        headline = sampler.spec.headline
    steps = [checkpoint.step for checkpoint in RunFolder.open(config.run).checkpoints()]
    numbers: dict[str, Any] = {
        "run": config.run.name,
        "env": settings.env_id,
        "step": steps[-1] if config.step is None else config.step,
        "episodes": config.episodes,
        "headline": headline,
    } | {name: summarise_evaluation(result, headline) for name, result in results.items()}
    atomic_write_json(config.output or config.run / "evaluation.json", numbers)
    return numbers


def summarise_evaluation(result: Evaluation, headline: str) -> dict[str, dict[str, Any]]:
    """Success, return, headline and roughness: mean and interquartile mean with 95 % intervals.

    The interval of success is Wilson's, the others are bootstrap intervals over the episodes. Episodes that
    lack a number (one that never landed has no landing distance) are left out; "known" counts the rest.
    """
    measures = {"success": result.headline("success"), "return": result.returns}
    measures |= {headline: result.headline(headline), "jerk": result.jerk}
    return {name: _measure(values, name == "success") for name, values in measures.items()}


def _measure(values: np.ndarray[Any, np.dtype[np.float64]], is_share: bool) -> dict[str, Any]:
    known = values[~np.isnan(values)]
    if not known.size:
        return {"known": 0}
    share = float(known.mean())
    mean = proportion_interval(share, known.size) if is_share else bootstrap_interval(known)
    middle = bootstrap_interval(known, interquartile_mean)
    return {
        "known": int(known.size),
        "mean": mean.value,
        "mean_interval": [mean.low, mean.high],
        "interquartile_mean": middle.value,
        "interquartile_mean_interval": [middle.low, middle.high],
    }


def print_evaluation(numbers: dict[str, Any]) -> None:
    """Show what `eval_command` measured as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"{numbers['run']}, iteration {numbers['step']}: {numbers['episodes']} episodes of {numbers['env']}",
        highlight=False,
        soft_wrap=True,
    )
    for policy in ("deterministic", "stochastic"):
        table = Table(title=f"{policy} policy", title_justify="left")
        for name in ("measure", "mean", "95 % interval", "interquartile mean", "95 % interval"):
            table.add_column(name, justify="left" if name == "measure" else "right")
        for name, found in numbers[policy].items():
            row = [name.replace("_", " ")]
            for key in ("mean", "interquartile_mean"):
                if found["known"]:
                    low, high = found[f"{key}_interval"]
                    row += [f"{found[key]:.4g}", f"{low:.4g} to {high:.4g}"]
                else:
                    row += ["unknown", ""]
            table.add_row(*row)
        console.print(table)


def compare_command(config: CompareConfig) -> list[Path]:
    """Train every algorithm with every seed, several at a time, each with its share of the cores.

    Finished runs are skipped and interrupted ones continued, so the same command goes on after a crash.

    Returns:
        The run folders: algorithms in the order of the config, seeds within them.

    Raises:
        ConfigError: no preset of one of the algorithms.
        RunFailedError: a run ended before it was finished; the others are kept.
    """
    runs = comparison_runs(config)
    cores = os.cpu_count() or 1
    at_once = min(config.jobs or cores, len(runs))
    share = max(1, cores // at_once)
    config.output.mkdir(parents=True, exist_ok=True)
    # A share of one core is best spent in one process that simulates and learns in turn.
    jobs = [_job(replace(run, workers=share if share > 1 else 0)) for run in runs]
    run_jobs(jobs, at_once=at_once, environment={"OMP_NUM_THREADS": "1"})
    return [job.folder for job in jobs]


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


def _job(run: TrainConfig) -> Job:
    out = run.folder()
    settings = write_settings(out.with_name(out.name + ".yaml"), run)
    command = (sys.executable, "-m", "tether", "episodic", "train", "--config", str(settings))
    return Job(f"{run.algo}, seed {run.seed}", command, out, run.iterations)


def _done(out: Path) -> int:
    """Iterations a resumed run has behind it."""
    if not (out / "config.json").is_file():
        return 0
    run = RunFolder.open(out)
    if run.config.kind != "episodic":
        raise CheckpointError(f"{out} is a run of kind {run.config.kind!r}, not an episodic one.")
    checkpoint = run.latest_checkpoint()
    return checkpoint.step if checkpoint else 0


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}.")
