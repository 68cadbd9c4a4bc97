"""What the host waits for in a step of the LM-head operations on a GPU, place by place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from device_steps import Put, Step, Waits, assert_step
from pretend_gpu import NEEDS_INTERPRETER, ROWS, TO_HOST, VALUE
from tether.ops import linear_log_probs, linear_trust_region
from tether.ops.logits import logits_least_id, logits_log_probs, logits_top_ids
from tether.projection import SparseLogProbs

N, D, V, K = 24, 8, 300, 16
KL_BOUND = 0.05
# Rows of each kind: unchanged, moved within the bound, and beyond it.
MOVED = torch.tensor([0.0, 0.01, 0.3, 0.5]).repeat(N // 4)[:, None]


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states of the new and the old policy, head and sampled ids."""
    generator = torch.Generator().manual_seed(0)
    hidden, old, weight = (
        torch.randn(size, D, generator=generator, dtype=torch.float64) for size in (N, N, V)
    )
    sampled = torch.randint(V, (N,), generator=generator)
    return hidden.to(dtype), (hidden + MOVED * old).to(dtype), weight.to(dtype), sampled


def _log_probs(backend: Any, dtype: torch.dtype) -> Step:
    hidden, _, weight, sampled = _inputs(dtype)
    ids = torch.stack((sampled, sampled.flip(0), torch.full_like(sampled, -1)), -1)

    def step(put: Put) -> list[Tensor]:
        leaves = [put(hidden.requires_grad_()), put(weight.requires_grad_())]
        found = linear_log_probs(
            *leaves, put(ids), top_k=K, with_min=True, temperature=0.7, softcap=20.0,
            vocabulary_size=V - 7, backend=backend,
        )  # fmt: skip
        assert found.top_log_probs is not None
        assert found.log_prob_min is not None
        loss = found.log_probs[:, :2].sum() + found.entropy.sum() + found.top_log_probs.sum()
        gradients = torch.autograd.grad(loss, leaves)
        return [found.log_probs[:, :2], found.entropy, found.top_log_probs, found.log_prob_min, *gradients]

    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", pytest.param("auto", marks=NEEDS_INTERPRETER)])
def test_the_lm_head_never_waits(backend: str, dtype: torch.dtype) -> None:
    # In half precision sums are float32's, and the results are rounded once.
    terms = V if dtype == torch.float32 else 1
    assert_step(
        _log_probs(backend, dtype), {}, terms=terms, reference=_log_probs("torch", dtype), kernels=True
    )


def _on_device(rows: SparseLogProbs, put: Put) -> SparseLogProbs:
    least = None if rows.log_tail_min is None else put(rows.log_tail_min)
    return SparseLogProbs(put(rows.ids), put(rows.log_probs), put(rows.log_tail), least)


def _trust_region(*, support: bool = False, sequences: bool = False, old_head: bool = False) -> Step:
    hidden, old, weight, sampled = _inputs()
    few = SparseLogProbs.from_logits(old @ weight.T, top_k=K) if support else None

    def step(put: Put) -> list[Tensor]:
        leaves = [put(hidden.requires_grad_()), put(weight.requires_grad_())]
        found = linear_trust_region(
            *leaves, put(sampled), put(old), kl_bound=KL_BOUND,
            old_weight=put(weight * 1.001).detach() if old_head else None,
            old_support=None if few is None else _on_device(few, put),
            sequences=put(torch.arange(N) // 6) if sequences else None,
        )  # fmt: skip
        loss = found.projected_log_probs.sum() + found.regression.sum() + found.new_log_probs.sum()
        gradients = torch.autograd.grad(loss, leaves)
        assert found.projected_kl is not None
        return [found.projected, found.projected_log_probs, found.projected_kl, *gradients]

    return step


# Rows that are not certified, then those outside the bound.
FORWARD: Waits = {
    ("ops/trust_region.py:evaluate_block", ROWS): 1,
    ("ops/dense_rows.py:by_reference", ROWS): 1,
}
BACKWARD: Waits = {
    ("ops/trust_region.py:Arrived.rows", ROWS): 1,
    ("ops/policy_pair.py:PolicyPair.old_logits_of", ROWS): 1,
    ("ops/dense_rows.py:to_gradient", ROWS): 1,
    ("ops/dense_rows.py:_part_gradient", VALUE): 1,
}
SEQUENCES: Waits = {
    ("ops/trust_region.py:evaluate_block", ROWS): 1,
    ("ops/shared_steps.py:_SequenceMeans.__init__", VALUE): 1,
    ("ops/shared_steps.py:project_sequences", ROWS): 1,
    ("ops/trust_region.py:_sums", VALUE): 2,
}


@pytest.mark.parametrize(
    ("settings", "waits"),
    [
        ({}, FORWARD | BACKWARD),
        ({"support": True}, FORWARD | BACKWARD),
        ({"support": True, "old_head": True}, FORWARD | BACKWARD),
        ({"sequences": True}, SEQUENCES | BACKWARD),
    ],
)
def test_the_exact_trust_region_asks_which_rows_need_work(settings: dict[str, bool], waits: Waits) -> None:
    """Once a block of rows: the tokens here are one."""
    assert_step(_trust_region(**settings), waits, terms=V)


# How many rows are projected, and how many are left to the plain path.
KERNELS_FORWARD: Waits = {
    ("ops/trust_region.py:evaluate_block", ROWS): 1,
    ("ops/backlog.py:Backlog.read", TO_HOST): 1,
}
KERNELS_BACKWARD: Waits = {
    ("ops/trust_region.py:Arrived.rows", ROWS): 1,
    ("ops/policy_pair.py:PolicyPair.old_logits_of", ROWS): 1,
    ("ops/dense_rows_triton.py:to_gradient", ROWS): 1,
}


@NEEDS_INTERPRETER
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("support", [False, True])
def test_the_kernels_ask_no_more_often_than_the_plain_path(support: bool) -> None:
    waits = KERNELS_FORWARD | KERNELS_BACKWARD
    assert sum(waits.values()) <= sum((FORWARD | BACKWARD).values())
    assert_step(_trust_region(support=support), waits, terms=V, kernels=True)


def test_logits_of_others_are_read_without_waiting() -> None:
    hidden, _, weight, sampled = _inputs()
    logits = hidden @ weight.T

    def step(put: Put) -> list[Tensor]:
        leaf, rows = put(logits.requires_grad_()), put(torch.arange(1, N))
        log_probs = logits_log_probs(leaf, put(sampled[1:, None]), rows=rows)
        (gradient,) = torch.autograd.grad(log_probs.sum(), leaf)
        return [log_probs, gradient, logits_top_ids(leaf, K, rows=rows), logits_least_id(leaf, rows=rows)]

    assert_step(step, {}, terms=V)
