"""TROLL against its formula written out with dense float64 tensors, hand numbers, finite differences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oracles
from rounding import unit_of
from tether.errors import InvalidInputError
from tether.losses import PolicyLoss, project_tokens, troll, unclipped
from tether.ops import HiddenStates
from tether.projection import SparseLogProbs

INF = math.inf
B, T, V = 3, 4, 9


@dataclass
class _Batch:
    """Logits of both policies, [B, T, V], and what was sampled."""

    logits: Tensor
    old_logits: Tensor
    ids: Tensor
    mask: Tensor
    advantages: Tensor

    def dense(self, logits: Tensor, **options: Any) -> PolicyLoss:
        new, old = logits.log_softmax(-1), self.old_logits.log_softmax(-1)
        return troll(
            self.sampled(new), self.sampled(old), self.advantages, self.mask,
            response_ids=self.ids, new=new, old=old, **options,
        )  # fmt: skip

    def sparse(self, logits: Tensor, top_k: int, *, own_ids: bool = False, **options: Any) -> PolicyLoss:
        old = SparseLogProbs.from_logits(self.old_logits, top_k, keep_ids=self.ids)
        if own_ids:
            new = SparseLogProbs.from_logits(logits, top_k, keep_ids=self.ids)
        else:
            new = SparseLogProbs.at_ids(logits, old.ids)
        return troll(
            self.sampled(logits.log_softmax(-1)),
            self.sampled(self.old_logits.log_softmax(-1)),
            self.advantages, self.mask, response_ids=self.ids, new=new, old=old, **options,
        )  # fmt: skip

    def sampled(self, log_probs: Tensor) -> Tensor:
        return log_probs.gather(-1, self.ids[..., None]).squeeze(-1)


@pytest.fixture
def batch() -> _Batch:
    """Some tokens inside a bound of 0.05, some outside, some masked."""
    generator = torch.Generator().manual_seed(5)
    old = torch.randn(B, T, V, dtype=torch.float64, generator=generator)
    shift = torch.tensor([[0.1, 1.0, 1.5, 0.05], [1.2, 0.1, 0.8, 1.0], [0.05, 0.1, 2.0, 1.0]])
    logits = old + shift[..., None] * torch.randn(B, T, V, dtype=torch.float64, generator=generator)
    ids = torch.randint(V, (B, T), generator=generator)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]])
    advantages = torch.randn(B, T, dtype=torch.float64, generator=generator)
    return _Batch(logits, old, ids, mask, advantages)


def _token_loss(
    batch: _Batch, b: int, t: int, logits: np.ndarray, alpha: float, goal: np.ndarray | None = None
) -> tuple[float, np.ndarray]:
    """-ratio A + alpha KL(p || goal) of one token at a bound of 0.05, and its projection."""
    p, q = oracles.normalise(logits), oracles.normalise(batch.old_logits[b, t])
    projection, _ = oracles.project_by_root(p, q, 0.05)
    sampled = int(batch.ids[b, t])
    ratio = math.exp(projection[sampled] - q[sampled])
    inside = oracles.kl(p, q) <= 0.05
    regression = 0.0 if inside else float(oracles.kl(p, projection if goal is None else goal))
    return -ratio * float(batch.advantages[b, t]) + alpha * regression, projection


def _counted(batch: _Batch) -> list[tuple[int, int]]:
    return [(int(b), int(t)) for b, t in np.argwhere(batch.mask.numpy())]


@pytest.mark.parametrize("alpha", [0.0, 1.0, 0.3])
def test_the_loss_equals_its_formula_and_its_gradient_finite_differences(batch: _Batch, alpha: float) -> None:
    logits = batch.logits.clone().requires_grad_()
    result = batch.dense(logits, alpha=alpha)
    result.loss.backward()
    assert logits.grad is not None
    total, tokens = 0.0, _counted(batch)
    for b, t in tokens:
        row = batch.logits[b, t].numpy()
        loss, goal = _token_loss(batch, b, t, row, alpha)
        total += loss
        # The regression's goal is a constant of the objective: sg[projection].
        numerical = oracles.central_differences(
            lambda x, b=b, t=t, goal=goal: _token_loss(batch, b, t, x, alpha, goal)[0], row, 1e-5
        )
        np.testing.assert_allclose(logits.grad[b, t], numerical / len(tokens), atol=2e-8)
    assert result.loss.item() == pytest.approx(total / len(tokens), rel=1e-9)
    assert bool((logits.grad[batch.mask == 0] == 0).all())
    assert 0.2 < result.metrics["projected"].item() < 0.9


def test_one_token_by_hand() -> None:
    """q = (1/2, 1/2), p = (.9, .1), bound = KL of (.8, .2): ratio 1.6, regression KL(p || (.8, .2))."""
    bound = math.log(2) + 0.8 * math.log(0.8) + 0.2 * math.log(0.2)
    new = torch.tensor([[[0.9, 0.1]]], dtype=torch.float64).log()
    old = torch.tensor([[[0.5, 0.5]]], dtype=torch.float64).log()
    result = troll(
        new[..., 0], old[..., 0], torch.tensor([2.0]).double(), torch.ones(1, 1),
        response_ids=torch.tensor([[0]]), new=new, old=old, kl_bound=bound, alpha=0.5,
    )  # fmt: skip
    regression = 0.9 * math.log(0.9 / 0.8) + 0.1 * math.log(0.1 / 0.2)
    assert result.loss.item() == pytest.approx(-1.6 * 2 + 0.5 * regression, rel=1e-9)
    metrics = {name: value.item() for name, value in result.metrics.items()}
    kl = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    assert metrics["kl_mean"] == metrics["kl_max"] == pytest.approx(kl)
    assert metrics["projected"] == 1
    assert metrics["mean_step"] == pytest.approx(math.log(4) / math.log(9))
    assert metrics["regression"] == pytest.approx(regression)
    assert metrics["entropy"] == pytest.approx(-0.9 * math.log(0.9) - 0.1 * math.log(0.1))
    assert metrics["tail_mass"] == 0
    assert metrics["ratio_mean"] == metrics["ratio_max"] == pytest.approx(1.6)


def test_without_a_bound_it_is_the_plain_policy_gradient_to_the_bit(batch: _Batch) -> None:
    logits, plain = batch.logits.clone().requires_grad_(), batch.logits.clone().requires_grad_()
    result = batch.dense(logits, kl_bound=INF, alpha=1.0)
    expected = unclipped(
        batch.sampled(plain.log_softmax(-1)), batch.sampled(batch.old_logits.log_softmax(-1)),
        batch.advantages, batch.mask,
    )  # fmt: skip
    assert torch.equal(result.loss, expected.loss)
    result.loss.backward()
    expected.loss.backward()
    assert torch.equal(logits.grad, plain.grad)  # type: ignore[arg-type]
    assert result.metrics["projected"].item() == 0
    assert result.metrics["mean_step"].item() == 1


def test_unprojected_tokens_receive_exactly_no_gradient_from_the_regression(batch: _Batch) -> None:
    for sparse in (False, True):
        logits = batch.logits.clone().requires_grad_()
        new = logits.log_softmax(-1)
        old_log_probs = batch.old_logits.log_softmax(-1)
        distributions: tuple[Any, Any] = (new, old_log_probs)
        if sparse:
            old = SparseLogProbs.from_logits(batch.old_logits, 4, keep_ids=batch.ids)
            distributions = (SparseLogProbs.at_ids(logits, old.ids), old)
        tokens = project_tokens(*distributions, batch.ids, batch.mask)
        (gradient,) = torch.autograd.grad(tokens.regression.sum(), logits)
        free = ~tokens.projected
        assert tokens.projected.any()
        assert (free & (batch.mask > 0)).any()
        assert bool((tokens.regression[free] == 0).all())
        assert bool((gradient[free] == 0).all())
        assert bool((gradient[tokens.projected] != 0).any(-1).all())


def test_the_regression_pulls_towards_the_projection(batch: _Batch) -> None:
    """Following its gradient reduces the divergence from the projection and from the old policy."""
    logits = batch.logits.clone().requires_grad_()
    old = batch.old_logits.log_softmax(-1)

    def tokens(z: Tensor) -> Any:
        new = z.log_softmax(-1)
        return project_tokens(new, old, batch.ids, batch.mask)

    before = tokens(logits)
    (gradient,) = torch.autograd.grad(before.regression.sum(), logits)
    after = tokens(logits.detach() - 0.05 * gradient)
    acted = before.projected
    assert bool((after.kl[acted] < before.kl[acted]).all())
    assert bool((after.regression[acted] < before.regression[acted]).all())


def test_keeping_the_whole_vocabulary_equals_the_dense_loss(batch: _Batch) -> None:
    outcomes = []
    for compute in (batch.dense, lambda z: batch.sparse(z, 50)):
        logits = batch.logits.clone().requires_grad_()
        result = compute(logits)
        result.loss.backward()
        outcomes.append((result.loss, logits.grad, result.metrics))
    (loss, gradient, metrics), (sparse_loss, sparse_gradient, sparse_metrics) = outcomes
    torch.testing.assert_close(sparse_loss, loss, rtol=1e-9, atol=0)
    torch.testing.assert_close(sparse_gradient, gradient, rtol=1e-6, atol=1e-9)
    for name in metrics:
        torch.testing.assert_close(sparse_metrics[name], metrics[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("region", ["token", "sequence"])
@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
@pytest.mark.parametrize("support", ["dense", "bucket", "paper"])
def test_gradients_of_every_variant_equal_finite_differences(
    batch: _Batch, support: str, ratio_level: str, region: str
) -> None:
    """alpha = 0, because the regression's goal is a constant; GSPO's ratio has a surrogate's gradient,
    equal to the true one where a sequence's advantages are all alike."""
    if ratio_level == "sequence":
        batch.advantages = batch.advantages[:, :1].expand(B, T)
    options = {
        "alpha": 0.0, "region": region, "ratio_level": ratio_level, "loss_agg_mode": "seq-mean-token-mean",
        "kl_bound": 0.03,
    }  # fmt: skip

    def loss(z: Tensor) -> Tensor:
        if support == "dense":
            return batch.dense(z, **options).loss
        if support == "bucket":
            return batch.sparse(z, 3, **options).loss
        return batch.sparse(z, 3, own_ids=True, support="paper", **options).loss

    leaf = batch.logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    numerical = oracles.central_differences(
        lambda x: loss(torch.from_numpy(x)).item(), batch.logits.numpy(), 1e-6
    )
    np.testing.assert_allclose(gradient, numerical, atol=3e-8)
    assert float(gradient.abs().max()) > 1e-2


