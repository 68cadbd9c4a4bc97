"""IcePop: weigh by the ratio where trainer and sampler roughly agree, drop the token where they do not."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.tokens import check_range, read_tokens, weighted_log_likelihood


def icepop(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    ratio_low: float = 0.5,
    ratio_high: float = 5.0,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-sg(r) A log π for tokens with ratio_low <= r <= ratio_high; the others are dropped.

    A cap (TIS) still learns from a token about which the two engines disagree wildly; IcePop does not, on
    either side. Here, as in asynchronous training, r compares the network with the policy that sampled, so
    that the band is the trust region too. (The publication's r compares the trainer's and the sampler's
    arithmetic of one policy, beside GRPO's clip of the update.)

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T]; old as the sampler reports them.
        advantages: [B] or [B, T].
        response_mask: [B, T].
        ratio_low, ratio_high: the band; .5 and 5 are published, .2 and 5 prime-rl's.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `clipped` (fraction of tokens dropped), `ratio_mean`, `ratio_max`. The loss is
        no surrogate: only its gradient means something.

    Raises:
        InvalidInputError: shapes that do not fit, or no band 0 <= ratio_low <= ratio_high.

    Source: IcePop (Ling Team; in "Every Step Evolves", arXiv 2510.18855, the double-sided mask).

    Example:
        >>> import torch
        >>> new, old = torch.tensor([[0.6, 0.6]]).log().requires_grad_(), torch.tensor([[0.5, 0.1]]).log()
        >>> icepop(new, old, torch.ones(1), torch.ones(1, 2)).loss.backward()
        >>> new.grad  # minus half the weights 1.2 and 0 (6 is outside)
        tensor([[-0.6000,  0.0000]])
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_range("ratio", ratio_low, ratio_high, "0.5 and 5 are usual")
    with torch.no_grad():
        ratio = tokens.ratio
        outside = (ratio < ratio_low) | (ratio > ratio_high)
    loss = aggregate(
        weighted_log_likelihood(tokens, torch.where(outside, 0.0, ratio)),
        response_mask,
        loss_agg_mode,
        max_response_length=max_response_length,
    )
    return PolicyLoss(loss, tokens.metrics(ratio, outside))
