"""Robot environments behind gymnasium. Importing this package registers them, and imports none of them.

``gymnasium.make("tether.episodic.envs:tether/HopperJump-v0")`` imports it by itself.
"""

from __future__ import annotations

from typing import Any

import gymnasium

from tether.episodic.envs.meta_world_tasks import META_WORLD_TASKS

_RANDOM = {"random_init": True}
_SPARSE_HOPPER = {"sparse": True, "height_weight": 10.0, "landing_weight": 2.0, "healthy_reward": 2.0}

# id -> module, the first part of its classes' names (FooEnv and FooAdapter), steps of an episode, keywords
_TABLE: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "tether/PointReach-v0": ("point_reach", "PointReach", 50, {}),
    "tether/HopperJump-v0": ("hopper_jump", "HopperJump", 250, {}),
    "tether/HopperJumpSparse-v0": ("hopper_jump", "HopperJump", 250, _SPARSE_HOPPER),
    "tether/BoxPushingDense-v0": ("box_pushing", "BoxPushing", 100, {}),
    "tether/BoxPushingSparse-v0": ("box_pushing", "BoxPushing", 100, {"reward": "sparse"}),
    "tether/BoxPushingSpatiallySparse-v0": ("box_pushing", "BoxPushing", 100, {"reward": "spatially_sparse"}),
    "tether/BoxPushingRandomInitDense-v0": ("box_pushing", "BoxPushing", 100, _RANDOM),
    "tether/BoxPushingRandomInitSparse-v0": (
        "box_pushing",
        "BoxPushing",
        100,
        _RANDOM | {"reward": "sparse"},
    ),
    "tether/TableTennis-v0": ("table_tennis", "TableTennis", 300, {}),
    "tether/TableTennisRandomInit-v0": (
        "table_tennis",
        "TableTennis",
        300,
        _RANDOM | {"reward": "dense", "violations": "executed"},
    ),
}
for _task in META_WORLD_TASKS:
    _TABLE[f"tether/MetaWorld-{_task}"] = ("meta_world", "MetaWorld", 500, {"task": _task})

BUILT_IN_ADAPTERS: dict[str, str] = {}
"""Environment id -> where the class is that runs trajectories in it, "package.module:Class"."""

for _id, (_module, _name, _steps, _options) in _TABLE.items():
    gymnasium.register(
        _id, entry_point=f"{__name__}.{_module}:{_name}Env", max_episode_steps=_steps, kwargs=_options
    )
    BUILT_IN_ADAPTERS[_id] = f"{__name__}.{_module}:{_name}Adapter"
