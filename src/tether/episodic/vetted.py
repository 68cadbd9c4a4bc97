"""Settings by task: the published ones, what makes them affordable, and quick ones for a laptop.

``docs/episodic_published.md`` holds every published setting beside what is here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tether.episodic.config import (
    OffPolicyConfig,
    OnPolicyConfig,
    ReplayConfig,
    TrustRegionConfig,
    UpdateConfig,
    taken_over,
)
from tether.episodic.critic import CriticConfig
from tether.episodic.policy import PolicyConfig
from tether.episodic.prodmp import ProDMPConfig
from tether.episodic.segment_critic import SegmentCriticConfig

# Learning rates fell to a hundredth over this many iterations wherever no other number was configured,
# however long the training was.
_SCHEDULED_ITERATIONS = 10_000


def _fraction_after(iterations: int) -> float:
    """What is left of a learning rate after so many iterations of the schedule nobody configured."""
    return round(1 - 0.99 * iterations / _SCHEDULED_ITERATIONS, 4)


def metaworld(task: str = "button-press-v3") -> OnPolicyConfig:
    return OnPolicyConfig(
        env_id=f"tether/MetaWorld-{task}",
        iterations=7600,
        episodes=16,
        motion=ProDMPConfig(8, 5.0, 10.0, 5.0, weights_scale=0.1, goal_scale=0.1, relative_goal=True),
        policy=PolicyConfig(activation="relu", min_std=1e-5),
        critic=CriticConfig(activation="relu"),
        trust_region=TrustRegionConfig(0.005, 0.0005, target_entropy=0.0),
        evaluate_every=25,
    )


def metaworld_quick(task: str = "button-press-v3") -> OnPolicyConfig:
    """A million steps: schedules that end with them, and sixteen times the published trust region."""
    long = affordable(metaworld(task))
    region = replace(long.trust_region, mean_bound=0.08, cov_bound=0.008)
    return replace(long, iterations=125, trust_region=region)


def metaworld_bbrl(config: OnPolicyConfig) -> OnPolicyConfig:
    return replace(
        config,
        algo="bbrl",
        iterations=min(config.iterations, 7500),
        policy_input="context",
        motion=ProDMPConfig(4, 5.0, 10.0, 5.0, weights_scale=0.1, goal_scale=0.1, relative_goal=True),
        policy=PolicyConfig((32, 32), "relu", covariance="diagonal", min_std=1e-5),
        critic=CriticConfig((32, 32), "relu", epochs=100, normalise_inputs=False),
        trust_region=replace(
            config.trust_region, regression_weight=10.0, pull_covariance=False, target_entropy=None
        ),
        update=UpdateConfig(epochs=100, final_learning_rate_fraction=1.0),
    )


def box_dense() -> OnPolicyConfig:
    return OnPolicyConfig(
        env_id="tether/BoxPushingRandomInitDense-v0",
        iterations=7500,
        episodes=152,
        precision="float64",
        motion=ProDMPConfig(8, 2.0, 10.0, 3.0, weights_scale=0.3, goal_scale=0.3),
        policy=PolicyConfig(min_std=1e-4),
        critic=CriticConfig((256, 256), learning_rate=1e-3, weight_decay=5e-5),
        trust_region=TrustRegionConfig(0.05, 0.0005, target_entropy=0.0),
        update=UpdateConfig(final_learning_rate_fraction=_fraction_after(7500), weight_decay=5e-5),
        evaluate_every=25,
    )


def box_dense_quick() -> OnPolicyConfig:
    """A fifth of the episodes: more and smaller steps for the same experience."""
    long = affordable(box_dense())
    update = replace(long.update, final_learning_rate_fraction=0.01)
    return replace(long, iterations=150, episodes=32, update=update, evaluate_every=10)


def box_fixed_start_quick() -> OnPolicyConfig:
    """An easier task: the box always starts at the same place; and the critic does not know the time."""
    return _older(box_dense_quick(), "tether/BoxPushingDense-v0")


def box_sparse() -> OnPolicyConfig:
    dense = box_dense()
    return replace(
        dense,
        env_id="tether/BoxPushingRandomInitSparse-v0",
        episodes=76,
        update=replace(dense.update, learning_rate=1e-4),
    )


def box_bbrl(config: OnPolicyConfig) -> OnPolicyConfig:
    return replace(
        config,
        algo="bbrl",
        policy_input="context",
        precision="float32",
        motion=replace(config.motion, tau=1.5),
        critic=CriticConfig((256, 256), epochs=10, weight_decay=5e-5, normalise_inputs=False),
        trust_region=TrustRegionConfig(0.05, 0.001, regression_weight=10.0, pull_covariance=False),
        update=UpdateConfig(epochs=20, final_learning_rate_fraction=1.0, weight_decay=5e-5),
    )


def hopper() -> OnPolicyConfig:
    return OnPolicyConfig(
        env_id="tether/HopperJump-v0",
        iterations=3000,
        episodes=64,
        precision="float64",
        motion=ProDMPConfig(3, 0.8, 10.0, 3.0),
        policy=PolicyConfig(min_std=1e-4),
        critic=CriticConfig(learning_rate=1e-4, weight_decay=5e-5),
        trust_region=TrustRegionConfig(0.1, 0.02),
        update=UpdateConfig(1e-4, _fraction_after(3000), weight_decay=5e-5),
        evaluate_every=25,
    )


def hopper_quick() -> OnPolicyConfig:
    """A quarter of the episodes at three times the learning rate, rewards where they are earned, and a critic
    with normalised targets that is fitted on every fifth state."""
    paper = hopper()
    return replace(
        paper,
        iterations=200,
        episodes=16,
        precision="float32",
        critic=replace(paper.critic, learning_rate=3e-4, normalise_targets=True, state_stride=5),
        update=UpdateConfig(weight_decay=5e-5, shift_rewards=False),
        evaluate_every=10,
        checkpoint_every=20,
    )


def hopper_sparse() -> OnPolicyConfig:
    """The task of the published curve: the highest point counts, once, at the end."""
    return replace(hopper(), env_id="tether/HopperJumpSparse-v0")


def hopper_sparse_long() -> OnPolicyConfig:
    """Three million steps: a quarter of the episodes at three times the learning rate, and a critic that is
    fitted on every fifth state and shown what the reward remembers (`show_memory`) instead of the time."""
    paper = hopper_sparse()
    return replace(
        paper,
        env_options={"show_memory": True},
        iterations=750,
        episodes=16,
        precision="float32",
        critic=replace(paper.critic, learning_rate=3e-4, state_stride=5, time_input=False),
        update=UpdateConfig(weight_decay=5e-5, shift_rewards=False),
        evaluate_every=20,
        checkpoint_every=50,
    )


def hopper_sparse_high() -> OnPolicyConfig:
    """Motions long enough to bend and straighten before the jump, made of more and six times as wide basis
    functions; and whole returns, in which the reward at the end counts without the critic's help."""
    config = hopper_sparse_long()
    update = replace(config.update, gae_lambda=1.0, include_last_reward=True, learning_rates_fall_from=0.7)
    motion = replace(config.motion, num_basis=10, tau=1.3, weights_scale=6.0, goal_scale=6.0)
    return replace(config, iterations=219, episodes=64, motion=motion, update=update)


