"""The training loop: sample episodes, learn from them, measure, save; and go on after a crash."""

from __future__ import annotations

import functools
import io
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tether.episodic.algorithms import build_learner, config_from_dict
from tether.episodic.config import EpisodicConfig
from tether.episodic.episodes import EnvSpec
from tether.episodic.evaluate import check_training_seed, evaluate_learner, mean_of_known
from tether.episodic.learner import Learner
from tether.episodic.run_kind import EPISODIC_RUNS
from tether.episodic.sampler import EpisodeSampler
from tether.errors import CheckpointError, ConfigError, SimulationError
from tether.experiments import RunConfig, RunFolder, atomic_write_bytes, seed_everything
from tether.experiments.checkpoints import Checkpoint, find_damage, step_of
from tether.experiments.files import dump_json, load_json
from tether.experiments.interrupts import Interrupts
from tether.experiments.run_start import check_target
from tether.experiments.trackers import check_trackers

Report = Callable[[int, dict[str, float]], None]

_Beginning = tuple[int, dict[str, Any]]
"""Iterations done, and the state that training goes on with."""

_STATE_FILE = "state.pt"
_STOPPING = "Stopping after this iteration, with a checkpoint. Again to stop at once without one."
MAY_CHANGE = ("num_workers", "checkpoint_every", "keep_checkpoints")
"""Settings that change no number of a run."""
BRANCH_FROM = "branch_from"
"""What `config.json` calls the checkpoint that a run begins with."""


def train(
    config: EpisodicConfig,
    out: str | Path,
    *,
    label: str | None = None,
    resume: bool = False,
    until: int | None = None,
    branch_from: Path | None = None,
    trackers: Collection[str] = (),
    report: Report | None = None,
    say: Callable[[str], None] | None = None,
) -> RunFolder:
    """Train an episodic policy into a run folder.

    Metrics, deterministic evaluations and checkpoints are written as they come. A run that was killed is
    continued with ``resume=True``, exactly: its files are those of an uninterrupted run, times aside.
    Ctrl-C and SIGTERM end it after the iteration at hand, with a checkpoint; the second one at once.

    Args:
        config: the run; see `tether.episodic.presets`.
        out: the run's folder, new or empty unless `resume`.
        label: the run's name in legends; the algorithm's by default.
        resume: go on where the folder's latest checkpoint stands.
        until: stop after this iteration, with a checkpoint, and leave the run to be resumed. The schedules
            still end with `config.iterations`: this is for a look at the beginning of a long run. What it
            reached is evaluated, which leaves one row more than the unbroken run has.
        branch_from: folder of another run's checkpoint (``RUN/checkpoints/step-000050``) to begin with
            instead of a new policy. Iterations, steps, schedules and random numbers go on from there: with
            that run's settings the branch is its continuation, and with others it shows what they change.
        trackers: what else gets every number: names of `tether.experiments.trackers`.
        report: called with (iteration, its metrics), from 1; and with each evaluation's.
        say: called with messages to whoever waits; they are printed to stderr by default.

    Returns:
        The run folder, closed.

    Raises:
        ConfigError: an unknown environment or algorithm, settings that do not fit it, the evaluation's own
            seed, a branch of another seed or without an iteration to train, or a number that environment and
            algorithm both have.
        CheckpointError: the folder holds another run; the branch's checkpoint is missing, damaged or of
            another environment, algorithm or network.
        SimulationError: a simulator failed; the message says in which iteration.
    """
    check_training_seed(config.seed)
    check_trackers(trackers)
    resuming = check_target(Path(out), resume)  # before environments are made, which may take long
    last = config.iterations if until is None else min(until, config.iterations)
    begun = resuming and _goes_on(RunFolder.open(out))
    origin = None if branch_from is None or begun else _origin(branch_from, config.seed, last)
    torch.set_num_threads(config.learner_threads)
    settings = config.as_dict()
    seed = settings.pop("seed")
    with EpisodeSampler(config.env_id, config.num_workers, seed, config.env_options) as sampler:
        seed_everything(seed)
        learner = build_learner(config, sampler.spec)
        _to_bytes(learner.state())  # what could not be saved is refused before time is spent
        if origin is not None:  # and so is the policy of another environment
            learner.load_state(origin[1]["agent"])
        settings |= {"headline": sampler.spec.headline}
        settings |= {} if branch_from is None else {BRANCH_FROM: branch_from}
        with RunFolder.create(
            out, kind="episodic", label=label or config.algo, seed=seed, settings=settings,
            resume=resume, may_change=MAY_CHANGE, current_settings=_with_defaults, trackers=trackers,
        ) as run:  # fmt: skip
            loop = _Loop(learner, sampler, run, report or (lambda step, metrics: None))
            loop.restore(origin)
            if not run.finished:
                with Interrupts(functools.partial(say or _print_to_stderr, _STOPPING)) as interrupts:
                    loop.run(last, interrupts)
    return run


