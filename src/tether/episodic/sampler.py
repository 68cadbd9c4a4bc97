"""Collects whole episodes from many copies of an environment at once.

A policy needs the starts of a batch before it can plan, and the plans before anything moves, so sampling
has two halves: `EpisodeSampler.reset` gives the starts, `EpisodeSampler.execute` runs one desired
trajectory an episode to the end. Between the two an episode is nothing but its seed: a worker resets its
environment to that seed again when it executes (unless it stands there already), which is exact and
needs no copies of simulator states.

Every episode draws from its own seed, derived from the sampler's seed and the episode's number, so the
results do not depend on how many workers there are.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tether.episodic.adapters import (
    EnvSpec,
    Episode,
    FloatArray,
    PositionControlledEnv,
    Start,
    check_trajectory,
    make_position_controlled,
)
from tether.errors import InvalidInputError, SimulationError, TetherError

__all__ = ["EnvSpec", "EpisodeSampler", "Episodes", "Starts"]


@dataclass(frozen=True)
class Starts:
    """Where a batch of E episodes begins: what a policy sees and a movement primitive departs from."""

    contexts: FloatArray
    """[E, C], the entries of the first observation that describe the task."""

    observations: FloatArray
    """[E, O], the whole first observation."""

    positions: FloatArray
    """[E, D], joint positions."""

    velocities: FloatArray
    """[E, D], joint velocities per second."""

    seeds: tuple[int, ...]
    """What each episode's environment was reset with; it alone determines the start."""


@dataclass(frozen=True)
class Episodes:
    """A batch of E finished episodes of T steps."""

    observations: FloatArray
    """[E, T + 1, O], from the first observation to the one after the last step."""

    rewards: FloatArray
    """[E, T]"""

    success: NDArray[np.bool_]
    """[E]"""

    positions: FloatArray
    """[E, T + 1, D], where the joints really were (the desired trajectory is what they were asked)."""

    lengths: NDArray[np.int64]
    """[E], steps taken: T, fewer where the environment terminated. The rows after that are an absorbing
    state: the last observation repeated, rewards zero."""

    extras: dict[str, FloatArray]
    """Numbers of each episode by name, [E] each: e.g. "max_height"."""

    @property
    def returns(self) -> FloatArray:
        """The sum of each episode's rewards, [E]."""
        total: FloatArray = self.rewards.sum(axis=1)
        return total

    @property
    def env_steps(self) -> int:
        """Environment steps these episodes took together."""
        return int(self.lengths.sum())