def affordable(paper: OnPolicyConfig, state_stride: int = 5) -> OnPolicyConfig:
    """The published task, budget and trust region with what makes the budget affordable on two cores:
    float32, and a critic with normalised targets that is fitted on some of the states."""
    critic = replace(paper.critic, state_stride=state_stride, normalise_targets=True)
    return replace(paper, precision="float32", critic=critic)


def _older(quick: OnPolicyConfig, env_id: str) -> OnPolicyConfig:
    """An older version of a task, with the critic it had: not told the time, values as they are earned."""
    return replace(
        quick, env_id=env_id, critic=replace(quick.critic, time_input=False, normalise_targets=False)
    )


def hopper_bbrl(config: OnPolicyConfig) -> OnPolicyConfig:
    """None were published for this task: TCE's, with the baseline's epochs and weight of the pull from
    Meta-World. The covariance is pulled as well, as in all runs of these presets so far."""
    return replace(
        config,
        algo="bbrl",
        policy_input="context",
        critic=replace(config.critic, learning_rate=3e-4, epochs=100, normalise_inputs=False),
        trust_region=replace(config.trust_region, regression_weight=10.0),
        update=UpdateConfig(epochs=100, final_learning_rate_fraction=1.0, weight_decay=5e-5),
    )


def table_tennis() -> OnPolicyConfig:
    return OnPolicyConfig(
        env_id="tether/TableTennisRandomInit-v0",
        iterations=12000,
        episodes=76,
        motion=ProDMPConfig(
            3, 0.75, 25.0, 3.0, weights_scale=0.7, goal_scale=0.1, relative_goal=True, delay=0.3
        ),
        policy=PolicyConfig((256,), "tanh", min_std=1e-5),
        critic=CriticConfig((256, 256), weight_decay=1e-5),
        trust_region=TrustRegionConfig(0.005, 0.00025),
        update=UpdateConfig(weight_decay=1e-5),
        evaluate_every=25,
    )


