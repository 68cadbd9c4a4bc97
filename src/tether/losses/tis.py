"""TIS: importance weights against the policy that really sampled, none above a cap."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.tokens import (
    check_at_least,
    read_tokens,
    sequence_ratio,
    weighted_log_likelihood,
)
from tether.settings import check_choice

Level = Literal["token", "sequence"]


def tis(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    level: Level = "token",
    ratio_cap: float = 2.0,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-sg(min(r, cap)) A log π: truncated importance sampling.

    The sampler is another engine, or older, and its policy another policy. Weighing by new / old corrects for
    it; a cap keeps the few tokens (or, with ``level="sequence"``, responses) with huge weights from deciding
    the update. There is no trust region besides: a token keeps its gradient however far it moved.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T]; old as the sampler reports them.
        advantages: [B] or [B, T].
        response_mask: [B, T].
        level: "token" for each token's own ratio; "sequence" for the product over its response: unbiased
            before the cap, and of far larger variance.
        ratio_cap: largest weight; `math.inf` for none.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `clipped` (fraction of tokens whose weight was cut), `ratio_mean`, `ratio_max`
        (before the cut). The loss is no surrogate: only its gradient means something.

    Raises:
        InvalidInputError: shapes that do not fit, an unknown level, or a cap that is not positive.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (the
        truncated ratio, cap 2); both levels as verl's rollout correction has them.

    Example:
        >>> import torch
        >>> new, old = torch.tensor([[0.6, 0.6]]).log().requires_grad_(), torch.tensor([[0.5, 0.1]]).log()
        >>> tis(new, old, torch.ones(1), torch.ones(1, 2)).loss.backward()
        >>> new.grad  # minus half the weights 1.2 and 2 (6 cut)
        tensor([[-0.6000, -1.0000]])
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_choice("level", level, get_args(Level))
    check_at_least("ratio_cap", ratio_cap, 0.0, "2 is usual, math.inf for none", above=True)
    with torch.no_grad():
        ratio = tokens.ratio if level == "token" else sequence_ratio(tokens)
        weight = ratio.clamp_max(ratio_cap)
    loss = aggregate(
        weighted_log_likelihood(tokens, weight),
        response_mask,
        loss_agg_mode,
        max_response_length=max_response_length,
    )
    return PolicyLoss(loss, tokens.metrics(ratio, weight != ratio))
