"""What `tether episodic train`, `eval`, `render` and `compare` do."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from tether.episodic.algorithms import build_learner
from tether.episodic.config import typed_keywords
from tether.episodic.evaluate import Evaluation, evaluate_learner, evaluation_seeds
from tether.episodic.figures import sample_motions, save_exploration
from tether.episodic.options import CompareConfig, EvalConfig, RenderConfig, TrainConfig, comparison_runs
from tether.episodic.plans import MotionLimits
from tether.episodic.render import render_motions
from tether.episodic.run_kind import EPISODIC_RUNS, metric_text
from tether.episodic.sampler import EpisodeSampler
from tether.episodic.train import (
    BRANCH_FROM,
    MAY_CHANGE,
    checkpoint_step,
    config_of,
    load_config,
    load_learner,
    train,
)
from tether.errors import CheckpointError, ConfigError, MissingDependencyError, SimulationError
from tether.experiments import RunConfig, RunFolder
from tether.experiments.checkpoints import step_of
from tether.experiments.files import atomic_write_json, atomic_write_text, csv_text, dump_json, load_json
from tether.experiments.jobs import Job, run_jobs, usable_cores
from tether.experiments.progress import TrainingProgress
from tether.experiments.run_config import differences, refuse_other_settings
from tether.experiments.settings_file import write_settings
from tether.experiments.statistics import (
    Interval,
    bootstrap_interval,
    interquartile_mean,
    proportion_interval,
)

_DRAWN_MOTIONS = 24


def train_command(config: TrainConfig) -> RunFolder:
    """Train with a progress display; picture and film the result into the run's figures.

    A computer that cannot take pictures still gets its run: the display says what is missing.

    Raises:
        ConfigError: settings that do not fit, an unknown environment.
        CheckpointError: the output folder holds another run.
        SimulationError: a simulator failed while training.
    """
    settings, out = config.settings, config.folder()
    label = config.label or settings.algo
    done = _done(out) if config.resume else 0
    branched_at = step_of(config.branch_from) if config.branch_from else None
    with TrainingProgress(
        config.end(),
        f"{label}, seed {settings.seed}",
        done=done or branched_at or 0,
        displayed=EPISODIC_RUNS.displayed,
    ) as progress:
        if config.resume and not done:  # who misspelt the folder is to know before hours pass
            progress.message(f"Nothing to resume in {out}: training begins.")
        run = train(
            settings, out, label=label, resume=config.resume, until=config.until,
            branch_from=config.branch_from,
            trackers=(*config.report_to, *(("tensorboard",) if config.tensorboard else ())),
            report=lambda step, numbers: progress.update(step, **shown_numbers(out, numbers)),
            say=progress.message,
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
    return {name: value for name, value in numbers.items() if not name.startswith("success")}


def draw_exploration(run: Path) -> Path:
    """Picture the motions a run's policy tried before training and tries after it.

    Raises:
        CheckpointError: not an episodic run, or one without a checkpoint.
    """
    config = load_config(run)
    with EpisodeSampler(config.env_id, 0, 0, config.env_options) as sampler:
        start = sampler.reset(seeds=evaluation_seeds(1))
        before, after = build_learner(config, sampler.spec), load_learner(run, sampler.spec)
    rows = [
        (name, sample_motions(learner, start, _DRAWN_MOTIONS))
        for name, learner in (("before training", before), ("after training", after))
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
        learners = {
            "untrained": build_learner(settings, sampler.spec),
            "trained": load_learner(config.run, sampler.spec, config.step),
        }
    motions = {name: learner.act(start, explore=False) for name, learner in learners.items()}
    return render_motions(
        settings.env_id,
        {name: (motion.positions[0], motion.velocities[0]) for name, motion in motions.items()},
        seeds[0],
        config.output or config.run / "figures" / "motion.mp4",
        film=config.film,
        env_options=settings.env_options,
    )


def eval_command(config: EvalConfig) -> dict[str, Any]:
    """Measure a run's policy, deterministic and stochastic, and write the numbers as JSON.

    Returns:
        What the file holds: for "deterministic" and "stochastic", each measure of `summarise_evaluation`.

    Raises:
        CheckpointError: not an episodic run, or no such checkpoint.
        SimulationError: a simulator failed.
    """
    settings = load_config(config.run)
    step = checkpoint_step(config.run, config.step)
    limits = None if config.limits == MotionLimits() else config.limits
    with EpisodeSampler(settings.env_id, config.workers, 0, settings.env_options) as sampler:
        learner = load_learner(config.run, sampler.spec, step)
        results = {
            name: evaluate_learner(
                learner,
                sampler,
                config.episodes,
                deterministic=deterministic,
                limits=limits,
                on_violation=config.on_violation,
            )
            for name, deterministic in (("deterministic", True), ("stochastic", False))
        }
        spec = sampler.spec
    numbers: dict[str, Any] = {
        "run": config.run.resolve().name,  # also of "."
        "env": settings.env_id,
        "step": step,
        "episodes": config.episodes,
        "headline": spec.headline,
    } | {name: summarise_evaluation(result, spec.headline) for name, result in results.items()}
    if limits is not None:
        numbers |= {"limits": limits.described(spec.num_dof), "on_violation": config.on_violation}
    atomic_write_json(config.output or config.run / "evaluation.json", numbers)
    if config.each is not None:
        write_each_episode(config.each, results)
    return numbers


def write_each_episode(path: Path, results: dict[str, Evaluation]) -> None:
    """Write a table with a row an episode, numbered as `tether episodic render` counts them."""
    header, rows = list[str](), list[list[object]]()
    for policy, result in results.items():
        context = {f"context_{index}": entry for index, entry in enumerate(result.contexts.T)}
        columns = context | result.numbers()
        header = ["policy", "episode", *columns]
        for episode, row in enumerate(zip(*columns.values(), strict=True)):
            rows.append([policy, episode, *(f"{value:.6g}" for value in row)])
    atomic_write_text(path, csv_text([header, *rows]))


def summarise_evaluation(result: Evaluation, headline: str) -> dict[str, dict[str, Any]]:
    """What the task is judged by, the environment's other numbers, return and roughness.

    Each with its mean, interquartile mean and their 95 % intervals over the episodes. "success" is at the
    last step, "success_any" at any; of shares, these two and numbers that are 0 in some episodes and 1 in
    the rest, the middle half says nothing, and they have a mean alone. Their intervals are Wilson's, the
    others are bootstrap intervals, or None where episodes do not differ: it would have no width and look
    like certainty. Success is left out where another number is the headline: such a task (Hopper Jump) may
    define none, and 0 would look like a failure. Episodes that lack a number (one that never landed has no
    landing distance) are left out; "known" counts the rest.
    """
    measures: dict[str, np.ndarray[Any, Any]] = {headline: result.headline(headline)}
    if headline == "success":
        measures = {"success": result.success, "success_any": result.success_any}
    measures |= result.extras | {"return": result.returns, "jerk": result.jerk}
    return {
        name: _measured_share(values) if _is_share(values) else _measured(values)
        for name, values in measures.items()
    }


def _is_share(values: np.ndarray[Any, Any]) -> bool:
    return values.dtype == np.bool_ or set(np.unique(values)) == {0.0, 1.0}


def _measured_share(values: np.ndarray[Any, Any]) -> dict[str, Any]:
    mean = proportion_interval(float(values.mean()), values.size)
    return {"known": int(values.size), "mean": mean.value, "mean_interval": _bounds(mean)}


def _measured(values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, Any]:
    known = values[~np.isnan(values)]
    if not known.size:
        return {"known": 0}
    mean, middle = bootstrap_interval(known), bootstrap_interval(known, interquartile_mean)
    return {
        "known": int(known.size),
        "mean": mean.value,
        "mean_interval": _bounds(mean),
        "interquartile_mean": middle.value,
        "interquartile_mean_interval": _bounds(middle),
    }


def _bounds(interval: Interval) -> list[float] | None:
    return [interval.low, interval.high] if interval.low < interval.high else None


def print_evaluation(numbers: dict[str, Any]) -> None:
    """Show what `eval_command` measured as a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"{numbers['run']}, iteration {numbers['step']}: {numbers['episodes']} episodes of {numbers['env']}",
        highlight=False,
        soft_wrap=True,
    )
    for policy in ("deterministic", "stochastic"):
        # As narrow as it goes: an interval on two lines is hard to read.
        table = Table(
            title=f"{policy} policy",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for name in ("measure", "mean", "95 % interval", "middle\nhalf", "95 % interval"):
            first = name == "measure"
            table.add_column(name, justify="left" if first else "right", no_wrap=first)
        for name, found in numbers[policy].items():
            row, lacking = [metric_text(name)], "" if found["known"] else "unknown"
            for key in ("mean", "interquartile_mean"):
                bounds = found.get(f"{key}_interval")
                row.append(f"{found[key]:.4g}" if key in found else lacking)
                row.append("{:.4g} to {:.4g}".format(*bounds) if bounds else "")
            table.add_row(*row)
        console.print(table)
    console.print("Middle half: its mean, the interquartile mean.")


def compare_command(config: CompareConfig) -> list[Path]:
    """Train every algorithm with every seed, several at a time, each with its share of the cores.

    Finished runs are skipped and interrupted ones continued, so the same command goes on after a crash.

    Returns:
        The run folders: algorithms in the order of the config, seeds within them.

    Raises:
        ConfigError: no preset of one of the algorithms; a run of other settings in one of the folders.
        RunFailedError: a run ended before it was finished; the others are kept.
    """
    runs = comparison_runs(config)
    check_folders(runs)
    train_all(runs, config)
    return [run.folder() for run in runs]


def check_folders(runs: list[TrainConfig]) -> None:
    """Refuse folders that hold other runs than those that are to be trained, or taken from them if finished.

    Raises:
        ConfigError: as `check_same_run`.
        CheckpointError: not an episodic run.
    """
    for run in runs:
        if (run.folder() / "config.json").is_file():
            kept = RunFolder.open(run.folder())
            check_same_run(kept.config, kept.path, run, "another output folder, or delete that run")


def check_same_run(kept: RunConfig, path: Path, asked: TrainConfig, remedy: str) -> None:
    """Refuse to take a run for one of other settings. Those that it is too old to know had their defaults.

    Args:
        kept: what the run was asked to do.
        path: where it is.
        asked: what it would be taken for.
        remedy: what else the comparison may be given: "another output folder".

    Raises:
        ConfigError: another label, a branch of a run, or settings that differ in more than what changes no
            number of a run.
        CheckpointError: not an episodic run.
    """
    try:
        known = config_of(kept, path)
    except ConfigError as error:  # of a setting that there is no more
        raise ConfigError(f"{path}: {error} Give the comparison {remedy}.") from error
    if origin := kept.settings.get(BRANCH_FROM):
        raise ConfigError(
            f"{path} begins with {origin}, not with a new policy. Give the comparison {remedy}."
        )
    # Through JSON, so that tuples and lists compare equal.
    there, here = (
        RunConfig(kept.kind, label, config.seed, load_json(dump_json(config.as_dict())))
        for label, config in ((kept.label, known), (asked.label or asked.settings.algo, asked.settings))
    )
    refuse_other_settings(path, differences(there, here, MAY_CHANGE), remedy)


def train_all(runs: list[TrainConfig], config: CompareConfig) -> None:
    """Train runs as `compare_command` does, as far as the minutes go.

    Raises:
        RunFailedError: a run ended before it was finished; the others are kept.
    """
    cores = usable_cores()
    at_once = min(config.jobs or cores, len(runs))
    share = max(1, cores // at_once)
    config.output.mkdir(parents=True, exist_ok=True)
    # A share of one core is best spent in one process that simulates and learns in turn.
    workers = share if share > 1 else 0
    runs = [
        replace(run, settings=replace(run.settings, num_workers=workers), report_to=config.report_to)
        for run in runs
    ]
    jobs = [
        _job(run, "" if run.folder().parent == config.output else run.folder().parent.name) for run in runs
    ]
    run_jobs(
        jobs,
        at_once=at_once,
        environment={"OMP_NUM_THREADS": "1"},
        keep_going=True,  # a run that fails does so again at every call
        seconds=None if config.minutes is None else 60 * config.minutes,
        displayed=EPISODIC_RUNS.displayed,
    )


def _job(run: TrainConfig, study: str = "") -> Job:
    out = run.folder()
    options = asdict(run)
    options = options.pop("settings") | options
    options["env_options"] = typed_keywords(run.settings.env_options)
    file = write_settings(out.with_name(out.name + ".yaml"), options)
    command = (sys.executable, "-m", "tether", "episodic", "train", "--config", str(file))
    name = f"{run.label or run.settings.algo}, seed {run.settings.seed}"
    name = f"{study}: {name}" if study else name
    return Job(name, command, out, run.end(), in_part=run.until is not None)


def _done(out: Path) -> int:
    """Iterations a resumed run has behind it."""
    if not (out / "config.json").is_file():
        return 0
    run = RunFolder.open(out)
    if run.config.kind != "episodic":
        raise CheckpointError(f"{out} is a run of kind {run.config.kind!r}, not an episodic one.")
    checkpoint = run.latest_checkpoint()
    return checkpoint.step if checkpoint else 0
