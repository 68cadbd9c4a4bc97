"""The sampled tokens of a batch as the losses read them: checked, in float32, free of what is masked."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.losses.base import check_tokens
from tether.projection.tokens import measure_tokens
from tether.settings import is_number

#: Where ratios stop growing: exp overflows float32 at 88.7, and 0 times infinity is NaN in a gradient.
LARGEST_LOG_RATIO = 80.0


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Its exponential, at most e^80."""
    return log_ratio.clamp_max(LARGEST_LOG_RATIO).exp()


@dataclass(frozen=True)
class Tokens:
    """All [B, T], float32 at least, zero where the mask is."""

    log_probs: Tensor
    """Of the sampled tokens under the network being trained; carries the gradient."""
    old_log_probs: Tensor
    """Of the same tokens under the policy that sampled them; no gradient."""
    advantages: Tensor
    mask: Tensor
    """As given: bool or 0/1."""

    @property
    def log_ratio(self) -> Tensor:
        """log(new / old)."""
        return self.log_probs - self.old_log_probs

    @property
    def ratio(self) -> Tensor:
        """new / old, at most e^80."""
        return ratio_of(self.log_ratio)

    @property
    def moves_away(self) -> Tensor:
        """Whether the update pushes a token further from where it was sampled: A (new - old) > 0."""
        return self.advantages * self.log_ratio.detach() > 0

    @property
    def probability_change(self) -> Tensor:
        """|new - old| of each sampled token's probability: total variation of "this token or another"."""
        return (self.log_probs.detach().exp() - self.old_log_probs.exp()).abs()

    def metrics(
        self, ratio: Tensor, acted: Tensor | None = None, distance: Tensor | None = None
    ) -> dict[str, Tensor]:
        """`ratio_mean`, `ratio_max`; where a rule acted on some tokens, their share `clipped`; and
        `divergence_mean` and `divergence_max` where a token's distance from the old policy is known."""
        means, maxima = {"ratio_mean": ratio}, {"ratio_max": ratio}
        if acted is not None:
            means["clipped"] = acted
        if distance is not None:
            means["divergence_mean"] = maxima["divergence_max"] = distance
        return measure_tokens(self.mask, means, maxima)


def read_tokens(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor
) -> Tokens:
    """Check the shapes, raise half precision to float32 and put zeros where the mask is.

    Raises:
        InvalidInputError: naming the tensor whose shape does not fit.
    """
    advantages = check_tokens(log_probs, old_log_probs, advantages, response_mask)
    counted = response_mask > 0
    dtype = torch.promote_types(log_probs.dtype, torch.float32)

    def clean(values: Tensor) -> Tensor:
        return torch.where(counted, values.to(dtype), 0.0)

    return Tokens(
        clean(log_probs),
        clean(old_log_probs.detach()),
        clean(advantages.detach().expand(log_probs.shape)),
        response_mask,
    )


def weighted_log_likelihood(tokens: Tokens, weight: Tensor) -> Tensor:
    """-sg(weight) A log π a token, [B, T]: a policy gradient whose weight is not differentiated.

    A weight of zero drops the token. So does a log π of -inf, which no finite pull moves.
    """
    scale = -weight.detach() * tokens.advantages
    dropped = (scale == 0) | torch.isneginf(tokens.log_probs)
    return scale * torch.where(dropped, 0.0, tokens.log_probs)


def check_at_least(name: str, value: float, least: float, usual: str, *, above: bool = False) -> None:
    """Refuse a hyperparameter below `least` (or, with `above`, equal to it), or NaN."""
    if not is_number(value) or math.isnan(value) or value < least or (above and value == least):
        relation = "greater than" if above else "at least"
        raise InvalidInputError(f"{name} must be {relation} {least:g}, got {value!r} ({usual}).")


def sequence_ratio(tokens: Tokens) -> Tensor:
    """new / old of whole responses, the product of their tokens' ratios, [B, 1]; at most e^80."""
    return ratio_of(tokens.log_ratio.sum(-1, keepdim=True))


def check_range(name: str, low: float, high: float, usual: str) -> None:
    """Refuse bounds that are not 0 <= low <= high."""
    check_at_least(f"{name}_low", low, 0.0, usual)
    check_at_least(f"{name}_high", high, low, usual)


def check_share(name: str, value: float, usual: str, *, from_zero: bool = False) -> None:
    """Refuse a hyperparameter outside (0, 1] (with `from_zero`, outside [0, 1)), or NaN."""
    if not is_number(value) or not (0 <= value < 1 if from_zero else 0 < value <= 1):
        allowed = "[0, 1)" if from_zero else "(0, 1]"
        raise InvalidInputError(f"{name} must lie in {allowed}, got {value!r} ({usual}).")
