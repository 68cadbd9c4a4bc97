"""A learned policy as files that a robot's own program can run, without Tether."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from tether.episodic.environments import make_position_controlled
from tether.episodic.episodes import FloatArray, Starts
from tether.episodic.evaluate import evaluation_seeds
from tether.episodic.learner import Learner, Motions
from tether.episodic.options import ExportConfig
from tether.episodic.plans import Plan, plan_motion
from tether.episodic.prodmp import MotionBasis
from tether.episodic.sampler import EpisodeSampler
from tether.episodic.train import checkpoint_step, load_config, load_learner
from tether.errors import CheckpointError, ConfigError, MissingDependencyError
from tether.experiments.files import TEMPORARY_PREFIX, atomic_write_json

Format = Literal["torch", "onnx"]

FILES: dict[Format, str] = {"torch": "motion.pt2", "onnx": "motion.onnx"}
"""Format -> name of its file."""

DESCRIPTION = "motion.json"
"""Name of the file that says what the others are."""

_OWN_FILES = re.compile(r"motion\.(pt2|onnx|json)|motion_\d+\.csv")
_INPUTS = ("observation", "position", "velocity")
_OUTPUTS = ("weights", "positions", "velocities")
_CHECKED_STARTS = 16
# The exported network may sum in another order than the run's, which float32 shows at 1e-7.
_TOLERANCE = 1e-6

Run = Callable[[dict[str, Tensor]], tuple[Tensor, ...]]


class MotionModule(nn.Module):
    """From what a robot sees to its whole motion: the policy's mean and the movement primitive in one module.

    Args:
        learner: trained; it must define `Learner.planner`.

    Raises:
        ConfigError: a learner without a planner.

    Example:
        >>> from tether.episodic.algorithms import build_learner
        >>> from tether.episodic.config import OnPolicyConfig
        >>> config = OnPolicyConfig("tether/PointReach-v0")
        >>> with EpisodeSampler(config.env_id) as sampler:
        ...     learner, start = build_learner(config, sampler.spec), sampler.reset(1)
        >>> module = MotionModule(learner)
        >>> weights, positions, velocities = module(*inputs_of(learner, start).values())
        >>> positions.shape
        torch.Size([1, 50, 2])
    """

    def __init__(self, learner: Learner) -> None:
        super().__init__()
        self.planner = learner.planner()
        self.motion = learner.motion
        for field in fields(MotionBasis):
            # A name of their own: ONNX's outputs are called positions and velocities.
            self.register_buffer(f"basis_{field.name}", getattr(learner.basis, field.name))

    def forward(self, observation: Tensor, position: Tensor, velocity: Tensor) -> tuple[Tensor, ...]:
        """Weights [E, W], positions and velocities [E, T, D] of motions from states [E, D], all float64."""
        weights = self.planner(observation).double()
        names = [field.name for field in fields(MotionBasis)]
        basis = MotionBasis(**{name: getattr(self, f"basis_{name}") for name in names})
        return (weights, *self.motion.trajectory(weights, position, velocity, basis))


def inputs_of(learner: Learner, starts: Starts) -> dict[str, Tensor]:
    """What an exported motion is given for some starts, by name, float64."""
    values = (learner.seen(starts), starts.positions, starts.velocities)
    return {
        name: torch.as_tensor(value, dtype=torch.float64) for name, value in zip(_INPUTS, values, strict=True)
    }


def export_run(config: ExportConfig) -> Path:
    """Write a run's policy as a program for torch, as ONNX, with a description and motions as CSV.

    Programs are read back and compared with the run's own motions, and so are the motions of the tables
    before the limits act. Only then do the files of an earlier export in the folder make way for them, all
    together: a refused one leaves the folder as it was.

    Returns:
        The folder.

    Raises:
        CheckpointError: not an episodic run, no such checkpoint, or a file that does not repeat the run.
        ConfigError: an algorithm that cannot be exported, or an output that is a file.
        MissingDependencyError: ONNX was asked for and is not installed.
        MotionLimitError: a motion for the CSV files that the limits forbid.
    """
    _check_installed(config.formats)
    settings = load_config(config.run)
    config = replace(config, step=checkpoint_step(config.run, config.step))
    folder = config.output or config.run / "export"
    if in_the_way := next((path for path in (folder, *folder.parents) if path.is_file()), None):
        raise ConfigError(f"output={folder} must be a folder, but {in_the_way} is a file. Give another one.")
    with EpisodeSampler(settings.env_id, 0, 0, settings.env_options) as sampler:
        learner = load_learner(config.run, sampler.spec, config.step)
        starts = sampler.reset(seeds=evaluation_seeds(max(_CHECKED_STARTS, config.motions)))
    motions = learner.act(starts, explore=False)
    plans = _plans(learner, starts, motions, config)  # refused before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=folder) as scratch:
        made = Path(scratch)
        differences = {
            name: _write_and_compare(name, learner, starts, motions, made / FILES[name])
            for name in config.formats
        }
        for index, plan in enumerate(plans):
            plan.write_csv(made / f"motion_{index}.csv")
        atomic_write_json(
            made / DESCRIPTION, _description(learner, starts, config) | {"checked": differences}
        )
        _move(made, folder)
    return folder


def _move(made: Path, folder: Path) -> None:
    """Put new files in the place of an earlier export's: its description goes first, the new comes last."""
    (folder / DESCRIPTION).unlink(missing_ok=True)
    new = sorted((path.name for path in made.iterdir()), key=lambda name: name == DESCRIPTION)
    for old in folder.iterdir():
        if _OWN_FILES.fullmatch(old.name) and old.name not in new:
            old.unlink()
    for name in new:
        os.replace(made / name, folder / name)


