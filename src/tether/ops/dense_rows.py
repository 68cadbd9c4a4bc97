"""Blocks of dense rows of logits: their projection onto the trust region and its gradient, by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tether.ops.backlog import Backlog
from tether.ops.head import Head
from tether.ops.policy_pair import rows_at_a_time
from tether.ops.rows import Upstream, probs_to_gradient, reduce_rows
from tether.ops.token_state import ProjectedRows
from tether.projection.anchored import AnchoredCurve, AnchoredStep
from tether.projection.divergence import log_partition, rows_kl, where
from tether.projection.geodesic import Geodesic
from tether.projection.solve import may_ask


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


class Compared(NamedTuple):
    """What comparing some rows found."""

    kl: Tensor
    """KL(new || old), [n]."""
    projections: list[tuple[Tensor, ProjectedRows]]
    """Which of the rows are outside the bound, and their projections."""
    plain: bool = True
    """Whether any of them was left to the functions of this module."""


def measure(logits: Tensor, vocabulary: int, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows of logits, padding included: log-probabilities of `ids`, entropies, log-sum-exps, [n] each."""
    found = logits.new_empty((3, len(ids)))
    logits, scratch = logits[:, :vocabulary], None
    for part in rows_at_a_time(logits):
        some = logits[part]
        scratch = some.new_empty((2, *some.shape)) if scratch is None else scratch[:, : len(some)]
        reduced = reduce_rows(some, ids[part, None], probs=scratch[0], shifted=scratch[1])
        found[0, part], found[1, part] = reduced.log_probs.squeeze(-1), reduced.entropy
        torch.add(reduced.largest, reduced.log_total, out=found[2, part])
    log_probs, entropy, log_sum = found
    return log_probs, entropy, log_sum


def compare_rows(
    new: Tensor, old: Tensor, ids: Tensor, kl_bound: float, *, project: bool, rows: Tensor | None = None,
    meanwhile: Backlog | None = None,
) -> Compared:  # fmt: skip
    """Compare rows of logits [n, V], and project those outside the bound, each with a step of its own.

    On a CPU `AnchoredCurve` does it where it can; `rows_kl` and `Geodesic` take what it cannot, and on an
    accelerator without Triton everything, for it cannot be asked.

    Args:
        rows: which rows of `new` the old ones belong to, if not all.
        meanwhile: left alone, as nothing waits here; the kernels' function of this name works on it.
    """
    if not may_ask(new):
        kl, every = new.new_empty(len(old)), torch.arange(len(old), device=old.device)
        return Compared(kl, by_reference(new, old, ids, kl_bound, kl, every, project=project, rows=rows))
    curve = AnchoredCurve(new, old, ids, kl_bound if project else math.inf, rows)
    kl, reliable = curve.kl, curve.reliable
    for row in _one_by_one(~reliable):
        kl[row] = rows_kl(new[row if rows is None else rows[row]], old[row])
    if not project:
        return Compared(kl, [])
    easy = (reliable & (kl > kl_bound)).nonzero().squeeze(-1)
    hard = ~reliable & (kl > kl_bound)
    projections = []
    if easy.numel():
        found = curve.solve(easy)
        projections.append((easy, _read_off_anchored(curve, easy, found)))
        hard[easy[~found.met]] = True
    # Last, for they take the place of what did not work out.
    for row in _one_by_one(hard):
        at = row if rows is None else rows[row]
        projections.append((row, project_rows(new[at], old[row], ids[row], kl[row], kl_bound)))
    return Compared(kl, projections)


def _one_by_one(chosen: Tensor) -> Sequence[Tensor]:
    """Few, and the reference holds a dozen copies of each."""
    return chosen.nonzero().unbind(0)


def by_reference(
    new: Tensor,
    old: Tensor,
    ids: Tensor,
    kl_bound: float,
    kl: Tensor,
    chosen: Tensor,
    *,
    project: bool,
    rows: Tensor | None,
) -> list[tuple[Tensor, ProjectedRows]]:
    """The same of some of the old rows, whatever they hold: their divergences go into `kl`."""
    projections = []
    for part in rows_at_a_time(old[: len(chosen)]):
        at = chosen[part]
        some_new, some_old = new[at if rows is None else rows[at]], old[at]
        some_kl = kl[at] = rows_kl(some_new, some_old)
        outside = (some_kl > kl_bound).nonzero().squeeze(-1) if project else at[:0]
        if outside.numel():
            some = (some_new[outside], some_old[outside], ids[at[outside]], some_kl[outside])
            projections.append((at[outside], project_rows(*some, kl_bound)))
    return projections


