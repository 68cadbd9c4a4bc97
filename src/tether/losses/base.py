"""What every policy loss takes, checks and returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tether.errors import InvalidInputError


@dataclass(frozen=True)
class PolicyLoss:
    """A scalar to minimise and what to watch while it is minimised."""

    loss: Tensor
    """Scalar, differentiable."""
    metrics: dict[str, Tensor]
    """Detached scalars. Divergences and entropies in nats, over the tokens of `response_mask`."""


_Loss = TypeVar("_Loss", bound=Callable[..., PolicyLoss])


def looks_at_distributions_if(rule: Callable[[Mapping[str, Any]], bool]) -> Callable[[_Loss], _Loss]:
    """Say of a loss with arguments `new` and `old` under which of its options it needs them.

    A loss whose signature has them without a default always does; one that has neither never. Trainers read
    this, so that whole distributions are kept and evaluated for those losses alone.

    Example:
        >>> @looks_at_distributions_if(lambda options: options["kind"] == "exact")
        ... def loss(log_probs, old_log_probs, advantages, mask, *, kind="sampled", new=None, old=None): ...
        >>> loss.looks_at_distributions({"kind": "exact"})
        True
    """

    def declare(loss: _Loss) -> _Loss:
        loss.looks_at_distributions = rule  # type: ignore[attr-defined]
        return loss

    return declare


def check_tokens(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor
) -> Tensor:
    """Check the shapes every loss shares and return the advantages as [B, T] or [B, 1].

    Raises:
        InvalidInputError: naming the tensor whose shape does not fit.
    """
    if log_probs.dim() != 2:
        raise InvalidInputError(f"log_probs must be [B, T], got {tuple(log_probs.shape)}.")
    for name, tensor in (("old_log_probs", old_log_probs), ("response_mask", response_mask)):
        if tensor.shape != log_probs.shape:
            raise InvalidInputError(
                f"{name} must have the shape of log_probs, {tuple(log_probs.shape)}, "
                f"got {tuple(tensor.shape)}."
            )
    rows, columns = log_probs.shape
    if advantages.shape not in ((rows,), (rows, 1), (rows, columns)):
        raise InvalidInputError(
            f"advantages must be [B], [B, 1] or [B, T] for log_probs {tuple(log_probs.shape)}, "
            f"got {tuple(advantages.shape)}."
        )
    return advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages


def sequence_log_ratio(token_log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """GSPO's log-ratio of a sequence, spread over its tokens, [B, T].

    The value is the mean of the sequence's token log-ratios; the gradient of each token reaches only
    that token's log-probability: sg[log s] + log r_t - sg[log r_t] (GSPO-token, arXiv 2507.18071,
    eq. 14). The ratio of a sequence with an impossible token is 0.
    """
    count = (response_mask > 0).sum(-1, keepdim=True).clamp_min(1)
    mean = (token_log_ratio * response_mask).sum(-1, keepdim=True) / count
    # Zero, with the token's gradient; inf - inf would be NaN.
    carrier = torch.where(token_log_ratio.isfinite(), token_log_ratio - token_log_ratio.detach(), 0.0)
    return mean.detach() + carrier