def table_tennis_quick() -> OnPolicyConfig:
    """Fewer episodes and wider trust regions: a few hundred iterations instead of twelve thousand."""
    region = TrustRegionConfig(0.02, 0.001)
    long = affordable(table_tennis())
    return replace(long, iterations=200, episodes=32, trust_region=region, evaluate_every=10)


def table_tennis_refusing_quick() -> OnPolicyConfig:
    """An older task: one start, one reward at the end, motions that leave the joints' range refused."""
    older = _older(table_tennis_quick(), "tether/TableTennis-v0")
    return replace(older, update=replace(older.update, shift_rewards=False))


def table_tennis_bbrl(config: OnPolicyConfig) -> OnPolicyConfig:
    return replace(
        config,
        algo="bbrl",
        env_options={"violations": "refused"},
        policy_input="context",
        critic=CriticConfig((256,), "tanh", epochs=100, weight_decay=1e-5, normalise_inputs=False),
        trust_region=TrustRegionConfig(
            config.trust_region.mean_bound, 0.001, regression_weight=25.0, pull_covariance=False
        ),
        update=UpdateConfig(epochs=100, final_learning_rate_fraction=1.0, weight_decay=1e-5),
    )


def toperl(config: OnPolicyConfig, **changes: Any) -> OffPolicyConfig:
    """The same motion and trust region, without a schedule of its entropy; four episodes an iteration."""
    region = replace(config.trust_region, target_entropy=None)
    usual: dict[str, Any] = {"episodes": 4, "evaluate_every": 10, "precision": "float32"}
    settings = usual | changes | {"trust_region": region}
    return replace(taken_over(config, OffPolicyConfig, "toperl"), **settings)


def hopper_toperl(config: OnPolicyConfig) -> OffPolicyConfig:
    """Twice TCE's steps of the policy, and half of a batch of the best, as few episodes jump at first."""
    region = replace(config.trust_region, mean_bound=0.2, cov_bound=0.04)
    return toperl(replace(config, trust_region=region), iterations=400, replay=ReplayConfig(best=0.5))


def box_toperl(config: OnPolicyConfig) -> OffPolicyConfig:
    """Box Pushing's short episodes: forty an iteration, read whole and in fewer pieces, and networks that can
    tell how the box must be turned from how it lies."""
    region = replace(config.trust_region, mean_bound=0.1)
    return toperl(
        replace(config, trust_region=region),
        policy=replace(config.policy, hidden_sizes=(256, 256)),
        iterations=2500,
        episodes=40,
        evaluate_every=25,
        epochs=40,
        least_noise=0.0,
        critic=SegmentCriticConfig(width=64, epochs=60),
        replay=ReplayConfig(capacity=20_000, batch=128, pieces=10, segments=1),
    )


def metaworld_toperl(config: OnPolicyConfig) -> OffPolicyConfig:
    return toperl(config, iterations=1000, least_noise=0.0)
