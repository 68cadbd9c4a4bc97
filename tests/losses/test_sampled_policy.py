"""TROLL anchored at the policy that sampled, against whole distributions in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rounding import unit_of
from torch import Tensor

from tether.errors import InvalidInputError
from tether.losses import project_tokens, troll, truncated_weights
from tether.ops import HiddenStates
from tether.ops.head import Head
from tether.projection import LagBound, SampledPolicy, kl_categorical

V, K, BOUND = 50, 8, 0.05


def _policies(
    tokens: int, *, top_k: int | None, moved: float, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Behaviour policy [B, T, V] in float64, maybe truncated, the network's logits, and what was drawn."""
    generator = torch.Generator().manual_seed(seed)
    shape = (4, tokens // 4, V)
    old = 2 * torch.randn(shape, dtype=torch.float64, generator=generator)
    new = old + moved * torch.randn(shape, dtype=torch.float64, generator=generator)
    if top_k is not None:
        old = old.masked_fill(old < old.topk(top_k).values[..., -1:], -torch.inf)
    mu = old.log_softmax(-1)
    drawn = mu.exp().view(-1, V).multinomial(1, generator=generator).view(shape[:2])
    return mu, new.requires_grad_(), drawn


def _report(mu: Tensor, drawn: Tensor, *, truncated: bool, lag: Any = None) -> SampledPolicy:
    log_probs, ids = mu.topk(K)
    own = mu.gather(-1, drawn[..., None]).squeeze(-1)
    mask = torch.ones_like(drawn)
    return SampledPolicy.from_report(
        drawn, ids, log_probs, mask, sampled_log_probs=own, truncated=truncated, lag=lag
    )


def _drawn(log_probs: Tensor, drawn: Tensor) -> Tensor:
    return log_probs.gather(-1, drawn[..., None]).squeeze(-1)


def _held(old: SampledPolicy) -> Tensor:
    """Which ids of the vocabulary a report knows, [B, T, V]."""
    ids = old.support.ids
    known = torch.zeros(*ids.shape[:-1], V + 1, dtype=torch.bool)
    return known.scatter_(-1, torch.where(ids < 0, V, ids), True)[..., :-1]


def _loss(new: Tensor, mu: Tensor, index: Tensor, **settings: Any) -> Any:
    """Of whole distributions: log-probabilities [B, T, O] of the same outcomes."""
    advantages = torch.linspace(-1, 1, 4).double()
    return troll(_drawn(new, index), _drawn(mu, index), advantages, torch.ones_like(index),
                 response_ids=index, new=new, old=mu, kl_bound=BOUND, **settings)  # fmt: skip


def _loss_at_sampler(new: Tensor, old: SampledPolicy, drawn: Tensor, **settings: Any) -> Any:
    own = _drawn(new.log_softmax(-1), drawn)
    return troll(own, old.log_probs, torch.linspace(-1, 1, 4).double(), torch.ones_like(drawn),
                 response_ids=drawn, new=new, old=old, **{"kl_bound": BOUND, **settings})  # fmt: skip


def test_truncated_sampling_is_bounded_exactly_with_the_gradient_of_whole_distributions() -> None:
    """10^5 tokens of top-k sampling: the dense problem on the behaviour policy's own support."""
    mu, new, drawn = _policies(100_000, top_k=5, moved=0.6)
    old = _report(mu, drawn, truncated=True)
    result = _loss_at_sampler(new, old, drawn)
    (found,) = torch.autograd.grad(result.loss, new)
    restricted = new.masked_fill(torch.isneginf(mu), -torch.inf).log_softmax(-1)
    expected = _loss(restricted, mu, drawn)
    (gradient,) = torch.autograd.grad(expected.loss, new)
    assert 0.05 < result.metrics["projected"] < 0.95
    assert torch.allclose(result.loss, expected.loss, rtol=1e-9)
    assert (found - gradient).abs().max() <= 1e-6 * gradient.abs().max()
    tokens = project_tokens(new, old, drawn, torch.ones_like(drawn), kl_bound=BOUND)
    assert torch.allclose(tokens.kl, kl_categorical(restricted, mu), rtol=1e-6, atol=1e-12)
    assert tokens.projected_kl is not None
    assert tokens.projected_kl.max() <= BOUND * (1 + 1e-9)
    assert torch.allclose(
        tokens.projected_kl[tokens.projected].double(), torch.tensor(BOUND).double(), rtol=1e-9
    )


def test_a_report_with_a_tail_is_the_problem_of_its_outcomes() -> None:
    """Kept ids and all others as one, added up here from whole distributions."""
    mu, new, drawn = _policies(2_000, top_k=None, moved=0.5)
    old = _report(mu, drawn, truncated=False)
    result = _loss_at_sampler(new, old, drawn)
    (found,) = torch.autograd.grad(result.loss, new)

    held = _held(old)

    def outcomes(log_probs: Tensor) -> Tensor:
        """The vocabulary's outcomes of which the unreported have moved into one more."""
        probs = log_probs.exp()
        rest = torch.where(held, 0.0, probs).sum(-1, keepdim=True)
        return torch.cat((torch.where(held, log_probs, -torch.inf), rest.log()), -1)

    log_new = new.log_softmax(-1)
    expected = _loss(outcomes(log_new), outcomes(mu), drawn)
    (gradient,) = torch.autograd.grad(expected.loss, new)
    assert 0.05 < result.metrics["projected"] < 0.95
    assert (found - gradient).abs().max() <= 1e-6 * gradient.abs().max()
    tokens = project_tokens(new, old, drawn, torch.ones_like(drawn), kl_bound=BOUND)
    assert torch.allclose(tokens.kl, kl_categorical(outcomes(log_new), outcomes(mu)), rtol=1e-6, atol=1e-12)


def test_the_divergence_of_a_report_with_a_tail_is_a_lower_bound_of_the_true_one() -> None:
    """Of 10^5 tokens, and by no more than what the tail hides; what is projected is held to it."""
    mu, new, drawn = _policies(100_000, top_k=None, moved=0.5)
    old = _report(mu, drawn, truncated=False)
    with torch.no_grad():
        log_new = new.log_softmax(-1)
        tokens = project_tokens(log_new, old, drawn, torch.ones_like(drawn), kl_bound=BOUND)
        true = kl_categorical(log_new, mu)
        tails = (side.masked_fill(_held(old), -torch.inf).log_softmax(-1) for side in (log_new, mu))
        hidden = tokens.tail_mass * kl_categorical(*tails)
    allowed = unit_of(true, torch.float64, terms=V)
    assert (tokens.kl <= true + allowed).all()
    assert (true - tokens.kl - hidden).abs().max() <= 1e-6 * true.max()  # the chain rule of KL
    assert hidden.mean() > 0.01
    assert tokens.projected_kl is not None
    assert tokens.projected_kl.max() <= BOUND * (1 + 1e-9)


def test_a_padded_vocabulary_cannot_be_sampled_around_a_sampler_either() -> None:
    mu, _, drawn = _policies(40, top_k=None, moved=0.0)
    old = _report(mu, drawn, truncated=False)
    hidden, weight = mu, torch.eye(V, dtype=torch.float64)
    padded = torch.cat((weight, 9 * torch.ones(7, V, dtype=torch.float64)))
    new = HiddenStates(hidden, padded, head=Head(vocabulary_size=V))
    tokens = project_tokens(new, old, drawn, torch.ones_like(drawn), kl_bound=BOUND)
    assert torch.allclose(tokens.new_log_probs, _drawn(mu, drawn))
    assert tokens.kl.max() < 1e-6
    assert not tokens.projected.any()


@pytest.mark.parametrize("garbage", [math.nan, -math.inf])
def test_what_a_mask_hides_may_hold_anything_around_a_sampler_too(garbage: float) -> None:
    mu, new, drawn = _policies(40, top_k=None, moved=1.0)
    old, mask = _report(mu, drawn, truncated=False), torch.ones_like(drawn)
    mask[1, 2:] = 0
    expected = project_tokens(new, old, drawn, mask, kl_bound=BOUND)
    spoiled = torch.where(mask[..., None] > 0, new, garbage).detach().requires_grad_()
    found = project_tokens(spoiled, old, drawn, mask, kl_bound=BOUND)
    counted = mask > 0
    assert torch.equal(found.projected_log_probs[counted], expected.projected_log_probs[counted])
    found.projected_log_probs[counted].sum().backward()
    assert spoiled.grad is not None
    assert spoiled.grad.isfinite().all()
    assert not spoiled.grad[~counted].any()


@pytest.mark.parametrize("truncated", [False, True])
def test_hidden_states_say_what_their_logits_say(truncated: bool) -> None:
    mu, _, drawn = _policies(40, top_k=5 if truncated else None, moved=0.0)
    old = _report(mu, drawn, truncated=truncated, lag=torch.tensor([0, 1, 2, 2]))
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(4, 10, 6, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(V, 6, dtype=torch.float64, generator=generator).requires_grad_()
    bound = LagBound(0.1, "linear", 1.0)
    found = {}
    for form, new in {"logits": hidden @ weight.t(), "hidden": HiddenStates(hidden, weight)}.items():
        own = _drawn((hidden @ weight.t()).log_softmax(-1), drawn)
        result = troll(own, old.log_probs, torch.ones(4).double(), torch.ones_like(drawn),
                       response_ids=drawn, new=new, old=old, kl_bound=bound)  # fmt: skip
        found[form] = (result.loss, *torch.autograd.grad(result.loss, (hidden, weight), retain_graph=True))
    for logits, states in zip(found["logits"], found["hidden"], strict=True):
        assert torch.allclose(logits, states, rtol=1e-6, atol=1e-9)


def test_each_token_is_held_to_the_bound_of_its_lag() -> None:
    mu, new, drawn = _policies(400, top_k=5, moved=1.0)
    lag = torch.randint(0, 4, drawn.shape, generator=torch.Generator().manual_seed(1))
    old = _report(mu, drawn, truncated=True, lag=lag)
    mask = torch.ones_like(drawn)
    mask[0, :50] = 0
    bound = LagBound(0.02, "linear", 2.0)
    tokens = project_tokens(new, old, drawn, mask, kl_bound=bound)
    assert tokens.projected_kl is not None
    for versions in range(4):
        alone = (lag == versions) & (mask > 0)
        one = project_tokens(new, old, drawn, alone, kl_bound=0.02 * (1 + 2 * versions))
        for name, values in tokens.known().items():
            assert torch.equal(values[alone], one.known()[name][alone]), name
        acted = alone & tokens.projected
        assert acted.any()
        expected = torch.tensor(0.02 * (1 + 2 * versions)).double()
        assert torch.allclose(tokens.projected_kl[acted].double(), expected, rtol=1e-9)


def test_a_constant_bound_asks_for_no_lag() -> None:
    mu, new, drawn = _policies(40, top_k=5, moved=1.0)
    old, mask = _report(mu, drawn, truncated=True), torch.ones_like(drawn)
    constant = project_tokens(new, old, drawn, mask, kl_bound=LagBound(0.02))
    number = project_tokens(new, old, drawn, mask, kl_bound=0.02)
    assert number.projected.any()
    assert torch.equal(constant.projected_log_probs, number.projected_log_probs)


def test_a_sequence_has_one_bound() -> None:
    mu, new, drawn = _policies(40, top_k=5, moved=1.0)
    bounds = torch.tensor([0.02, 0.05, 0.1, 0.02])[:, None]
    old, mask = _report(mu, drawn, truncated=True), torch.ones_like(drawn)
    tokens = project_tokens(new, old, drawn, mask, kl_bound=bounds, region="sequence")
    assert tokens.projected_kl is not None
    assert torch.allclose(tokens.projected_kl.mean(-1, keepdim=True), bounds.double(), rtol=1e-6)
    mixed = bounds.expand(4, 10).clone()
    mixed[1, 3] = 0.3
    with pytest.raises(InvalidInputError, match="share one bound"):
        project_tokens(new, old, drawn, mask, kl_bound=mixed, region="sequence")


def test_the_decoupled_form_by_hand() -> None:
    """-min(prox / mu, 2) (projected / prox) A of one token with two outcomes."""
    mu, prox, new = (torch.tensor([[[p, 1 - p]]], dtype=torch.float64).log() for p in (0.2, 0.6, 0.9))
    ids, mask = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1)
    weights = truncated_weights(prox[..., 0], mu[..., 0], mask)
    result = troll(new[..., 0], prox[..., 0], torch.ones(1), mask, response_ids=ids, new=new, old=prox,
                   kl_bound=BOUND, alpha=0.0, policy_weights=weights)  # fmt: skip
    # By bisection on p in [.6, .9]: p log(p / .6) + (1 - p) log((1 - p) / .4) = .05.
    low, high = 0.6, 0.9
    for _ in range(60):
        p = (low + high) / 2
        inside = p * math.log(p / 0.6) + (1 - p) * math.log((1 - p) / 0.4) < BOUND
        low, high = (p, high) if inside else (low, p)
    assert result.loss.item() == pytest.approx(-2.0 * low / 0.6, rel=1e-9)


def test_what_does_not_go_with_a_sampler_is_refused() -> None:
    mu, new, drawn = _policies(40, top_k=5, moved=1.0)
    old, mask = _report(mu, drawn, truncated=True), torch.ones_like(drawn)
    with pytest.raises(InvalidInputError, match="nothing says how old"):
        project_tokens(new, old, drawn, mask, kl_bound=LagBound(0.05, "linear", 1.0))
    with pytest.raises(InvalidInputError, match='Use support="bucket"'):
        project_tokens(new, old, drawn, mask, support="paper")
    with pytest.raises(InvalidInputError, match="sequence 0, position 0: the sampler reported to have drawn"):
        project_tokens(new, old, drawn + 1, mask)
    for bounds in (torch.ones(7), torch.ones(drawn.shape[1])):
        with pytest.raises(InvalidInputError, match="expand to"):
            project_tokens(new, old, drawn, mask, kl_bound=bounds)
    with pytest.raises(InvalidInputError, match=r"ids must lie in \[0, 3\)"):
        project_tokens(new[..., :3], old, drawn, mask)
    with pytest.raises(InvalidInputError, match=r"policy_weights must be \[B, T\] = .*got \(4,\)"):
        _loss_at_sampler(new, old, drawn, policy_weights=torch.ones(4))


def test_the_example_of_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "other_engines.md").read_text(encoding="utf-8")
    example = next(block.split("```")[0] for block in page.split("```python\n") if "from_report" in block)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["logits"].grad.abs().sum() > 0


