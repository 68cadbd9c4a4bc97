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
        InvalidInputError: no point, or a position of another size.

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
        for joint, value in enumerate(_checked(point, motion.num_dof).position)
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
    noise = mean.new_tensor([point.std**2 for _, point in rows]).diag()
    spread = look @ scale  # H L
    gain = torch.linalg.solve(spread @ spread.mT + noise, spread @ scale.mT).mT  # [..., W, rows]
    gap = wanted - moved - mean @ look.mT
    posterior_mean = mean + (gain @ gap[..., None]).squeeze(-1)
    # Joseph's form stays positive definite in rounding.
    kept = torch.eye(motion.num_weights, dtype=mean.dtype) - gain @ look
    covariance = kept @ scale @ scale.mT @ kept.mT + gain @ noise @ gain.mT
    return WeightDistribution(posterior_mean, torch.linalg.cholesky(covariance), "full")


def _checked(point: ViaPoint, num_dof: int) -> ViaPoint:
    if len(point.position) != num_dof:
        raise InvalidInputError(
            f"A via-point has a position for each of the {num_dof} joints, got {len(point.position)}."
        )
    return point
