"""The exact trust region against dense float64 rows: every option, values and gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rounding import error_of, rounding_of
from tether.errors import InvalidInputError
from tether.ops import HiddenStates, linear_trust_region, memory, policy_pair
from tether.ops.head import Head
from tether.projection import (
    ProjectedTokens,
    SparseLogProbs,
    geodesic,
    kl_categorical,
    project_categorical,
    solve,
)

TOKENS, WIDTH, VOCABULARY, BOUND = 24, 12, 150, 0.05

# A float32 divergence is solved to this much of the bound and grows with the square of the step, which
# therefore is off by half of it. Log-ratios of one, about the largest here, are off by as much.
STEP_ERROR = solve.TOLERANCE[torch.float32] / 2

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "logit scale": {"logit_scale": 0.5, "temperature": 0.6},
    "soft cap": {"softcap": 4.0},
    "soft cap, scale, temperature": {"softcap": 3.0, "logit_scale": 1.3, "temperature": 0.8},
    "bias": {"with_bias": True},
    "ids that cannot be sampled": {"with_bias": True, "impossible": 7},
    "padded vocabulary": {"vocabulary_size": 131},
    "everything": {"softcap": 5.0, "with_bias": True, "vocabulary_size": 140, "temperature": 0.9},
}


@dataclass(frozen=True)
class _Batch:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    old_hidden: Tensor
    old_weight: Tensor | None
    old_bias: Tensor | None
    ids: Tensor
    options: dict[str, Any]

    def to(self, dtype: torch.dtype) -> _Batch:
        def cast(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.detach().to(dtype, copy=True)

        names = ("hidden", "weight", "bias", "old_hidden", "old_weight", "old_bias")
        return replace(self, **{name: cast(getattr(self, name)) for name in names})

    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(t.requires_grad_() for t in (self.hidden, self.weight, self.bias) if t is not None)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Of the vocabulary that can be sampled, [N, V]."""
        raw = hidden @ weight.T + (0 if bias is None else bias)
        raw = raw * self.options.get("logit_scale", 1.0)
        if "softcap" in self.options:
            raw = self.options["softcap"] * torch.tanh(raw / self.options["softcap"])
        return (raw / self.options.get("temperature", 1.0))[:, : self.options.get("vocabulary_size")]

    def dense(self) -> tuple[Tensor, Tensor]:
        new = self.logits(self.hidden, self.weight, self.bias).log_softmax(-1)
        old_weight = self.weight if self.old_weight is None else self.old_weight
        old_bias = self.bias if self.old_weight is None else self.old_bias
        return new, self.logits(self.old_hidden, old_weight, old_bias).log_softmax(-1).detach()

    def ours(self, **more: Any) -> ProjectedTokens:
        return linear_trust_region(
            self.hidden, self.weight, self.ids, self.old_hidden, bias=self.bias, old_weight=self.old_weight,
            old_bias=self.old_bias, **{"kl_bound": BOUND, **self.options, **more},
        )  # fmt: skip

    def support(self, top_k: int) -> SparseLogProbs:
        return SparseLogProbs.from_logits(self.dense()[1].float(), top_k, keep_ids=self.ids)


def _make(name: str = "plain", *, frozen: bool = False, seed: int = 0) -> _Batch:
    """Rows from equal to far beyond the bound, about half of them outside."""
    options = dict(OPTIONS[name])
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight, old_hidden = normal(VOCABULARY, WIDTH), 0.8 * normal(TOKENS, WIDTH)
    distance = torch.linspace(0, 0.4, TOKENS, dtype=torch.float64)[:, None] ** 1.5
    bias = normal(VOCABULARY) if options.pop("with_bias", False) else None
    impossible = options.pop("impossible", None)
    if bias is not None and impossible is not None:
        bias[impossible] = -torch.inf
    ids = torch.randint(8, 130, (TOKENS,), generator=generator)
    moved = 0.0 if frozen else 0.01
    return _Batch(
        hidden=old_hidden + distance * normal(TOKENS, WIDTH),
        weight=weight + moved * normal(*weight.shape),
        bias=bias,
        old_hidden=old_hidden,
        old_weight=None if frozen else weight,
        old_bias=None if frozen or bias is None else bias.clone(),
        ids=ids,
        options=options,
    )


