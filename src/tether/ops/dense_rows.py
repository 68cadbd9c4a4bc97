"""Blocks of dense rows of logits: their projection onto the trust region and its gradient, by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tether.ops.token_state import ProjectedRows
from tether.projection.divergence import log_partition, where
from tether.projection.geodesic import Geodesic


class ProjectedUpstream(NamedTuple):
    """What projected rows must know of the gradient that arrived, [N] each."""

    sampled: Tensor
    """For the projected log-probability of the sampled token."""
    regression: Tensor
    along: Tensor
    """The multiple of the direction that would change the divergence which is taken out."""
    step: Tensor
    acts: Tensor
    """Rows with anything to pass on, bool."""

    def at(self, rows: Any) -> ProjectedUpstream:
        """Of some rows."""
        return ProjectedUpstream(*(value[rows] for value in self))


def project_rows(new: Tensor, old: Tensor, ids: Tensor, kl: Tensor, kl_bound: float) -> ProjectedRows:
    """Project rows of logits [n, V] that are outside the bound, each with a step of its own."""
    geodesic = one_token_curves(new, old, kl, kl_bound)
    x, constrained, converged = geodesic.solve()
    return read_off(geodesic, x, constrained, converged, new, ids, geodesic.scale)


def one_token_curves(new: Tensor, old: Tensor, kl: Tensor, kl_bound: float) -> Geodesic:
    """The curves of rows [n, V], each a region of its own."""
    return Geodesic(new[:, None], old[:, None], new.new_ones((new.shape[0], 1)), None, kl, kl_bound)


def read_off(
    geodesic: Geodesic,
    x: Tensor,
    constrained: Tensor,
    converged: Tensor,
    new: Tensor,
    ids: Tensor,
    unit: Tensor,
) -> ProjectedRows:
    """What is kept of the distributions at x on their curves."""
    log_probs, probs, centred, variance = geodesic.at(x)
    log_probs, probs, centred = log_probs.squeeze(1), probs.squeeze(1), centred.squeeze(1)
    index = ids[:, None].long()
    scale = geodesic.scale / unit
    terms, _ = regression_terms(new, log_probs)
    return ProjectedRows(
        projected_log_probs=log_probs.gather(-1, index).squeeze(-1),
        projected_kl=_divergence(log_probs, probs, geodesic.old.squeeze(1)),
        regression=terms.sum(-1),
        step=x / geodesic.scale,
        constrained=constrained,
        converged=converged,
        centred=centred.gather(-1, index).squeeze(-1) * scale,
        variance=variance * scale * scale,
        unit=unit,
    )


def _divergence(log_probs: Tensor, probs: Tensor, old: Tensor) -> Tensor:
    """KL(pi || old) of rows whose logarithms and probabilities are both at hand: no exponential needed."""
    terms = (log_probs - old).nan_to_num_(nan=0.0).mul_(probs)  # zero in both: 0 times (inf - inf)
    return terms.sum(-1) / probs.sum(-1)


def projected_gradient(
    new: Tensor, old: Tensor, ids: Tensor, upstream: ProjectedUpstream, kl_bound: float
) -> Tensor:
    """Gradient with respect to the new logits of projected rows [n, V] whose steps are known.

    Of the projected log-probability: s [g (delta_o - pi) - a pi c], with c = z - E_pi[z] and a c the
    direction that would change the divergence, taken out because the bound holds it fixed. Of the
    regression: r [v - p sum(v)], v = p (log p - log pi + 1).
    """
    ratio = new - old
    if bool(ratio.sum().isfinite()):
        return _gradient_without_zeros(new, old, ratio, ids, upstream)
    geodesic = one_token_curves(new, old, torch.full_like(upstream.step, torch.inf), kl_bound)
    log_probs, probs, centred, _ = geodesic.at(upstream.step * geodesic.scale)
    log_probs, probs, centred = log_probs.squeeze(1), probs.squeeze(1), centred.squeeze(1)
    free = None if geodesic.free is None else geodesic.free.squeeze(1)
    index = ids[:, None].long()
    # A projected probability of zero is constant: whatever arrives for it goes nowhere.
    pulled = where(None if free is None else free.gather(-1, index), upstream.sampled[:, None], 0.0)
    along = (upstream.along * geodesic.scale)[:, None]
    inner = torch.addcmul(pulled, along, centred).mul_(probs).neg_()
    inner.scatter_add_(-1, index, pulled)
    grad = where(free, inner.mul_(upstream.step[:, None]), 0.0)
    terms, new_probs = regression_terms(new, log_probs)
    slopes = terms.add_(torch.where(torch.isneginf(log_probs), 0.0, new_probs))
    slopes.sub_(new_probs * slopes.sum(-1, keepdim=True))
    return grad + slopes.mul_(upstream.regression[:, None])


def _gradient_without_zeros(
    new: Tensor, old: Tensor, ratio: Tensor, ids: Tensor, upstream: ProjectedUpstream
) -> Tensor:
    """The same where every probability is positive, in a quarter of the passes.

    The log-ratio z needs no normalisation: c = z - E_pi[z], and v - p sum(v) = (1 - s) p (z - E_p[z]).
    """
    step, sampled, along = upstream.step[:, None], upstream.sampled[:, None], upstream.along[:, None]
    pull = upstream.regression[:, None] * (1 - step)
    probs, new_probs = torch.addcmul(old, step, ratio).softmax(-1), new.softmax(-1)
    terms = probs * ratio
    mass = probs.sum(-1, keepdim=True)  # 1 but for the rounding of a large vocabulary
    mean = terms.sum(-1, keepdim=True) / mass
    new_mass = new_probs.sum(-1, keepdim=True)
    new_mean = torch.mul(new_probs, ratio, out=terms).sum(-1, keepdim=True) / new_mass
    grad = torch.addcmul(sampled - along * mean, along, ratio, out=terms).mul_(probs).mul_(-step / mass)
    grad.addcmul_(new_probs, ratio.sub_(new_mean).mul_(pull / new_mass))
    return grad.scatter_add_(-1, ids[:, None].long(), step * sampled)


def regression_terms(new: Tensor, projected: Tensor) -> tuple[Tensor, Tensor]:
    """p log(p / pi) of rows of logits [n, V] against projected log-probabilities, and p.

    Outcomes that the projection cannot produce are left out: their term is infinite, and no finite pull
    removes them.
    """
    largest, log_sum, probs = log_partition(new)
    terms = (new - largest).sub_(log_sum).sub_(projected)
    return terms.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).mul_(probs), probs
