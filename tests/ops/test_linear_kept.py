"""A batch whose logits fit the workspace keeps them for its backward pass; nothing but the time changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tether.ops import linear_log_probs, linear_trust_region, memory
from tether.ops.head import Head

N, D, V = 40, 6, 7000  # several cachefuls of rows

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"softcap": 3.0, "temperature": 1.7, "logit_scale": 0.5, "vocabulary_size": 6900},
}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each product with the head had."""
    seen: list[int] = []
    logits_of = Head.logits

    def spy(self: Any, hidden: Tensor, *args: Any) -> Tensor:
        seen.append(hidden.shape[0])
        return logits_of(self, hidden, *args)

    monkeypatch.setattr(Head, "logits", spy)
    return seen


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, D, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(V, D, dtype=torch.float64, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(6900, (N, 3), generator=generator)


def _loss(hidden: Tensor, weight: Tensor, ids: Tensor, rows: Any, options: dict[str, Any]) -> Tensor:
    """Uses every output of some rows."""
    found = linear_log_probs(hidden, weight, ids, top_k=5, **options)
    assert found.top_log_probs is not None
    scale = torch.linspace(-1, 1, N, dtype=torch.float64)[rows]
    per_row = found.log_probs[rows].sum(-1) + 2 * found.entropy[rows] + found.top_log_probs[rows].sum(-1)
    return (scale * (per_row + found.log_sum_exp[rows])).sum()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    "rows", [slice(None), [0, 3, 4, 17, 38, 39], [5], []], ids=["all", "some", "one", "none"]
)
def test_kept_give_the_gradients_of_logits_formed_again(
    setting: str, rows: Any, products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, ids = _inputs()
    kept = torch.autograd.grad(_loss(hidden, weight, ids, rows, SETTINGS[setting]), (hidden, weight))
    assert products == [N]  # the forward pass's
    monkeypatch.setattr(memory, "WORKSPACE_ELEMENTS", 9 * V)
    formed = torch.autograd.grad(_loss(hidden, weight, ids, rows, SETTINGS[setting]), (hidden, weight))
    for ours, expected in zip(kept, formed, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-13)


def test_a_second_backward_pass_forms_what_the_first_one_spoiled(products: list[int]) -> None:
    hidden, weight, ids = _inputs()
    loss = _loss(hidden, weight, ids, slice(None), {})
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert products == [N, N]
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_of_several_graphs_alive_one_keeps_its_logits(products: list[int]) -> None:
    """A batch scored in chunks must not hold all its logits, a chunk at a time."""
    hidden, weight, ids = _inputs()
    chunks = [
        linear_log_probs(hidden[at], weight, ids[at]).log_probs.sum() for at in torch.arange(N).split(10)
    ]
    torch.autograd.grad(torch.stack(chunks).sum(), (hidden, weight))
    assert len(products) == 4 + 3  # of four backward passes, three form their logits again


def test_nothing_is_kept_where_nothing_will_be_differentiated() -> None:
    hidden, weight, ids = _inputs()
    with torch.no_grad():
        linear_log_probs(hidden, weight, ids)
    found = linear_log_probs(hidden, weight, ids)
    assert found.log_probs.grad_fn is not None
    node = found.log_probs.grad_fn
    assert node.kept.shape == (N, V)  # the pass without gradient before it did not stand in the way
    found.log_probs.sum().backward()
    assert node.kept is None


@pytest.mark.parametrize("rows", [slice(None), [0, 3, 4, 17, 38], []], ids=["all", "some", "none"])
@pytest.mark.parametrize("violating", [0.0, 0.4, 1.0])
def test_the_exact_trust_region_keeps_both_policies_logits(
    rows: Any, violating: float, products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, ids = _inputs()
    generator = torch.Generator().manual_seed(4)
    moved = torch.randn(N, D, dtype=torch.float64, generator=generator)
    size = torch.where(torch.arange(N)[:, None] < violating * N, 0.7, 1e-4)
    old_hidden = (hidden + size * moved).detach()

    def gradients() -> tuple[Tensor, ...]:
        found = linear_trust_region(hidden, weight, ids[:, 0], old_hidden, kl_bound=0.05)
        assert int(found.projected.sum()) == violating * N
        per_row = found.projected_log_probs + 2 * found.entropy + 3 * found.regression + found.new_log_probs
        return torch.autograd.grad((torch.linspace(-1, 1, N) * per_row)[rows].sum(), (hidden, weight))

    kept = gradients()
    assert products == ([N, violating * N] if violating else [N])  # those of the forward pass
    monkeypatch.setattr(memory, "WORKSPACE_ELEMENTS", V * 7)
    for ours, expected in zip(kept, gradients(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


def test_a_second_backward_pass_of_the_exact_trust_region_forms_its_logits_again() -> None:
    hidden, weight, ids = _inputs()
    found = linear_trust_region(hidden, weight, ids[:, 0], hidden.detach() * 0.5, kl_bound=0.05)
    loss = (found.projected_log_probs + found.regression).sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, (hidden, weight)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