def test_weights_are_truncated_and_one_under_the_mask() -> None:
    prox, mu = torch.tensor([[0.9, 0.1, 0.5]]).log(), torch.tensor([[0.3, 0.2, math.nan]]).log()
    mask = torch.tensor([[1, 1, 0]])
    assert truncated_weights(prox, mu, mask).tolist()[0] == pytest.approx([2.0, 0.5, 1.0])
    assert truncated_weights(prox, mu, mask, largest=math.inf).tolist()[0] == pytest.approx([3.0, 0.5, 1.0])
    assert truncated_weights(prox, mu, mask, largest=0.5).tolist()[0] == pytest.approx([0.5, 0.5, 1.0])
    halves = truncated_weights(prox.bfloat16(), mu.bfloat16(), mask)
    assert torch.equal(halves, truncated_weights(prox.bfloat16().float(), mu.bfloat16().float(), mask))
    for wrong in (0.0, "2"):
        with pytest.raises(InvalidInputError, match=f"largest must be positive, got {wrong!r}"):
            truncated_weights(prox, mu, mask, largest=wrong)  # type: ignore[arg-type]


def test_weights_of_other_tokens_are_refused() -> None:
    for mask in (torch.ones(3), torch.ones(2, 1)):
        with pytest.raises(InvalidInputError, match=r"must have one shape, got \(2, 3\), \(2, 3\) and"):
            truncated_weights(torch.zeros(2, 3), torch.zeros(2, 3), mask)