def test_the_sequence_ratio_is_the_geometric_mean_of_projected_token_ratios(batch: _Batch) -> None:
    result = batch.dense(batch.logits, alpha=0.0, ratio_level="sequence", loss_agg_mode="seq-mean-token-mean")
    expected = 0.0
    for b in range(B):
        counted = [t for row, t in _counted(batch) if row == b]
        logs = []
        for t in counted:
            sampled = int(batch.ids[b, t])
            projection = _token_loss(batch, b, t, batch.logits[b, t].numpy(), 0.0)[1]
            logs.append(projection[sampled] - oracles.normalise(batch.old_logits[b, t])[sampled])
        expected += -math.exp(np.mean(logs)) * float(batch.advantages[b, counted].mean()) / B
    assert result.loss.item() == pytest.approx(expected, rel=1e-9)


def test_a_token_of_gspo_is_moved_by_its_own_advantage_only() -> None:
    """s_t = sg[s] r_t / sg[r_t]: d loss / d log p_t = -s A_t / T / B, whatever the other advantages."""
    new = torch.log(torch.tensor([[0.5, 0.2]], dtype=torch.float64)).requires_grad_()
    old = torch.log(torch.tensor([[0.4, 0.4]], dtype=torch.float64))
    dense = [torch.stack((x, (-x.exp()).log1p()), -1).detach() for x in (new, old)]
    result = troll(
        new, old, torch.tensor([[3.0, -1.0]]).double(), torch.ones(1, 2),
        response_ids=torch.zeros(1, 2).long(), new=dense[0], old=dense[1],
        kl_bound=INF, ratio_level="sequence", loss_agg_mode="seq-mean-token-mean",
    )  # fmt: skip
    result.loss.backward()
    s = math.sqrt(0.5 / 0.4 * 0.2 / 0.4)
    np.testing.assert_allclose(new.grad, [[-s * 3 / 2, s / 2]], rtol=1e-12)


