"""Before anything is timed: every contestant's loss and gradients against dense float64.

In float32 whatever the precision that is timed: others form half-precision logits, whose rounding alone moves
a gradient by some percent, as much as a wrong formula might.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from benchmarks.bench.contestants import CLIP_RANGE, Loss
from benchmarks.bench.workload import KL_BOUND, SEQUENCES, Workload
from torch import Tensor

from tether import SparseLogProbs, project_categorical, project_sparse

# Relative errors of gradients that rounding explains, far below what a wrong formula gives.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
CHECKED_TOKENS = 8 * SEQUENCES


def check(
    contestants: Mapping[str, tuple[Loss, Loss]], work: Workload, *, rivals: Collection[str] = ()
) -> dict[str, float]:
    """Relative gradient errors of (contestant, reference) pairs on a part of a workload, in its precision.

    Args:
        contestants: by name.
        work: the batch they will be timed on.
        rivals: names of those whose rounding in half precision is theirs to answer for.

    Raises:
        SystemExit: one of them computes something else than it should.
    """
    tokens, dtype = min(CHECKED_TOKENS, work.shape.tokens), work.shape.dtype
    errors = {}
    for name, (loss, reference) in contestants.items():
        exact = _gradients(reference, work.part(tokens, torch.float64))
        for precision in dict.fromkeys((torch.float32, dtype)):
            errors[name] = _relative_error(_gradients(loss, work.part(tokens, precision)), exact)
            judged = precision == torch.float32 or name not in rivals
            if judged and not errors[name] <= _TOLERANCE[precision]:
                raise SystemExit(
                    f"{name} on {work.shape.name} in {precision}: its gradient is off by "
                    f"{errors[name]:.1e}, so its time means nothing."
                )
    return errors


def _gradients(loss: Loss, work: Workload) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(work), (work.hidden, work.weight))


def _relative_error(gradients: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    return max(float((g.double() - e).norm() / e.norm()) for g, e in zip(gradients, exact, strict=True))


def dense_clip(work: Workload) -> Tensor:
    """The clipped loss, dense."""
    log_probs = _dense(work).gather(-1, work.sampled[:, None]).squeeze(-1)
    ratio, advantages = (log_probs - work.old_log_probs).exp(), _by_token(work)
    clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
    return torch.maximum(-ratio * advantages, -clipped * advantages).mean()


def dense_bucket(work: Workload) -> Tensor:
    """TROLL on the old support and one outcome for the rest, from dense logits."""
    new = SparseLogProbs.at_ids(work.hidden @ work.weight.t(), work.old.ids)
    result = project_sparse(new, work.old, KL_BOUND)
    exact = _dense(work).gather(-1, work.sampled[:, None]).squeeze(-1)
    sampled = torch.where(result.projected, result.log_probs.log_prob_of(work.sampled), exact)
    return _troll(work, sampled, new.with_buckets(), result.log_probs.with_buckets(), result.projected)


def dense_exact(work: Workload) -> Tensor:
    """TROLL over the whole vocabulary, dense."""
    new = _dense(work)
    old = (work.old_hidden @ work.weight.detach().t()).log_softmax(-1)
    result = project_categorical(new, old, KL_BOUND)
    sampled = result.log_probs.gather(-1, work.sampled[:, None]).squeeze(-1)
    return _troll(work, sampled, new, result.log_probs, result.projected)


def dense_paper(work: Workload) -> Tensor:
    """TROLL with the paper's tail by our own projection, which the bracketing has nothing in common with."""
    logits = work.hidden @ work.weight.t()
    new = SparseLogProbs.from_logits(logits, work.shape.top_k, mass=1 - 1e-5, keep_ids=work.sampled)
    result = project_sparse(new, work.old, KL_BOUND, support="paper")
    old_log_probs = result.old.log_prob_of(work.sampled)
    sampled = result.log_probs.log_prob_of(work.sampled)
    return _troll(
        work, sampled, result.new.log_probs, result.log_probs.log_probs, result.projected, old_log_probs
    )


def _troll(
    work: Workload,
    sampled: Tensor,
    new: Tensor,
    projected: Tensor,
    acted: Tensor,
    old_log_probs: Tensor | None = None,
) -> Tensor:
    """-ratio A + KL(new || sg projected) in the mean over tokens."""
    old_log_probs = work.old_log_probs if old_log_probs is None else old_log_probs
    ratio = (sampled - old_log_probs).exp()
    possible = acted[:, None] & ~torch.isneginf(new)
    log_new = torch.where(possible, new, 0.0)
    pull = log_new.exp() * (log_new - torch.where(possible, projected.detach(), 0.0))
    regression = torch.where(possible, pull, 0.0).sum(-1)
    return (regression - ratio * _by_token(work)).mean()


def _dense(work: Workload) -> Tensor:
    return (work.hidden @ work.weight.t()).log_softmax(-1)


def _by_token(work: Workload) -> Tensor:
    return work.advantages.repeat_interleave(work.shape.tokens // SEQUENCES)
