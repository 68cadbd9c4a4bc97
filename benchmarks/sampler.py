"""Does the episode sampler keep up with bare environments?

For each environment, one run alternates between two ways to use the same cores:

- raw: one process a core, each stepping its own gymnasium environment with recorded actions, storing
  nothing; the rates of the processes are summed;
- sampler: `EpisodeSampler` with as many workers, from `reset` to the finished `Episodes`, controller
  included.

The claim is median(sampler / raw) >= 0.85 over the rounds of a run. On a machine that others use as well
the wall clock is noisy; the same ratio in steps per second of processor time, the parent's included, stands
beside it (from /proc, so on Linux).

    python benchmarks/sampler.py --workers 2 --rounds 7

writes benchmarks/results/sampler/sampler.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil

from tether.episodic.environments import make_position_controlled
from tether.episodic.sampler import EpisodeSampler

RESULTS = Path(__file__).parent / "results" / "sampler" / "sampler.json"

# Environment and episodes a batch: as the training settings have them, fewer for the slow box.
CASES = {
    "tether/HopperJump-v0": 64,
    "tether/BoxPushingDense-v0": 24,
    "tether/TableTennis-v0": 76,
    "tether/MetaWorld-button-press-v3": 16,
}


def desired_motion(env_id: str, episodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Smooth random motions from each start: [E, T, D] positions and velocities."""
    with make_position_controlled(env_id) as env:
        start, spec = env.reset(0), env.spec
    rng = np.random.default_rng(0)
    time_in_motion = np.arange(1, spec.horizon + 1)[None, :, None] / spec.horizon
    reach = rng.normal(0.0, 0.1, (episodes, 1, spec.num_dof))
    positions = start.position + reach * np.sin(np.pi * time_in_motion) ** 2
    return positions, np.gradient(positions, spec.dt, axis=1)


def recorded_actions(env_id: str, positions: np.ndarray, velocities: np.ndarray) -> np.ndarray:
    """The actions the controller takes along one motion, [T, A], for the raw loop to repeat."""
    actions: list[np.ndarray] = []
    with make_position_controlled(env_id) as env:
        step = env.env.step

        def recording_step(action: np.ndarray) -> Any:
            actions.append(np.array(action))
            return step(action)

        env.env.step = recording_step  # type: ignore[method-assign]
        env.execute(0, positions[0], velocities[0])
    return np.array(actions)


def raw_worker(link: Connection, env_id: str, actions: np.ndarray) -> None:
    """Step an environment on request; answers with seconds taken, by the wall and by the processor."""
    env = gymnasium.make(f"tether.episodic.envs:{env_id}", disable_env_checker=True)
    link.send("ready")
    while (episodes := link.recv()) is not None:
        start, start_cpu = time.perf_counter(), time.process_time()
        for seed in range(episodes):
            env.reset(seed=seed)
            for action in actions:
                env.step(action)
        link.send((time.perf_counter() - start, time.process_time() - start_cpu))


class RawProcesses:
    """As many bare loops as workers."""

    def __init__(self, env_id: str, workers: int, actions: np.ndarray) -> None:
        context = get_context("spawn")
        self._links = []
        self._steps = len(actions)
        for _ in range(workers):
            ours, theirs = context.Pipe()
            context.Process(target=raw_worker, args=(theirs, env_id, actions), daemon=True).start()
            self._links.append(ours)
        for link in self._links:
            link.recv()

    def rates(self, episodes: int) -> tuple[float, float]:
        """The sum of the processes' steps per second, and their steps per processor second."""
        shares = [len(share) for share in np.array_split(np.arange(episodes), len(self._links))]
        for link, share in zip(self._links, shares, strict=True):
            link.send(share)
        seconds = [link.recv() for link in self._links]
        summed = sum(share * self._steps / wall for share, (wall, _) in zip(shares, seconds, strict=True))
        return summed, episodes * self._steps / sum(cpu for _, cpu in seconds)

    def close(self) -> None:
        for link in self._links:
            link.send(None)


def processor_seconds() -> float:
    """What this process and its children have used so far; the bare loops wait while the sampler works."""
    children = (psutil.Process(child.pid).cpu_times() for child in active_children())
    return time.process_time() + sum(times.user + times.system for times in children)


def sampler_rates(
    sampler: EpisodeSampler, positions: np.ndarray, velocities: np.ndarray
) -> tuple[float, float]:
    """Steps per second, by wall and by processor, from the draw of the starts to the finished batch."""
    start, start_cpu = time.perf_counter(), processor_seconds()
    sampler.reset(len(positions))
    steps = sampler.execute(positions, velocities).env_steps
    return steps / (time.perf_counter() - start), steps / (processor_seconds() - start_cpu)


def measure(env_id: str, episodes: int, workers: int, rounds: int) -> dict[str, Any]:
    """Alternate raw and sampler; a first round of each warms up and is not counted."""
    positions, velocities = desired_motion(env_id, episodes)
    raw = RawProcesses(env_id, workers, recorded_actions(env_id, positions, velocities))
    pairs = []
    with EpisodeSampler(env_id, num_workers=workers) as sampler:
        for number in range(rounds + 1):
            pair = raw.rates(episodes), sampler_rates(sampler, positions, velocities)
            if number:
                pairs.append(pair)
    raw.close()
    ratios = [ours / theirs for (theirs, _), (ours, _) in pairs]
    return {
        "env_id": env_id,
        "episodes_a_batch": episodes,
        "raw_steps_per_second": round(statistics.median(theirs for (theirs, _), _ in pairs), 1),
        "sampler_steps_per_second": round(statistics.median(ours for _, (ours, _) in pairs), 1),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "processor_time_ratio_median": round(
            statistics.median(ours / theirs for (_, theirs), (_, ours) in pairs), 4
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--env", action="append", help="only this environment (may be repeated)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # for the raw processes; the sampler sees to its own
    results = []
    for env_id in arguments.env or CASES:
        results.append(measure(env_id, CASES.get(env_id, 64), arguments.workers, arguments.rounds))
        print(json.dumps(results[-1]))
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    report = {
        "command": f"python benchmarks/sampler.py --workers {arguments.workers} --rounds {arguments.rounds}",
        "workers": arguments.workers,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_average_at_end": load,
        "results": results,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