def test_a_sequence_region_bounds_the_mean_divergence_of_its_counted_tokens(batch: _Batch) -> None:
    new, old = batch.logits.log_softmax(-1), batch.old_logits.log_softmax(-1)
    tokens = project_tokens(new, old, batch.ids, batch.mask, region="sequence")
    np.testing.assert_allclose(tokens.kl * batch.mask, oracles.kl(new, old) * batch.mask.numpy(), rtol=1e-9)
    for b in range(B):
        counted = batch.mask[b] > 0
        log_pi, s = oracles.project_by_root(new[b][counted], old[b][counted], 0.05)
        assert tokens.step[b][counted].tolist() == pytest.approx([s] * int(counted.sum()), rel=1e-8)
        expected = [log_pi[t, i] for t, i in enumerate(batch.ids[b][counted].tolist())]
        assert tokens.projected_log_probs[b][counted].tolist() == pytest.approx(expected, rel=1e-9)


def test_inside_the_bound_the_exact_log_prob_is_used_not_the_supports(batch: _Batch) -> None:
    """The sampled token's log-probability is handed in; what the distributions say must not override it."""
    new, old = batch.logits.log_softmax(-1), batch.old_logits.log_softmax(-1)
    log_probs = batch.sampled(new) + 0.25
    tokens = project_tokens(new, old, batch.ids, batch.mask, log_probs=log_probs)
    free = ~tokens.projected
    assert torch.equal(tokens.projected_log_probs[free], log_probs[free])
    assert not bool((tokens.projected_log_probs == log_probs)[tokens.projected].any())


