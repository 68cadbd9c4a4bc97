"""One of two processes that share a vocabulary over gloo; started by test_vocabulary_parallel.py.

    python vocabulary_parallel_worker.py OUT      with RANK set

Writes OUT/RANK.json: by scenario, the largest difference of each quantity to one process with the whole head,
below float64 in multiples of that process's own rounding.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from naive_head import SETTINGS, V, make_inputs, use_everything
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Shard, distribute_tensor

from ranks import end_rank
from rounding import error_of, rounding_of
from tether.ops import LinearLogProbs, linear_log_probs, vocabulary_parallel
from tether.ops.shards import VocabularyShard

Loss = Callable[[LinearLogProbs, Tensor], Tensor]

#: Where the second process's rows start: even and uneven, and (of 37, 29 real) nothing but padding.
SPLITS = {"even": 19, "uneven": 30, "narrow": 35}


def _own(start: int, vocabulary: int, group: Any = None) -> tuple[VocabularyShard, slice]:
    """This process's shard and rows."""
    rows = slice(start, vocabulary) if dist.get_rank() else slice(0, start)
    return VocabularyShard(group or dist.group.WORLD, rows.start, vocabulary), rows


def _difference(got: Tensor, wanted: Tensor, exact: Tensor | None = None) -> float:
    """Largest difference, relative to the largest entry; infinite entries must be the same.

    In float64. In lower precision the error against `exact`, in multiples of what `wanted` itself rounds by.
    """
    if exact is not None:
        return error_of(got, exact) / rounding_of(wanted, exact)
    assert wanted.dtype == torch.float64
    return error_of(got, wanted) / max(1.0, float(wanted.abs().where(wanted.isfinite(), 0.0).max()))


def compare(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    shard: VocabularyShard,
    rows: slice,
    *,
    with_bias: bool = True,
    loss: Loss = use_everything,
    **options: Any,
) -> dict[str, float]:
    """Values and gradients of a split head against those of a whole one."""
    hidden, weight, bias, ids = inputs
    options["with_min"] = True

    def outcome(split: bool, dtype: torch.dtype = hidden.dtype) -> dict[str, Tensor]:
        mine = rows if split else slice(None)
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight[mine], bias[mine])]
        used = leaves if with_bias else leaves[:2]
        keywords = {**options, "bias": leaves[2] if with_bias else None}
        if split:
            result = vocabulary_parallel.linear_log_probs(*leaves[:2], ids, shard=shard, **keywords)
        else:
            result = linear_log_probs(*leaves[:2], ids, **keywords)
        gradients = torch.autograd.grad(loss(result, ids), used)
        own = slice(None) if split else rows
        named = zip(("hidden gradient", "weight gradient", "bias gradient"), gradients, strict=False)
        found = {name: gradient[own] if name[0] != "h" else gradient for name, gradient in named}
        for name in ("log_probs", "log_sum_exp", "entropy", "log_prob_min", "top_ids", "top_log_probs"):
            if getattr(result, name) is not None:
                found[name] = getattr(result, name)
        return found

    got, wanted = outcome(split=True), outcome(split=False)
    exact = {} if hidden.dtype == torch.float64 else outcome(split=False, dtype=torch.float64)
    found = {}
    if "top_ids" in got:
        found["top_ids"] = float((got.pop("top_ids") != wanted["top_ids"]).sum())
    return found | {name: _difference(got[name], wanted[name], exact.get(name)) for name in got}


def every_setting() -> dict[str, dict[str, float]]:
    """All options of the head, split in every way."""
    found = {}
    for name, options in SETTINGS.items():
        for split, start in SPLITS.items():
            for with_bias in (False, True):
                inputs = make_inputs(largest_id=options.get("vocabulary_size", V))
                key = f"{name}, {split}, {'bias' if with_bias else 'no bias'}"
                shard, rows = _own(start, V)
                found[key] = compare(inputs, shard, rows, with_bias=with_bias, top_k=5, **options)
    return found


