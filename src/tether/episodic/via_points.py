"""Motions that pass through given points: a Gaussian over weights, conditioned on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.episodic.policy import WeightDistribution
from tether.episodic.prodmp import ProDMP
from tether.errors import InvalidInputError

# Conditioned means that miss a point by more standard deviations than this do not pass it.
_FAR = 10.0


@dataclass(frozen=True)
class ViaPoint:
    """A point the motion should pass."""

    time: float
    """Seconds of the movement primitive."""

    position: tuple[float, ...]
    """[D]; NaN leaves a joint free."""

    std: float = 1e-3
    """How closely: standard deviation of what is wanted around `position`, in its unit."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.std) and self.std > 0):
            raise InvalidInputError(f"std must be a positive number, got {self.std}.")
        if not math.isfinite(self.time):
            raise InvalidInputError(f"time must be a number of seconds, got {self.time}.")
        if any(math.isinf(value) for value in self.position):
            raise InvalidInputError(f"position must hold numbers, or NaN for a free joint: {self.position}.")


def condition_on_via_points(
    motion: ProDMP,
    distribution: WeightDistribution,
    position: Tensor,
    velocity: Tensor,
    via_points: Sequence[ViaPoint],
) -> WeightDistribution:
    """The motions a policy would choose, among those that pass given points.

    The position at a time is linear in the weights, so that conditioning is exact: with the observation
    y = H w + b + noise of variance std², the result is the Gaussian posterior of w.

    Args:
        motion: the movement primitive.
        distribution: what the policy says, for E episodes.
        position, velocity: [E, D], where the motions start.
        via_points: at least one joint of one point must be given.

    Returns:
        Full covariances [E, W, W], or [W, W] where the distribution's is shared, in float64.

    Raises:
        InvalidInputError: no point, a position of another size, a time before the motion starts, or a point
            that the conditioned motions miss by more than ten times its std: points that contradict each
            other, or a policy too sure of something else.

    Source: conditioning of probabilistic movement primitives (Paraschos et al., 2013, section 2.2), with
    ProDMP's boundary condition (arXiv 2210.01531).

    Example:
        >>> from tether.episodic.prodmp import ProDMPConfig
        >>> motion = ProDMP(ProDMPConfig(num_basis=3), num_dof=1)
        >>> prior = WeightDistribution(torch.zeros(1, 4), torch.eye(4), "full")
        >>> start = torch.zeros(1, 1, dtype=torch.float64)
        >>> passed = condition_on_via_points(motion, prior, start, start, [ViaPoint(0.5, (0.3,))])
        >>> at, _ = motion.trajectory(passed.mean, start, start, [0.5])
        >>> round(at.item(), 4)
        0.3
    """
    rows = [
        (joint, point)
        for point in via_points
        for joint, value in enumerate(_checked(point, motion).position)
        if not math.isnan(value)
    ]
    if not rows:
        raise InvalidInputError("Conditioning needs at least one via-point with a joint that is not NaN.")
    times = sorted({point.time for _, point in rows})
    basis = motion.basis(times)
    mean, scale = distribution.mean.double(), distribution.scale_tril.double()
    zeros = torch.zeros_like(mean)
    undriven, _ = motion.trajectory(zeros, position.double(), velocity.double(), basis)
    size = motion.config.num_basis + 1
    look = mean.new_zeros(len(rows), motion.num_weights)  # H
    for row, (joint, point) in enumerate(rows):
        look[row, joint * size : (joint + 1) * size] = basis.positions[times.index(point.time)]
    wanted = mean.new_tensor([point.position[joint] for joint, point in rows])
    moved = torch.stack([undriven[:, times.index(p.time), joint] for joint, p in rows], dim=-1)  # b
    gap = wanted - moved - mean @ look.mT
    std = mean.new_tensor([point.std for _, point in rows])
    # With weights = mean + L z and z standard normal, a point is one more look at z. Singular values of these
    # looks keep the digits that covariances, which hold their squares, would lose.
    left, values, right = torch.linalg.svd(look @ scale / std[:, None])
    rank = values.shape[-1]
    known = (left.mT @ (gap / std)[..., None])[..., :rank, :] * (values / (1 + values.square()))[..., None]
    moved_by = (scale @ (right.mT[..., :rank] @ known)).squeeze(-1)
    _check_passed((gap - moved_by @ look.mT).abs(), rows)
    kept = torch.ones_like(right[..., 0])  # of the spread in each direction; what no point sees stays
    kept[..., :rank] = (1 + values.square()).rsqrt()
    return WeightDistribution(mean + moved_by, _lower_factor(scale @ (right.mT * kept[..., None, :])), "full")


def _check_passed(missed: Tensor, rows: Sequence[tuple[int, ViaPoint]]) -> None:
    """Refuse what misses a point, [E, rows], by far more than was asked."""
    worst, index = missed.max(dim=0).values.div(missed.new_tensor([p.std for _, p in rows])).max(dim=0)
    if worst > _FAR:
        joint, point = rows[int(index)]
        raise InvalidInputError(
            f"The motions do not pass {point.position[joint]:g} with joint {joint + 1} at {point.time:g} s: "
            f"they miss it by {missed[:, int(index)].max():.3g}, with a std of {point.std:g}. Give points a "
            "larger std, or fewer or others: these contradict each other, or what the policy would choose."
        )


def _lower_factor(root: Tensor) -> Tensor:
    """The Cholesky factor of root rootᵀ, [..., W, W], without forming the product."""
    upper = torch.linalg.qr(root.mT).R
    signs = torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(upper)
    return upper.mT * signs[..., None, :]


def _checked(point: ViaPoint, motion: ProDMP) -> ViaPoint:
    if len(point.position) != motion.num_dof:
        raise InvalidInputError(
            f"A via-point has a position for each of the {motion.num_dof} joints, got {len(point.position)}."
        )
    if point.time <= motion.config.delay:
        raise InvalidInputError(
            f"A via-point at {point.time:g} s is asked for before anything moves: motions start at "
            f"{motion.config.delay:g} s. Give it a later time."
        )
    return point