@pytest.mark.parametrize("support", ["dense", "bucket", "paper"])
@pytest.mark.parametrize("region", ["token", "sequence"])
def test_what_the_mask_hides_leaks_nowhere(batch: _Batch, support: str, region: str) -> None:
    hidden = batch.mask == 0
    outcomes = []
    for garbage in (0.0, 1e30):
        dirty = _Batch(
            torch.where(hidden[..., None], garbage * torch.randn(V).double(), batch.logits).requires_grad_(),
            torch.where(hidden[..., None], garbage * torch.randn(V).double(), batch.old_logits),
            batch.ids, batch.mask, torch.where(hidden, garbage, batch.advantages),
        )  # fmt: skip
        options: dict[str, Any] = {"region": region}
        if support == "dense":
            result = dirty.dense(dirty.logits, **options)
        elif support == "bucket":
            result = dirty.sparse(dirty.logits, 3, **options)
        else:
            result = dirty.sparse(dirty.logits, 3, own_ids=True, support="paper", **options)
        (gradient,) = torch.autograd.grad(result.loss, dirty.logits)
        outcomes.append((result.loss, gradient, result.metrics))
    (loss, gradient, metrics), (dirty_loss, dirty_gradient, dirty_metrics) = outcomes
    assert torch.equal(loss, dirty_loss)
    assert torch.equal(gradient, dirty_gradient)
    assert bool((gradient[hidden] == 0).all())
    assert {k: v.item() for k, v in metrics.items()} == {k: v.item() for k, v in dirty_metrics.items()}