def nasty() -> dict[str, dict[str, float]]:
    """Ties across shards, more wanted than a shard holds, impossible rows, groups of one."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randint(-2, 3, (9, 3), generator=generator).double()
    weight = torch.randint(-2, 3, (700, 3), generator=generator).double()
    bias = torch.zeros(700, dtype=torch.float64)
    ids = torch.randint(700, (9, 4), generator=generator)
    ties = (hidden, weight, bias, ids)
    shard, rows = _own(690, 700)
    losses = {
        name: lambda result, _, name=name: getattr(result, name).sin().sum()
        for name in ("log_probs", "entropy", "log_sum_exp")
    }
    found = {
        "ties": compare(ties, shard, rows, top_k=40),
        "ties in float32": compare((*(x.float() for x in ties[:3]), ids), shard, rows, top_k=40),
        "a shard narrower than top_k": compare(ties, shard, rows, top_k=650),
    }
    for name, loss in losses.items():
        found[f"{name} alone"] = compare(ties, shard, rows, loss=loss)
    impossible = bias.clone()
    impossible[650:] = -torch.inf
    shard, rows = _own(660, 700)
    possible = (hidden, weight, impossible, ids.clamp(max=649))
    found["a shard of impossible ids"] = compare(possible, shard, rows, top_k=5)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    shard = VocabularyShard(alone, 0, 700)
    found["a group of one"] = compare(ties, shard, slice(0, 700), top_k=5, softcap=3.0)
    certain = torch.tensor([[1.0, 1.0]])
    head = torch.tensor([[1000.0, 9.0], [990.0, 3.0], [1000.0, 0.0], [-50.0, 3.0]])
    shard, rows = _own(2, 4)
    found["a certain token in float32"] = compare(
        (certain, head, torch.zeros(4), torch.tensor([[0]])),
        shard,
        rows,
        loss=lambda result, _: result.entropy.sum(),
    )
    return found


def half_precision() -> dict[str, dict[str, float]]:
    shard, rows = _own(SPLITS["uneven"], V)
    return {"bfloat16": compare(make_inputs(torch.bfloat16), shard, rows, top_k=5)}


def on_triton() -> dict[str, dict[str, float]]:
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        return {}
    shard, rows = _own(SPLITS["uneven"], V)
    options = {**SETTINGS["everything"], "backend": "triton", "top_k": 5}
    return {"triton": compare(make_inputs(largest_id=29), shard, rows, **options)}


def gathered_heads() -> dict[str, dict[str, float]]:
    """A head sharded at rest by DTensor, as FSDP2 does: gathered for the operation, or used where it lies."""
    hidden, weight, _, ids = make_inputs()
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    whole = [x.clone().requires_grad_() for x in (hidden, weight)]
    expected = linear_log_probs(*whole, ids, top_k=5)
    wanted = torch.autograd.grad(use_everything(expected, ids), whole)
    sharded = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    # Both processes see the same tokens here, so the mean over processes is the gradient of one.
    gathered = sharded.full_tensor(grad_placements=[Partial("avg")])
    leaf = hidden.clone().requires_grad_()
    result = linear_log_probs(leaf, gathered, ids, top_k=5)
    got = torch.autograd.grad(use_everything(result, ids), (leaf, sharded))
    found["gathered"] = {
        "log_probs": _difference(result.log_probs, expected.log_probs),
        "hidden gradient": _difference(got[0], wanted[0]),
        "weight gradient": _difference(got[1].full_tensor(), wanted[1]),
        "sharded at rest": float(got[1].to_local().shape[0] - sharded.to_local().shape[0]),
    }
    start = sharded.to_local().shape[0] if dist.get_rank() == 0 else V - sharded.to_local().shape[0]
    shard, rows = _own(start, V)
    assert torch.equal(sharded.to_local(), weight[rows])
    local = sharded.to_local()
    leaf = hidden.clone().requires_grad_()
    result = vocabulary_parallel.linear_log_probs(leaf, local, ids, shard=shard, top_k=5)
    got = torch.autograd.grad(use_everything(result, ids), (leaf, sharded))
    found["used where it lies"] = {
        "log_probs": _difference(result.log_probs, expected.log_probs),
        "hidden gradient": _difference(got[0], wanted[0]),
        "weight gradient": _difference(got[1].to_local(), wanted[1][rows]),
    }
    return found


def main() -> None:
    output, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{output}/store", rank=rank, world_size=2)
    found = every_setting() | nasty() | half_precision() | on_triton() | gathered_heads()
    (output / f"{rank}.json").write_text(json.dumps(found))
    end_rank()


if __name__ == "__main__":
    main()
