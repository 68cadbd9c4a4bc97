"""A loss in one pass over the head: against the ordinary operations, and against dense float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.losses import (
    LOSSES,
    LossAggMode,
    PolicyLoss,
    ProjectedTokens,
    aggregate,
    cispo,
    course,
    gspo,
    linear,
    linear_policy_loss,
    ppo_clip,
    project_tokens,
    troll_objective,
)
from tether.ops import HiddenStates, head, linear_log_probs, memory, one_pass
from tether.ops.head import Head
from tether.projection import SparseLogProbs

B, T, D, V, K = 4, 6, 10, 90, 8
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0]])
BOUND = 0.05
HEADS = {
    "plain": Head(),
    "temperature": Head(temperature=0.7),
    "soft cap and padding": Head(softcap=6.0, vocabulary_size=80, temperature=0.9),
}


class Batch:
    def __init__(self, dtype: torch.dtype = torch.float64, name: str = "plain") -> None:
        generator = torch.Generator().manual_seed(2)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, dtype=torch.float64, generator=generator)

        self.head = HEADS[name]
        weight, bias, old = normal(V, D), normal(V), 0.7 * normal(B, T, D)
        moved = torch.where(torch.arange(T)[:, None] % 2 == 0, 0.3, 0.01) * normal(B, T, D)
        self.old = HiddenStates(old.to(dtype), weight.to(dtype, copy=True), bias.to(dtype, copy=True))
        self.leaves = [
            x.to(dtype).requires_grad_() for x in (old + moved, weight + 0.003 * normal(V, D), bias)
        ]
        self.ids = torch.randint(80, (B, T), generator=generator)
        self.advantages = normal(B).to(dtype)
        with torch.no_grad():
            self.old_support = self._support()
            self.old_log_probs = self.old_support.log_prob_of(self.ids)

    def _support(self) -> SparseLogProbs:
        assert self.old.weight is not None
        flat = self.old.hidden.flatten(0, 1)
        ids = self.ids.flatten()
        found = linear_log_probs(
            flat, self.old.weight, ids[:, None], bias=self.old.bias, top_k=K, **vars(self.head)
        )
        assert found.top_ids is not None
        assert found.top_log_probs is not None
        few = SparseLogProbs.from_top_k(found.top_ids, found.top_log_probs, ids, found.log_probs[:, 0])
        return SparseLogProbs(few.ids.view(B, T, -1), few.log_probs.view(B, T, -1), few.log_tail.view(B, T))

    @property
    def new(self) -> HiddenStates:
        return HiddenStates(self.leaves[0], self.leaves[1], self.leaves[2], head=self.head)

    def policy(self, name: str) -> Any:
        return {"none": None, "exact": self.old, "bucket": self.old_support}[name]

    def run(self, objective: Any, old: str = "none", **options: Any) -> tuple[PolicyLoss, tuple[Tensor, ...]]:
        result = linear_policy_loss(
            objective, self.new, self.ids, MASK, old=self.policy(old), old_log_probs=self.old_log_probs,
            **{"kl_bound": BOUND, **options},
        )  # fmt: skip
        return result, torch.autograd.grad(result.loss, self.leaves)


def of_sampled(loss: Callable[..., PolicyLoss], batch: Batch, **options: Any) -> Any:
    return lambda tokens: loss(tokens.new_log_probs, batch.old_log_probs, batch.advantages, MASK, **options)


def of_troll(batch: Batch, mode: LossAggMode = "token-mean", ratio_level: Any = "token") -> Any:
    """TROLL with an entropy bonus, so that every gradient there is takes part."""

    def objective(tokens: ProjectedTokens) -> PolicyLoss:
        found = troll_objective(tokens, batch.advantages, MASK, ratio_level=ratio_level)
        assert tokens.entropy is not None
        loss = found.token_loss - 0.01 * tokens.entropy
        return PolicyLoss(aggregate(loss, MASK, mode, max_response_length=9), found.metrics)

    return objective


def assert_same(ours: Any, ordinary: Any) -> None:
    (found, gradients), (expected, wanted) = ours, ordinary
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-10, atol=1e-12)
    for mine, theirs in zip(gradients, wanted, strict=True):
        assert float(theirs.abs().max()) > 1e-4
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)
    assert list(found.metrics) == list(expected.metrics)
    for name, value in found.metrics.items():
        torch.testing.assert_close(value, expected.metrics[name], rtol=1e-8, atol=1e-10, equal_nan=True)


@pytest.fixture(autouse=True)
def _blocks_of_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "WORKSPACE_ELEMENTS", V * 7)


@pytest.mark.parametrize("mode", get_args(LossAggMode))
@pytest.mark.parametrize("loss", [ppo_clip, cispo])
def test_a_ratio_of_tokens_equals_the_ordinary_path(loss: Any, mode: LossAggMode) -> None:
    batch = Batch()
    objective = of_sampled(loss, batch, loss_agg_mode=mode, max_response_length=9)
    assert_same(batch.run(objective), batch.run(objective, depends_on="batch"))


@pytest.mark.parametrize("old", ["exact", "bucket"])
@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_troll_equals_the_ordinary_path(mode: LossAggMode, old: str) -> None:
    batch = Batch()
    ours = batch.run(of_troll(batch, mode), old)
    assert_same(ours, batch.run(of_troll(batch, mode), old, depends_on="batch"))
    assert 0.2 < ours[0].metrics["projected"].item() < 0.8


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("old", ["none", "exact", "bucket"])
def test_every_head_equals_the_ordinary_path(name: str, old: str) -> None:
    batch = Batch(name=name)
    objective = of_sampled(ppo_clip, batch) if old == "none" else of_troll(batch)
    assert_same(batch.run(objective, old), batch.run(objective, old, depends_on="batch"))


@pytest.mark.parametrize("old", ["none", "exact", "bucket"])
def test_a_ratio_of_sequences_keeps_sequences_together(old: str) -> None:
    batch = Batch()
    objective = of_sampled(gspo, batch) if old == "none" else of_troll(batch, ratio_level="sequence")
    ordinary = batch.run(objective, old, depends_on="batch")
    assert_same(batch.run(objective, old, depends_on="sequence"), ordinary)


def test_a_sequence_longer_than_a_block_takes_the_ordinary_path(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch()
    objective = of_sampled(gspo, batch)
    expected = batch.run(objective, depends_on="sequence")
    monkeypatch.setattr(memory, "WORKSPACE_ELEMENTS", V * 3)
    assert_same(batch.run(objective, depends_on="sequence"), expected)


@pytest.mark.parametrize("kind", ["a ratio of sequences", "a square of a sum"])
def test_a_slope_that_depends_on_other_tokens_is_refused(kind: str) -> None:
    batch = Batch()

    def squared(tokens: ProjectedTokens) -> PolicyLoss:
        return PolicyLoss((tokens.new_log_probs * MASK).sum() ** 2, {})

    objective = of_sampled(gspo, batch) if kind == "a ratio of sequences" else squared
    with pytest.raises(InvalidInputError, match='depends_on="sequence" for ratios of sequences'):
        batch.run(objective)


def test_an_objective_may_be_asked_at_the_end_alone() -> None:
    """Where something with the same slopes stands in for it; with other slopes it is refused."""
    batch, asked = Batch(), []
    objective = of_troll(batch)

    def slow(tokens: ProjectedTokens) -> PolicyLoss:
        asked.append(tokens)
        return objective(tokens)

    def alike(tokens: ProjectedTokens) -> PolicyLoss:
        return PolicyLoss(objective(tokens).loss + 5, {})

    assert_same(batch.run(slow, "exact", in_blocks=alike), batch.run(objective, "exact"))
    assert len(asked) == 1
    with pytest.raises(InvalidInputError, match="or is not what in_blocks said"):
        batch.run(objective, "exact", in_blocks=lambda tokens: PolicyLoss(1.01 * objective(tokens).loss, {}))


@pytest.mark.parametrize("old", ["none", "bucket", "exact"])
def test_each_block_is_multiplied_with_the_head_once(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with an exact old policy's if no certificate clears it; the ordinary path does it all again."""
    rows = []
    formed = head.raw_logits

    def count(hidden: Tensor, *arguments: Any) -> Tensor:
        rows.append(len(hidden))
        return formed(hidden, *arguments)

    monkeypatch.setattr(head, "raw_logits", count)
    batch = Batch()
    rows.clear()
    objective = of_sampled(ppo_clip, batch) if old == "none" else of_troll(batch)
    found, _ = batch.run(objective, old)
    certified = found.metrics["certified"].item() if old == "exact" else 1.0
    expected = round(float(MASK.sum()) * (2 - certified))
    assert sum(rows) == expected
    assert max(rows) <= 7
    rows.clear()
    batch.run(objective, old, depends_on="batch")
    assert sum(rows) > 1.3 * expected


