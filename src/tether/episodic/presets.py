"""Vetted settings for each environment: the published ones, and quick ones for a laptop.

``docs/episodic_published.md`` holds every published setting beside what the preset has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from tether.episodic.algorithms import find_algorithm
from tether.episodic.config import (
    EpisodicConfig,
    OffPolicyConfig,
    OnPolicyConfig,
    ReplayConfig,
    TrustRegionConfig,
    UpdateConfig,
)
from tether.episodic.critic import CriticConfig
from tether.episodic.policy import PolicyConfig
from tether.episodic.prodmp import ProDMPConfig
from tether.errors import ConfigError
from tether.names import look_up

ConfigT = TypeVar("ConfigT", bound=EpisodicConfig)

DEFAULT_PRESET = "hopper-jump-quick"

# Learning rates fell to a hundredth over this many iterations wherever no other number was configured,
# however long the training was.
_SCHEDULED_ITERATIONS = 10_000


def _fraction_after(iterations: int) -> float:
    """What is left of a learning rate after so many iterations of the schedule nobody configured."""
    return round(1 - 0.99 * iterations / _SCHEDULED_ITERATIONS, 4)


def _metaworld(task: str = "button-press-v3") -> OnPolicyConfig:
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


def _metaworld_bbrl(config: OnPolicyConfig) -> OnPolicyConfig:
    return replace(
        config,
        algo="bbrl",
        iterations=min(config.iterations, 7500),
        policy_input="context",
        motion=ProDMPConfig(4, 5.0, 10.0, 5.0, weights_scale=0.1, goal_scale=0.1, relative_goal=True),
        policy=PolicyConfig((32, 32), "relu", covariance="diagonal", min_std=1e-5),
        critic=CriticConfig((32, 32), "relu", epochs=100, normalise_inputs=False),
        trust_region=TrustRegionConfig(0.005, 0.0005, regression_weight=10.0, pull_covariance=False),
        update=UpdateConfig(epochs=100, final_learning_rate_fraction=1.0),
    )


def _box_dense() -> OnPolicyConfig:
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


def _box_dense_quick() -> OnPolicyConfig:
    """A fifth of the episodes: more and smaller steps for the same experience."""
    long = _affordable(_box_dense())
    update = replace(long.update, final_learning_rate_fraction=0.01)
    return replace(long, iterations=150, episodes=32, update=update, evaluate_every=10)


def _box_fixed_start_quick() -> OnPolicyConfig:
    """An easier task: the box always starts at the same place; and the critic does not know the time."""
    quick = _box_dense_quick()
    return replace(
        quick,
        env_id="tether/BoxPushingDense-v0",
        critic=replace(quick.critic, time_input=False, normalise_targets=False),
    )


def _box_sparse() -> OnPolicyConfig:
    dense = _box_dense()
    return replace(
        dense,
        env_id="tether/BoxPushingRandomInitSparse-v0",
        episodes=76,
        update=replace(dense.update, learning_rate=1e-4),
    )


def _box_bbrl(config: OnPolicyConfig) -> OnPolicyConfig:
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


def _hopper() -> OnPolicyConfig:
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


def _hopper_quick() -> OnPolicyConfig:
    """A quarter of the episodes at three times the learning rate, rewards where they are earned, and a critic
    with normalised targets that is fitted on every fifth state."""
    paper = _hopper()
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


def _hopper_sparse() -> OnPolicyConfig:
    """The task of the published curve: the highest point counts, once, at the end."""
    return replace(_hopper(), env_id="tether/HopperJumpSparse-v0")


def _hopper_sparse_long() -> OnPolicyConfig:
    """Three million steps: a quarter of the episodes at three times the learning rate, and a critic that is
    fitted on every fifth state and shown what the reward remembers (`show_memory`) instead of the time."""
    paper = _hopper_sparse()
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


def _affordable(paper: OnPolicyConfig, state_stride: int = 5) -> OnPolicyConfig:
    """The published task, budget and trust region with what makes the budget affordable on two cores:
    float32, and a critic with normalised targets that is fitted on some of the states."""
    critic = replace(paper.critic, state_stride=state_stride, normalise_targets=True)
    return replace(paper, precision="float32", critic=critic)


def _hopper_bbrl(config: OnPolicyConfig) -> OnPolicyConfig:
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


def _table_tennis() -> OnPolicyConfig:
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


def _table_tennis_quick() -> OnPolicyConfig:
    """Fewer episodes and wider trust regions: a few hundred iterations instead of twelve thousand."""
    region = TrustRegionConfig(0.02, 0.001)
    long = _affordable(_table_tennis())
    return replace(long, iterations=200, episodes=32, trust_region=region, evaluate_every=10)


def _table_tennis_refusing_quick() -> OnPolicyConfig:
    """An older task: one start, one reward at the end, motions that leave the joints' range refused."""
    quick = _table_tennis_quick()
    return replace(
        quick,
        env_id="tether/TableTennis-v0",
        critic=replace(quick.critic, time_input=False, normalise_targets=False),
        update=replace(quick.update, shift_rewards=False),
    )


