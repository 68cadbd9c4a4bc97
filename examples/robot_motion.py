"""From a learned policy to a real robot: limits, via-points and replanning, drawn in one picture.

Trains a policy that reaches points in a plane for some seconds, then shows what a robot needs besides it:

- its limits: a motion that is too fast is run slower, along the same path, or refused;
- via-points: the motions the policy would choose among those that pass a given point;
- replanning: in the middle of the motion the goal moves, and the motion bends there without a jump;
- the exported policy: one file that torch runs without Tether, the same for ONNX Runtime, and a CSV table of
  the steps within the limits.

    pip install "tether-rl[export]"
    python examples/robot_motion.py        # writes runs/robot-motion/motion.png and the files beside it
"""

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
import torch

from tether.episodic.config import OnPolicyConfig
from tether.episodic.export import export_run, inputs_of
from tether.episodic.options import ExportConfig
from tether.episodic.plans import MotionLimits, plan_motion
from tether.episodic.prodmp import ProDMPConfig
from tether.episodic.sampler import EpisodeSampler
from tether.episodic.train import load_learner, train
from tether.episodic.via_points import ViaPoint, condition_on_via_points
from tether.errors import MotionLimitError

OUTPUT = Path("runs/robot-motion")
LIMITS = MotionLimits(velocity=1.0, acceleration=6.0)


def main(output: Path = OUTPUT, iterations: int = 200) -> None:
    motion = ProDMPConfig(num_basis=3, tau=1.0, weights_scale=0.2, relative_goal=True)
    config = OnPolicyConfig("tether/PointReach-v0", iterations=iterations, num_workers=0, motion=motion)
    run = train(config, output / "run", resume=True).path
    with EpisodeSampler(config.env_id) as sampler:
        learner = load_learner(run, sampler.spec)
        starts = sampler.reset(seeds=(1, 4))
    spec = learner.spec
    seen, positions, velocities = inputs_of(learner, starts).values()
    with torch.no_grad():
        weights = learner.planner()(seen).double()  # for two goals
        chosen = learner.policy(seen[:1].to(learner.dtype)).detach()

    def plan(w, position, velocity, **options):
        return plan_motion(learner.motion, w, position, velocity, spec.dt, spec.duration, **options)

    start = positions[0], velocities[0]
    free, limited = plan(weights[0], *start), plan(weights[0], *start, limits=LIMITS)
    print(f"Largest speed {np.abs(free.velocities).max():.2f} m/s; {limited.slowed:.2f} times slower: "
          f"{np.abs(limited.velocities).max():.2f} m/s")  # fmt: skip
    try:
        plan(weights[0], *start, limits=LIMITS, on_violation="refuse")
    except MotionLimitError as refusal:
        print(f"Or refused: {refusal}")

    half = len(free.times) // 2 - 1
    via = ViaPoint(float(free.times[half]), tuple(free.positions[half] + np.array([0.15, -0.15])))
    passing = condition_on_via_points(learner.motion, chosen, positions[:1], velocities[:1], [via])
    noise = torch.randn(12, learner.motion.num_weights, generator=torch.Generator().manual_seed(0))
    through = [plan(passing.weights(n.double()[None])[0], *start) for n in noise]
    missed = max(np.abs(motion.positions[half] - via.position).max() for motion in through)
    print(f"{len(through)} motions through a point miss it by {missed:.4f} m at most")

    here = len(free.times) // 3
    state = torch.from_numpy(free.positions[here]), torch.from_numpy(free.velocities[here])
    bent = plan(weights[1], *state, start_time=float(free.times[here]), goal_from=positions[0])
    jump = np.abs(bent.positions[0] - free.positions[here] - spec.dt * free.velocities[here]).max()
    print(f"Replanned after {free.times[here]:.2f} s: the next step is {jump:.4f} m off going straight on")

    folder = export_run(ExportConfig(run, output=output / "export", limits=LIMITS))
    inputs = {"observation": seen, "position": positions, "velocity": velocities}
    _, alone, _ = torch.export.load(folder / "motion.pt2").module()(**inputs)  # torch alone
    session = onnxruntime.InferenceSession(folder / "motion.onnx")
    (other,) = session.run(["positions"], {name: value.numpy() for name, value in inputs.items()})
    for name, found in (("torch", alone.numpy()), ("ONNX Runtime", other)):
        print(f"Exported to {folder}: {name} differs by {np.abs(found[0] - free.positions).max():.1e} m")
    with (folder / "motion_0.csv").open() as file:
        table = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    draw(output / "motion.png", free, limited, through, via, bent, here, table)


def draw(path, free, limited, through, via, bent, here, table) -> None:
    figure, grid = plt.subplots(2, 2, figsize=(9, 7), layout="constrained")
    speeds, points, goals, steps = grid.flat
    for motion, label in ((free, "as learned"), (limited, "within the limits")):
        speeds.plot(motion.times, np.abs(motion.velocities).max(axis=1), label=label)
    speeds.axhline(LIMITS.velocity, color="grey", linestyle=":", label="limit")
    speeds.set(title="Limits", xlabel="seconds", ylabel="speed of the faster joint (m/s)")
    for motion in through:
        points.plot(*motion.positions.T, color="tab:blue", alpha=0.4, linewidth=0.8)
    points.plot(*free.positions.T, color="black", label="as learned")
    points.plot(*via.position, "o", color="tab:red", label="via-point")
    points.set(title="Motions through a point", xlabel="x (m)", ylabel="y (m)")
    goals.plot(*free.positions.T, color="black", linestyle="--", label="first goal")
    goals.plot(*bent.positions.T, color="tab:green", label="replanned")
    goals.plot(*free.positions[here], "o", color="tab:red", label="the goal moves")
    goals.set(title="Replanning", xlabel="x (m)", ylabel="y (m)")
    for name in table[0]:
        if name.startswith(("position", "velocity")):
            unit, line = ("m", "-") if name.startswith("position") else ("m/s", "--")
            drawn = [row[name] for row in table]
            steps.plot([row["seconds"] for row in table], drawn, line, label=f"{name} ({unit})")
    steps.set(title="The exported table of another start", xlabel="seconds")
    steps.margins(y=0.3)
    for axes in grid.flat:
        axes.legend(frameon=False, ncols=2 if axes is steps else 1)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    print(f"Picture: {path}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