@pytest.mark.parametrize("old", ["exact", "bucket"])
def test_gradients_equal_dense_rows_in_float64(old: str) -> None:
    batch = Batch()
    _, gradients = batch.run(of_troll(batch), old)
    hidden, weight, bias = batch.leaves
    new = (hidden @ weight.T + bias).log_softmax(-1)
    assert batch.old.weight is not None
    assert batch.old.bias is not None
    past: Any = (batch.old.hidden @ batch.old.weight.T + batch.old.bias).log_softmax(-1)
    now: Any = new
    if old == "bucket":
        now, past = SparseLogProbs.at_ids(new, batch.old_support.ids), batch.old_support
    tokens = project_tokens(
        now, past, batch.ids, MASK, kl_bound=BOUND, old_log_probs=batch.old_log_probs,
        log_probs=new.gather(-1, batch.ids[..., None]).squeeze(-1),
    )  # fmt: skip
    tokens = replace(tokens, entropy=-(new.exp() * new).sum(-1))
    wanted = torch.autograd.grad(of_troll(batch)(tokens).loss, batch.leaves)
    for mine, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("name", HEADS)
def test_the_kernels_give_the_same(name: str) -> None:
    pytest.importorskip("triton", reason="the Triton path needs the package", exc_type=ImportError)
    if torch.cuda.is_available():
        pytest.skip("tests/ops/test_linear_triton.py runs the kernels on the device")
    batch = Batch(name=name)
    objective = of_sampled(ppo_clip, batch)
    assert_same(batch.run(objective, backend="triton"), batch.run(objective, backend="torch"))


