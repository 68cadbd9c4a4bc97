"""An old policy from what a sampler reports: what it is, and what is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from tests.rounding import unit_of
from torch import Tensor

from tether.errors import InvalidInputError
from tether.projection import LagBound, SampledPolicy, certify, kl_categorical

B, T, V, K = 3, 4, 40, 6


class Report:
    """What an engine would say of `mu`, dense float64 log-probabilities [B, T, V]."""

    def __init__(self, *, top_k: int | None = None, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(B, T, V, dtype=torch.float64, generator=generator)
        if top_k is not None:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
        self.mu = logits.log_softmax(-1)
        self.sampled = self.mu.exp().view(-1, V).multinomial(1, generator=generator).view(B, T)
        self.own = self.mu.gather(-1, self.sampled[..., None]).squeeze(-1)
        self.log_probs, self.ids = self.mu.topk(K)
        self.mask = torch.ones(B, T)

    def policy(self, **changes: Any) -> SampledPolicy:
        given: dict[str, Any] = {
            "sampled_ids": self.sampled, "ids": self.ids, "log_probs": self.log_probs, "mask": self.mask,
            "sampled_log_probs": self.own, **changes,
        }  # fmt: skip
        return SampledPolicy.from_report(**given)


def test_the_tail_is_the_mass_nobody_reported() -> None:
    report = Report()
    policy = report.policy()
    held = torch.zeros(B, T, V + 1, dtype=torch.bool)
    held.scatter_(-1, torch.where(policy.support.ids < 0, V, policy.support.ids), True)
    left = torch.where(held[..., :-1], 0.0, report.mu.exp()).sum(-1)
    assert torch.allclose(policy.support.log_tail.exp(), left, rtol=1e-9, atol=0)
    assert torch.equal(policy.log_probs, report.own)
    assert not policy.truncated.any()


def test_a_drawn_id_outside_the_top_k_gets_a_slot_and_one_inside_keeps_its_own() -> None:
    report = Report()
    inside = (report.ids == report.sampled[..., None]).any(-1)
    assert inside.any()
    assert (~inside).any()
    support = report.policy().support
    assert torch.equal((support.ids >= 0).sum(-1), torch.where(inside, K, K + 1))
    assert ((support.ids == report.sampled[..., None]).sum(-1) == 1).all()


@pytest.mark.parametrize("how", ["trimmed", "too small for float32"])
def test_the_smallest_probability_of_the_tail_is_that_of_what_joined_it(how: str) -> None:
    """Else a network that moves mass onto a reported id of next to no probability would be certified."""
    v, rare = 52, 1e-9 if how == "trimmed" else 1e-48
    mu = torch.full((v,), 4e-4, dtype=torch.float64)
    mu[1] = rare
    mu[0] += 1 - mu.sum()
    least = torch.full((1, 1), math.log(4e-4), dtype=torch.float64)
    ids = torch.tensor([[[0, 1]]])
    policy = SampledPolicy.from_report(
        torch.tensor([[0]]), ids, mu[ids].log(), torch.ones(1, 1), log_tail_min=least
    )
    policy = policy.trimmed(0.9) if how == "trimmed" else policy
    assert policy.support.log_tail_min is not None
    assert float(policy.support.log_tail_min) == pytest.approx(math.log(rare))
    new = mu.clone()
    new[:2] += torch.tensor([-0.02, 0.02], dtype=torch.float64)
    proof = certify(policy.see(new.log()[None, None]), policy.support, 0.2)
    true = float((new * (new / mu).log()).sum())
    assert not proof.inside.any()
    assert float(proof.kl_upper) >= true > 0.2


def test_drawn_tokens_alone_are_a_report() -> None:
    report = Report()
    nothing = {"ids": report.ids[..., :0], "log_probs": report.log_probs[..., :0]}
    alone = report.policy(**nothing)
    assert torch.equal(alone.log_probs, report.own)
    assert torch.allclose(alone.support.log_tail.exp(), 1 - report.own.exp())
    with pytest.raises(InvalidInputError, match=r"sequence 0, position 0: .* among the 0 reported ids"):
        report.policy(**nothing, sampled_log_probs=None)


@pytest.mark.parametrize("vocabulary_size", [None, 50_000])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_ids_may_be_of_any_integer_type(dtype: torch.dtype, vocabulary_size: int | None) -> None:
    """A number that the type does not hold wraps where it is compared with."""
    report = Report()
    wanted = report.policy(vocabulary_size=vocabulary_size)
    for narrow in (
        {"sampled_ids": report.sampled.to(dtype)},
        {"ids": report.ids.to(dtype)},
        {"sampled_ids": report.sampled.to(dtype), "ids": report.ids.to(dtype)},
    ):
        found = report.policy(vocabulary_size=vocabulary_size, **narrow)
        assert torch.equal(found.support.ids, wanted.support.ids)
        assert torch.equal(found.log_probs, wanted.log_probs)


def test_drawn_ids_that_are_no_integers_are_refused() -> None:
    report = Report()
    with pytest.raises(InvalidInputError, match="sampled_ids and ids must be integers"):
        report.policy(sampled_ids=report.sampled.float())


def test_where_sampling_was_truncated_the_reported_set_is_the_policy() -> None:
    report = Report(top_k=4)  # reports six ids, two of which cannot be drawn
    policy = report.policy(truncated=True)
    assert policy.truncated.all()
    assert torch.equal((policy.support.ids >= 0).sum(-1), torch.full((B, T), 4))
    new = torch.randn(B, T, V, dtype=torch.float64)
    seen = policy.see(new)
    restricted = new.masked_fill(torch.isneginf(report.mu), -torch.inf).log_softmax(-1)
    there = restricted.gather(-1, seen.ids.clamp_min(0)).exp()
    assert torch.allclose(seen.log_probs.exp(), torch.where(seen.ids < 0, 0.0, there), rtol=1e-12, atol=0)
    true = kl_categorical(restricted, report.mu)
    assert torch.allclose(kl_categorical(seen.with_buckets(), policy.support.with_buckets()), true, rtol=1e-9)


def test_a_divergence_seen_from_the_top_k_never_exceeds_the_true_one() -> None:
    report = Report()
    policy = report.policy()
    new = report.mu + torch.randn(B, T, V, dtype=torch.float64)
    seen = kl_categorical(policy.see(new).with_buckets(), policy.support.with_buckets())
    true = kl_categorical(new, report.mu)
    assert (seen <= true + unit_of(true, torch.float64, terms=V)).all()
    assert (seen > 0.5 * true).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("truncated", [False, True])
def test_the_rounding_of_an_engine_is_no_fault(dtype: torch.dtype, truncated: bool) -> None:
    for seed in range(20):
        report = Report(top_k=K if truncated else None, seed=seed)
        policy = report.policy(
            log_probs=report.log_probs.to(dtype), sampled_log_probs=report.own.to(dtype), truncated=truncated
        )
        assert policy.support.log_probs.dtype == torch.float32
        assert (policy.support.with_buckets().exp().sum(-1) <= 1 + 0.02).all()


def _at(values: Tensor, position: tuple[int, ...], value: float) -> Tensor:
    changed = values.clone()
    changed[position] = value
    return changed


def _broken(report: Report, what: str) -> dict[str, Any]:
    """A report that is wrong at sequence 1, position 2 alone."""
    where = (1, 2)
    ids, log_probs, likeliest = report.ids, report.log_probs, report.ids[..., 0]
    outside = next(i for i in range(V) if i not in ids[where].tolist())
    another = {"sampled_ids": _at(likeliest, where, outside), "sampled_log_probs": None}
    first = log_probs[..., 0]
    cases: dict[str, dict[str, Any]] = {
        "nan": {"log_probs": _at(log_probs, (*where, 3), math.nan)},
        "own nan": {"sampled_log_probs": _at(report.own, where, math.nan)},
        "twice": {"ids": _at(ids, (*where, 3), int(ids[where][0]))},
        "vocabulary": {"ids": _at(ids, (*where, 3), V + 7), "vocabulary_size": V},
        "negative": {"ids": _at(ids, (*where, 3), -5), "vocabulary_size": V},
        "drawn nothing": {"sampled_ids": _at(likeliest, where, -1), "sampled_log_probs": None},
        "drawn outside": {
            "sampled_ids": _at(likeliest, where, V), "sampled_log_probs": None, "vocabulary_size": V
        },
        "mass": {
            "log_probs": _at(log_probs, (*where, 5), 0.0), "sampled_log_probs": None, "sampled_ids": likeliest
        },
        "scores": {
            "log_probs": _at(log_probs, (*where, 5), 720.0), "sampled_log_probs": None,
            "sampled_ids": likeliest,
        },
        "infinite": {
            "log_probs": _at(log_probs, (*where, 5), math.inf), "sampled_log_probs": None,
            "sampled_ids": likeliest,
        },
        "missing": another,
        "impossible": {**another, "sampled_log_probs": _at(first, where, -torch.inf)},
        "temperature": {"sampled_ids": likeliest, "sampled_log_probs": _at(first, where, -3.0)},
    }  # fmt: skip
    return cases[what]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nan", "log-probability is NaN"),
        ("own nan", "log-probability is NaN"),
        ("twice", "reported twice"),
        ("vocabulary", "the reported id 47 is not in the vocabulary"),
        ("negative", "the reported id -5 is not in the vocabulary"),
        ("drawn nothing", "the sampled id -1 is not in the vocabulary"),
        ("drawn outside", "the sampled id 40 is not in the vocabulary"),
        ("mass", "more than 1 by more than rounding"),
        ("scores", "more than 1 by more than rounding"),
        ("infinite", "more than 1 by more than rounding"),
        ("missing", "is not among the 6 reported ids and its own log-probability is missing"),
        ("impossible", "so it cannot have been sampled"),
        ("temperature", "by itself and"),
    ],
)
def test_a_broken_record_is_refused_by_sequence_and_position(what: str, message: str) -> None:
    report = Report()
    with pytest.raises(InvalidInputError, match=re.escape(message)) as refusal:
        report.policy(**_broken(report, what))
    assert "sequence 1, position 2: " in str(refusal.value)
    assert "(1 token in all)" in str(refusal.value)
    # The same under the mask is nobody's business.
    report.policy(**_broken(report, what), mask=_at(report.mask, (1, 2), 0.0))


def test_a_truncated_set_must_be_whole_and_hold_the_drawn_id() -> None:
    whole = Report(top_k=8)  # of which six are reported
    with pytest.raises(InvalidInputError, match="nothing else could be sampled"):
        whole.policy(truncated=True, sampled_ids=whole.ids[..., 0], sampled_log_probs=None)
    other = Report(top_k=4)
    outside = other.mu[2, 1].argmin()
    with pytest.raises(InvalidInputError, match=r"sequence 2, position 1: the set of 4 ids .* does not hold"):
        other.policy(
            truncated=True, sampled_ids=_at(other.sampled, (2, 1), float(outside)), sampled_log_probs=None
        )


@pytest.mark.parametrize("lag", [torch.tensor([1, 2]), torch.tensor(-1), torch.tensor([0.5] * B)])
def test_a_lag_counts_versions(lag: Tensor) -> None:
    with pytest.raises(InvalidInputError, match="lag counts versions"):
        Report().policy(lag=lag)


def test_lags_come_by_batch_by_sequence_or_by_token() -> None:
    report = Report()
    by_token = torch.arange(B * T).view(B, T)
    by_sequence = torch.arange(B)[:, None].expand(B, T)
    for given, expected in ((3, torch.full((B, T), 3)), (torch.arange(B), by_sequence), (by_token, by_token)):
        lag = report.policy(lag=given).lag
        assert lag is not None
        assert torch.equal(lag, expected)


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        (LagBound(0.1), [0.1, 0.1, 0.1]),
        (LagBound(0.1, "linear", 2.0), [0.1, 0.3, 0.9]),
        (LagBound(0.1, "power", 0.5), [0.1, 0.1 * 2**0.5, 0.1 * 5**0.5]),
        (LagBound(0.1, "geometric", 0.5), [0.1, 0.15, 0.1 * 1.5**4]),
        (LagBound(0.1, "geometric", 0.5, largest=0.3), [0.1, 0.15, 0.3]),
    ],
)
def test_bounds_by_lag_worked_out_by_hand(bound: LagBound, expected: list[float]) -> None:
    assert bound.at(torch.tensor([0, 1, 4])).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kl_bound": 0.0}, {"growth": "cubic"}, {"rate": -0.1}, {"rate": math.nan}, {"rate": "0.5"},
        {"rate": True}, {"largest": 0.01}, {"largest": "0.5"}, {"rate": 0.5}, {"largest": 0.5},
        {"rate": 0.0, "growth": "linear"}, {"rate": 0.0, "growth": "power"},
    ],
)  # fmt: skip
def test_a_bound_by_lag_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        LagBound(**wrong)


def test_trimming_an_empty_batch_and_masses_that_are_none() -> None:
    empty = SampledPolicy.from_report(
        torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2, 3, dtype=torch.long), torch.zeros(0, 2, 3),
        torch.ones(0, 2),
    )  # fmt: skip
    assert empty.trimmed(0.9).support.ids.shape == (0, 2, 1)
    for mass in (0.0, -1.0, 2.0, math.nan):
        with pytest.raises(InvalidInputError, match=r"mass must lie in \(0, 1\]"):
            empty.trimmed(mass)


@pytest.mark.parametrize("order", ["falling", "as it comes"])
@pytest.mark.parametrize("mass", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("top_k", [None, K])
def test_trimming_keeps_what_one_row_after_the_other_would(
    top_k: int | None, mass: float, order: str
) -> None:
    report = Report(top_k=top_k)
    report.mask[0, 2:] = 0
    shuffled = torch.rand(B, T, K, generator=torch.Generator().manual_seed(1)).argsort(-1)
    order_of = shuffled if order == "as it comes" else torch.arange(K).expand(B, T, K)
    given = report.policy(
        ids=report.ids.gather(-1, order_of), log_probs=report.log_probs.gather(-1, order_of),
        truncated=top_k is not None,
    )  # fmt: skip
    found = given.trimmed(mass)
    assert torch.equal(found.log_probs, given.log_probs)
    for b, t in report.mask.nonzero().tolist():
        whole, few = given.support[b, t], found.support[b, t]
        rows = sorted(
            (-value, i)
            for i, value in zip(whole.ids.tolist(), whole.log_probs.tolist(), strict=True)
            if i >= 0
        )
        kept, held = {}, 0.0
        for surprise, i in rows:
            if held < mass or top_k is not None or i == report.sampled[b, t]:
                kept[i] = -surprise
            held += math.exp(-surprise)
        assert {i: v for i, v in zip(few.ids.tolist(), few.log_probs.tolist(), strict=True) if i >= 0} == kept
        assert float(few.log_tail.exp()) == pytest.approx(
            max(0.0, 1 - sum(map(math.exp, kept.values()))), abs=1e-12
        )
