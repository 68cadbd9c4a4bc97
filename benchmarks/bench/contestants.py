"""The paths that compete on a workload: each computes a loss and its gradients on hidden states and head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from benchmarks.bench.paper_style import paper_troll
from benchmarks.bench.workload import KL_BOUND, SEQUENCES, Workload, old_support
from torch import Tensor

from tether import SparseLogProbs
from tether.losses import (
    PolicyLoss,
    ProjectedTokens,
    aggregate,
    linear_policy_loss,
    ppo_clip,
    troll,
    troll_objective,
)
from tether.ops import HiddenStates, linear_log_probs, linear_trust_region

CLIP_RANGE = 0.2
# What TRL 1.16's trainer passes.
_TRL_VOCABULARY_CHUNK = 32768

Loss = Callable[[Workload], Tensor]


def tether_clip(work: Workload) -> Tensor:
    """Our LM-head operation and our clip."""
    found = linear_log_probs(work.hidden, work.weight, work.sampled[:, None])
    return ppo_clip(
        work.batch(found.log_probs[:, 0]), work.batch(work.old_log_probs), work.advantages, work.mask
    ).loss


def tether_troll(work: Workload) -> Tensor:
    """The same with the projection on the old policy's support and the rest as one outcome."""
    wanted = torch.cat((work.sampled[:, None], work.old.ids), -1)
    found = linear_log_probs(work.hidden, work.weight, wanted)
    new = SparseLogProbs.from_log_probs(
        work.old.ids, found.log_probs[:, 1:], vocabulary_size=work.weight.shape[0]
    )
    return troll(
        work.batch(found.log_probs[:, 0]),
        work.batch(work.old_log_probs),
        work.advantages,
        work.mask,
        response_ids=work.batch(work.sampled),
        new=_batched(work, new),
        old=_batched(work, work.old),
        kl_bound=KL_BOUND,
    ).loss


def tether_exact(work: Workload) -> Tensor:
    """Exact mode: the old policy as its hidden states and its head, compared over the whole vocabulary."""
    found = linear_trust_region(
        work.hidden,
        work.weight,
        work.sampled,
        work.old_hidden,
        kl_bound=KL_BOUND,
        old_weight=work.old_weight,
        old_support=work.old,
    )
    ratio = (found.projected_log_probs - work.old_log_probs).exp()
    return (found.regression - ratio * _by_token(work)).mean()


def fused_clip(work: Workload) -> Tensor:
    """Our clip in one pass over the head."""
    return linear_policy_loss(
        lambda tokens: ppo_clip(
            tokens.new_log_probs, work.batch(work.old_log_probs), work.advantages, work.mask
        ),
        HiddenStates(work.batch(work.hidden), work.weight),
        work.batch(work.sampled),
        work.mask,
    ).loss


def fused_troll(work: Workload) -> Tensor:
    """TROLL on the old policy's support in one pass over the head."""
    return _fused(work, _batched(work, work.old))


def fused_exact(work: Workload) -> Tensor:
    """Exact TROLL in one pass over the head, two where no certificate clears a row."""
    old = HiddenStates(work.batch(work.old_hidden), work.old_weight, support=_batched(work, work.old))
    return _fused(work, old)


def _fused(work: Workload, old: HiddenStates | SparseLogProbs) -> Tensor:
    def objective(tokens: ProjectedTokens) -> PolicyLoss:
        found = troll_objective(tokens, work.advantages, work.mask)
        return PolicyLoss(aggregate(found.token_loss, work.mask), found.metrics)

    return linear_policy_loss(
        objective,
        HiddenStates(work.batch(work.hidden), work.weight),
        work.batch(work.sampled),
        work.mask,
        old=old,
        old_log_probs=work.batch(work.old_log_probs),
        kl_bound=KL_BOUND,
    ).loss


def paper_style_troll(work: Workload) -> Tensor:
    """TROLL with everything dense and the papers' search."""
    return paper_troll(
        work.hidden,
        work.weight,
        work.sampled,
        work.old,
        _by_token(work),
        top_k=work.shape.top_k,
        kl_bound=KL_BOUND,
    )


def trl_clip(work: Workload) -> Tensor:
    """TRL 1.16's chunked log-probabilities, asked for nothing else, and its clipped loss."""
    from trl.kernels import ChunkedLogProbFunction

    log_probs, *_ = ChunkedLogProbFunction.apply(
        work.hidden, work.weight, None, work.sampled, 1.0, _TRL_VOCABULARY_CHUNK, None, 1.0, ("log_probs",)
    )
    ratio, advantages = (log_probs - work.old_log_probs).exp(), _by_token(work)
    clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
    return -torch.min(ratio * advantages, clipped * advantages).mean()


def liger_clip(work: Workload) -> Tensor:
    """Liger's fused GRPO loss, all sequences in one chunk, which is its fastest.

    Its loss is compiled on accelerators only: on a CPU compiling it changes nothing that can be measured.
    """
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=work.hidden.device.type != "cpu",
        use_ref_model=False,
        chunk_size=SEQUENCES,
        epsilon_low=CLIP_RANGE,
        epsilon_high=CLIP_RANGE,
        loss_type="bnpo",
    )
    value, _ = loss(
        work.batch(work.hidden),
        work.weight,
        work.batch(work.sampled),
        work.mask,
        work.advantages,
        old_per_token_logps=work.batch(work.old_log_probs),
    )
    return value


def step(loss: Loss, work: Workload) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward, as often as it is called; gradients are new each time."""

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(work), (work.hidden, work.weight))

    return run


def old_policy_pass(work: Workload, *, with_support: bool) -> Callable[[], object]:
    """Scoring the sampled tokens, with or without keeping the most likely ids."""
    weight = work.weight.detach()

    def plain() -> object:
        with torch.no_grad():
            return linear_log_probs(work.old_hidden, weight, work.sampled[:, None]).log_probs

    def supported() -> object:
        return old_support(work.old_hidden, weight, work.sampled, work.shape.top_k)

    return supported if with_support else plain


def _by_token(work: Workload) -> Tensor:
    return work.advantages.repeat_interleave(work.shape.tokens // SEQUENCES)


def _batched(work: Workload, rows: SparseLogProbs) -> SparseLogProbs:
    return SparseLogProbs(work.batch(rows.ids), work.batch(rows.log_probs), work.batch(rows.log_tail))