def test_an_accelerators_branches_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """No questions asked: rows without gradient stay, the check of the slopes is an assertion."""
    batch = Batch()
    expected = batch.run(of_sampled(ppo_clip, batch))
    monkeypatch.setattr(one_pass, "may_ask", lambda _: False)
    monkeypatch.setattr(course, "may_ask", lambda _: False)
    assert_same(batch.run(of_sampled(ppo_clip, batch)), expected)


def test_the_gradient_scales_with_what_arrives_and_is_handed_on_once() -> None:
    batch = Batch()
    objective = of_sampled(ppo_clip, batch)
    _, wanted = batch.run(objective)
    result = linear_policy_loss(objective, batch.new, batch.ids, MASK)
    (3 * result.loss).backward(retain_graph=True)
    for leaf, single in zip(batch.leaves, wanted, strict=True):
        torch.testing.assert_close(leaf.grad, 3 * single, rtol=1e-12, atol=0)
    with pytest.raises(InvalidInputError, match="handed on by an earlier backward pass"):
        result.loss.backward()


def test_a_parameter_of_the_objective_itself_gets_its_gradient() -> None:
    """Such as a weight of the entropy bonus that is learned."""
    batch = Batch()
    found = []
    for depends_on in ("token", "batch"):
        weight = torch.tensor(0.01, dtype=torch.float64, requires_grad=True)

        def objective(tokens: ProjectedTokens, weight: Tensor = weight) -> PolicyLoss:
            assert tokens.entropy is not None
            return PolicyLoss(aggregate(-tokens.new_log_probs - weight * tokens.entropy, MASK), {})

        result = linear_policy_loss(objective, batch.new, batch.ids, MASK, depends_on=depends_on)
        found.append(torch.autograd.grad(2 * result.loss, [weight, *batch.leaves]))
    assert abs(float(found[0][0])) > 0.1
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