def _weights(seed: int = 5) -> tuple[Tensor, ...]:
    """Upstream gradients for the four differentiable outputs."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(4, TOKENS, generator=generator, dtype=torch.float64))


def _dense_outputs(batch: _Batch, sequences: Tensor | None = None) -> Any:
    """The same from whole rows: the four outputs with a gradient, the divergence before, who was projected,
    and the divergence after."""
    new, old = batch.dense()
    index = batch.ids[:, None]
    finite = torch.where(new.isneginf(), 0.0, new)
    if sequences is None:
        result = project_categorical(new, old, BOUND)
        projected, acted = result.log_probs, result.projected
    else:
        projected, acted = torch.empty_like(new), torch.zeros(TOKENS, dtype=torch.bool)
        pieces = []
        for sequence in range(int(sequences.max()) + 1):
            rows = (sequences == sequence).nonzero().squeeze(-1)
            result = project_categorical(new[rows], old[rows], BOUND, region="sequence")
            pieces.append((rows, result.log_probs))
            acted[rows] = result.projected
        projected = torch.zeros_like(new).index_copy(
            0, torch.cat([rows for rows, _ in pieces]), torch.cat([values for _, values in pieces])
        )
    counted = ~(new.isneginf() | projected.isneginf()) & acted[:, None]
    terms = new.exp() * (finite - torch.where(counted, projected.detach(), 0.0))
    return (
        new.gather(-1, index).squeeze(-1),
        -(new.exp() * finite).sum(-1),
        projected.gather(-1, index).squeeze(-1),
        torch.where(counted, terms, 0.0).sum(-1),
        kl_categorical(new, old).detach(),
        acted,
        torch.where(acted, kl_categorical(projected, old), kl_categorical(new, old)).detach(),
    )


def _outputs(result: ProjectedTokens) -> tuple[Tensor, ...]:
    return result.new_log_probs, result.entropy, result.projected_log_probs, result.regression


def _gradients(outputs: Any, leaves: tuple[Tensor, ...], which: range = range(4)) -> tuple[Tensor, ...]:
    weights = _weights()
    loss = sum((outputs[i].double() * weights[i]).sum() for i in which)
    return torch.autograd.grad(loss, leaves)


def _assert_close(batch: _Batch, result: ProjectedTokens, expected: Any, tolerance: float) -> None:
    assert torch.equal(result.projected, expected[5])
    for actual, wanted in zip(_outputs(result), expected[:4], strict=True):
        torch.testing.assert_close(actual.double(), wanted.double(), atol=tolerance, rtol=tolerance)
    evaluated = ~result.certified
    for actual, wanted in ((result.kl, expected[4]), (result.projected_kl, expected[6])):
        torch.testing.assert_close(
            actual[evaluated].double(), wanted[evaluated].double(), atol=tolerance, rtol=tolerance
        )
    assert torch.equal(result.projected_kl[result.certified], result.kl[result.certified])


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_dense_rows_in_float64(name: str, frozen: bool) -> None:
    batch = _make(name, frozen=frozen)
    leaves = batch.leaves()
    expected = _dense_outputs(batch)
    assert 5 <= expected[5].sum() <= TOKENS - 5
    wanted = _gradients(expected, leaves)
    for support in (None, batch.support(16)):
        result = batch.ours(old_support=support)
        _assert_close(batch, result, expected, 1e-9)
        for actual, reference in zip(_gradients(_outputs(result), leaves), wanted, strict=True):
            torch.testing.assert_close(actual, reference, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("which", range(4))
def test_each_output_has_its_own_gradient(which: int) -> None:
    batch = _make("bias")
    leaves = batch.leaves()
    wanted = _gradients(_dense_outputs(batch), leaves, range(which, which + 1))
    actual = _gradients(_outputs(batch.ours()), leaves, range(which, which + 1))
    for ours, reference in zip(actual, wanted, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-9, rtol=1e-7)
        assert reference.abs().max() > 1e-3


def test_gradients_agree_with_finite_differences() -> None:
    batch = _make("soft cap")
    rows = torch.tensor([2, 12, 20])  # inside, a little outside, far outside
    hidden, weight = batch.hidden[rows].requires_grad_(), batch.weight.requires_grad_()

    def function(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        # The old head is given, or it would move along; the projection in the regression is a constant.
        result = linear_trust_region(
            hidden, weight, batch.ids[rows], batch.old_hidden[rows], kl_bound=BOUND,
            old_weight=batch.old_weight, **batch.options,
        )  # fmt: skip
        return result.new_log_probs, result.entropy, result.projected_log_probs

    assert torch.autograd.gradcheck(
        function, (hidden, weight), eps=1e-6, atol=1e-6, rtol=1e-4, fast_mode=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "everything", "ids that cannot be sampled"])
def test_low_precision_against_the_references_own_rounding(name: str, dtype: torch.dtype) -> None:
    """Twice the error of the dense float32 computation on the same rounded inputs, gradients included."""
    batch = _make(name).to(dtype)
    exact, plain = batch.to(torch.float64), batch.to(torch.float32)
    leaves = [side.leaves() for side in (exact, plain, batch)]
    expected, reference = _dense_outputs(exact), _dense_outputs(plain)
    result = batch.ours(old_support=exact.support(16))
    assert result.new_log_probs.dtype == torch.float32
    assert torch.equal(result.projected, expected[5])
    for actual, rough, wanted in zip(_outputs(result), reference, expected, strict=False):
        assert error_of(actual, wanted) <= 2 * rounding_of(rough, wanted) + STEP_ERROR
    wanted_gradients = _gradients(expected, leaves[0])
    rough_gradients = _gradients(reference, leaves[1])
    actual_gradients = _gradients(_outputs(result), leaves[2])
    for actual, rough, wanted in zip(actual_gradients, rough_gradients, wanted_gradients, strict=True):
        rounding = (rough.to(dtype).double() - wanted).norm()  # the gradient comes in the parameters' type
        assert (actual.double() - wanted).norm() <= 2 * rounding + STEP_ERROR * wanted.norm()


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_sequences_share_one_step(name: str, frozen: bool) -> None:
    batch = _make(name, frozen=frozen)
    leaves = batch.leaves()
    sequences = torch.arange(TOKENS) // 6
    sequences[::7] = 3  # rows of a sequence need not be neighbours
    expected = _dense_outputs(batch, sequences=sequences)
    assert 0 < expected[5].sum() < TOKENS
    result = batch.ours(sequences=sequences)
    _assert_close(batch, result, expected, 1e-8)
    wanted = _gradients(expected, leaves)
    for actual, reference in zip(_gradients(_outputs(result), leaves), wanted, strict=True):
        torch.testing.assert_close(actual, reference, atol=1e-8, rtol=1e-6)
    for sequence in range(4):
        assert result.step[sequences == sequence].unique().numel() == 1


@pytest.mark.parametrize("with_sequences", [False, True])
def test_blocks_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch, with_sequences: bool) -> None:
    batch = _make("everything")
    leaves = batch.leaves()
    more = {"sequences": torch.arange(TOKENS) % 3} if with_sequences else {"old_support": batch.support(8)}
    whole = batch.ours(**more)
    gradients = _gradients(_outputs(whole), leaves)
    monkeypatch.setattr(memory, "WORKSPACE_ELEMENTS", VOCABULARY * 5)
    monkeypatch.setattr(policy_pair, "BLOCK_ELEMENTS", VOCABULARY * 2)
    blocks = batch.ours(**more)
    for actual, expected in zip(_outputs(blocks), _outputs(whole), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    for actual, expected in zip(_gradients(_outputs(blocks), leaves), gradients, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("frozen", [True, False])
def test_an_accelerators_blocks_give_the_same(monkeypatch: pytest.MonkeyPatch, frozen: bool) -> None:
    """The branches that a CPU never takes, on a CPU: blocks of many rows, fixed iterations, no questions."""
    batch = _make("everything", frozen=frozen)
    leaves = batch.leaves()
    whole = batch.ours(old_support=batch.support(8))
    gradients = _gradients(_outputs(whole), leaves)
    monkeypatch.setattr(memory, "may_ask", lambda _: False)
    monkeypatch.setattr(policy_pair, "may_ask", lambda _: False)
    monkeypatch.setattr(geodesic, "may_ask", lambda _: False)
    monkeypatch.setattr(solve, "may_ask", lambda _: False)
    monkeypatch.setattr(memory, "ACCELERATOR_ROWS", 10)
    monkeypatch.setattr(memory, "WORKSPACE_ELEMENTS", 1)
    blocks = batch.ours(old_support=batch.support(8))
    for actual, expected in zip(_outputs(blocks), _outputs(whole), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)
    for actual, expected in zip(_gradients(_outputs(blocks), leaves), gradients, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-8, rtol=1e-8)


def test_an_unchanged_policy_is_certified_and_costs_no_old_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = _make("plain", frozen=True)
    batch = replace(batch, hidden=batch.old_hidden.clone())
    monkeypatch.setattr(policy_pair.PolicyPair, "old_logits", None)
    for support in (None, batch.support(4)):
        result = batch.ours(old_support=support, kl_bound=1e-9)
        assert result.certified.all()
        assert torch.equal(result.projected_log_probs, result.new_log_probs)
        assert (result.regression == 0).all()
        assert (result.step == 1).all()


@pytest.mark.parametrize("name", ["plain", "bias", "soft cap", "padded vocabulary"])
def test_the_range_of_log_ratios_is_bounded_tightly_enough_to_certify(name: str) -> None:
    """Small steps, as with learning rates of 1e-6: the bound holds, and clears most rows."""
    batch = _make(name)
    batch = replace(
        batch,
        hidden=batch.old_hidden + 0.05 * (batch.hidden - batch.old_hidden),
        weight=batch.old_weight + 0.05 * (batch.weight - batch.old_weight),
    )
    new, old = batch.dense()
    ratio = new - old
    result = batch.ours()
    head = batch.options
    pair = policy_pair.PolicyPair.of(
        Head(head.get("temperature", 1.0), head.get("logit_scale", 1.0), head.get("softcap"),
             head.get("vocabulary_size"), lambda: None),  # type: ignore[arg-type, return-value]
        batch.hidden, batch.weight, batch.bias,
        HiddenStates(batch.old_hidden, batch.old_weight, batch.old_bias),
    )  # fmt: skip
    assert (ratio.amax(-1) - ratio.amin(-1) <= pair.log_ratio_range()).all()
    assert result.certified.sum() > TOKENS // 2
    assert (kl_categorical(new, old)[result.certified] <= BOUND).all()


def test_certified_rows_are_inside_and_uncertain_ones_are_looked_at() -> None:
    batch = _make("plain")
    truth = _dense_outputs(batch)[4]
    for top_k in (4, 32, 120):
        result = batch.ours(old_support=batch.support(top_k))
        assert (truth[result.certified] <= BOUND).all()
        assert (result.kl[result.certified] <= truth[result.certified]).all()
        assert not (result.certified & result.uncertain).any()
        assert torch.equal(result.projected, truth > BOUND)
    assert result.certified.sum() > 5
    assert result.tail_mass.isfinite().all()


def test_rows_without_gradient_and_frozen_heads_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = _make("plain", frozen=True)
    hidden = batch.hidden.requires_grad_()
    result = batch.ours()
    formed: list[int] = []
    original = policy_pair.PolicyPair.new_logits

    def count(self: Any, rows: Tensor) -> Tensor:
        formed.append(rows.numel())
        return original(self, rows)

    monkeypatch.setattr(policy_pair.PolicyPair, "new_logits", count)
    (grad,) = torch.autograd.grad(result.projected_log_probs[[3, 20]].sum(), hidden)
    assert formed == [2]
    assert (grad.abs().sum(-1) > 0).nonzero().flatten().tolist() == [3, 20]


def test_no_token_at_all() -> None:
    batch = _make("bias")
    none = {n: getattr(batch, n)[:0] for n in ("hidden", "old_hidden", "ids")}
    batch = replace(batch, **none)
    leaves = batch.leaves()
    result = batch.ours()
    gradients = torch.autograd.grad(sum(o.sum() for o in _outputs(result)), leaves)
    assert all((gradient == 0).all() for gradient in gradients)
    assert result.kl.shape == (0,)


def test_an_old_policy_in_float32_keeps_its_digits_beside_a_new_one_in_half_precision() -> None:
    batch = _make("plain")
    exact = replace(batch.to(torch.float64), hidden=batch.hidden.bfloat16().double()).ours()
    mixed = replace(batch.to(torch.float32), hidden=batch.hidden.bfloat16()).ours()
    assert torch.allclose(mixed.kl.double(), exact.kl, rtol=1e-3, atol=1e-6)


def test_the_gradient_reaches_the_last_byte() -> None:
    """-1, which marks empty slots, is 255 in a byte."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 4, generator=generator) for n in (2, 256))
    hidden.requires_grad_()
    ids, gradients = torch.tensor([255, 3]), []
    for given in (ids, ids.byte()):
        result = linear_trust_region(hidden, weight, given, hidden, kl_bound=0.05)
        gradients.append(torch.autograd.grad(result.projected_log_probs.sum(), hidden)[0])
    assert torch.equal(*gradients)


