"""Robot environments behind gymnasium. Importing this module registers them.

``gymnasium.make("tether.episodic.envs:tether/HopperJump-v0")`` imports it by itself.
"""

from __future__ import annotations

import gymnasium

from tether.episodic.adapters import register_adapter
from tether.episodic.envs.meta_world_tasks import META_WORLD_TASKS

_HERE = "tether.episodic.envs"


def _register(name: str, module: str, env: str, adapter: str, horizon: int, **options: object) -> None:
    env_id = f"tether/{name}"
    gymnasium.register(
        env_id, entry_point=f"{_HERE}.{module}:{env}", max_episode_steps=horizon, kwargs=dict(options)
    )
    register_adapter(env_id, f"{_HERE}.{module}:{adapter}")


_register("PointReach-v0", "point_reach", "PointReachEnv", "PointReachAdapter", horizon=50)
_register("HopperJump-v0", "hopper_jump", "HopperJumpEnv", "HopperJumpAdapter", horizon=250)
_register(
    "HopperJumpSparse-v0",
    "hopper_jump",
    "HopperJumpEnv",
    "HopperJumpAdapter",
    horizon=250,
    sparse=True,
    height_weight=10.0,
    landing_weight=2.0,
    healthy_reward=2.0,
)
_register("BoxPushingDense-v0", "box_pushing", "BoxPushingEnv", "BoxPushingAdapter", horizon=100)
for _name, _reward in (("Sparse", "sparse"), ("SpatiallySparse", "spatially_sparse")):
    _register(
        f"BoxPushing{_name}-v0",
        "box_pushing",
        "BoxPushingEnv",
        "BoxPushingAdapter",
        horizon=100,
        reward=_reward,
    )
_register("TableTennis-v0", "table_tennis", "TableTennisEnv", "TableTennisAdapter", horizon=300)
for _task in META_WORLD_TASKS:
    _register(f"MetaWorld-{_task}", "meta_world", "MetaWorldEnv", "MetaWorldAdapter", horizon=500, task=_task)