def test_small_gradients_survive_half_precision_under_a_scaled_loss() -> None:
    """As under a gradient scaler: rounded after the scale, not before it."""
    batch = Batch()
    half = [leaf.detach().half().requires_grad_() for leaf in batch.leaves]
    advantages = 1e-4 * batch.advantages.float()

    def run(leaves: list[Tensor], advantages: Tensor) -> tuple[Tensor, ...]:
        new = HiddenStates(leaves[0], leaves[1], leaves[2], head=batch.head)
        old = batch.old_log_probs.to(leaves[0].dtype).float()
        result = linear_policy_loss(
            lambda tokens: ppo_clip(tokens.new_log_probs, old, advantages, MASK), new, batch.ids, MASK
        )
        return torch.autograd.grad(65536 * result.loss, leaves)

    exact = run([leaf.detach().double().requires_grad_() for leaf in half], advantages.double())
    for mine, theirs in zip(run(half, advantages), exact, strict=True):
        off = (mine.double() - theirs).norm() / theirs.norm()
        assert off <= 4 * torch.finfo(torch.float16).eps


def test_a_head_that_is_empty_at_rest_takes_the_ordinary_path() -> None:
    """As under ZeRO-3: it is there while it is asked for."""
    batch = Batch()
    expected, _ = batch.run(of_sampled(ppo_clip, batch))
    whole, at_rest = batch.leaves[1].detach(), torch.zeros(0, dtype=torch.float64)

    @contextmanager
    def at_hand() -> Iterator[None]:
        at_rest.set_(whole)
        yield
        at_rest.set_(torch.zeros(0, dtype=torch.float64))

    head_at_rest = replace(batch.head, weights_at_hand=at_hand)
    new = HiddenStates(batch.leaves[0], at_rest, batch.leaves[2], head=head_at_rest)
    result = linear_policy_loss(of_sampled(ppo_clip, batch), new, batch.ids, MASK)
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("wrong", [-1, -100, V])
@pytest.mark.parametrize("old", ["none", "exact", "bucket"])
def test_a_counted_id_outside_the_vocabulary_is_refused(old: str, wrong: int) -> None:
    batch = Batch()
    at = tuple(MASK.nonzero()[0].tolist())
    batch.ids[at] = wrong
    with pytest.raises(InvalidInputError, match=rf"ids must lie in \[0, {V}\); found {wrong}"):
        batch.run(of_sampled(ppo_clip, batch) if old == "none" else of_troll(batch), old)


@pytest.mark.parametrize("depends_on", ["token", "batch"])
@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        ("old bias left out", "give both where the head has a bias"),
        ("bias of one number", rf"bias must be \[{V}\], got \(1,\)"),
        ("old head of another size", rf"old_weight must be \({V}, {D}\).*got \({V - 1}, {D}\)"),
        ("more ids than rows", rf"vocabulary_size must lie in \[1, {V}\].*got {V + 1}"),
    ],
)
def test_heads_that_do_not_fit_are_refused_whatever_the_path(
    spoiled: str, message: str, depends_on: str
) -> None:
    batch = Batch()
    new, old = batch.new, batch.old
    assert old.weight is not None
    if spoiled == "old bias left out":
        old = replace(old, bias=None)
    elif spoiled == "bias of one number":
        new = replace(new, bias=batch.leaves[2][:1])
    elif spoiled == "old head of another size":
        new, old = replace(new, bias=None), HiddenStates(old.hidden, old.weight[:-1])
    else:
        new = replace(new, head=Head(vocabulary_size=V + 1))
    with pytest.raises(InvalidInputError, match=message):
        linear_policy_loss(
            of_troll(batch), new, batch.ids, MASK, old=old, old_log_probs=batch.old_log_probs,
            depends_on=depends_on,
        )  # fmt: skip