def _print_to_stderr(message: str) -> None:
    sys.stderr.write(f"{message}\n")


class _Loop:
    def __init__(self, learner: Learner, sampler: EpisodeSampler, run: RunFolder, report: Report) -> None:
        self.learner = learner
        self.sampler = sampler
        self.run_folder = run
        self.report = report
        self.done = 0
        self.env_steps = 0
        self.begins = True

    def restore(self, origin: _Beginning | None) -> None:
        """Stand where the latest checkpoint stands, or where a branch begins, or at the beginning."""
        if self.run_folder.finished:
            return
        checkpoint = self.run_folder.latest_checkpoint()
        self.run_folder.truncate_after(checkpoint.step if checkpoint else -1)
        self.begins = checkpoint is None
        if checkpoint is not None:
            origin = checkpoint.step, _read_state(checkpoint.path / _STATE_FILE)
        if origin is None:
            return
        self.done, state = origin
        self.learner.load_state(state["agent"])
        self.sampler.set_random_state(state["sampler"])
        self.env_steps = state["env_steps"]

    def run(self, until: int, interrupts: Interrupts) -> None:
        config = self.learner.config
        if self.begins:
            self._evaluate()
        while self.done < until:
            metrics = self._iterate()
            self.done += 1
            self.run_folder.log(self.done, **metrics)
            self.report(self.done, metrics)
            if self.done in (until, config.iterations) or self.done % config.evaluate_every == 0:
                self._evaluate()
            stopping = interrupts.noted is not None
            if stopping or self.done == until or self.done % config.checkpoint_every == 0:
                self._save()
            if stopping and self.done < until:
                interrupts.pass_on()
        if self.done == config.iterations:
            self.run_folder.mark_finished()
        # SIGTERM asks a run to save and stop, and by now this one has: it ends as one that is complete.
        if interrupts.noted == signal.SIGINT:
            interrupts.pass_on()

    def _iterate(self) -> dict[str, float]:
        config = self.learner.config
        started = time.perf_counter()
        with _saying_where(f"iteration {self.done + 1}"):
            motions = self.learner.act(self.sampler.reset(config.episodes))
            episodes = self.sampler.execute(motions.positions, motions.velocities)
        sampling_seconds = time.perf_counter() - started
        self.env_steps += episodes.env_steps
        self.learner.observe(motions, episodes)
        learned = self.learner.update(progress=self.done / config.iterations)
        measured = {
            "env_steps": self.env_steps,
            "return_mean": float(episodes.returns.mean()),
            "success": float(episodes.success.mean()),
            "success_any": float(episodes.success_any.mean()),
            **{name: mean_of_known(values) for name, values in episodes.extras.items()},
            "sampling_seconds": sampling_seconds,
        }
        if twice := measured.keys() & learned.keys():
            raise ConfigError(
                f"{config.env_id} and {config.algo} both measure {', '.join(sorted(twice))}, and one number "
                f"would hide the other. Rename it: in the environment's extra_names, or in what "
                f"{type(self.learner).__name__}.update returns."
            )
        return measured | learned

    def _evaluate(self) -> None:
        with _saying_where(f"evaluation after iteration {self.done}"):
            result = evaluate_learner(self.learner, self.sampler, self.learner.config.evaluation_episodes)
        numbers = {"env_steps": self.env_steps, **result.summary()}
        self.run_folder.log_eval(self.done, **numbers)
        self.report(self.done, numbers)

    def _save(self) -> None:
        folder = self.run_folder.checkpoint_folder(self.done)
        state = {
            "agent": self.learner.state(),
            "sampler": self.sampler.random_state(),
            "env_steps": self.env_steps,
        }
        atomic_write_bytes(folder / _STATE_FILE, _to_bytes(state))
        self.run_folder.mark_complete(self.done, keep=self.learner.config.keep_checkpoints)


@contextmanager
def _saying_where(where: str) -> Iterator[None]:
    try:
        yield
    except SimulationError as error:
        raise SimulationError(f"{where}: {error}") from error


def load_learner(run_path: str | Path, spec: EnvSpec, step: int | None = None) -> Learner:
    """The trained learner of a run folder, at its latest or another checkpoint.

    Args:
        run_path: an episodic run.
        spec: of the environment it will act in (`EpisodeSampler.spec`).
        step: which checkpoint; the latest by default.

    Raises:
        CheckpointError: not an episodic run, no such checkpoint, a damaged one, or one of another
            environment.
    """
    config, chosen = load_config(run_path), _checkpoint(run_path, step)
    if spec.env_id != config.env_id:
        raise CheckpointError(
            f"{run_path} was trained in {config.env_id}; its motions mean nothing in {spec.env_id}."
        )
    _refuse_damaged(chosen, run_path)
    learner = build_learner(config, spec)
    learner.load_state(_read_state(chosen.path / _STATE_FILE)["agent"])
    return learner


