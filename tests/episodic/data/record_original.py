"""Replays the stored action sequences in the original environments and stores what they answered.

Run with Python 3.11 in an environment of its own, beside nothing of Tether:

    pip install "numpy<2" mujoco==2.3.3 gymnasium==0.29.1 && pip install --no-deps fancy-gym==0.3.0
    python tests/episodic/data/record_original.py

Each original_<name>.npz keeps its seeds and actions; observations, rewards and success are recorded anew.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
ENVS = "fancy_gym.envs.mujoco"


def original_classes() -> dict[str, Callable[[], Any]]:
    """The original environments by the name of their recording.

    Their package's own __init__ pulls in far more (torch among it), so its folders are entered directly.
    """
    spec = importlib.util.find_spec("fancy_gym")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(next(iter(spec.submodule_search_locations)))
    for name in ("", ".envs", ".envs.mujoco", *(f".envs.mujoco.{n}" for n in FOLDERS)):
        package = types.ModuleType(f"fancy_gym{name}")
        package.__path__ = [str(root / name.strip(".").replace(".", "/"))]
        sys.modules[package.__name__] = package
    hopper = importlib.import_module(f"{ENVS}.hopper_jump.hopper_jump")
    box = importlib.import_module(f"{ENVS}.box_pushing.box_pushing_env")
    tennis = importlib.import_module(f"{ENVS}.table_tennis.table_tennis_env")
    return {
        "hopper_jump": lambda: hopper.HopperJumpEnv(
            sparse=False, healthy_reward=1.0, contact_weight=0.0, height_weight=3.0
        ),
        "hopper_jump_sparse": lambda: hopper.HopperJumpEnv(sparse=True),
        "box_pushing_dense": box.BoxPushingDense,
        "box_pushing_sparse": box.BoxPushingTemporalSparse,
        "box_pushing_spatially_sparse": box.BoxPushingTemporalSpatialSparse,
        "table_tennis": lambda: tennis.TableTennisEnv(ctxt_dim=4, frame_skip=4),
    }


FOLDERS = ("hopper_jump", "box_pushing", "table_tennis")


def record(make: Callable[[], Any], seeds: np.ndarray, actions: np.ndarray) -> dict[str, np.ndarray]:
    """Rewards [E, T] (zero once over), observations [E, T + 1, O] (NaN once over), success and length [E]."""
    rewards = np.zeros(actions.shape[:2])
    observations, success, lengths, infos = [], [], [], []
    for episode, seed in enumerate(seeds):
        env = make()
        first, _ = env.reset(seed=int(seed))
        seen = np.full((actions.shape[1] + 1, first.size), np.nan)
        seen[0] = first
        for t, action in enumerate(actions[episode]):
            seen[t + 1], rewards[episode, t], over, _, info = env.step(action)
            if over:
                break
        observations.append(seen)
        success.append(bool(info.get("is_success", False)))
        lengths.append(t + 1)
        infos.append(info)
    extras = {
        name: np.array([float(info[key]) for info in infos])
        for name, key in EXTRAS.items()
        if key in infos[0]
    }
    return {
        "observations": np.array(observations),
        "rewards": rewards,
        "success": np.array(success),
        "lengths": np.array(lengths),
        **extras,
    }


EXTRAS = {
    "max_height": "max_height",
    "landing_distance": "contact_dist",
    "goal_distance": "box_goal_pos_dist",
    "goal_angle": "box_goal_rot_dist",
    "landing_error": "land_dist_error",
    "hit_ball": "hit_ball",
    "returned": "ball_returned_success",
}


def main() -> None:
    for name, make in original_classes().items():
        path = HERE / f"original_{name}.npz"
        with np.load(path) as stored:
            seeds, actions = stored["seeds"], stored["actions"]
        np.savez_compressed(path, seeds=seeds, actions=actions, **record(make, seeds, actions))


if __name__ == "__main__":
    main()
