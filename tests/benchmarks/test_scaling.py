"""docs/scaling.md says what its script prints, and the script's formulas say what really happens."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.scaling import __main__ as scaling
from benchmarks.scaling import formulas, tables, two_processes
from benchmarks.scaling.formulas import MODELS, Model, head_products
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pretend_gpu import PretendGPU
from tether.losses import PolicyLoss, linear_policy_loss
from tether.ops import linear_log_probs, linear_trust_region
from tether.ops.hidden_states import HiddenStates

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
N, D, V = 12, 8, 40


def test_the_tables_of_the_page_are_those_that_the_script_prints() -> None:
    page = scaling.PAGE.read_text(encoding="utf-8")
    assert set(scaling.TABLES) == {line.split()[2] for line in page.splitlines() if "<!-- table:" in line}
    made = {name: make() for name, make in scaling.TABLES.items() if name != "measured"}
    assert scaling.filled(page, made) == page, "python -m benchmarks.scaling --write"
    with pytest.raises(ValueError, match="no place marked <!-- table: other -->"):
        scaling.filled(page, {"other": ""})


def test_what_two_processes_move_is_what_the_formulas_say() -> None:
    compared = two_processes.compare()
    assert len(compared) == 5
    for name, moved, formula in compared:
        assert moved == pytest.approx(formula, rel=0.1), name
    page = scaling.PAGE.read_text(encoding="utf-8")
    assert all(f"| {name} | " in page for name, *_ in compared)


def test_examples_of_the_script() -> None:
    for module in (formulas, tables):
        assert doctest.testmod(module).failed == 0


def _with_transformers(model: Model) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": model.vocabulary, "hidden_size": model.width, "num_hidden_layers": model.layers,
        "intermediate_size": model.intermediate, "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads, "head_dim": model.head_width,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if model.experts:
        experts = {"num_experts": model.experts, "num_experts_per_tok": model.experts_a_token}
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**sizes, **experts, moe_intermediate_size=model.intermediate)
        )
    if model.query_key_norm:
        return Qwen3ForCausalLM(Qwen3Config(**sizes))
    return LlamaForCausalLM(LlamaConfig(**sizes))


@pytest.mark.parametrize(
    ("model", "published"), [*zip(MODELS, (8_190_735_360, 70_553_706_496, 235_093_634_560), strict=True)]
)
def test_models_have_as_many_parameters_as_published(model: Model, published: int) -> None:
    assert model.parameters == published
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in _with_transformers(model).parameters()) == published


def test_operations_of_a_forward_pass_are_those_that_torch_counts() -> None:
    """Attention as torch runs it here is not causal, so a context counts twice."""
    small = Model("small", 2, 64, 4, 2, 256, 512, head_width=16, query_key_norm=True)
    network = _with_transformers(small)
    network.set_attn_implementation("eager")
    length = 48
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(input_ids=torch.zeros((1, length), dtype=torch.long), logits_to_keep=1)
    expected = length * small.forward(2 * length) + small.product
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


class _HeadProducts(TorchDispatchMode):
    """Counts products of N tokens with the head."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            (rows, inner), (_, columns) = (side.shape for side in args[-2:])
            self.operations += rows * inner * columns
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> float:
        return self.operations / (N * D * V)


@pytest.mark.parametrize(("moved", "uncertain", "projected"), [(0.0, 0, 0), (0.05, 0.5, 0), (3.0, 1, 1)])
def test_an_update_multiplies_with_the_head_as_often_as_the_page_counts(
    moved: float, uncertain: float, projected: float
) -> None:
    """As an accelerator does it: where certificates clear everything, where hardly any holds, and beyond."""
    generator = torch.Generator().manual_seed(0)
    hidden, old, weight = (torch.randn(size, D, generator=generator) for size in (N, N, V))
    sampled = torch.randint(V, (N,), generator=generator)
    with PretendGPU() as gpu:
        leaves = [gpu.put(hidden.requires_grad_()), gpu.put(weight.requires_grad_())]
        with _HeadProducts() as bucket:
            linear_log_probs(*leaves, gpu.put(sampled[:, None])).log_probs.sum().backward()
        assert bucket.products == head_products("bucket")
        with _HeadProducts() as exact:
            found = linear_trust_region(
                *leaves, gpu.put(sampled), gpu.put((hidden + moved * old).detach()), kl_bound=0.05
            )
            (found.projected_log_probs.sum() + found.regression.sum()).backward()
        shares = [float(share) for share in (found.uncertain.float().mean(), found.projected.float().mean())]
    assert shares[0] >= uncertain
    assert shares[1] == projected
    assert exact.products == pytest.approx(head_products("exact", *shares))


class _BuffersOfTheHead(TorchDispatchMode):
    """Bytes of all that is allocated in the head's shape to be filled later."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "new_empty" and found.shape == (V, D):
            self.nbytes += found.nbytes
        return found


def test_the_gradient_of_a_head_that_is_trained_is_summed_in_float32() -> None:
    hidden, old, weight = (torch.randn(size, D, dtype=torch.bfloat16) for size in (N, N, V))

    def buffers(*, trained: bool) -> int:
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trained)
        with _BuffersOfTheHead() as found:
            region = linear_trust_region(*leaves, torch.zeros(N, dtype=torch.long), old, kl_bound=0.05)
            region.projected_log_probs.sum().backward()
        return found.nbytes

    assert buffers(trained=True) - buffers(trained=False) == formulas.head_gradient_bytes(V * D)


@pytest.mark.parametrize("support", ["bucket", "exact"])
def test_in_one_pass_nothing_is_multiplied_again(support: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, old, weight = (torch.randn(1, size, D, generator=generator) for size in (N, N, V))
    sampled = torch.randint(V, (1, N), generator=generator)
    with PretendGPU() as gpu, _HeadProducts() as counter:
        new = HiddenStates(gpu.put(hidden.requires_grad_()), gpu.put(weight[0].requires_grad_()))
        result = linear_policy_loss(
            lambda tokens: PolicyLoss(tokens.projected_log_probs.mean(), {}),
            new, gpu.put(sampled), gpu.put(torch.ones(1, N)),
            old=HiddenStates(gpu.put((hidden + 3 * old).detach())) if support == "exact" else None,
        )  # fmt: skip
        result.loss.backward()
    assert counter.products == head_products(support, 1.0, 1.0, one_pass=True)


def test_a_record_takes_as_many_bytes_as_were_measured() -> None:
    rows = json.loads((RESULTS / "verl_payload" / "payload.json").read_text())["rows"]
    assert len(rows) >= 8
    for row in rows:
        assert formulas.record_bytes(row["kept_mean"]) == pytest.approx(row["bytes_a_token"], rel=0.02)