def _read_off_anchored(curve: AnchoredCurve, rows: Tensor, found: AnchoredStep) -> ProjectedRows:
    """The anchor is the sampled token, whose log-ratio is zero by definition."""
    regression = (1 - found.step) * curve.mean_new[rows] + curve.log_new[rows] - found.log_prob
    always = torch.ones_like(found.met)
    return ProjectedRows(
        projected_log_probs=found.log_prob,
        projected_kl=found.kl,
        regression=regression.clamp_min(0),
        step=found.step,
        constrained=always,
        converged=always,
        centred=-found.step * found.mean,
        variance=found.step.square() * found.variance,
    )


def project_rows(new: Tensor, old: Tensor, ids: Tensor, kl: Tensor, kl_bound: float) -> ProjectedRows:
    """Project rows of logits [n, V] that are outside the bound, whatever they hold."""
    geodesic = one_token_curves(new, old, kl, kl_bound)
    x, constrained, converged = geodesic.solve()
    return read_off(geodesic, x, constrained, converged, new, ids)


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
) -> ProjectedRows:
    """What is kept of the distributions at x on their curves."""
    log_probs, probs, centred, variance = geodesic.at(x)
    log_probs, probs, centred = log_probs.squeeze(1), probs.squeeze(1), centred.squeeze(1)
    index = ids[:, None].long()
    terms, _ = regression_terms(new, log_probs)
    return ProjectedRows(
        projected_log_probs=log_probs.gather(-1, index).squeeze(-1),
        projected_kl=_divergence(log_probs, probs, geodesic.old.squeeze(1)),
        regression=terms.sum(-1),
        step=x / geodesic.scale,
        constrained=constrained,
        converged=converged,
        centred=centred.gather(-1, index).squeeze(-1),
        variance=variance,
    )


def _divergence(log_probs: Tensor, probs: Tensor, old: Tensor) -> Tensor:
    """KL(pi || old) of rows whose logarithms and probabilities are both at hand: no exponential needed."""
    terms = (log_probs - old).nan_to_num_(nan=0.0).mul_(probs)  # zero in both: 0 times (inf - inf)
    return terms.sum(-1) / probs.sum(-1)


def to_gradient(
    head: Head,
    logits: Tensor,
    grad: Tensor,
    own: Upstream,
    old: Tensor | None,
    old_rows: Tensor,
    ids: Tensor,
    upstream: ProjectedUpstream,
    kl_bound: float,
    *,
    plain: bool = True,
) -> None:
    """Turn logits [n, V] of the new policy into the gradient that reaches the head's raw output.

    Args:
        logits: they are spoiled.
        grad: where the gradient goes, [n, V]: another tensor, or `logits` again.
        own: what arrived for the network's own log-probabilities of `ids` and its entropies, [n].
        old: old logits, [m, V], in the order of the rows; None if there are none.
        old_rows: which of them is each row's, [n]; -1 at rows that do not act. On a CPU those that act have
            all of `old`.
        upstream: what arrived for the projections, [n].
        plain: whether a row that acts may have been left to this function.
    """
    count, scratch = 0, None
    for part in rows_at_a_time(logits):
        some = logits[part]
        slope = head.slope(some)
        acting, some_old = (old_rows[part] >= 0).nonzero().squeeze(-1), None
        at = acting + part.start
        if acting.numel():
            assert old is not None
            # In order, they need no copy.
            some_old = old[count : count + acting.numel()] if may_ask(old) else old[old_rows[at]]
            count += acting.numel()
            if scratch is None:
                scratch = old.new_empty((3, *some.shape))
        _part_gradient(some, own.at(part), some_old, acting, ids[at], upstream.at(at), kl_bound, scratch)
        if isinstance(slope, Tensor) or slope != 1:
            some.mul_(slope)
        if grad is not logits:
            grad[part] = some


def _part_gradient(
    logits: Tensor,
    own: Upstream,
    old: Tensor | None,
    acting: Tensor,
    ids: Tensor,
    upstream: ProjectedUpstream,
    kl_bound: float,
    scratch: Tensor | None = None,
) -> None:
    """Replace logits [n, V] of the new policy by the gradient that reaches them.

    Args:
        own: what arrived for the network's own log-probabilities and entropies, [n].
        old: old logits of the rows that act, [m, V].
        acting: which rows those are, [m].
        ids, upstream: of those rows, [m].
        scratch: [3, n, V], where rows act.
    """
    if old is None or scratch is None:
        probs_to_gradient(torch.softmax(logits, -1, out=logits), own, 1.0)
        return
    every = acting.numel() == logits.shape[0]
    scratch = scratch[:, : len(old)]
    ratio = torch.sub(logits if every else logits[acting], old, out=scratch[0])
    if not bool(ratio.sum().isfinite()):
        extra = _gradient_with_zeros(logits[acting], old, ids, upstream, kl_bound)
        probs_to_gradient(torch.softmax(logits, -1, out=logits), own, 1.0)
        logits.index_add_(0, acting, extra)
        return
    probs = torch.softmax(logits, -1, out=logits)
    if every and own.grad_entropy is None:  # one pass for both
        _gradient_without_zeros(probs, old, scratch, ids, upstream, own.total, out=probs)
        for at, arrived in own.gathered:
            probs.scatter_add_(-1, at.clamp_min(0).long(), arrived)
        return
    extra = _gradient_without_zeros(probs if every else probs[acting], old, scratch, ids, upstream)
    probs_to_gradient(probs, own, 1.0)
    probs.index_add_(0, acting, extra)


