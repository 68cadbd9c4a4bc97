"""SAPO: a smooth gate in place of the clip."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.tokens import check_at_least, read_tokens
from tether.projection.tokens import masked_mean

# sigmoid'(tau (e^20 - 1)) is zero in float64 for every tau above 1e-5, and e^20 does not overflow.
_SATURATED = 20.0


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    loss_agg_mode: LossAggMode = "seq-mean-token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a token's gradient fades as its ratio leaves 1, never jumping.

    The gate's slope at r = 1 is 1, so on fresh data this is the plain policy gradient; away from it
    the slope falls as 1 / cosh^2(tau (r - 1) / 2). Tokens that are discouraged (A <= 0) get the larger
    tau and fade sooner, because pushing one token down pushes all others up.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        tau_pos, tau_neg: temperatures for A > 0 and A <= 0; larger is narrower.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `weight_mean` (mean slope of the gate: 1 on fresh data), `ratio_mean`
        and `ratio_max`.

    Raises:
        InvalidInputError: shapes that do not fit, or a temperature that is not positive.

    Source: SAPO (arXiv 2511.20347, the gate f).

    Example:
        >>> import torch
        >>> old, mask = torch.zeros(1, 1), torch.ones(1, 1)
        >>> new = torch.tensor([[2.0]]).log()
        >>> result = sapo(new, old, torch.tensor([1.0]), mask)  # 4 sigmoid(1), slope 4 sigmoid'(1)
        >>> round(result.loss.item(), 4), round(result.metrics["weight_mean"].item(), 4)
        (-2.9242, 0.7864)
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_at_least("tau_pos", tau_pos, 0.0, "1.0 in the paper", above=True)
    check_at_least("tau_neg", tau_neg, 0.0, "1.05 in the paper", above=True)
    tau = torch.full_like(tokens.advantages, tau_neg).masked_fill(tokens.advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * tokens.log_ratio.clamp_max(_SATURATED).expm1())
    loss = aggregate(
        -4 / tau * gate * tokens.advantages,
        response_mask,
        loss_agg_mode,
        max_response_length=max_response_length,
    )
    metrics = tokens.metrics(tokens.ratio)
    slope = 4 * gate.detach() * (1 - gate.detach())
    metrics["weight_mean"] = masked_mean(slope, response_mask)
    return PolicyLoss(loss, metrics)