def checkpoint_step(run_path: str | Path, step: int | None = None) -> int:
    """The iteration that `load_learner` loads of a run now; a run in training will have later ones soon.

    Raises:
        CheckpointError: not a run, or no such checkpoint.
    """
    return _checkpoint(run_path, step).step


def _goes_on(run: RunFolder) -> bool:
    """Whether a run has something of its own to go on from, or has come to its end."""
    return run.finished or bool(run.checkpoints())


def _origin(path: Path, seed: int, last: int) -> _Beginning:
    """What a branch begins with, once it is certain that a run can go on from there."""
    step = step_of(path)
    if step is None:
        raise CheckpointError(
            f"{path} is no checkpoint to branch from. Give one of a run, such as RUN/checkpoints/step-000050."
        )
    run_path = Path(os.path.abspath(path)).parents[1]
    checkpoint = _checkpoint(run_path, step)
    _refuse_damaged(checkpoint, run_path)
    if (drawn := load_config(run_path).seed) != seed:
        raise ConfigError(f"A branch goes on with the random numbers of its run, seed {drawn}; got {seed}.")
    if last <= step:
        raise ConfigError(
            f"{path} has {step} iterations behind it, and training is to end after {last}. "
            "Give more iterations, or a later until."
        )
    return step, _read_state(checkpoint.path / _STATE_FILE)


def _refuse_damaged(checkpoint: Checkpoint, run_path: str | Path) -> None:
    if damage := find_damage(checkpoint):
        others = [one.step for one in RunFolder.open(run_path).checkpoints() if one.step != checkpoint.step]
        raise CheckpointError(
            f"{checkpoint.path} is damaged: {damage}. Restore the file, or give another step"
            f"{f' ({others} are there)' if others else ', of which there is none'}."
        )


def _checkpoint(run_path: str | Path, step: int | None) -> Checkpoint:
    checkpoints = {checkpoint.step: checkpoint for checkpoint in RunFolder.open(run_path).checkpoints()}
    if not checkpoints or (step is not None and step not in checkpoints):
        wanted = "no complete checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"{run_path} has {wanted}; it has those of steps {sorted(checkpoints)}.")
    return checkpoints[max(checkpoints) if step is None else step]


def load_config(run_path: str | Path) -> EpisodicConfig:
    """The configuration of an episodic run folder.

    Raises:
        CheckpointError: not an episodic run.
    """
    return config_of(RunFolder.open(run_path).config, run_path)


def config_of(config: RunConfig, run_path: str | Path) -> EpisodicConfig:
    """The configuration of an episodic run, from what its folder or a table kept of it.

    Raises:
        CheckpointError: not an episodic run.
        ConfigError: a setting that there is no more.
    """
    if config.kind != "episodic":
        raise CheckpointError(f"{run_path} is a run of kind {config.kind!r}, not an episodic one.")
    return _config_of(EPISODIC_RUNS.current_settings(config.settings), config.seed)


def _config_of(current: Mapping[str, Any], seed: int) -> EpisodicConfig:
    settings = {name: value for name, value in current.items() if name not in ("headline", BRANCH_FROM)}
    return config_from_dict(settings | {"seed": seed})


def _with_defaults(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that is to be resumed, and the defaults of those that it is too old to know."""
    current = EPISODIC_RUNS.current_settings(saved)
    try:
        known = _config_of(current, seed=0).as_dict()
    except ConfigError:  # a setting that there is no more: whoever compares the settings names it
        return current
    del known["seed"]  # stands beside the settings
    completed: dict[str, Any] = load_json(dump_json(known))  # tuples become lists, as in the folder
    return current | completed


def _to_bytes(state: dict[str, Any]) -> bytes:
    """A state as a file's content, once it is certain that it can be read back."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "A checkpoint holds tensors, numbers, strings, and dicts and lists of them; this state holds "
            f"something else (numpy arrays: torch.from_numpy). {error}"
        ) from error
    return buffer.getvalue()


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # changed bytes raise almost anything here
        raise CheckpointError(
            f"{path} is not a training state ({type(error).__name__}). Use another checkpoint."
        ) from error
    if not isinstance(state, dict) or not state.keys() >= {"agent", "sampler", "env_steps"}:
        raise CheckpointError(f"{path} holds no state of a training. Use another checkpoint.")
    return state