@pytest.mark.parametrize("depends_on", ["token", "batch"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("old", ["exact", "bucket"])
def test_logits_that_are_no_numbers_are_refused_whatever_the_path(
    old: str, value: float, depends_on: str
) -> None:
    """Row 9 is the last token of the second sequence, in the second block."""
    batch = Batch()
    with torch.no_grad():
        batch.leaves[0][1, 3, 0] = value
    with pytest.raises(InvalidInputError, match="the first in row 9" if old == "exact" else "hold NaN"):
        batch.run(of_troll(batch), old, depends_on=depends_on)


def test_a_frozen_head_costs_no_product_and_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch()
    for leaf in batch.leaves[1:]:
        leaf.requires_grad_(False)
    monkeypatch.setattr(head.HeadGradients, "_add_weight", None)
    result = linear_policy_loss(of_sampled(ppo_clip, batch), batch.new, batch.ids, MASK)
    result.loss.backward()
    assert batch.leaves[0].grad is not None
    assert batch.leaves[1].grad is None


def test_without_gradients_and_without_tokens() -> None:
    batch = Batch()
    with torch.no_grad():
        assert not linear_policy_loss(
            of_sampled(ppo_clip, batch), batch.new, batch.ids, MASK
        ).loss.requires_grad
    nothing = torch.zeros_like(MASK)
    result = linear_policy_loss(
        lambda tokens: ppo_clip(tokens.new_log_probs, batch.old_log_probs, batch.advantages, nothing),
        batch.new, batch.ids, nothing,
    )  # fmt: skip
    assert result.loss.item() == 0
    assert all(float(g.abs().max()) == 0 for g in torch.autograd.grad(result.loss, batch.leaves))


@pytest.mark.parametrize("old", ["none", "exact", "bucket"])
def test_what_is_said_of_the_tokens_equals_the_ordinary_path(old: str) -> None:
    batch = Batch()
    objective = of_sampled(ppo_clip, batch) if old == "none" else of_troll(batch)
    found, expected = (
        linear_policy_loss(
            objective, batch.new, batch.ids, MASK, old=batch.policy(old), old_log_probs=batch.old_log_probs,
            kl_bound=BOUND, depends_on=depends_on,
        ).tokens.known()
        for depends_on in ("token", "batch")
    )  # fmt: skip
    assert list(found) == list(expected)
    for name, value in found.items():
        assert not value.requires_grad
        torch.testing.assert_close(value, expected[name], rtol=1e-8, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in sorted(linear.REACH)), ("tis", {"level": "sequence"})]
)
def test_every_loss_reaches_as_far_as_is_said(name: str, options: dict[str, Any]) -> None:
    batch = Batch()
    given = {"lag": torch.ones(B)} if name == "decoupled_clip" else options
    objective = of_sampled(LOSSES[name], batch, **given)
    assert_same(batch.run(objective, depends_on=linear.REACH[name]), batch.run(objective, depends_on="batch"))


def test_a_batch_whose_logits_are_kept_takes_the_ordinary_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "WORKSPACE_ELEMENTS", V * int(MASK.sum()))
    monkeypatch.setattr(linear, "_in_one_pass", None)
    batch = Batch()
    batch.run(of_sampled(ppo_clip, batch))


def test_an_infinite_bound_projects_nothing() -> None:
    batch = Batch()
    found, _ = batch.run(of_troll(batch), "exact", kl_bound=math.inf)
    assert found.metrics["projected"].item() == 0
    assert "kl_projected_mean" not in found.metrics


def test_what_does_not_fit_is_refused() -> None:
    batch = Batch()
    with pytest.raises(InvalidInputError, match="need the weight of their LM head"):
        linear_policy_loss(lambda _: None, HiddenStates(batch.leaves[0]), batch.ids, MASK)  # type: ignore[arg-type, return-value]
    with pytest.raises(InvalidInputError, match="depends_on must be one of"):
        batch.run(of_sampled(ppo_clip, batch), depends_on="word")
    with pytest.raises(InvalidInputError, match=r"old_log_probs must be \[B, T\] = \(4, 6\).*got \(4, 7\)"):
        linear_policy_loss(
            of_sampled(ppo_clip, batch), batch.new, batch.ids, MASK, old_log_probs=torch.zeros(B, T + 1)
        )
    with pytest.raises(InvalidInputError, match=r"new must be \[B, T, outcomes\]"):
        linear_policy_loss(of_sampled(ppo_clip, batch), batch.new, batch.ids[:, :2], MASK[:, :2])