def _check_installed(formats: tuple[Format, ...]) -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if not importlib.util.find_spec(name)]
    if "onnx" in formats and missing:
        raise MissingDependencyError(
            f"ONNX needs {', '.join(missing)}: pip install 'tether-rl[export]', or --formats torch."
        )


def _write_and_compare(name: Format, learner: Learner, starts: Starts, motions: Motions, path: Path) -> float:
    """Export to a file, read it back, and give the largest difference of its motions from the run's."""
    module, inputs = MotionModule(learner).eval().requires_grad_(False), inputs_of(learner, starts)
    read = _write_torch(module, inputs, path) if name == "torch" else _write_onnx(module, inputs, path)
    _, positions, velocities = read(inputs)
    return _compared(
        path.name,
        (positions, motions.positions),
        (velocities, motions.velocities),
        remedy="Use another format",
    )


def _compared(name: str, *pairs: tuple[Tensor | FloatArray, FloatArray], remedy: str) -> float:
    """The largest difference of what was found from the run's own motions, relative where those exceed 1."""
    difference = 0.0
    for found, own in pairs:
        expected = torch.as_tensor(own)
        off = (torch.as_tensor(found) - expected).abs() / expected.abs().clamp_min(1)
        difference = max(difference, float(off.max()))
    if not difference <= _TOLERANCE:
        raise CheckpointError(
            f"{name} differs from the run's own motions by {difference:.2g} (allowed: {_TOLERANCE:g}). "
            f"{remedy}, and please report this."
        )
    return difference


def _any_number_of_motions() -> dict[str, Any]:
    return {name: {0: torch.export.Dim("motions", min=1)} for name in _INPUTS}


