"""Twenty steps of a small language model with TROLL and with the clip, and a few with vLLM colocated."""

from __future__ import annotations

import importlib.util
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu_check.outcome import Figure, NotHere
from benchmarks.gpu_check.plan import Plan

from tether.llm.config import TrainConfig
from tether.llm.train import train
from tether.settings import TROLLSettings

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / "models" / "smollm2-135m-instruct"

# The paper's own figure for a 4B model; a smaller one spends more of its step in the LM head.
_STEP_BAR = 1.10
# Exact support keeps old hidden states and a second block of logits: little beside weights and activations.
_MEMORY_BAR = 1.15
# What the loss sees is inside the bound but for the solver's tolerance, in any precision of the model.
_INSIDE_BAR = 1.001
# The first update of a batch starts at the old policy: whatever it measures is rounding between two passes.
_FIRST_UPDATE_BAR = 0.1


def run(plan: Plan) -> list[Figure]:
    """TROLL against the clip on the same work."""
    model = _model(plan)
    lines = {region: _train(plan, model, method=region) for region in ("clip", "troll")}
    steps = plan.training["steps"]
    figures = [*_completed(lines["clip"], steps, "clip: "), *_completed(lines["troll"], steps, "TROLL: ")]
    figures.append(_moved(plan, lines["troll"]))
    figures += _inside(plan, lines["troll"])
    for name, measure, bar in (
        ("seconds of an update", _seconds, _STEP_BAR),
        ("bytes at peak", _peak, _MEMORY_BAR),
    ):
        clip, troll = (measure(lines[region]) for region in ("clip", "troll"))
        # Of sizes that nothing was promised for, there is no bar.
        figures.append(Figure(f"{name}, TROLL / clip", troll / max(clip, 1e-9), None if plan.dry else bar))
        figures += [Figure(f"{name}, clip", clip), Figure(f"{name}, TROLL", troll)]
    return figures


def run_with_vllm(plan: Plan) -> list[Figure]:
    """Colocated vLLM writes the responses; in the dry run, Transformers in its place.

    Raises:
        NotHere: vLLM is not installed.
    """
    if not plan.dry and importlib.util.find_spec("vllm") is None:
        raise NotHere("vLLM is not installed: pip install vllm, of a version that TRL 1.16 takes.")
    rollouts = "transformers" if plan.dry else "vllm"
    lines = _train(plan, _model(plan), method="troll", rollouts=rollouts, steps=plan.vllm_steps)
    return [*_completed(lines, plan.vllm_steps), *_inside(plan, lines)]


def _completed(lines: list[dict[str, Any]], steps: int, whose: str = "") -> Iterator[Figure]:
    finite = sum(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in lines)
    yield Figure(f"{whose}steps with finite loss and gradient", finite, steps, least=True)


def _moved(plan: Plan, lines: list[dict[str, Any]]) -> Figure:
    """Without a response that earned more than another there is no gradient, and no region to hold."""
    moved = sum(line["grad_norm"] > 0 for line in lines)
    return Figure("TROLL: steps with a gradient", moved, None if plan.dry else len(lines) / 2, least=True)


def _inside(plan: Plan, lines: list[dict[str, Any]]) -> list[Figure]:
    bound = TROLLSettings.kl_bound
    updates = plan.training["updates_per_rollout"]
    return [
        Figure(
            "largest divergence that the loss saw / bound",
            max(line["kl_projected_max"] for line in lines) / bound, _INSIDE_BAR,
        ),
        Figure(
            "mean divergence before a batch's first update / bound",
            max(line["kl_mean"] for line in lines[::updates]) / bound, _FIRST_UPDATE_BAR,
        ),
    ]  # fmt: skip


def _seconds(lines: list[dict[str, Any]]) -> float:
    """Of the usual step, which samples nothing; the first one compiles."""
    return statistics.median(line["step_seconds"] for line in lines[1:])


def _peak(lines: list[dict[str, Any]]) -> float:
    """Bytes of the device, or of the process where there is none."""
    return max(line.get("device_bytes_max", line.get("resident_bytes_max", math.nan)) for line in lines)


def _model(plan: Plan) -> str:
    """A folder or a name; SmolLM2 is fetched if it is not there."""
    if plan.model is not None or plan.dry:
        return plan.model or "embedded"
    if not SMOLLM2.is_dir():
        command = [sys.executable, str(ROOT / "recipes" / "smollm2.py")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(
                f"{' '.join(command)} failed: {done.stderr[-800:]} "
                "Name another model, such as --model Qwen/Qwen3-0.6B."
            )
    return str(SMOLLM2)


def _train(plan: Plan, model: str, **changes: Any) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            **plan.training, "model": model, "output": Path(folder) / "run", "eval_every": 0,
            "eval_problems": 1, "save_every": 0, "preflight": "off", **changes,
        }  # fmt: skip
        lines = [dict(line) for line in train(TrainConfig(**settings)).metrics()]
    if plan.device.type == "cuda":
        torch.cuda.empty_cache()
    return lines
