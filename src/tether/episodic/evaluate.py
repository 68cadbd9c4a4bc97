"""How good a policy is: success and return on a fixed set of episodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tether.episodic.episodes import FloatArray
from tether.episodic.learner import Learner, Motions
from tether.episodic.limited_motions import within_limits
from tether.episodic.plans import MotionLimits, OnViolation
from tether.episodic.sampler import EpisodeSampler
from tether.errors import ConfigError

_EVALUATION_STREAM = 0x7E7E
# Fewer positions have no third difference.
_FEWEST_FOR_JERK = 4


@dataclass(frozen=True)
class Evaluation:
    """What became of E episodes."""

    success: NDArray[np.bool_]
    """At the last step, [E]."""

    success_any: NDArray[np.bool_]
    """At any step, [E]."""

    returns: FloatArray
    """Sum of rewards, [E]."""

    jerk: FloatArray
    """Roughness of the motions the robot really made, [E]; see `jerk_of_episodes`."""

    extras: dict[str, FloatArray]
    """Other numbers of the episodes, [E] each."""

    contexts: FloatArray
    """The entries of the first observation that describe the task, [E, C]."""

    deterministic: bool
    """Whether the policy's mean acted, or a sample."""

    def headline(self, name: str) -> FloatArray:
        """The number of each episode that the environment is judged by (`EnvSpec.headline`), [E]."""
        return self.success.astype(np.float64) if name == "success" else self.extras[name]

    def summary(self) -> dict[str, float]:
        """Means over the episodes; the names of a deterministic evaluation end in ``_greedy``."""
        suffix = "_greedy" if self.deterministic else ""
        return {f"{name}{suffix}": mean_of_known(values) for name, values in self.numbers().items()}

    def numbers(self) -> dict[str, FloatArray]:
        """Of each episode by name, [E] each."""
        shares = {"success": self.success, "success_any": self.success_any}
        numbers = {name: share.astype(np.float64) for name, share in shares.items()}
        return numbers | {"return": self.returns, "jerk": self.jerk, **self.extras}


def root_mean_square_jerk(positions: FloatArray, dt: float) -> FloatArray:
    """How jerky motions are: root mean square of the third derivative over time and joints.

    Args:
        positions: [E, T, D] at least four steps, dt apart.
        dt: seconds.

    Returns:
        [E], position units per second cubed.

    >>> t = np.arange(10)[None, :, None] * 0.1
    >>> root_mean_square_jerk(2 * t**3, 0.1).round(9).tolist()
    [12.0]
    """
    jerk = np.diff(positions, n=3, axis=1) / dt**3
    result: FloatArray = np.sqrt(np.square(jerk).mean(axis=(1, 2)))
    return result


def jerk_of_episodes(positions: FloatArray, lengths: NDArray[np.int64], dt: float) -> FloatArray:
    """`root_mean_square_jerk` of the steps that each episode took, [E].

    NaN where there are too few: a motion that was refused is not smooth, but none.

    Args:
        positions: [E, T + 1, D]; rows past an episode's end repeat the last one and count for nothing.
        lengths: [E], steps taken.
        dt: seconds.

    >>> t = np.arange(10)[None, :, None] * 0.1
    >>> stopped = np.minimum(2 * t**3, 2 * 0.5**3).repeat(3, axis=0)
    >>> jerk_of_episodes(stopped, np.array([5, 2, 0]), 0.1).round(9).tolist()
    [12.0, nan, nan]
    """
    steps = positions.shape[1] - 1
    if steps + 1 < _FEWEST_FOR_JERK:
        return np.full(len(positions), np.nan)
    jerk = root_mean_square_jerk(positions, dt)
    for i in np.flatnonzero(lengths < steps):
        taken = positions[i : i + 1, : lengths[i] + 1]
        jerk[i] = root_mean_square_jerk(taken, dt)[0] if taken.shape[1] >= _FEWEST_FOR_JERK else np.nan
    return jerk


def mean_of_known(values: FloatArray) -> float:
    """Mean over the episodes that have the number: one that never landed has no landing distance.

    >>> mean_of_known(np.array([1.0, np.nan, 3.0]))
    2.0
    """
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def evaluation_seeds(number: int) -> tuple[int, ...]:
    """Seeds of the episodes every evaluation of `number` episodes uses, whatever the run.

    >>> evaluation_seeds(2) == evaluation_seeds(3)[:2]
    True
    """
    return tuple(
        int(np.random.SeedSequence(_EVALUATION_STREAM, spawn_key=(i,)).generate_state(1)[0])
        for i in range(number)
    )


def check_training_seed(seed: int) -> None:
    """Refuse the one seed of training whose stream of episodes is the evaluation's.

    Raises:
        ConfigError: that seed.
    """
    if seed == _EVALUATION_STREAM:
        raise ConfigError(
            f"With seed {seed} a run would train on the very episodes that evaluations measure it on. Choose "
            "another seed."
        )


def evaluate_learner(
    learner: Learner,
    sampler: EpisodeSampler,
    number: int,
    *,
    deterministic: bool = True,
    limits: MotionLimits | None = None,
    on_violation: OnViolation = "scale",
) -> Evaluation:
    """Run what has been learned on the first `number` evaluation episodes.

    Training does not notice: the sampler's stream of episodes does not move, and the random numbers of a
    stochastic evaluation are put back.

    Args:
        learner: what acts.
        sampler: of its environment.
        number: how many episodes.
        deterministic: by the policy's mean, or by samples.
        limits: of a robot, within which the motions are run; the extras then have "slowed" and "refused".
        on_violation: whether motions that are too fast for the limits are run slower or refused.

    Raises:
        SimulationError: a simulator failed.
        ConfigError: limits that do not fit the robot, or motions that do not say their weights.
    """
    starts = sampler.reset(seeds=evaluation_seeds(number))
    before = learner.generator.get_state()
    motions: Motions = learner.act(starts, explore=not deterministic)
    learner.generator.set_state(before)
    kept: dict[str, FloatArray] = {}
    if limits is not None:
        motions = limited = within_limits(learner, motions, starts, limits, on_violation)
        kept = {"slowed": limited.slowed, "refused": limited.refused.astype(np.float64)}
    episodes = sampler.execute(motions.positions, motions.velocities)
    jerk = jerk_of_episodes(episodes.positions, episodes.lengths, learner.spec.dt)
    return Evaluation(
        success=episodes.success,
        success_any=episodes.success_any,
        returns=episodes.returns,
        jerk=jerk,
        extras=episodes.extras | kept,
        contexts=starts.contexts,
        deterministic=deterministic,
    )
