"""Vetted settings for each environment: the paper's, and quick ones for a laptop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tether.episodic.config import EpisodicConfig, TrustRegionConfig, UpdateConfig
from tether.episodic.critic import CriticConfig
from tether.episodic.policy import PolicyConfig
from tether.episodic.prodmp import ProDMPConfig
from tether.errors import ConfigError

METAWORLD_DEFAULT_TASK = "button-press-v3"


def preset(name: str) -> EpisodicConfig:
    """The configuration of a name in `PRESETS`.

    Meta-World presets take a task after a colon: "metaworld-paper:reach-v3".

    Raises:
        ConfigError: an unknown name; the message lists the known ones.

    Example:
        >>> preset("hopper-jump-paper").episodes
        64
        >>> preset("metaworld-paper:reach-v3").env_id
        'tether/MetaWorld-reach-v3'
    """
    base, _, task = name.partition(":")
    if base not in PRESETS:
        raise ConfigError(f"Unknown preset {name!r}. Known: {', '.join(sorted(PRESETS))}.")
    config = PRESETS[base]()
    if not task:
        return config
    if not base.startswith("metaworld"):
        raise ConfigError(f"{base} has no tasks to choose from; got {name!r}.")
    return replace(config, env_id=f"tether/MetaWorld-{task}")


def _metaworld() -> EpisodicConfig:
    return EpisodicConfig(
        env_id=f"tether/MetaWorld-{METAWORLD_DEFAULT_TASK}",
        iterations=7600,
        episodes=16,
        motion=ProDMPConfig(8, 5.0, 10.0, 5.0, weights_scale=0.1, goal_scale=0.1, relative_goal=True),
        policy=PolicyConfig(activation="relu", min_std=1e-5),
        critic=CriticConfig(activation="relu"),
        trust_region=TrustRegionConfig(0.005, 0.0005, target_entropy=0.0),
        evaluate_every=10,
    )


def _metaworld_bbrl() -> EpisodicConfig:
    return replace(
        _metaworld(),
        algo="bbrl",
        policy_input="context",
        motion=ProDMPConfig(4, 5.0, 10.0, 5.0, weights_scale=0.1, goal_scale=0.1, relative_goal=True),
        policy=PolicyConfig((32, 32), "relu", covariance="diagonal", min_std=1e-5),
        critic=CriticConfig((32, 32), "relu", epochs=100),
        trust_region=TrustRegionConfig(0.005, 0.0005, regression_weight=10.0),
        update=UpdateConfig(epochs=100, final_learning_rate_fraction=1.0),
    )


def _box_dense() -> EpisodicConfig:
    return EpisodicConfig(
        env_id="tether/BoxPushingDense-v0",
        iterations=7500,
        episodes=152,
        precision="float64",
        motion=ProDMPConfig(8, 2.0, 10.0, 3.0, weights_scale=0.3, goal_scale=0.3),
        policy=PolicyConfig(min_std=1e-4),
        critic=CriticConfig((256, 256), learning_rate=1e-3, weight_decay=5e-5),
        trust_region=TrustRegionConfig(0.05, 0.0005, target_entropy=0.0),
        update=UpdateConfig(weight_decay=5e-5),
    )


def _box_dense_quick() -> EpisodicConfig:
    """A fifth of the episodes: more and smaller steps for the same experience."""
    paper = _box_dense()
    return replace(
        paper, iterations=150, episodes=32, precision="float32", critic=replace(paper.critic, state_stride=5)
    )


def _box_sparse() -> EpisodicConfig:
    dense = _box_dense()
    return replace(
        dense,
        env_id="tether/BoxPushingSparse-v0",
        episodes=76,
        update=replace(dense.update, learning_rate=1e-4),
    )


def _box_bbrl(config: EpisodicConfig) -> EpisodicConfig:
    return replace(
        config,
        algo="bbrl",
        policy_input="context",
        critic=replace(config.critic, learning_rate=3e-4, epochs=10),
        trust_region=TrustRegionConfig(0.05, 0.001, regression_weight=10.0),
        update=UpdateConfig(epochs=20, final_learning_rate_fraction=1.0),
    )


def _hopper() -> EpisodicConfig:
    return EpisodicConfig(
        env_id="tether/HopperJump-v0",
        iterations=3000,
        episodes=64,
        precision="float64",
        motion=ProDMPConfig(3, 0.8, 10.0, 3.0),
        policy=PolicyConfig(min_std=1e-4),
        critic=CriticConfig(learning_rate=1e-4, weight_decay=5e-5),
        trust_region=TrustRegionConfig(0.1, 0.02),
        update=UpdateConfig(learning_rate=1e-4, weight_decay=5e-5),
        evaluate_every=5,
    )


def _hopper_quick() -> EpisodicConfig:
    """A quarter of the episodes at three times the learning rate, and a critic that knows the time and is
    fitted on every fifth state."""
    paper = _hopper()
    return replace(
        paper,
        iterations=200,
        episodes=16,
        precision="float32",
        critic=replace(
            paper.critic, learning_rate=3e-4, time_input=True, normalise_targets=True, state_stride=5
        ),
        update=replace(paper.update, learning_rate=3e-4),
        evaluate_every=10,
        checkpoint_every=20,
    )


def _hopper_sparse() -> EpisodicConfig:
    """The task of the published curve: the highest point counts, once, at the end."""
    return replace(_hopper(), env_id="tether/HopperJumpSparse-v0")


def _hopper_sparse_long() -> EpisodicConfig:
    """Three million steps: a quarter of the episodes at three times the learning rate, and a critic that is
    fitted on every fifth state and shown what the reward remembers; else as published."""
    paper = _hopper_sparse()
    return replace(
        paper,
        env_options={"show_memory": True},
        iterations=750,
        episodes=16,
        precision="float32",
        critic=replace(paper.critic, learning_rate=3e-4, state_stride=5),
        update=replace(paper.update, learning_rate=3e-4),
        evaluate_every=20,
        checkpoint_every=50,
    )


def _hopper_bbrl(config: EpisodicConfig) -> EpisodicConfig:
    return replace(
        config,
        algo="bbrl",
        policy_input="context",
        critic=replace(config.critic, learning_rate=3e-4, epochs=100),
        trust_region=replace(config.trust_region, regression_weight=10.0),
        update=UpdateConfig(epochs=100, final_learning_rate_fraction=1.0, weight_decay=5e-5),
    )


def _table_tennis() -> EpisodicConfig:
    return EpisodicConfig(
        env_id="tether/TableTennis-v0",
        iterations=12000,
        episodes=76,
        motion=ProDMPConfig(
            3, 0.75, 25.0, 3.0, weights_scale=0.7, goal_scale=0.1, relative_goal=True, delay=0.3
        ),
        policy=PolicyConfig((256,), "tanh", min_std=1e-5),
        critic=CriticConfig((256, 256), weight_decay=1e-5),
        trust_region=TrustRegionConfig(0.005, 0.00025),
        update=UpdateConfig(weight_decay=1e-5),
    )


def _table_tennis_quick() -> EpisodicConfig:
    """Fewer episodes and wider trust regions: a few hundred iterations instead of twelve thousand."""
    paper = _table_tennis()
    return replace(
        paper,
        iterations=200,
        episodes=32,
        critic=replace(paper.critic, state_stride=5),
        trust_region=TrustRegionConfig(0.02, 0.001),
    )


def _table_tennis_bbrl(config: EpisodicConfig) -> EpisodicConfig:
    return replace(
        config,
        algo="bbrl",
        policy_input="context",
        critic=replace(config.critic, epochs=100),
        trust_region=TrustRegionConfig(config.trust_region.mean_bound, 0.001, regression_weight=25.0),
        update=UpdateConfig(epochs=100, final_learning_rate_fraction=1.0, weight_decay=1e-5),
    )


PRESETS: dict[str, Callable[[], EpisodicConfig]] = {
    "metaworld-paper": _metaworld,
    "metaworld-quick": lambda: replace(_metaworld(), iterations=125),
    "metaworld-bbrl": _metaworld_bbrl,
    "metaworld-bbrl-quick": lambda: replace(_metaworld_bbrl(), iterations=125),
    "box-pushing-dense-paper": _box_dense,
    "box-pushing-dense-bbrl": lambda: _box_bbrl(_box_dense()),
    "box-pushing-dense-quick": _box_dense_quick,
    "box-pushing-dense-bbrl-quick": lambda: _box_bbrl(_box_dense_quick()),
    "box-pushing-sparse-paper": _box_sparse,
    "box-pushing-sparse-bbrl": lambda: _box_bbrl(_box_sparse()),
    "hopper-jump-paper": _hopper,
    "hopper-jump-quick": _hopper_quick,
    "hopper-jump-bbrl": lambda: _hopper_bbrl(_hopper()),
    "hopper-jump-bbrl-quick": lambda: _hopper_bbrl(_hopper_quick()),
    "hopper-jump-sparse-paper": _hopper_sparse,
    "hopper-jump-sparse-bbrl": lambda: _hopper_bbrl(_hopper_sparse()),
    "hopper-jump-sparse-long": _hopper_sparse_long,
    "hopper-jump-sparse-bbrl-long": lambda: _hopper_bbrl(_hopper_sparse_long()),
    "table-tennis-paper": _table_tennis,
    "table-tennis-bbrl": lambda: _table_tennis_bbrl(_table_tennis()),
    "table-tennis-quick": _table_tennis_quick,
    "table-tennis-bbrl-quick": lambda: _table_tennis_bbrl(_table_tennis_quick()),
}
"""Name -> configuration: "paper" are the published settings of TCE and "bbrl" those of the baseline;
"quick" ones fit into minutes on two cores, "long" is the longest affordable there."""
