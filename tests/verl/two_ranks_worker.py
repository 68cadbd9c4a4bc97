"""Run on each of two processes: train on half of every batch and write what came out."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from actor import (
    FLOAT64,
    LORA,
    NO_CLIP,
    VOCABULARY,
    Rollouts,
    acting,
    in_float64,
    largest_difference,
    make_actor,
    parameters,
    unclipped,
)
from dense import KL_BOUND, worst_gradient
from parallel_seams import losses_and_gradients, split_vocabulary
from safetensors.torch import save_file

from ranks import end_rank
from tether.integrations.verl import TROLLPolicyLossConfig
from tether.ops import memory

UPDATES = 3
CASES: dict[str, dict[str, Any]] = {
    "token-mean": {},
    "seq-mean-token-mean": {"troll_region": "sequence"},
    "seq-mean-token-sum": {"troll_step_back": 1e-4, "troll_step_back_statistic": 0.5},
}
DENSE: dict[str, tuple[dict[str, Any], int]] = {
    "full": ({}, 1000), "LoRA": (LORA, 1000), "full, in one pass": ({}, 3), "LoRA, in one pass": (LORA, 3),
}  # fmt: skip


def halves(rank: int) -> Rollouts:
    return Rollouts.scripted().part(slice(2 * rank, 2 * rank + 2))


def dense_gradients(model: Path, rank: int) -> dict[str, float]:
    """How far exact support's gradients are off dense ones in float64, and what was projected."""
    numbers = {}
    for name, (lora, tokens) in DENSE.items():
        # In one pass over the head where so few tokens are taken at a time.
        with in_float64(), patch.object(memory, "WORKSPACE_ELEMENTS", VOCABULARY * tokens):
            actor = make_actor(
                model, acting(troll_kl_bound=KL_BOUND, troll_top_k=6), model_settings=lora,
                engine_settings=FLOAT64, learning_rate=1e-2 if lora else 1e-3, micro_batch=1,
            )  # fmt: skip
            found = worst_gradient(model, actor, halves(rank), Rollouts.scripted(), lora)
            numbers[f"gradient {name}"], numbers[f"projected {name}"] = found
    return numbers


def main(model: Path, output: Path, only_gradients: bool = False) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=2, init_method=f"file://{output / 'meeting'}"
    )
    numbers = dense_gradients(model, rank) if only_gradients else everything(model, output, rank)
    (output / f"numbers-{rank}.json").write_text(json.dumps(numbers))
    end_rank()


def everything(model: Path, output: Path, rank: int) -> dict[str, float]:
    rollouts, numbers = halves(rank), {}
    boundless = TROLLPolicyLossConfig(troll_kl_bound=math.inf, troll_alpha=0.0)
    ours = make_actor(model, boundless)
    theirs = make_actor(model, unclipped(), **NO_CLIP)
    start = parameters(ours)
    old, their_old = rollouts.score(ours), rollouts.score(theirs)
    for _ in range(UPDATES):
        rollouts.update(ours, old, world_size=2)
        rollouts.update(theirs, their_old, world_size=2)
    numbers["to verl"] = largest_difference(parameters(ours), parameters(theirs))
    numbers["moved"] = largest_difference(parameters(ours), start)
    for mode, settings in CASES.items():
        actor = make_actor(model, acting(**settings), loss_agg_mode=mode)
        old = rollouts.score(actor)
        for step in range(UPDATES):
            metrics = rollouts.update(actor, old, world_size=2, update_lr_scheduler=step == UPDATES - 1)
            numbers |= {f"{mode} {step} {n}": v for n, v in metrics.items() if "troll" in n or n == "loss"}
        save_file(parameters(actor), output / f"{mode}-{rank}.safetensors")
    numbers |= dense_gradients(model, rank)
    for name, (loss, gradient) in losses_and_gradients(torch.distributed.group.WORLD).items():
        numbers[f"ulysses {name}"] = loss
        save_file({"gradient": gradient}, output / f"ulysses {name}-{rank}.safetensors")
    loss, gradient, ids = split_vocabulary(torch.distributed.group.WORLD, rank)
    numbers["split vocabulary"] = loss
    save_file({"gradient": gradient, "ids": ids}, output / f"split-{rank}.safetensors")
    return numbers


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), only_gradients="gradients" in sys.argv[3:])
