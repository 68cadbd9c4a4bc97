"""What collectives really move on two processes, beside the formulas.

The passes of a step of a small language model, float32 over gloo on this machine: recording the old policy
and an update with bucket and with exact support under FSDP2, and the LM head with a split vocabulary. Every
collective is seen where PyTorch dispatches it; counted is what one process receives of the tensors it is
given, as a ring hands them on.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.scaling import formulas
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PROCESSES = 2
WIDTH, VOCABULARY, LAYERS, TOP_K = 64, 2048, 3, 16
ROWS, PROMPT, RESPONSE = 4, 4, 24
TOKENS = ROWS * RESPONSE


class Traffic(TorchDispatchMode):
    """Counts the bytes this process receives."""

    def __init__(self) -> None:
        super().__init__()
        self.received = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self.received += _received(func.overloadpacket.__name__, args, result)
        return result


def _received(name: str, args: Any, result: Any) -> float:
    """Bytes of one collective.

    Raises:
        NotImplementedError: one that the passes here do not use, and nobody has thought about.
    """
    if name in ("_allgather_base_", "all_gather_into_tensor"):  # args: output, input; or input
        whole = args[0] if name == "_allgather_base_" else result
        return formulas.gathered(whole.nbytes, PROCESSES)
    if name in ("_reduce_scatter_base_", "reduce_scatter_tensor"):
        whole = args[1] if name == "_reduce_scatter_base_" else args[0]
        return formulas.gathered(whole.nbytes, PROCESSES)
    if name == "allgather_":
        return formulas.gathered(sum(tensor.nbytes for tensor in args[0][0]), PROCESSES)
    if name == "allreduce_":
        return formulas.reduced(sum(tensor.nbytes for tensor in args[0]), PROCESSES)
    if name in ("wait_tensor", "_wrap_tensor_autograd", "barrier"):
        return 0.0
    raise NotImplementedError(f"How many bytes a process receives in {name} is not written down.")


def compare() -> list[tuple[str, float, float]]:
    """Name of the pass, bytes that were moved, bytes by the formula."""
    measured, parameters = run()
    head = VOCABULARY * WIDTH
    ids = TOP_K + 1
    update = formulas.update_traffic(parameters, PROCESSES, formulas.SINGLE)
    forward = formulas.forward_traffic(parameters, PROCESSES, formulas.SINGLE)
    split = functools.partial(formulas.shared_vocabulary_traffic, TOKENS, processes=PROCESSES)
    back = formulas.shared_vocabulary_backward_traffic(TOKENS, WIDTH, PROCESSES)
    expected = {
        "FSDP2, old pass": forward,
        "FSDP2, update with bucket support": update,
        "FSDP2, update with exact support": update
        + formulas.snapshot_traffic(head, PROCESSES, formulas.SINGLE),
        "split vocabulary, old pass": split(ids=1, top_k=TOP_K),
        "split vocabulary, update": split(ids=ids + 1, top_k=0) + back,
    }
    return [(name, measured[name], formula) for name, formula in expected.items()]


def run() -> tuple[dict[str, float], int]:
    """Start both processes; what the first one received, and the parameters of its model."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.scaling.two_processes", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        ranks = [
            subprocess.Popen([*command, str(rank)], cwd=root, env=environment) for rank in range(PROCESSES)
        ]
        try:
            codes = [rank.wait(timeout=300) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise RuntimeError(f"the two processes ended with {codes}; their words are above.")
        found = json.loads((Path(folder) / "found.json").read_text())
    return found["received"], found["parameters"]


def _measure(run_pass: Callable[[], object]) -> float:
    with Traffic() as traffic:
        run_pass()
    return traffic.received


def _at_hand(*parameters: Any) -> AbstractContextManager[None]:
    """FSDP2 gathers the head before it is used."""
    return nullcontext()


def _model() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tether.integrations.sparse_head import add_sparse_head

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    add_sparse_head(model, 1.0, _at_hand)
    return model


def _shard(model: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (PROCESSES,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)


def _under_fsdp() -> tuple[dict[str, float], int]:
    from tether.integrations.exact_head import OldTokens, take_snapshot

    model = _model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    _shard(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(VOCABULARY, (ROWS, PROMPT + RESPONSE), generator=generator)
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    kept: list[Any] = []

    @torch.no_grad()
    def record() -> None:
        kept.append(model(**inputs, support_top_k=TOP_K, keep_hidden=True))

    def bucket() -> None:
        support = kept[0].support_ids[:, -RESPONSE:]
        model(**inputs, support_ids=support).log_probs.sum().backward()

    def exact() -> None:
        old = OldTokens(
            hidden=0.5 * kept[0].hidden[:, -RESPONSE:], support=kept[0].support(RESPONSE),
            mask=torch.ones(ROWS, RESPONSE), head=snapshot, kl_bound=0.05, region="token",
        )  # fmt: skip
        found = model(**inputs, old_tokens=old)
        (found.projected_log_probs.sum() + found.regression.sum()).backward()

    record()  # the first pass is preceded by a check of the head
    kept.clear()
    received = {"FSDP2, old pass": _measure(record)}
    snapshot = take_snapshot(model.lm_head.weight, None, _at_hand)
    received["FSDP2, update with bucket support"] = _measure(bucket)
    received["FSDP2, update with exact support"] = _measure(exact)
    return received, parameters


def _split_vocabulary() -> dict[str, float]:
    from tether.ops.shards import VocabularyShard
    from tether.ops.vocabulary_parallel import linear_log_probs

    part = VOCABULARY // PROCESSES
    start = dist.get_rank() * part
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)[start : start + part].requires_grad_()
    sampled = torch.randint(VOCABULARY, (TOKENS, 1), generator=generator)
    shard = VocabularyShard(dist.group.WORLD, start=start, vocabulary_size=VOCABULARY)
    kept: list[Tensor] = []

    def record() -> None:
        with torch.no_grad():
            found = linear_log_probs(hidden, weight, sampled, shard=shard, top_k=TOP_K)
        assert found.top_ids is not None
        kept.append(torch.cat((sampled, found.top_ids, sampled), -1))

    def update() -> None:
        linear_log_probs(hidden, weight, kept[0], shard=shard).log_probs.sum().backward()

    return {"split vocabulary, old pass": _measure(record), "split vocabulary, update": _measure(update)}


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    received, parameters = _under_fsdp()
    received |= _split_vocabulary()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps({"received": received, "parameters": parameters}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