@pytest.mark.parametrize("support", ["dense", "bucket", "paper"])
def test_ids_of_padding_may_be_anything(batch: _Batch, support: str) -> None:
    """Trainers pad responses with -100; the mask says that they do not count."""
    new, old = batch.logits.log_softmax(-1), batch.old_logits.log_softmax(-1)
    few = SparseLogProbs.from_logits(batch.old_logits, 3, keep_ids=batch.ids)
    sides: tuple[Any, Any] = (
        (new, old) if support == "dense" else (SparseLogProbs.at_ids(batch.logits, few.ids), few)
    )
    losses = [
        troll(
            batch.sampled(new),
            batch.sampled(old),
            batch.advantages,
            batch.mask,
            response_ids=ids,
            new=sides[0],
            old=sides[1],
            support="paper" if support == "paper" else "bucket",
        ).loss
        for ids in (batch.ids, torch.where(batch.mask > 0, batch.ids, -100))
    ]
    assert torch.equal(*losses)


def test_the_papers_tail_takes_masked_rows_on_equal_ids(batch: _Batch) -> None:
    few = SparseLogProbs.from_logits(batch.old_logits, 3, keep_ids=batch.ids)
    result = batch.sparse(batch.logits, 3, support="paper")
    assert math.isfinite(result.loss.item())
    everything_hidden = troll(
        torch.zeros(B, T), torch.zeros(B, T), batch.advantages, torch.zeros(B, T), response_ids=batch.ids,
        new=few, old=few, support="paper",
    )  # fmt: skip
    assert everything_hidden.loss.item() == 0


def test_the_papers_ratio_is_that_of_the_renormalised_supports() -> None:
    """One id kept on each side of a (.5, .3, .2) policy: the paper sees probability 1, so a ratio of 1."""
    old_logits = torch.tensor([[[0.5, 0.3, 0.2]]], dtype=torch.float64).log()
    logits = torch.tensor([[[0.6, 0.3, 0.1]]], dtype=torch.float64).log()
    ids = torch.zeros(1, 1, dtype=torch.long)
    few = [SparseLogProbs.at_ids(x, ids[..., None]) for x in (logits, old_logits)]
    for tail, ratio in (("paper", 1.0), ("bucket", 1.2)):
        result = troll(
            logits[..., 0], old_logits[..., 0], torch.ones(1).double(), torch.ones(1, 1), response_ids=ids,
            new=few[0], old=few[1], support=tail, kl_bound=INF,
        )  # fmt: skip
        assert result.metrics["ratio_max"].item() == pytest.approx(ratio, rel=1e-9)


