"""Which tokens make the entropy fall: those whose log-probability and advantage are high together."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.losses.tokens import Tokens


def token_covariance(tokens: Tokens) -> Tensor:
    """(log π - mean log π) (A - mean A) of each token, [B, T]; its mean is the batch's covariance.

    To first order a policy-gradient step lowers the entropy by this covariance. Means are over the
    tokens that count and are not impossible to the new policy; -inf for the others. No gradient.

    Source: Cui et al. (arXiv 2505.22617, token-wise centred cross-product).
    """
    with torch.no_grad():
        counted = (tokens.mask > 0) & ~torch.isneginf(tokens.log_probs)
        count = counted.sum().clamp_min(1)
        centred = [
            values - torch.where(counted, values, 0.0).sum() / count
            for values in (tokens.log_probs, tokens.advantages)
        ]
        return torch.where(counted, centred[0] * centred[1], -torch.inf)


def number_of_tokens(tokens: Tokens, fraction: float) -> int:
    """floor(fraction * tokens), but at least 1: a method that chooses none would be off unnoticed."""
    return max(1, int(fraction * int((tokens.mask > 0).sum())))
