"""DRPO: DPPO's threshold as a slope: the further a probability moved, the less it is pushed on."""

from __future__ import annotations

from torch import Tensor

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.tokens import check_at_least, read_tokens


def drpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    probability_bound: float = 12.5,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-r A + |A| q (r - 1)^2 / (2 d), with q the old probability of the sampled token and d the bound.

    A mask throws a token's gradient away once it has moved too far; this quadratic turns it around. The
    policy gradient is weighted by 1 - sign(A (r - 1)) |p - q| / d, p the new probability: less the further
    the update has moved the token, nothing at |p - q| = d, and a pull back beyond.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        probability_bound: d. The paper trains with 12.5, where no weight is ever below .92; at DPPO's .15
            the pull back begins where DPPO drops.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `divergence_mean`, `divergence_max` (of |p - q|), `ratio_mean`, `ratio_max` and
        `clipped` (fraction of tokens that are pulled back).

    Raises:
        InvalidInputError: shapes that do not fit, or a bound that is not positive.

    Source: DRPO (arXiv 2606.09821, eq. 8; the weight is its eq. 9 and table 1).

    Example:
        >>> import torch
        >>> old = torch.tensor([[0.5]]).log()
        >>> new = torch.tensor([[0.6]]).log().requires_grad_()
        >>> drpo(new, old, torch.ones(1), torch.ones(1, 1), probability_bound=0.2).loss.backward()
        >>> new.grad  # -r A, of which half is left at half the bound
        tensor([[-0.6000]])
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_at_least("probability_bound", probability_bound, 0.0, "12.5 is published", above=True)
    ratio = tokens.ratio
    # q (r - 1)^2 as (p - q)(r - 1): the square alone may overflow where q is tiny.
    shift = tokens.log_probs.exp() - tokens.old_log_probs.exp()
    pull = tokens.advantages.abs() * shift * (ratio - 1) / (2 * probability_bound)
    loss = aggregate(
        pull - ratio * tokens.advantages,
        response_mask,
        loss_agg_mode,
        max_response_length=max_response_length,
    )
    distance = tokens.probability_change
    turned = tokens.moves_away & (distance > probability_bound)
    return PolicyLoss(loss, tokens.metrics(ratio, turned, distance))
