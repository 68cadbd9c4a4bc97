"""TROLL from logits as flat rows against `tether.losses.troll` on dense or sparse distributions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tether.errors import InvalidInputError
from tether.integrations.logits_hooks import (
    project_on_old_policy,
    record_old_policy,
    troll_token_losses,
)
from tether.losses import troll
from tether.projection import SparseLogProbs
from tether.projection.compact import CompactLogProbs

LENGTHS = [4, 1, 6]


class Case:
    """Three sequences of 11 tokens in a packed list of 20 positions, in float64."""

    def __init__(self, vocabulary: int = 40) -> None:
        generator = torch.Generator().manual_seed(1)
        self.old = 2 * torch.randn(20, vocabulary, dtype=torch.float64, generator=generator)
        self.new = self.old + 0.4 * torch.randn(20, vocabulary, dtype=torch.float64, generator=generator)
        self.rows = torch.randperm(20, generator=generator)[: sum(LENGTHS)]
        self.sampled = torch.randint(0, vocabulary, (sum(LENGTHS),), generator=generator)
        self.advantages = torch.randn(sum(LENGTHS), dtype=torch.float64, generator=generator)

    def padded(self, flat: torch.Tensor) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(flat.split(LENGTHS), batch_first=True)

    def reference(self, logits: torch.Tensor, top_k: int | None, **settings: Any) -> Any:
        """`troll` as [B, T], every token weighing the same."""
        ids = self.padded(self.sampled)
        new = self.padded(logits[self.rows].log_softmax(-1))
        old = self.padded(self.old[self.rows].log_softmax(-1))
        sampled, old_sampled = (x.gather(-1, ids[..., None]).squeeze(-1) for x in (new, old))
        sides: dict[str, Any] = {"new": new, "old": old}
        if top_k is not None:
            keep = {"mass": 0.99, "keep_ids": ids}
            kept_old = SparseLogProbs.from_logits(old, top_k, **keep)
            kept_old = replace(kept_old, log_tail_min=old.amin(-1))
            paper = settings.get("support") == "paper"
            sides["old"] = kept_old
            sides["new"] = (
                SparseLogProbs.from_logits(new, top_k, **keep)
                if paper
                else SparseLogProbs.at_ids(new, kept_old.ids)
            )
        return troll(
            sampled, old_sampled, self.padded(self.advantages), self.padded(torch.ones(sum(LENGTHS))),
            response_ids=ids, **sides, **settings,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("top_k", "hook", "settings"),
    [
        (None, {}, {}),
        (6, {}, {}),
        (6, {"support": "paper", "mass": 0.99}, {"support": "paper"}),
        (None, {"sequence_lengths": torch.tensor(LENGTHS)}, {"region": "sequence"}),
    ],
    ids=["dense", "few ids", "the paper's tail", "a sequence's mean"],
)
def test_losses_and_gradient_are_those_of_the_reference(
    top_k: int | None, hook: dict[str, Any], settings: dict[str, Any]
) -> None:
    case = Case()
    old = record_old_policy(
        case.old, case.sampled, top_k=top_k or 40, mass=0.99 if top_k else 1.0, rows=case.rows
    )
    mine, theirs = case.new.clone().requires_grad_(), case.new.clone().requires_grad_()
    projection = project_on_old_policy(mine, case.sampled, old, kl_bound=0.02, rows=case.rows, **hook)
    losses, metrics = troll_token_losses(projection, case.advantages, alpha=0.7)
    losses.mean().backward()
    found = losses.mean().item()
    expected = case.reference(theirs, top_k, kl_bound=0.02, alpha=0.7, **settings)
    expected.loss.backward()
    assert found == pytest.approx(expected.loss.item(), abs=1e-10)
    torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-9, rtol=1e-9)
    assert metrics["projected"] > 0.3
    unknown = {"certified", "uncertain"} if top_k is None else set()  # a dense reference has no tail to prove
    for name in metrics.keys() - unknown:
        torch.testing.assert_close(metrics[name], expected.metrics[name], atol=1e-10, rtol=1e-9)


def test_the_papers_projection_is_the_same_of_an_old_policy_that_was_packed() -> None:
    """Packing drops the columns that no token fills, and the new policy's ids are not fewer for it."""
    case = Case()
    old = record_old_policy(case.old, case.sampled, top_k=12, mass=0.6, rows=case.rows)
    packed = CompactLogProbs.pack(old).unpack()
    assert packed.ids.shape[-1] < 10
    as_recorded, unpacked = (
        project_on_old_policy(
            case.new, case.sampled, side, support="paper", top_k=12, mass=0.999, kl_bound=0.02, rows=case.rows
        )
        for side in (old, packed)
    )
    torch.testing.assert_close(unpacked.kl, as_recorded.kl, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        unpacked.projected_log_probs, as_recorded.projected_log_probs, atol=1e-6, rtol=0
    )


