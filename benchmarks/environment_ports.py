"""How far the ported environments are from the originals, episode by recorded episode.

Replays tests/episodic/data/original_*.npz (fancy_gym 0.3.0 under mujoco 2.3.3, see record_original.py there)
and writes the largest differences to benchmarks/results/environment_ports/ports.json.

    python benchmarks/environment_ports.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np

import tether.episodic.envs  # noqa: F401 - registers the environments

ROOT = Path(__file__).parents[1]
RECORDINGS = ROOT / "tests" / "episodic" / "data"
RESULTS = Path(__file__).parent / "results" / "environment_ports" / "ports.json"

ENV_IDS = {
    "hopper_jump": "tether/HopperJump-v0",
    "hopper_jump_sparse": "tether/HopperJumpSparse-v0",
    "box_pushing_dense": "tether/BoxPushingDense-v0",
    "box_pushing_sparse": "tether/BoxPushingSparse-v0",
    "box_pushing_spatially_sparse": "tether/BoxPushingSpatiallySparse-v0",
    "table_tennis": "tether/TableTennis-v0",
}


def compare(name: str, recording: dict[str, np.ndarray], native_collider: bool = False) -> dict[str, Any]:
    """Replay one episode; `native_collider` switches Box Pushing to mujoco 3's own convex collider."""
    env = gymnasium.make(ENV_IDS[name])
    if native_collider:
        inner: Any = env.unwrapped
        inner.model.opt.disableflags &= ~int(mujoco.mjtDisableBit.mjDSBL_NATIVECCD)
    observations = [env.reset(seed=int(recording["seeds"]))[0]]
    rewards, info = [], {}
    for action in recording["actions"]:
        observation, reward, _, _, info = env.step(action)
        observations.append(observation)
        rewards.append(reward)
    length = int(recording["lengths"])
    gaps = np.abs(np.array(observations)[: length + 1] - recording["observations"][: length + 1]).max(axis=1)
    same_extras = sorted(set(info) & set(recording) - {"success"})
    return {
        "recording": name,
        "seed": int(recording["seeds"]),
        "mujoco_3_convex_collider": native_collider,
        "start_difference": float(gaps[0]),
        "observation_difference": float(gaps.max()),
        "observation_difference_at_step_10": float(gaps[10]),
        "reward_difference": float(np.abs(np.array(rewards) - recording["rewards"]).max()),
        "return": [float(np.sum(rewards)), float(recording["rewards"].sum())],
        "success": [bool(info.get("success", False)), bool(recording["success"])],  # both at the last step
        **{key: [float(info[key]), float(recording[key])] for key in same_extras},
    }


def main() -> None:
    results = []
    for name in ENV_IDS:
        with np.load(RECORDINGS / f"original_{name}.npz") as stored:
            for episode in range(len(stored["seeds"])):
                recording = {key: stored[key][episode] for key in stored}
                results.append(compare(name, recording))
                if name == "box_pushing_dense":
                    results.append(compare(name, recording, native_collider=True))
    report = {
        "command": "python benchmarks/environment_ports.py",
        "pairs": "[port, original]",
        "mujoco": mujoco.__version__,
        "results": results,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    for result in results:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