def _table_tennis_bbrl(config: OnPolicyConfig) -> OnPolicyConfig:
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


def _toperl(config: OnPolicyConfig, **changes: Any) -> OffPolicyConfig:
    """The same motion and trust region, without a schedule of its entropy; four episodes an iteration."""
    region = replace(config.trust_region, target_entropy=None)
    changes |= {"precision": "float32", "episodes": 4, "evaluate_every": 10, "trust_region": region}
    return replace(_taken_over(config, OffPolicyConfig, "toperl"), **changes)


def _hopper_toperl(config: OnPolicyConfig) -> OffPolicyConfig:
    """Twice TCE's steps of the policy, and half of a batch of the best, as few episodes jump at first."""
    region = replace(config.trust_region, mean_bound=0.2, cov_bound=0.04)
    return _toperl(replace(config, trust_region=region), iterations=400, replay=ReplayConfig(best=0.5))


def _metaworld_toperl(config: OnPolicyConfig) -> OffPolicyConfig:
    return _toperl(config, iterations=1000, least_noise=0.0)


PRESETS: dict[str, Callable[..., EpisodicConfig]] = {
    "metaworld-paper": _metaworld,
    "metaworld-long": lambda *task: _affordable(_metaworld(*task)),
    "metaworld-quick": lambda *task: replace(_metaworld(*task), iterations=125, evaluate_every=10),
    "box-pushing-dense-paper": _box_dense,
    "box-pushing-dense-quick": _box_dense_quick,
    "box-pushing-dense-long": lambda: _affordable(_box_dense()),
    "box-pushing-sparse-paper": _box_sparse,
    "box-pushing-sparse-long": lambda: _affordable(_box_sparse()),
    "box-pushing-fixed-start-quick": _box_fixed_start_quick,
    "hopper-jump-paper": _hopper,
    "hopper-jump-quick": _hopper_quick,
    "hopper-jump-sparse-paper": _hopper_sparse,
    "hopper-jump-sparse-long": _hopper_sparse_long,
    "table-tennis-paper": _table_tennis,
    "table-tennis-long": lambda: _affordable(_table_tennis(), state_stride=10),
    "table-tennis-quick": _table_tennis_quick,
    "table-tennis-refusing-quick": _table_tennis_refusing_quick,
}
"""Name -> configuration: "paper" are published settings of TCE and "bbrl" the baseline's; "quick", "long" and
"toperl" ones fit two cores; "fixed-start" and "refusing" ones are of older, easier versions of a task."""

VARIANT_OF: dict[str, str] = {}
"""Preset for another algorithm -> the preset of the same task and budget that it changes."""


def add_variant(name: str, of: str, change: Callable[..., EpisodicConfig]) -> None:
    """Make a preset known that changes another one for another algorithm."""
    PRESETS[name] = lambda *task: change(PRESETS[of](*task))
    VARIANT_OF[name] = of


add_variant("metaworld-bbrl", "metaworld-paper", _metaworld_bbrl)
add_variant("metaworld-bbrl-long", "metaworld-long", _metaworld_bbrl)
add_variant("metaworld-bbrl-quick", "metaworld-quick", _metaworld_bbrl)
add_variant("metaworld-toperl", "metaworld-paper", _metaworld_toperl)
add_variant("box-pushing-dense-bbrl", "box-pushing-dense-paper", _box_bbrl)
add_variant("box-pushing-dense-bbrl-long", "box-pushing-dense-long", _box_bbrl)
add_variant("box-pushing-sparse-bbrl-long", "box-pushing-sparse-long", _box_bbrl)
add_variant("box-pushing-dense-bbrl-quick", "box-pushing-dense-quick", _box_bbrl)
add_variant("box-pushing-fixed-start-bbrl-quick", "box-pushing-fixed-start-quick", _box_bbrl)
add_variant("box-pushing-sparse-bbrl", "box-pushing-sparse-paper", _box_bbrl)
add_variant("hopper-jump-bbrl", "hopper-jump-paper", _hopper_bbrl)
add_variant("hopper-jump-bbrl-quick", "hopper-jump-quick", _hopper_bbrl)
add_variant("hopper-jump-sparse-bbrl", "hopper-jump-sparse-paper", _hopper_bbrl)
add_variant("hopper-jump-sparse-toperl", "hopper-jump-sparse-long", _hopper_toperl)
add_variant("hopper-jump-sparse-bbrl-long", "hopper-jump-sparse-long", _hopper_bbrl)
add_variant("table-tennis-bbrl", "table-tennis-paper", _table_tennis_bbrl)
add_variant("table-tennis-bbrl-long", "table-tennis-long", _table_tennis_bbrl)
add_variant("table-tennis-bbrl-quick", "table-tennis-quick", _table_tennis_bbrl)
add_variant("table-tennis-refusing-bbrl-quick", "table-tennis-refusing-quick", _table_tennis_bbrl)


