"""Which rows are inside the bound for certain, although most of the vocabulary was never looked at."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.projection.divergence import kl_categorical
from tether.projection.solve import may_ask
from tether.projection.sparse import SparseLogProbs
from tether.settings import check_kl_bound


@dataclass(frozen=True)
class Certificate:
    """What a support proves about KL(new || old) over the whole vocabulary; see `certify`."""

    kl_lower: Tensor
    """The divergence is at least this, [...], nats: that of the support and the tail as one outcome."""
    kl_upper: Tensor
    """And at most this, [...], nats; infinite where nothing is known about the tail."""
    inside: Tensor
    """Provably within the bound, bool."""
    outside: Tensor
    """Provably beyond it, bool."""

    @property
    def uncertain(self) -> Tensor:
        """Neither: the support is inside the bound, what the tail adds may or may not exceed it."""
        return ~(self.inside | self.outside)


def certify(
    new: SparseLogProbs,
    old: SparseLogProbs,
    kl_bound: float,
    *,
    kl: Tensor | None = None,
    log_ratio_range: Tensor | None = None,
) -> Certificate:
    """Bound KL(new ‖ old) over the whole vocabulary from a support and the two tail masses.

    With p the new and q the old distribution, S the support, m and n their masses outside it and B the
    divergence with all of the tail as one outcome, the divergence is at least B, and at most the least of

    - sum_S p log(p / q) + m (log m - log q_min), q_min = exp(old.log_tail_min): no tail can do worse than to
      put its mass on the id the old policy thinks least likely;
    - B + m r^2 / 8 and r^2 / 8, where r bounds max - min of log(p / q) (Hoeffding): what the tail adds to B
      is m times the divergence of the tails as distributions of their own.

    The arithmetic is float64 and the bounds allow for the rounding of the inputs to the type they have, so
    that what is certified is inside in exact arithmetic as well. No gradient.

    Args:
        new, old: distributions [..., K] on the same ids in the same order.
        kl_bound: in nats.
        kl: B, [...], if it is at hand, as `project_sparse` returns it for tokens.
        log_ratio_range: r, [...], if something is known that bounds it, such as how far hidden states have
            moved under the same LM head. Zero proves that nothing changed.

    Raises:
        InvalidInputError: the supports differ in shape or ids, or the bound is not positive.

    Example:
        >>> import torch
        >>> old = SparseLogProbs.from_logits(torch.tensor([4.0, 2.0, -4.0, -5.0]), top_k=2)
        >>> new = SparseLogProbs.at_ids(torch.tensor([4.0, 2.2, -4.1, -5.0]), old.ids)
        >>> certificate = certify(new, old, kl_bound=0.05)
        >>> bool(certificate.inside), 0 < certificate.kl_lower < certificate.kl_upper < 0.01
        (True, tensor(True))
    """
    check_kl_bound(kl_bound)
    if new.ids.shape != old.ids.shape or (
        new.ids is not old.ids and may_ask(new.ids) and not torch.equal(new.ids, old.ids)
    ):
        raise InvalidInputError(
            "certify compares distributions on the same ids in the same order, but those of new "
            f"{tuple(new.ids.shape)} and old {tuple(old.ids.shape)} differ. Evaluate the new policy at the "
            "old one's ids: SparseLogProbs.at_ids(new_logits, old.ids)."
        )
    with torch.no_grad():
        if kl is None:
            kl = kl_categorical(new.with_buckets(), old.with_buckets())
        lower, upper = _bounds(kl.double(), new, old, log_ratio_range)
    return Certificate(lower, upper, inside=upper <= kl_bound, outside=lower > kl_bound)


def _bounds(
    kl: Tensor, new: SparseLogProbs, old: SparseLogProbs, ratio_range: Tensor | None
) -> tuple[Tensor, Tensor]:
    # The coarser of the two types the numbers were rounded to.
    epsilon = max(torch.finfo(side.log_probs.dtype).eps for side in (new, old))
    # Every log-probability is off by a few ulps of itself and of the log-sum it was measured from. Their
    # means under p are an entropy of K + 1 outcomes and that entropy plus the divergence.
    slack = 8 * epsilon * (4 + 2 * math.log(new.ids.shape[-1] + 1) + kl)
    tail, old_tail = new.log_tail.double(), old.log_tail.double()
    empty = torch.isneginf(tail) & torch.isneginf(old_tail)
    # A tail mass is 1 minus a sum: what that rounds away is the same for every tail, however small.
    error = torch.where(empty, 0.0, 32 * epsilon)
    mass, old_mass = tail.exp(), old_tail.exp()
    ratio = torch.where(mass == 0, 0.0, tail) - torch.where(old_mass == 0, 0.0, old_tail)
    bucket = mass * ratio
    slack = slack + error * (1 + ratio.abs() + mass / old_mass.clamp_min(32 * epsilon))
    most = mass + error
    upper = torch.full_like(kl, torch.inf)
    if old.log_tail_min is not None:
        least = old.log_tail_min.double()
        least = least - 8 * epsilon * (4 + least.abs())
        # Convex in the mass and zero without any, so the largest possible mass is the worst one.
        upper = kl - bucket + slack + (most * (most.log() - least)).clamp_min(0)
    if ratio_range is not None:
        spread = ratio_range.double().square() / 8
        upper = torch.minimum(upper, torch.minimum(kl + slack + most * spread, spread))
    upper = torch.where(empty, kl + slack, upper)
    impossible = torch.isinf(kl)  # an id or a tail that the old policy cannot produce: no bound holds
    lower, upper = (kl - slack).clamp_min(0), upper.clamp_min(0)
    return torch.where(impossible, torch.inf, lower), torch.where(impossible, torch.inf, upper)
