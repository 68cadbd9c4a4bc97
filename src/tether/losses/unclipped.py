"""The plain importance-weighted policy gradient: no trust region at all."""

from __future__ import annotations

from torch import Tensor

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.tokens import read_tokens


def unclipped(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-r A with r = new / old probability of the sampled token: what a trust region has to improve on.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Raises:
        InvalidInputError: shapes that do not fit.

    Source: importance-weighted policy gradient (PPO, arXiv 1707.06347, eq. 6).

    Example:
        >>> import torch
        >>> old, mask = torch.zeros(1, 2), torch.ones(1, 2)
        >>> new = torch.tensor([[0.0, 0.5]])
        >>> round(unclipped(new, old, torch.tensor([1.0]), mask).loss.item(), 4)
        -1.3244
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    token_loss = -tokens.ratio * tokens.advantages
    loss = aggregate(token_loss, response_mask, loss_agg_mode, max_response_length=max_response_length)
    return PolicyLoss(loss, tokens.metrics(tokens.ratio))