def test_tail_mass_and_entropy_are_those_of_the_new_policy(batch: _Batch) -> None:
    result = batch.sparse(batch.logits, 2)
    old = SparseLogProbs.from_logits(batch.old_logits, 2, keep_ids=batch.ids)
    p = np.exp(oracles.normalise(batch.logits))
    tails, entropies = [], []
    for b, t in np.argwhere(batch.mask.numpy()):
        held = [i for i in old.ids[b, t].tolist() if i >= 0]
        outcomes = np.array([*p[b, t, held], 1 - p[b, t, held].sum()])
        tails.append(outcomes[-1])
        entropies.append(-(outcomes * np.log(outcomes)).sum())
    assert result.metrics["tail_mass"].item() == pytest.approx(np.mean(tails), rel=1e-9)
    assert result.metrics["entropy"].item() == pytest.approx(np.mean(entropies), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_distributions_are_widened_before_anything_is_computed(
    batch: _Batch, dtype: torch.dtype
) -> None:
    new, old = (x.log_softmax(-1).to(dtype) for x in (batch.logits, batch.old_logits))
    results = [
        troll(
            batch.sampled(n),
            batch.sampled(o),
            batch.advantages.float(),
            batch.mask,
            response_ids=batch.ids,
            new=n,
            old=o,
        )
        for n, o in ((new, old), (new.float(), old.float()))
    ]
    assert results[0].loss.dtype == torch.float32
    for name in ("kl_mean", "kl_max", "regression", "entropy", "projected"):
        assert results[0].metrics[name].item() == results[1].metrics[name].item()
    # The ratio of unprojected tokens is that of what was handed in, in its precision.
    within = 4 * unit_of(1.0, dtype)
    torch.testing.assert_close(results[0].loss, results[1].loss, rtol=within, atol=within)


def test_autocast_changes_nothing(batch: _Batch) -> None:
    new, old = (x.float().log_softmax(-1) for x in (batch.logits, batch.old_logits))
    arguments = (batch.sampled(new), batch.sampled(old), batch.advantages.float(), batch.mask)
    plain = troll(*arguments, response_ids=batch.ids, new=new, old=old)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = troll(*arguments, response_ids=batch.ids, new=new, old=old)
    assert torch.equal(plain.loss, under.loss)


def test_autocast_does_not_reach_into_a_backward_pass_over_the_head(batch: _Batch) -> None:
    """Which some call inside it."""
    generator = torch.Generator().manual_seed(0)
    rows, vocabulary = batch.mask.shape, batch.logits.shape[-1]
    hidden = torch.randn(*rows, 8, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, 8, generator=generator).requires_grad_()
    old = HiddenStates(hidden.detach() + torch.randn(*rows, 8, generator=generator), weight.detach().clone())

    def gradients() -> tuple[Tensor, ...]:
        new = HiddenStates(hidden, weight)
        tokens = project_tokens(new, old, batch.ids, batch.mask, kl_bound=0.05)
        assert tokens.projected.any()
        loss = (tokens.projected_log_probs + tokens.regression).sum()
        return torch.autograd.grad(loss, (hidden, weight))

    plain = gradients()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = gradients()
    assert all(torch.equal(one, other) for one, other in zip(plain, under, strict=True))


def test_what_does_not_fit_is_refused_with_the_remedy(batch: _Batch) -> None:
    new, old = batch.logits.log_softmax(-1), batch.old_logits.log_softmax(-1)
    few = SparseLogProbs.from_logits(batch.old_logits, 2)
    arguments: dict[str, Any] = {
        "log_probs": batch.sampled(new), "old_log_probs": batch.sampled(old), "advantages": batch.advantages,
        "response_mask": batch.mask, "response_ids": batch.ids, "new": new, "old": old,
    }  # fmt: skip
    for change, message in (
        ({"alpha": -0.1}, r"alpha must be finite and not negative, got -0\.1"),
        ({"alpha": math.nan}, "alpha must be finite and not negative, got nan"),
        ({"ratio_level": "word"}, "ratio_level must be .*got 'word'"),
        ({"kl_bound": 0.0}, r"kl_bound must be a positive.*got 0\.0"),
        ({"region": "batch"}, "region must be .*got 'batch'"),
        ({"old": few}, "got Tensor and SparseLogProbs"),
        ({"new": new[:, :2]}, r"new must be.*\(3, 4\).*got \(3, 2, 9\)"),
        ({"response_ids": batch.ids[:, :2]}, r"response_ids .* got \(3, 2\) and \(3, 4\)"),
        ({"new": few, "old": few}, r"sampled tokens are not among.*keep_ids=response_ids"),
        ({"new": torch.full_like(new, math.nan)}, "NaN"),
        ({"new": few, "old": few, "support": "none", "response_ids": few.ids[..., 0]}, "support must be"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            troll(**(arguments | change))


def test_metrics_carry_no_gradient(batch: _Batch) -> None:
    result = batch.sparse(batch.logits.clone().requires_grad_(), 2)
    assert result.loss.requires_grad
    assert not any(metric.requires_grad for metric in result.metrics.values())