def test_without_a_bound_nothing_is_projected() -> None:
    batch = _make("plain")
    result = batch.ours(kl_bound=math.inf)
    assert not result.projected.any()
    assert torch.equal(result.projected_log_probs, result.new_log_probs)


def test_what_does_not_fit_is_refused_with_the_remedy() -> None:
    batch = _make("bias")
    with pytest.raises(InvalidInputError, match="Flatten batch and time"):
        replace(batch, old_hidden=batch.old_hidden[:3]).ours()
    with pytest.raises(InvalidInputError, match="old_weight and old_bias are one head"):
        replace(batch, old_bias=None).ours()
    with pytest.raises(InvalidInputError, match=r"old_weight must be \(150, 12\)"):
        replace(batch, old_weight=batch.weight[:9]).ours()
    with pytest.raises(InvalidInputError, match=r"ids must lie in \[0, 131\); found 140"):
        replace(batch, ids=torch.full_like(batch.ids, 140)).ours(vocabulary_size=131)
    with pytest.raises(InvalidInputError, match="kl_bound must be a positive number"):
        batch.ours(kl_bound=0.0)
    with pytest.raises(InvalidInputError, match="temperature must be positive"):
        batch.ours(temperature=0.0)
    with pytest.raises(InvalidInputError, match="24 of 24 rows hold NaN"):
        replace(batch, hidden=batch.hidden * math.nan).ours()
    with pytest.raises(InvalidInputError, match="sequences must count from 0 on, got -1"):
        batch.ours(sequences=torch.full((TOKENS,), -1))
    with pytest.raises(InvalidInputError, match=r"sequences must be integers, got torch\.float32"):
        batch.ours(sequences=torch.zeros(TOKENS))
    for bad in (math.nan, math.inf):  # also where a frozen head and equal hidden states prove the rest
        bias = torch.where(torch.arange(VOCABULARY) == 3, bad, 0.0).to(batch.hidden.dtype)
        still = replace(batch, bias=bias, old_bias=None, old_weight=None, hidden=batch.old_hidden)
        with pytest.raises(InvalidInputError, match="24 of 24 rows hold NaN or infinity"):
            still.ours()
    with pytest.raises(InvalidInputError, match="one step a sequence needs finite logits"):
        _make("ids that cannot be sampled").ours(sequences=torch.zeros(TOKENS, dtype=torch.long))
