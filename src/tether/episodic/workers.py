"""Who runs a batch of episodes: this process, or a pool of worker processes that may die."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import numpy as np

from tether.episodic.adapters import PositionControlledEnv
from tether.episodic.environments import make_position_controlled
from tether.episodic.episodes import Episodes, FloatArray, Start, concatenate_episodes, stack_episodes
from tether.errors import SimulationError, TetherError

# What terminals, services and schedulers send to all processes of a group at once. The parent says what
# becomes of it, which may be to finish an iteration; when it closes their pipes the workers leave.
_OF_THE_PARENT = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()))
# Workers compute on one thread each: their number is what fills the cores.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class InProcess:
    """Runs episodes in this process, one after the other.

    Where a start takes long (`PositionControlledEnv.standing`) there are several environments, made when they
    are first needed: each stands at the start of an episode until that is run, and is not reset again.
    """

    def __init__(self, env_id: str, options: dict[str, Any]) -> None:
        self._make = partial(make_position_controlled, env_id, **options)
        self._envs = [self._make()]
        self.spec = self._envs[0].spec

    def reset(self, seeds: Sequence[int]) -> list[Start]:
        return [self._env(number).reset(seed) for number, seed in enumerate(seeds)]

    def execute(self, seeds: Sequence[int], positions: FloatArray, velocities: FloatArray) -> Episodes:
        motions = enumerate(zip(seeds, positions, velocities, strict=True))
        return stack_episodes([self._env(number).execute(*motion) for number, motion in motions])

    def _env(self, number: int) -> PositionControlledEnv:
        place = number % self._envs[0].standing
        if place == len(self._envs):
            self._envs.append(self._make())
        return self._envs[place]

    def close(self) -> None:
        for env in self._envs:
            env.close()


class WorkerPool:
    """One environment in each of several processes; each runs a contiguous share of the batch."""

    def __init__(self, env_id: str, num_workers: int, options: dict[str, Any]) -> None:
        with make_position_controlled(env_id, **options) as env:  # a wrong name or option fails here, clearly
            self.spec = env.spec
        self._env_id = env_id
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        # At the program's end, too, before multiprocessing waits for processes that were told to terminate.
        self._end = Finalize(self, _end, (self._connections, self._processes), exitpriority=0)
        context = get_context("spawn")
        try:
            with environment_variables(_ONE_THREAD), _children_without_interrupts():
                for _ in range(num_workers):
                    parent_end, child_end = context.Pipe()
                    process = context.Process(target=_serve, args=(child_end, env_id, options), daemon=True)
                    process.start()
                    child_end.close()
                    self._processes.append(process)
                    self._connections.append(parent_end)
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
        return concatenate_episodes(self._ask(requests))

    def close(self) -> None:
        self._end()

    def _shares(self, num_episodes: int) -> Iterator[tuple[int, slice]]:
        bounds = np.linspace(0, num_episodes, len(self._processes) + 1).round().astype(int)
        for worker in range(len(self._processes)):
            if bounds[worker] < bounds[worker + 1]:
                yield worker, slice(int(bounds[worker]), int(bounds[worker + 1]))

    def _ask(self, requests: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        if not self._processes:
            raise SimulationError(f"{self._env_id}: this sampler is closed. Build a new one.")
        try:
            for worker, request in requests.items():
                try:
                    self._connections[worker].send(request)
                except (BrokenPipeError, ConnectionResetError) as error:
                    self._fail(worker, error)
            return self._answers(list(requests))
        except TetherError:
            raise
        except BaseException:  # Ctrl-C: the next request would be given the answers still on their way
            self.close()
            raise

    def _answers(self, workers: Sequence[int]) -> list[Any]:
        """The answer of each worker, in order; a worker that dies is reported at once."""
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
        """Close the pool and raise how the worker that is gone ended."""
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


def _end(connections: list[Connection], processes: list[BaseProcess]) -> None:
    """Stop the workers and forget them."""
    for link in connections:
        link.close()  # a waiting worker reads the end of its pipe and leaves
    deadline = time.monotonic() + 1.0
    for process in processes:
        process.join(timeout=max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():  # in the middle of an episode
            process.kill()
            process.join()
    connections.clear()
    processes.clear()


@contextmanager
def environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started meanwhile, and put back what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _children_without_interrupts() -> Iterator[None]:
    """Let processes started meanwhile ignore Ctrl-C while they import; `_serve` takes over."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change handlers
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(link: Connection, env_id: str, options: dict[str, Any]) -> None:
    """What a worker process does: answer requests until the pipe closes."""
    for number in _OF_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    try:
        with closing(InProcess(env_id, options)) as episodes:
            link.send("ready")
            while True:
                try:
                    kind, *arguments = link.recv()
                except EOFError:
                    return
                link.send(_answer(episodes, kind, arguments))
    except (BrokenPipeError, ConnectionResetError):
        return  # the parent is gone, nobody is left to tell


def _answer(episodes: InProcess, kind: str, arguments: list[Any]) -> Any:
    """What the parent asked for, or the error it is to raise."""
    try:
        return (episodes.reset if kind == "reset" else episodes.execute)(*arguments)
    except TetherError as error:
        return error
    except Exception as error:  # noqa: BLE001 - not swallowed: the parent raises it
        return SimulationError(
            f"{episodes.spec.env_id}: the environment failed with {type(error).__name__}: {error}\n"
            f"In the worker:\n{traceback.format_exc()}"
        )
