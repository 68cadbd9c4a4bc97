"""FSDP2 on two devices: gradients of exact and bucket support against those of the same model unsharded.

python -m benchmarks.gpu_check.two_devices FOLDER RANK DEVICE SIZES     # one of two processes
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.gpu_check.outcome import Figure, NotHere
from benchmarks.gpu_check.plan import Plan
from torch import Tensor

ROOT = Path(__file__).parents[2]
PROCESSES = 2
TOP_K = 8
# Of the largest entry, in float32, which GPUs multiply in full precision here: sums over tokens and processes
# in another order; a gradient that is summed wrongly is off by half.
_GRADIENT_BAR = 1e-3


def run(plan: Plan) -> list[Figure]:
    """Start both processes and read what they found.

    Raises:
        NotHere: there is one GPU.
    """
    if plan.device.type == "cuda" and torch.cuda.device_count() < PROCESSES:
        raise NotHere(f"FSDP2 needs {PROCESSES} GPUs, there is {torch.cuda.device_count()}.")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.gpu_check.two_devices", folder]
        rest = [plan.device.type, json.dumps(plan.sharded)]
        ranks = [
            subprocess.Popen([*command, str(rank), *rest], cwd=ROOT, env=environment)
            for rank in range(PROCESSES)
        ]
        try:
            codes = [rank.wait(timeout=300) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise RuntimeError(f"the processes ended with {codes}")
        found = json.loads((Path(folder) / "found.json").read_text())
    figures = [
        Figure(f"{kind} support: largest error of a gradient, sharded / whole", found[kind], _GRADIENT_BAR)
        for kind in ("bucket", "exact")
    ]
    return [
        *figures,
        Figure("exact support: share of tokens projected", found["projected"], 0.01, least=True),
    ]


def _at_hand(*parameters: Any) -> AbstractContextManager[None]:
    """FSDP2 gathers the head before it is used."""
    return nullcontext()


def _model(sizes: dict[str, int], device: str) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tether.integrations.sparse_head import add_sparse_head

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=sizes["vocabulary"], hidden_size=sizes["width"], intermediate_size=2 * sizes["width"],
        num_hidden_layers=sizes["layers"], num_attention_heads=4, num_key_value_heads=2,
        head_dim=sizes["width"] // 4, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(15)  # random heads are nearly uniform
    add_sparse_head(model, 1.0, _at_hand)
    return model.to(device)


def _batch(sizes: dict[str, int], process: int, device: str) -> tuple[dict[str, Tensor], int]:
    """Token ids of one process, and how many of each row count."""
    generator = torch.Generator().manual_seed(process)
    ids = torch.randint(sizes["vocabulary"], (sizes["rows"], sizes["length"]), generator=generator).to(device)
    labels = ids.clone()
    labels[:, : sizes["length"] // 4] = -100
    counted = sizes["length"] - sizes["length"] // 4
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}, counted


def _loss(model: Any, inputs: dict[str, Tensor], counted: int, kind: str) -> tuple[Tensor, float]:
    """A loss of everything the trust region gives, and the share of tokens that is projected."""
    from tether.integrations.exact_head import OldTokens, take_snapshot

    with torch.no_grad():
        kept = model(**inputs, support_top_k=TOP_K, keep_hidden=True)
    if kind == "bucket":
        found = model(**inputs, support_ids=kept.support_ids[:, -counted:])
        return found.log_probs.mean() + found.support_log_tail.exp().mean(), 0.0
    nearness = torch.linspace(1.0, 0.3, counted, device=kept.hidden.device)  # from unmoved to far away
    hidden = nearness[:, None] * kept.hidden[:, -counted:]
    old = OldTokens(
        hidden=hidden, support=kept.support(counted), mask=torch.ones_like(hidden[..., 0]),
        head=take_snapshot(model.lm_head.weight, None, _at_hand), kl_bound=0.05, region="token",
    )  # fmt: skip
    found = model(**inputs, old_tokens=old)
    loss = found.projected_log_probs.mean() + found.regression.mean()
    return loss, float(found.projected[:, -counted:].float().mean())


def _whole_gradients(sizes: dict[str, int], device: str, kind: str) -> dict[str, Tensor]:
    """The mean over both processes' batches, as FSDP2 forms it."""
    model = _model(sizes, device)
    for process in range(PROCESSES):
        (_loss(model, *_batch(sizes, process, device), kind)[0] / PROCESSES).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _sharded(sizes: dict[str, int], device: str, kind: str, rank: int) -> tuple[float, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    expected = _whole_gradients(sizes, device, kind)
    model = _model(sizes, device)
    mesh = init_device_mesh(device.split(":")[0], (PROCESSES,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    loss, projected = _loss(model, *_batch(sizes, rank, device), kind)
    loss.backward()
    errors = []
    for name, parameter in model.named_parameters():
        largest = expected[name].abs().max().clamp_min(1e-12)
        errors.append(float((parameter.grad.full_tensor() - expected[name]).abs().max() / largest))
    return max(errors), projected


def main() -> None:
    folder, rank, kind, sizes = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    device = f"cuda:{rank}" if kind == "cuda" else kind
    if kind == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), PROCESSES)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=PROCESSES)
    bucket, _ = _sharded(sizes, device, "bucket", rank)
    exact, projected = _sharded(sizes, device, "exact", rank)
    found = {"bucket": bucket, "exact": exact, "projected": projected}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