def preset(name: str) -> EpisodicConfig:
    """The configuration of a name in `PRESETS`, or what your own function "package.module:function" returns.

    Meta-World presets take a task after a colon: "metaworld-paper:reach-v3".

    Raises:
        ConfigError: an unknown name; the message names the nearest known one.

    >>> preset("hopper-jump-paper").episodes
    64
    >>> preset("metaworld-paper:reach-v3").env_id
    'tether/MetaWorld-reach-v3'
    """
    base, colon, task = name.partition(":")
    if colon and (base in PRESETS or "-" in base):
        build = look_up(base, PRESETS, "preset")
        if not base.startswith("metaworld"):
            raise ConfigError(f"{base} has no tasks to choose from; got {name!r}.")
        config = build(task)
    else:
        config = look_up(name, PRESETS, "preset")()
    if not isinstance(config, EpisodicConfig):
        raise ConfigError(f"The preset {name!r} is {config!r}, which is no EpisodicConfig.")
    return config


def preset_for(name: str, algo: str) -> str | None:
    """The preset for another algorithm on the same task and budget, None where there is none.

    >>> preset_for("hopper-jump-quick", "bbrl"), preset_for("metaworld-bbrl:reach-v3", "tce")
    ('hopper-jump-bbrl-quick', 'metaworld-paper:reach-v3')
    """
    base, colon, task = name.partition(":")
    first = VARIANT_OF.get(base, base)
    family = [first, *(name for name, of in VARIANT_OF.items() if of == first)] if first in PRESETS else []
    return next((f"{name}{colon}{task}" for name in family if PRESETS[name]().algo == algo), None)


def choose(
    preset_name: str | None = None, env: str | None = None, algo: str | None = None
) -> tuple[str | None, EpisodicConfig]:
    """The preset and the settings meant by the name of a preset, an environment or an algorithm, or several.

    An environment alone takes its paper preset, or another of its own; without either it is the quick demo,
    `DEFAULT_PRESET`. An algorithm takes the preset's own variant for it. Where there is none, it takes the
    preset's environment, motion and budget (and all settings that the two algorithms share), and its own
    defaults for the rest.

    Raises:
        ConfigError: an unknown preset or algorithm, or an environment that is not the preset's.

    >>> choose("hopper-jump-quick", algo="bbrl")[0]
    'hopper-jump-bbrl-quick'
    >>> choose(env="tether/MetaWorld-reach-v3")[0]
    'metaworld-paper:reach-v3'
    """
    algorithm = find_algorithm(algo or EpisodicConfig.algo)
    if preset_name is None:
        preset_name = DEFAULT_PRESET if env is None else _preset_of(env)
    if preset_name is None:
        assert env is not None
        return None, algorithm.config_type(env, algo=algo or EpisodicConfig.algo)
    config = preset(preset_name)
    if algo is not None and config.algo != algo:
        if variant := preset_for(preset_name, algo):
            preset_name, config = variant, preset(variant)
        else:
            config = _taken_over(config, algorithm.config_type, algo)
    if env is not None and config.env_id != env:
        raise ConfigError(
            f"The preset {preset_name!r} is for {config.env_id}, not for {env}. Give only one of the two."
        )
    return preset_name, config


def _taken_over(config: EpisodicConfig, kind: type[ConfigT], algo: str) -> ConfigT:
    """Settings of another kind, with what both kinds have."""
    shared = next(base for base in kind.__mro__ if isinstance(config, base))
    return kind(**{f.name: getattr(config, f.name) for f in dataclasses.fields(shared)} | {"algo": algo})


def _preset_of(env: str) -> str | None:
    if env.startswith("tether/MetaWorld-"):
        return f"metaworld-paper:{env.removeprefix('tether/MetaWorld-')}"
    own = [name for name in PRESETS if preset(name).env_id == env]
    return next((name for name in own if name.endswith("-paper")), own[0] if own else None)
