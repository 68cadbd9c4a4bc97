"""Segments: what lies between learning from single steps and from whole episodes.

A motion is cut at a few points. The policy is credited for a segment through the likelihood that the
motion passes through the positions at both its ends, and the segment's advantage is what it earned.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tether.errors import ConfigError, InvalidInputError

# Positions near the boundary condition hardly depend on the weights; their covariance is made
# invertible by this fraction of the largest variance.
_REGULARISATION = 1e-4


def segment_points(horizon: int, num_points: int, offset: int) -> Tensor:
    """Steps at which a motion of `horizon` steps is cut, [S + 1], all over it, the first at `offset`.

    They are equally spaced, to a step where the number of points does not divide that of the steps.

    Raises:
        ConfigError: fewer than two points, more points than steps, or an offset beyond the spacing.

    Example:
        >>> segment_points(100, 5, offset=3).tolist(), segment_points(9, 5, offset=0).tolist()
        ([3, 23, 43, 63, 83], [0, 1, 3, 5, 7])
    """
    if not 2 <= num_points <= horizon:
        raise ConfigError(
            f"A motion of {horizon} steps is cut at 2 to {horizon} points, got {num_points} (25 is usual)."
        )
    spacing = horizon // num_points
    if not 0 <= offset < spacing:
        raise ConfigError(f"The offset must lie in [0, {spacing}), the points' spacing, got {offset}.")
    return torch.arange(num_points) * horizon // num_points + offset


def segment_log_probs(
    weights: Tensor, mean: Tensor, scale_tril: Tensor, pair_basis: Tensor, num_dof: int
) -> Tensor:
    """Log-likelihood of each segment: of the positions at its start and end, jointly, [E, S].

    With H the basis of one pair, a segment's positions are N(H mean + b, H Σ Hᵀ + r I) with b from the
    boundary condition and r = 1e-4 times the largest variance (treated as a constant). The sampled
    positions share b, so the deviation is H (weights - mean) and neither b nor the positions are needed.

    Equals the log-density of `torch.distributions.MultivariateNormal` at the 2 D positions.

    Args:
        weights: sampled, [E, W].
        mean: [E, W].
        scale_tril: Cholesky factor of the weights' covariance, [W, W] or, contextual, [E, W, W].
        pair_basis: position basis at the ends of every segment, [S, 2, nb + 1].
        num_dof: D, with W = D (nb + 1).

    Raises:
        InvalidInputError: sizes that do not fit.

    Source: TCE (arXiv 2401.11437, section 4.2).

    Example:
        >>> basis = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
        >>> weights, mean = torch.tensor([[1.0, 0.0]]), torch.zeros(1, 2)
        >>> round(segment_log_probs(weights, mean, torch.eye(2), basis, num_dof=1).item(), 3)
        -2.338
    """
    size = pair_basis.shape[-1]
    if pair_basis.shape[1:-1] != (2,) or weights.shape != mean.shape or weights.shape[-1] != num_dof * size:
        raise InvalidInputError(
            f"weights and mean must be [E, {num_dof} * {size}] and pair_basis [S, 2, nb + 1], got "
            f"{tuple(weights.shape)}, {tuple(mean.shape)} and {tuple(pair_basis.shape)}."
        )
    rows = scale_tril.unflatten(-2, (num_dof, size))
    # Square roots of the pairs' covariances, [(E,) S, 2 D, W]; dimensions ordered by end, then joint.
    root = torch.einsum("stk,...dkw->...stdw", pair_basis, rows).flatten(-3, -2)
    covariance = root @ root.mT
    largest = covariance.detach().diagonal(dim1=-2, dim2=-1).amax()
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    factor = torch.linalg.cholesky(covariance + _REGULARISATION * largest * identity)
    deviation = torch.einsum("stk,edk->estd", pair_basis, (weights - mean).unflatten(-1, (num_dof, size)))
    deviation = deviation.flatten(-2)  # [E, S, 2 D]
    if factor.dim() == 3:  # one covariance for all episodes: one solve a segment, episodes as columns
        whitened = torch.linalg.solve_triangular(factor, deviation.permute(1, 2, 0), upper=False)
        distance = whitened.square().sum(1).mT
    else:
        whitened = torch.linalg.solve_triangular(factor, deviation[..., None], upper=False)
        distance = whitened.square().sum((-1, -2))
    log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * distance - log_det - 0.5 * deviation.shape[-1] * math.log(2 * math.pi)


def segment_advantages(
    rewards: Tensor, values: Tensor, points: Tensor, *, gamma: float = 1.0, include_last_reward: bool = False
) -> Tensor:
    """What each segment earned beyond what the critic expected, [E, S].

    For a segment from step a to step b: sum_{a <= i < b} gamma^(i-a) r_i + gamma^(b-a) V(s_b) - V(s_a).

    The paper's segments end at the last point, so rewards from there on reach the policy only through
    the critic. With `include_last_reward` the last segment runs to the end of the episode, where
    nothing is left to come.

    Args:
        rewards: [E, T].
        values: V of the state before each step, [E, T].
        points: [S + 1] steps, increasing, below T.
        gamma: discount a step.
        include_last_reward: see above.

    Raises:
        InvalidInputError: shapes that do not fit, or points out of range.

    Source: TCE (arXiv 2401.11437, equation 8).

    Example:
        >>> rewards = torch.tensor([[1.0, 2.0, 3.0, 4.0, 8.0]])
        >>> values = torch.tensor([[10.0, 9.0, 7.0, 6.0, 5.0]])
        >>> segment_advantages(rewards, values, torch.tensor([0, 2, 4])).tolist()
        [[0.0, 5.0]]
        >>> segment_advantages(rewards, values, torch.tensor([0, 2, 4]), include_last_reward=True).tolist()
        [[0.0, 8.0]]
    """
    horizon = rewards.shape[-1]
    increasing = bool((points[1:] > points[:-1]).all())
    if rewards.shape != values.shape or points.dim() != 1 or len(points) < 2 or not increasing:
        raise InvalidInputError(
            "rewards and values must both be [E, T] and points increasing, [S + 1], got "
            f"{tuple(rewards.shape)}, {tuple(values.shape)} and {points.tolist()}."
        )
    if int(points[0]) < 0 or int(points[-1]) >= horizon:
        raise InvalidInputError(f"points must lie in [0, {horizon}), got {points.tolist()}.")
    starts, ends = points[:-1], points[1:].clone()
    next_values = values[:, ends]
    if include_last_reward:
        ends[-1] = horizon
        next_values = torch.cat((next_values[:, :-1], torch.zeros_like(next_values[:, -1:])), -1)
    steps = torch.arange(horizon, device=rewards.device)
    since = steps - starts[:, None]
    # A power of integers would be float32, whatever the rewards are.
    powers = gamma ** torch.arange(horizon + 1, dtype=rewards.dtype, device=rewards.device)
    weight = torch.where((since >= 0) & (steps < ends[:, None]), powers[since.clamp_min(0)], 0.0)
    earned = rewards @ weight.mT
    discount = powers[ends - starts]
    return earned + discount * next_values - values[:, starts]


def gae_returns(rewards: Tensor, values: Tensor, *, gamma: float = 1.0, gae_lambda: float = 0.95) -> Tensor:
    """The critic's targets: values plus generalised advantage estimates, [E, T].

    Episodes end for good after the last step: there is nothing to bootstrap from.

    Args:
        rewards: [E, T].
        values: V of the state before each step, [E, T].
        gamma: discount a step.
        gae_lambda: 1 for the plain sum of rewards, 0 for one step and the critic's opinion.

    Raises:
        InvalidInputError: different shapes.

    Source: generalised advantage estimation (arXiv 1506.02438).

    Example:
        >>> rewards, values = torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 1.0]])
        >>> gae_returns(rewards, values, gae_lambda=1.0).tolist()
        [[3.0, 2.0]]
    """
    if rewards.shape != values.shape or rewards.dim() != 2:
        raise InvalidInputError(
            f"rewards and values must both be [E, T], got {tuple(rewards.shape)} and {tuple(values.shape)}."
        )
    following = torch.cat((values[:, 1:], torch.zeros_like(values[:, :1])), -1)
    surprise = rewards + gamma * following - values
    steps = torch.arange(rewards.shape[1], device=rewards.device)
    ahead = steps[:, None] - steps
    decay = (gamma * gae_lambda) ** ahead.clamp_min(0).to(rewards)
    return surprise @ torch.where(ahead >= 0, decay, 0.0) + values


def rewards_at_event(rewards: Tensor, event_steps: Tensor) -> Tensor:
    """Rewards with all that an episode earns from its event on summed onto the event's step, [E, T].

    What is earned after a ball is hit does not depend on what the robot does then, and no state after the
    hit tells a critic that the robot is paid for the hit. Returns stay what they were.

    Args:
        rewards: [E, T].
        event_steps: the step of each episode's event, [E]; negative where there was none.

    Source: the published implementation of TCE, which does so with Table Tennis and Hopper Jump.

    Example:
        >>> rewards = torch.tensor([[1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0]])
        >>> rewards_at_event(rewards, torch.tensor([2, -1])).tolist()
        [[1.0, 1.0, 4.0, 0.0], [1.0, 1.0, 2.0, 2.0]]
    """
    steps, events = torch.arange(rewards.shape[1], device=rewards.device), event_steps[:, None]
    later = rewards.where((steps >= events) & (events >= 0), 0.0)
    return rewards - later + later.sum(-1, keepdim=True) * (steps == events)


def normalised(advantages: Tensor) -> Tensor:
    """Advantages with mean 0 and standard deviation 1 over the whole batch; 0 where they differ by rounding.

    Example:
        >>> normalised(torch.tensor([1.0, 2.0, 3.0])).tolist()
        [-1.0, 0.0, 1.0]
    """
    spread = advantages.std() if advantages.numel() > 1 else torch.ones_like(advantages).squeeze()
    # The mean of equal numbers may be another one, and what they are above it would come out as 1.
    rounding = 4 * torch.finfo(advantages.dtype).eps * advantages.abs().amax()
    return torch.where(spread > rounding, (advantages - advantages.mean()) / (spread + 1e-8), 0.0)