def test_the_unchanged_policy_has_ratio_one_and_the_plain_gradient() -> None:
    case = Case()
    old = record_old_policy(case.old, case.sampled, top_k=4, rows=case.rows)
    logits = case.old.clone().requires_grad_()
    losses, metrics = troll_token_losses(
        project_on_old_policy(logits, case.sampled, old, rows=case.rows), case.advantages
    )
    losses.sum().backward()
    plain = case.old.clone().requires_grad_()
    chosen = plain[case.rows].log_softmax(-1).gather(-1, case.sampled[:, None]).squeeze(-1)
    (-(chosen * case.advantages).sum()).backward()
    torch.testing.assert_close(logits.grad, plain.grad)
    assert metrics["projected"] == 0
    assert metrics["ratio_max"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"support": "exact"}, "support must be one of bucket, paper, got 'exact'"),
        ({"sequence_lengths": torch.tensor([4, 4])}, r"add up to the 11 tokens, got \[4, 4\]"),
        ({"sequence_lengths": torch.tensor([12, -1])}, r"not negative, .* got \[12, -1\]"),
        ({"kl_bound": 0.0}, "kl_bound"),
    ],
)
def test_what_cannot_be_worked_with_is_named(keywords: dict[str, Any], message: str) -> None:
    case = Case()
    old = record_old_policy(case.old, case.sampled, rows=case.rows)
    with pytest.raises(InvalidInputError, match=message):
        project_on_old_policy(case.new, case.sampled, old, rows=case.rows, **keywords)


@pytest.mark.parametrize("wrong", [-1, 10**6])
@pytest.mark.parametrize("which", ["rows", "sampled_ids"])
def test_a_row_or_an_id_that_is_none_is_refused(which: str, wrong: int) -> None:
    """A row of -1 is the last one of the pack: another sequence's distribution."""
    case = Case()
    given = {"rows": case.rows.clone(), "sampled_ids": case.sampled.clone()}
    old = record_old_policy(case.old, **given)
    given[which][3] = wrong
    for act in (lambda: record_old_policy(case.old, **given),
                lambda: project_on_old_policy(case.new, old=old, **given)):  # fmt: skip
        with pytest.raises(InvalidInputError, match=rf"must lie in \[0, \d+\); found {wrong}"):
            act()


def test_another_batchs_old_policy_is_refused() -> None:
    case = Case()
    old = record_old_policy(case.old, case.sampled, rows=case.rows)
    with pytest.raises(InvalidInputError, match="old holds 10 tokens and sampled_ids 11"):
        project_on_old_policy(case.new, case.sampled, old[:10], rows=case.rows)
    projection = project_on_old_policy(case.new, case.sampled, old, rows=case.rows)
    with pytest.raises(InvalidInputError, match=r"advantages must be \(11,\)"):
        troll_token_losses(projection, case.advantages[:5])
    with pytest.raises(InvalidInputError, match="alpha must be finite and not negative"):
        troll_token_losses(projection, case.advantages, alpha=-0.5)


def example_of_the_page(number: int) -> dict[str, Any]:
    page = (Path(__file__).parents[2] / "docs" / "other_engines.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[number].split("```")[0], names)
    return names


def test_the_toy_engine_of_the_page_learns_and_stays_near_the_old_policy() -> None:
    names = example_of_the_page(1)
    with torch.no_grad():
        ids = names["ids"]
        new = names["head"](names["backbone"](ids[:, :-1])).log_softmax(-1)
    moved = new.gather(-1, ids[:, 1:, None])[..., 0] - names["old_log_probs"]
    assert (moved.mean(-1) * names["advantages"]).mean() > 0, "what was good has become likelier"
    assert names["tokens"].projected.any()
    assert names["objective"].metrics["kl_projected_max"] < 0.0505


def test_the_example_of_the_page_for_logits_runs() -> None:
    names = example_of_the_page(2)
    assert names["new_logits"].grad[names["rows"]].abs().sum() > 0
    assert names["new_logits"].grad[[0, 1, 5]].abs().sum() == 0
