"""Decoupled PPO: clip against a recent policy, weigh for the older one that sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.tokens import LARGEST_LOG_RATIO, Tokens, check_at_least, ratio_of, read_tokens
from tether.projection.tokens import masked_max, masked_mean


def decoupled_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    weight_cap: float = 5.0,
    lag: Tensor | float | None = None,
    proximal_log_probs: Tensor | None = None,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-min(w, cap) min(r A, clip(r) A), with r = new / proximal and w = proximal / old.

    PPO's old policy does two things: it says how the data was sampled, and it is the centre of the trust
    region. Where data is stale the first is far away, and a clip around it holds the network back or does
    nothing. Decoupled, the region is centred on a recent, proximal policy, and w corrects for the one that
    sampled.

    The proximal policy's log-probabilities cost another pass of the network. A-3PO does without: log
    proximal lies between log old and log new, at 1/lag of the way back from new, because it is the policy
    of one update ago and old the one of `lag` updates ago. With a lag of 0 or 1 it is the old policy, and
    this is PPO's clip.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T]; old as the sampler reports them.
        advantages: [B] or [B, T].
        response_mask: [B, T].
        clip_ratio_low, clip_ratio_high: how far new / proximal may leave 1.
        weight_cap: largest w; `math.inf` for none. AReaL drops tokens above its cap; here they keep it.
        lag: updates since a token was sampled, one number, [B] or [B, T]: interpolates the proximal policy.
        proximal_log_probs: [B, T], where a pass computed them; lag is then not needed.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `clipped` (fraction of tokens whose update is clipped), `weight_mean`,
        `weight_max`, `ratio_mean`, `ratio_max` (of new / proximal).

    Raises:
        InvalidInputError: shapes that do not fit, a setting outside its range, a lag that is negative or
            NaN, or neither lag nor proximal_log_probs.

    Source: decoupled PPO (arXiv 2110.00641) as in AReaL (arXiv 2505.24298); the interpolation is A-3PO's
        (arXiv 2512.06547).

    Example:
        >>> import torch
        >>> new, old = torch.tensor([[0.8]]).log(), torch.tensor([[0.2]]).log()
        >>> result = decoupled_clip(new, old, torch.ones(1), torch.ones(1, 1), lag=2)
        >>> round(result.metrics["weight_mean"].item(), 3), round(result.metrics["ratio_mean"].item(), 3)
        (2.0, 2.0)
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_at_least("clip_ratio_low", clip_ratio_low, 0.0, "0.2 is usual")
    check_at_least("clip_ratio_high", clip_ratio_high, 0.0, "0.2 is usual")
    check_at_least("weight_cap", weight_cap, 0.0, "5 is usual, math.inf for none", above=True)
    # Nowhere so far below new that a probability of 0, as a sampler may round it to, has no ratio to it.
    old = torch.maximum(tokens.old_log_probs, tokens.log_probs.detach() - LARGEST_LOG_RATIO)
    proximal = _proximal(tokens, old, lag, proximal_log_probs)
    weight = ratio_of(proximal - old).clamp_max(weight_cap)
    ratio = ratio_of(tokens.log_probs - proximal)
    plain = ratio * tokens.advantages
    clipped = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * tokens.advantages
    loss = aggregate(
        -weight * torch.minimum(plain, clipped),
        response_mask,
        loss_agg_mode,
        max_response_length=max_response_length,
    )
    metrics = tokens.metrics(ratio, clipped < plain)
    metrics["weight_mean"] = masked_mean(weight, response_mask)
    metrics["weight_max"] = masked_max(weight, response_mask)
    return PolicyLoss(loss, metrics)


def _proximal(tokens: Tokens, old: Tensor, lag: Tensor | float | None, log_probs: Tensor | None) -> Tensor:
    """[B, T], without gradient; nowhere so far below old that a new probability of 0 has no ratio to it."""
    least = old - LARGEST_LOG_RATIO
    if log_probs is not None:
        if log_probs.shape != tokens.log_probs.shape:
            raise InvalidInputError(
                f"proximal_log_probs must be {tuple(tokens.log_probs.shape)}, got {tuple(log_probs.shape)}."
            )
        given = torch.where(tokens.mask > 0, log_probs.detach().to(tokens.log_probs.dtype), 0.0)
        return torch.maximum(given, least)
    if lag is None:
        raise InvalidInputError(
            "decoupled_clip needs lag (updates since the tokens were sampled) to interpolate its proximal "
            "policy, or proximal_log_probs."
        )
    new = torch.maximum(tokens.log_probs.detach(), least)
    return old + _towards_new(tokens, lag) * (new - old)


def _towards_new(tokens: Tokens, lag: Tensor | float) -> Tensor | float:
    """The share of the way from old to new at which the policy of one update ago lies."""
    if not isinstance(lag, Tensor):
        check_at_least("lag", lag, 0.0, "updates since the tokens were sampled")
        return 1 - 1 / max(float(lag), 1.0)
    rows, columns = tokens.mask.shape
    shape = tuple(lag.shape)
    if shape not in ((), (rows,), (rows, 1), (rows, columns)):
        raise InvalidInputError(
            f"lag must be one number, [B] or [B, T] for log_probs {(rows, columns)}, got {shape}."
        )
    lag = (lag[:, None] if lag.dim() == 1 else lag).to(tokens.log_probs)
    lag = torch.where(tokens.mask > 0, lag, 0.0)
    if not bool((lag >= 0).all()):
        raise InvalidInputError(
            f"lag must be at least 0, got {lag.min().item():g} (updates since the tokens were sampled)."
        )
    return 1 - 1 / lag.clamp_min(1)