def _gradient_with_zeros(
    new: Tensor, old: Tensor, ids: Tensor, upstream: ProjectedUpstream, kl_bound: float
) -> Tensor:
    """Gradient with respect to the new logits of projected rows [n, V] whose steps are known.

    Of the projected log-probability: s [g (delta_o - pi) - a pi c], with c = z - E_pi[z] (`Geodesic.at` has
    s c) and a c the direction that would change the divergence, taken out because the bound holds it fixed.
    Of the regression: r [v - p sum(v)], v = p (log p - log pi + 1).
    """
    geodesic = one_token_curves(new, old, torch.full_like(upstream.step, torch.inf), kl_bound)
    log_probs, probs, centred, _ = geodesic.at(upstream.step * geodesic.scale)
    log_probs, probs, centred = log_probs.squeeze(1), probs.squeeze(1), centred.squeeze(1)
    free = None if geodesic.free is None else geodesic.free.squeeze(1)
    index = ids[:, None].long()
    # A projected probability of zero is constant: whatever arrives for it goes nowhere.
    pulled = where(None if free is None else free.gather(-1, index), upstream.sampled[:, None], 0.0)
    along = (upstream.along / upstream.step)[:, None]
    inner = centred.mul_(probs).mul_(along).addcmul_(probs, pulled).neg_()
    inner.scatter_add_(-1, index, pulled)
    grad = where(free, inner.mul_(upstream.step[:, None]), 0.0)
    terms, new_probs = regression_terms(new, log_probs)
    slopes = terms.add_(torch.where(torch.isneginf(log_probs), 0.0, new_probs))
    slopes.sub_(new_probs * slopes.sum(-1, keepdim=True))
    return grad + slopes.mul_(upstream.regression[:, None])


def _gradient_without_zeros(
    new_probs: Tensor,
    old: Tensor,
    scratch: Tensor,
    ids: Tensor,
    upstream: ProjectedUpstream,
    taken: Tensor | float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """The same from probabilities up to a factor a row, where all are positive, in a quarter of the passes.

    The log-ratio z needs no normalisation: c = z - E_pi[z], and v - p sum(v) = (1 - s) p (z - E_p[z]).

    Args:
        scratch: three times such rows, the first of them the log-ratios.
        taken: how often the new probabilities are taken away besides, [n].
        out: where the gradient goes; may be `new_probs`.
    """
    step, sampled, along = upstream.step[:, None], upstream.sampled[:, None], upstream.along[:, None]
    ratio, probs, inner = scratch
    torch.addcmul(old, step, ratio, out=probs)
    torch.softmax(probs, -1, out=probs)
    # Their sums are 1 but for the rounding of a large vocabulary.
    mass, new_mass = probs.sum(-1, keepdim=True), new_probs.sum(-1, keepdim=True)
    mean = torch.linalg.vecdot(probs, ratio)[:, None] / mass
    new_mean = torch.linalg.vecdot(new_probs, ratio)[:, None] / new_mass
    share, pull = -step / mass, upstream.regression[:, None] * (1 - step) / new_mass
    taken = taken if isinstance(taken, float) else taken[:, None]
    torch.addcmul((sampled - along * mean) * share, along * share, ratio, out=inner).mul_(probs)
    torch.addcmul(-pull * new_mean - taken / new_mass, pull, ratio, out=ratio)
    grad = torch.addcmul(inner, new_probs, ratio, out=probs if out is None else out)
    return grad.scatter_add_(-1, ids[:, None].long(), step * sampled)


def regression_terms(new: Tensor, projected: Tensor) -> tuple[Tensor, Tensor]:
    """p log(p / pi) of rows of logits [n, V] against projected log-probabilities, and p.

    Outcomes that the projection cannot produce are left out: their term is infinite, and no finite pull
    removes them.
    """
    largest, log_sum, probs = log_partition(new)
    terms = (new - largest).sub_(log_sum).sub_(projected)
    return terms.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).mul_(probs), probs
