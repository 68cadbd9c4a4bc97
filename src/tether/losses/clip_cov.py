"""Clip-Cov: take a few random tokens of high covariance out of the gradient, to keep the entropy up."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.covariance import number_of_tokens, token_covariance
from tether.losses.tokens import check_at_least, check_share, read_tokens
from tether.projection.tokens import masked_mean


def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_cov_ratio: float = 2e-4,
    clip_cov_low: float = 1.0,
    clip_cov_high: float = 5.0,
    clip_ratio_low: float = math.inf,
    clip_ratio_high: float = math.inf,
    generator: torch.Generator | None = None,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-r A, but zero for a random few of the tokens whose covariance lies in (low, high).

    Confident tokens that are rewarded drive the entropy to zero and exploration with it; in the paper,
    taking out two of ten thousand stops that. The fraction is of the tokens that count, rounded down,
    at least one.

    The paper's equation has no clip on the ratio and neither has the default; the authors' code has
    PPO's, with half-widths given by `clip_ratio_low` and `clip_ratio_high`, and draws only among the
    tokens that it leaves alone. On an accelerator, counting and drawing wait for the device.

    Means and shares are over the tokens of one call: a micro-batch, where a trainer splits its batches. In
    one of a single sequence with one advantage for all its tokens every covariance is 0.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        clip_cov_ratio: fraction of tokens to take out.
        clip_cov_low, clip_cov_high: range of the covariance (of `log_probs` and `advantages`).
        clip_ratio_low, clip_ratio_high: PPO's clip; infinite for none.
        generator: of the random choice; torch's global one if None. Pass one seeded from the run and
            the step, or a resumed run draws other tokens. On a GPU, a generator of the CPU is fine.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `clipped` (fraction of tokens taken out), `covariance_mean`, `ratio_mean`,
        `ratio_max`.

    Raises:
        InvalidInputError: shapes that do not fit, a fraction outside (0, 1], an empty range of
            covariances, or a negative clip.

    Source: Cui et al. (arXiv 2505.22617, Clip-Cov).

    Example:
        >>> import torch
        >>> old, mask = torch.log(torch.tensor([[0.9, 0.01], [0.9, 0.01]])), torch.ones(2, 2)
        >>> result = clip_cov(old, old, torch.tensor([1.0, -1.0]), mask)  # covariances 2.2 and -2.2
        >>> result.metrics["clipped"].item()
        0.25
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_share("clip_cov_ratio", clip_cov_ratio, "2e-4 in the paper")
    check_at_least("clip_cov_low", clip_cov_low, -math.inf, "1 in the paper")
    check_at_least("clip_cov_high", clip_cov_high, clip_cov_low, "1 and 5 in the paper", above=True)
    check_at_least("clip_ratio_low", clip_ratio_low, 0.0, "math.inf for none")
    check_at_least("clip_ratio_high", clip_ratio_high, 0.0, "math.inf for none")
    ratio = tokens.ratio
    plain = -ratio * tokens.advantages
    clipped = -ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * tokens.advantages
    covariance = token_covariance(tokens)
    eligible = (covariance > clip_cov_low) & (covariance < clip_cov_high) & ~(clipped > plain)
    taken_out = _draw(eligible, number_of_tokens(tokens, clip_cov_ratio), generator)
    loss = aggregate(
        torch.where(taken_out, 0.0, torch.maximum(plain, clipped)),
        response_mask,
        loss_agg_mode,
        max_response_length=max_response_length,
    )
    metrics = tokens.metrics(ratio, taken_out)
    metrics["covariance_mean"] = masked_mean(covariance, covariance.isfinite())
    return PolicyLoss(loss, metrics)


def _draw(eligible: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """A random `count` of the eligible tokens (all, if there are no more), as a mask."""
    candidates = eligible.flatten().nonzero().squeeze(-1)
    device = "cpu" if generator is None else generator.device
    order = torch.randperm(len(candidates), generator=generator, device=device).to(candidates.device)
    drawn = torch.zeros_like(eligible).flatten()
    return drawn.index_fill_(0, candidates[order[:count]], True).view_as(eligible)