def _write_torch(module: MotionModule, inputs: dict[str, Tensor], path: Path) -> Run:
    program = torch.export.export(module, (), kwargs=inputs, dynamic_shapes=_any_number_of_motions())
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()

    def run(given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = loaded(**given)
        return found

    return run


class _LeakyReLU(nn.Module):
    """The activation from operations that ONNX Runtime has for float64 too; slopes lie in (0, 1)."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, values: Tensor) -> Tensor:
        return torch.maximum(values, self.slope * values)


def _write_onnx(module: MotionModule, inputs: dict[str, Tensor], path: Path) -> Run:
    module = copy.deepcopy(module)
    for layer in list(module.modules()):
        for name, part in layer.named_children():
            if isinstance(part, nn.LeakyReLU):
                setattr(layer, name, _LeakyReLU(part.negative_slope))
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter, about itself
            torch.onnx.export(
                module, (), str(path), kwargs=inputs, input_names=list(_INPUTS), output_names=list(_OUTPUTS),
                dynamic_shapes=_any_number_of_motions(), dynamo=True, external_data=False, verbose=False,
            )  # fmt: skip
    finally:
        exporter.setLevel(level)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        found = session.run(list(_OUTPUTS), {name: value.numpy() for name, value in given.items()})
        return tuple(torch.from_numpy(value) for value in found)

    return run


def _plans(learner: Learner, starts: Starts, motions: Motions, config: ExportConfig) -> list[Plan]:
    """The mean motions of the first starts, as a robot within the limits would run them."""
    inputs, spec = inputs_of(learner, starts), learner.spec
    with torch.no_grad():
        weights = learner.planner()(inputs["observation"]).double()
    plans = []
    for index in range(config.motions):
        motion = (
            learner.motion, weights[index], inputs["position"][index], inputs["velocity"][index],
            spec.dt, spec.duration,
        )  # fmt: skip
        free = plan_motion(*motion)
        _compared(
            f"motion_{index}.csv", (free.positions, motions.positions[index]),
            (free.velocities, motions.velocities[index]), remedy="Leave the tables out (--motions 0)",
        )  # fmt: skip
        plans.append(plan_motion(*motion, limits=config.limits, on_violation=config.on_violation))
    return plans


def _entries_seen(
    learner: Learner, starts: Starts, of_context: tuple[int, ...] | None
) -> Literal["all"] | list[int] | None:
    """Which entries of an observation the policy is given, None where it is given something else."""
    seen = learner.seen(starts)
    if np.array_equal(seen, starts.observations):
        return "all"
    if of_context is None or not np.array_equal(seen, starts.contexts):
        return None
    return [index % learner.spec.observation_size for index in of_context]


def _description(learner: Learner, starts: Starts, config: ExportConfig) -> dict[str, Any]:
    """What a program needs to know to run the files, for people and machines."""
    spec = learner.spec
    with make_position_controlled(spec.env_id, **learner.config.env_options) as robot:
        units, entries = list(robot.position_units), robot.context_indices
    return {
        "made_by": f"tether-rl {importlib.metadata.version('tether-rl')}",
        "environment": spec.env_id,
        "algorithm": learner.config.algo,
        "seed": learner.config.seed,
        "iteration": config.step,
        "seconds_between_steps": spec.dt,
        "steps": spec.horizon,
        "seconds": spec.duration,
        "inputs": {
            "observation": {
                "shape": ["motions", learner.seen_size],
                "entries_of_the_first_observation": _entries_seen(learner, starts, entries),
            },
            "position": {"shape": ["motions", spec.num_dof], "units": units},
            "velocity": {"shape": ["motions", spec.num_dof], "units": [f"{unit}/s" for unit in units]},
        },
        "outputs": {
            "weights": {"shape": ["motions", learner.motion.num_weights]},
            "positions": {"shape": ["motions", spec.horizon, spec.num_dof], "units": units},
            "velocities": {
                "shape": ["motions", spec.horizon, spec.num_dof],
                "units": [f"{unit}/s" for unit in units],
            },
        },
        "number_type": "float64",
        "first_step_after_seconds": spec.dt,
        "movement_primitive": asdict(learner.motion.config) | {"degrees_of_freedom": spec.num_dof},
        "limits": config.limits.described(spec.num_dof),
    }  # fmt: skip