class EpisodeSampler:
    """Runs batches of episodes in a pool of processes, reproducibly.

    Args:
        env_id: a name `make_position_controlled` knows.
        num_workers: processes; 0 runs in this one.
        seed: of the stream of episodes, in [0, 2^63).
        env_options: keywords of `make_position_controlled`.

    Raises:
        ConfigError: an unknown environment; the message lists the known ones.
        InvalidInputError: a negative number of workers or seed.

    >>> with EpisodeSampler("tether/PointReach-v0", num_workers=0, seed=1) as sampler:
    ...     starts = sampler.reset(4)
    ...     goal = np.repeat(starts.contexts[:, None, :2], sampler.spec.horizon, axis=1)
    ...     episodes = sampler.execute(goal, np.zeros_like(goal))
    >>> starts.positions.shape, episodes.rewards.shape, bool(episodes.success.all()), episodes.env_steps
    ((4, 2), (4, 50), True, 200)
    """

    spec: EnvSpec

    def __init__(
        self,
        env_id: str,
        num_workers: int = 0,
        seed: int = 0,
        env_options: Mapping[str, Any] | None = None,
    ) -> None:
        if num_workers < 0:
            raise InvalidInputError(f"num_workers is 0 (this process) or more; got {num_workers}.")
        if not 0 <= seed < 2**63:
            raise InvalidInputError(f"A seed lies in [0, 2^63); got {seed}.")
        self._seed = seed
        self._drawn = 0
        self._pending: tuple[int, ...] | None = None
        options = dict(env_options or {})
        self._backend: _InProcess | _WorkerPool = (
            _WorkerPool(env_id, num_workers, options) if num_workers else _InProcess(env_id, options)
        )
        self.spec = self._backend.spec

    def reset(self, num_episodes: int | None = None, *, seeds: Sequence[int] | None = None) -> Starts:
        """Begin a batch of episodes and say where each starts.

        Args:
            num_episodes: E, how many of the sampler's stream of episodes to draw.
            seeds: run the episodes of these seeds instead (evaluation on a fixed set); the stream does
                not move.

        Raises:
            InvalidInputError: not exactly one of the two, or none to run.
            SimulationError: a worker died or a simulator failed.
        """
        if (num_episodes is None) == (seeds is None):
            raise InvalidInputError("Give reset either num_episodes or seeds.")
        if num_episodes is not None:
            if num_episodes < 1:
                raise InvalidInputError(f"num_episodes is at least 1; got {num_episodes}.")
            chosen = tuple(self._episode_seed(self._drawn + i) for i in range(num_episodes))
        else:
            assert seeds is not None
            chosen = tuple(int(seed) for seed in seeds)
            if not chosen or min(chosen) < 0:
                raise InvalidInputError(f"seeds are one or more integers >= 0; got {chosen}.")
        starts = self._backend.reset(chosen)
        self._drawn += num_episodes or 0
        self._pending = chosen
        return Starts(
            contexts=np.stack([start.context for start in starts]),
            observations=np.stack([start.observation for start in starts]),
            positions=np.stack([start.position for start in starts]),
            velocities=np.stack([start.velocity for start in starts]),
            seeds=chosen,
        )

    def execute(self, desired_positions: ArrayLike, desired_velocities: ArrayLike) -> Episodes:
        """Run the episodes of the last `reset`, each along its own desired trajectory.

        May be called again, to run the same starts along other trajectories.

        Args:
            desired_positions: [E, T, D]; row t is what the robot ought to have reached at time (t + 1) dt.
            desired_velocities: [E, T, D] per second.

        Raises:
            InvalidInputError: nothing was reset, or shapes and values that cannot be run; checked before
                anything is stepped.
            SimulationError: a worker died or a simulator failed; the message names environment, worker and
                exit code or episode.
        """
        if self._pending is None:
            raise InvalidInputError("execute runs the starts of the last reset; call reset first.")
        positions = np.ascontiguousarray(desired_positions, dtype=np.float64)
        velocities = np.ascontiguousarray(desired_velocities, dtype=np.float64)
        check_trajectory(self.spec, positions, velocities, batch=(len(self._pending),))
        return self._backend.execute(self._pending, positions, velocities)

    def random_state(self) -> dict[str, int]:
        """Where the stream of episodes stands: all an exact resume needs, in plain integers."""
        return {"seed": self._seed, "episodes_drawn": self._drawn}

    def set_random_state(self, state: Mapping[str, int]) -> None:
        """Continue a stream of episodes where `random_state` left it.

        Raises:
            InvalidInputError: not what `random_state` returned.
        """
        if set(state) != {"seed", "episodes_drawn"} or min(state.values()) < 0:
            raise InvalidInputError(f"A sampler's random state has 'seed' and 'episodes_drawn'; got {state}.")
        self._seed, self._drawn = int(state["seed"]), int(state["episodes_drawn"])
        self._pending = None

    def close(self) -> None:
        """Stop the workers. Closing twice is fine."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _episode_seed(self, number: int) -> int:
        return int(np.random.SeedSequence(self._seed, spawn_key=(number,)).generate_state(1)[0])


def _run_batch(
    env: PositionControlledEnv, seeds: Sequence[int], positions: FloatArray, velocities: FloatArray
) -> Episodes:
    return _stack([env.execute(seeds[i], positions[i], velocities[i]) for i in range(len(seeds))])


def _stack(episodes: Sequence[Episode]) -> Episodes:
    return Episodes(
        observations=np.stack([episode.observations for episode in episodes]),
        rewards=np.stack([episode.rewards for episode in episodes]),
        success=np.array([episode.success for episode in episodes], dtype=np.bool_),
        positions=np.stack([episode.positions for episode in episodes]),
        lengths=np.array([episode.length for episode in episodes], dtype=np.int64),
        extras={name: np.array([e.extras[name] for e in episodes]) for name in episodes[0].extras},
    )


def _concatenate(parts: Sequence[Episodes]) -> Episodes:
    return Episodes(
        observations=np.concatenate([part.observations for part in parts]),
        rewards=np.concatenate([part.rewards for part in parts]),
        success=np.concatenate([part.success for part in parts]),
        positions=np.concatenate([part.positions for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        extras={name: np.concatenate([part.extras[name] for part in parts]) for name in parts[0].extras},
    )


class _InProcess:
    """The plain way: one environment, one episode after the other."""

    def __init__(self, env_id: str, options: dict[str, Any]) -> None:
        self._env = make_position_controlled(env_id, **options)
        self.spec = self._env.spec

    def reset(self, seeds: Sequence[int]) -> list[Start]:
        return [self._env.reset(seed) for seed in seeds]

    def execute(self, seeds: Sequence[int], positions: FloatArray, velocities: FloatArray) -> Episodes:
        return _run_batch(self._env, seeds, positions, velocities)

    def close(self) -> None:
        self._env.close()


class _WorkerPool:
    """One environment in each of several processes; each runs a contiguous share of the batch."""

    def __init__(self, env_id: str, num_workers: int, options: dict[str, Any]) -> None:
        with make_position_controlled(env_id, **options) as env:  # a wrong name or option fails here, clearly
            self.spec = env.spec
        self._env_id = env_id
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        context = get_context("spawn")
        try:
            with _children_on_one_thread(), _children_without_interrupts():
                for number in range(num_workers):
                    ours, theirs = context.Pipe()
                    process = context.Process(
                        target=_serve,
                        args=(theirs, env_id, options),
                        name=f"tether-sampler-{number}",
                        daemon=True,
                    )
                    process.start()
                    theirs.close()
                    self._processes.append(process)
                    self._connections.append(ours)
            self._answers(range(num_workers))
        except BaseException:
            self.close()
            raise

    def reset(self, seeds: Sequence[int]) -> list[Start]:
        requests = {w: ("reset", seeds[share]) for w, share in self._shares(len(seeds))}
        return [start for starts in self._ask(requests) for start in starts]

    def execute(self, seeds: Sequence[int], positions: FloatArray, velocities: FloatArray) -> Episodes:
        requests = {
            w: ("execute", seeds[share], positions[share], velocities[share])
            for w, share in self._shares(len(seeds))
        }
        return _concatenate(self._ask(requests))

    def close(self) -> None:
        for link in self._connections:
            link.close()  # a waiting worker reads the end of its pipe and leaves
        patience = time.monotonic() + 1.0
        for process in self._processes:
            process.join(timeout=max(0.0, patience - time.monotonic()))
        for process in self._processes:
            if process.is_alive():  # in the middle of an episode
                process.kill()
                process.join()
        self._connections, self._processes = [], []

    def _shares(self, num_episodes: int) -> Iterator[tuple[int, slice]]:
        bounds = np.linspace(0, num_episodes, len(self._processes) + 1).round().astype(int)
        for worker in range(len(self._processes)):
            if bounds[worker] < bounds[worker + 1]:
                yield worker, slice(int(bounds[worker]), int(bounds[worker + 1]))

    def _ask(self, requests: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        if not self._processes:
            raise SimulationError(f"{self._env_id}: this sampler is closed. Build a new one.")
        for worker, request in requests.items():
            try:
                self._connections[worker].send(request)
            except (BrokenPipeError, ConnectionResetError) as error:
                self._fail(worker, error)
        return self._answers(list(requests))

    def _answers(self, workers: Sequence[int]) -> list[Any]:
        """One answer of each worker, in order; whoever dies meanwhile is noticed at once."""
        answers: dict[int, Any] = {}
        failures: list[TetherError] = []
        waiting = {self._connections[worker]: worker for worker in workers}
        sentinels = {self._processes[worker].sentinel: worker for worker in workers}
        while waiting:
            for ready in connection.wait([*waiting, *sentinels]):
                if isinstance(ready, int):
                    worker = sentinels.pop(ready)
                    if self._connections[worker] in waiting and not self._connections[worker].poll():
                        self._fail(worker, None)
                elif isinstance(ready, Connection) and ready in waiting:
                    worker = waiting.pop(ready)
                    try:
                        answers[worker] = ready.recv()
                    except (EOFError, ConnectionResetError) as error:
                        self._fail(worker, error)
                    if isinstance(answers[worker], TetherError):
                        failures.append(answers[worker])
        if failures:
            raise failures[0]
        return [answers[worker] for worker in workers]

    def _fail(self, worker: int, cause: BaseException | None) -> None:
        """A worker is gone: close the rest and say how it ended."""
        process = self._processes[worker]
        process.join(timeout=5.0)
        code = process.exitcode
        ending = f"exit code {code}"
        if code is not None and code < 0:
            ending = f"signal {signal.Signals(-code).name}"
        total = len(self._processes)
        self.close()
        raise SimulationError(
            f"{self._env_id}: sampler worker {worker} of {total} (process {process.pid}) ended with {ending} "
            "in the middle of its episodes. Its own message, if it left one, is on stderr; SIGKILL usually "
            "means that memory ran out: use fewer workers."
        ) from cause


@contextmanager
def _children_on_one_thread() -> Iterator[None]:
    """Processes started meanwhile compute on one thread each: their number is what fills the cores."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _children_without_interrupts() -> Iterator[None]:
    """Processes started meanwhile do not die noisily of Ctrl-C while they import; `_serve` takes over."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change handlers
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(link: Connection, env_id: str, options: dict[str, Any]) -> None:
    """A worker's life: answer requests until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which closes the pipe
    try:
        with make_position_controlled(env_id, **options) as env:
            link.send("ready")
            while True:
                try:
                    kind, *arguments = link.recv()
                except EOFError:
                    return
                link.send(_answer(env, kind, arguments))
    except (BrokenPipeError, ConnectionResetError):
        return  # the parent is gone, nobody is left to tell


def _answer(env: PositionControlledEnv, kind: str, arguments: list[Any]) -> Any:
    """What the parent asked for, or the error it is to raise."""
    try:
        if kind == "reset":
            return [env.reset(seed) for seed in arguments[0]]
        return _run_batch(env, *arguments)
    except TetherError as error:
        return error
    except Exception as error:  # noqa: BLE001 - not swallowed: the parent raises it
        return SimulationError(
            f"{env.env_id}: the environment failed with {type(error).__name__}: {error}\n"
            f"In the worker:\n{traceback.format_exc()}"
        )
