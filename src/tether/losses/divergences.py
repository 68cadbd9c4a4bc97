"""How far the new policy is from the old one at each token, for the losses that ask."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.losses.tokens import LARGEST_LOG_RATIO, Tokens
from tether.projection import SparseLogProbs, kl_categorical
from tether.settings import check_choice

#: A token's whole distribution: log-probabilities [B, T, V] or their sparse form [B, T, K].
Distribution = Tensor | SparseLogProbs

#: KL(old || new): of whole distributions, or its estimates from the sampled token alone.
KLEstimate = Literal["exact", "k1", "k2", "k3"]


def kl_of_tokens(
    tokens: Tokens, estimate: KLEstimate, new: Distribution | None, old: Distribution | None
) -> Tensor:
    """KL(old || new) in nats at each token, [B, T], zero where the mask is; differentiable in `new`.

    With r = new/old of the token that the old policy sampled: ``k1`` = -log r and ``k3`` = r - 1 -
    log r are unbiased, k3 never negative; ``k2`` = (log r)^2 / 2 is biased and symmetric. ``exact``
    sums over the outcomes of `new` and `old`, which for a `SparseLogProbs` are its K ids and the rest
    as one more.

    Raises:
        InvalidInputError: an unknown estimate, or distributions that are missing or do not fit.

    Source: Schulman, "Approximating KL divergence" (2020), for k1 to k3.
    """
    check_choice("kl_estimate", estimate, get_args(KLEstimate))
    if estimate == "exact":
        new_rows, old_rows = outcomes(tokens, new, old)
        return torch.where(tokens.mask > 0, kl_categorical(old_rows, new_rows), 0.0)
    log_ratio = tokens.log_ratio
    if estimate == "k1":
        return -log_ratio
    if estimate == "k2":
        return log_ratio.square() / 2
    return log_ratio.clamp_max(LARGEST_LOG_RATIO).expm1() - log_ratio


def total_variation(new_rows: Tensor, old_rows: Tensor) -> Tensor:
    """Half the sum of absolute differences of probabilities, [..., outcomes] -> [...]."""
    return (new_rows.exp() - old_rows.exp()).abs().sum(-1) / 2


def outcomes(tokens: Tokens, new: Distribution | None, old: Distribution | None) -> tuple[Tensor, Tensor]:
    """Both distributions as log-probabilities of the same outcomes [B, T, V] or [B, T, K + 1].

    Rows under the mask are blank and equal on both sides; the old side carries no gradient.
    """
    if new is None or old is None:
        missing = " and ".join(name for name, value in (("new", new), ("old", old)) if value is None)
        raise InvalidInputError(
            f"{missing} must be given: this divergence needs whole distributions, log-probabilities "
            "[B, T, V] or SparseLogProbs [B, T, K]."
        )
    if isinstance(new, SparseLogProbs) != isinstance(old, SparseLogProbs):
        raise InvalidInputError(
            "new and old must both be log-probabilities [B, T, V] or both SparseLogProbs, got "
            f"{type(new).__name__} and {type(old).__name__}."
        )
    if isinstance(new, SparseLogProbs) and isinstance(old, SparseLogProbs):
        if new.ids.shape != old.ids.shape or not (new.ids is old.ids or torch.equal(new.ids, old.ids)):
            raise InvalidInputError(
                f"new and old must be known on the same ids, those of new {tuple(new.ids.shape)} and old "
                f"{tuple(old.ids.shape)} differ. Evaluate the new policy at the old one's ids: "
                "SparseLogProbs.at_ids(new_logits, old.ids)."
            )
        new, old = new.with_buckets(), old.with_buckets()
    assert isinstance(new, Tensor)
    assert isinstance(old, Tensor)
    if new.shape != old.shape or new.shape[:-1] != tokens.log_probs.shape:
        raise InvalidInputError(
            f"new and old must be [B, T, outcomes] with [B, T] = {tuple(tokens.log_probs.shape)}, "
            f"got {tuple(new.shape)} and {tuple(old.shape)}."
        )
    counted = (tokens.mask > 0)[..., None]
    dtype = tokens.log_probs.dtype
    return torch.where(counted, new.to(dtype), 0.0), torch.where(counted, old.detach().to(dtype), 0.0)
