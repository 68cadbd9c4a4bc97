"""Probabilistic dynamic movement primitives: whole trajectories from a few weights.

A trajectory obeys a critically damped second-order system that is pulled to a goal and pushed by a
weighted sum of basis functions. The system is linear, so position and velocity at any time are linear
in the weights, the goal and the boundary condition; `MotionBasis` holds the coefficients. They are
computed once, by exact propagation of the system between quadrature nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tether.errors import ConfigError, InvalidInputError

Array = NDArray[np.float64]

# Gauss-Legendre nodes in a piece of phase time of at most this length, or what `_piece` needs to be shorter:
# basis functions are several pieces wide, which leaves an error around 1e-14.
_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(6)
_LONGEST_PIECE = 0.02
# No shorter, however stiff: 50,000 pieces are work enough (stiffness 20,000, a thousand basis functions).
_SHORTEST_PIECE = 1e-4
# Basis functions are scaled by their maximum over this many time constants.
_SCALED_OVER = 5.0


@dataclass(frozen=True)
class ProDMPConfig:
    """Shape and scaling of the motions."""

    num_basis: int = 5
    """Basis functions per degree of freedom (nb); with its goal there are W = D (nb + 1) weights."""

    tau: float = 1.0
    """Time constant in seconds: how long the motion takes to unfold."""

    alpha: float = 10.0
    """Stiffness of the pull to the goal; the damping is critical."""

    bandwidth_factor: float = 3.0
    """Narrowness of the basis functions relative to their distance."""

    weights_scale: float = 1.0
    """How far a weight of 1 moves the position, at the peak of its basis function."""

    goal_scale: float = 1.0
    """How far a goal weight of 1 moves the goal."""

    relative_goal: bool = False
    """Measure the goal from the initial position."""

    delay: float = 0.0
    """Seconds for which the initial position is held before the motion starts."""

    alpha_phase: float = 3.0
    """Decay of the phase x = exp(-alpha_phase t / tau)."""

    def __post_init__(self) -> None:
        if self.num_basis < 2:
            raise ConfigError(f"num_basis must be at least 2, got {self.num_basis}.")
        for name in ("tau", "alpha", "bandwidth_factor", "weights_scale", "goal_scale", "alpha_phase"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a positive number, got {value!r}.")
        if not (math.isfinite(self.delay) and self.delay >= 0):
            raise ConfigError(f"delay must be a number of seconds, not negative, got {self.delay!r}.")


@dataclass(frozen=True)
class MotionBasis:
    """Coefficients of a motion at T times, from weights and boundary condition to position and velocity.

    position(t) = positions(t) · w + position_from_position(t) y0 + position_from_velocity(t) v0, a
    degree of freedom at a time, and likewise the velocity. All float64.
    """

    positions: Tensor
    """[T, nb + 1], scaled; the goal comes last."""
    velocities: Tensor
    """[T, nb + 1] per second."""
    position_from_position: Tensor
    """[T]"""
    position_from_velocity: Tensor
    """[T] seconds."""
    velocity_from_position: Tensor
    """[T] per second."""
    velocity_from_velocity: Tensor
    """[T]"""


class ProDMP:
    """Turn weights into smooth trajectories that start at a given position and velocity, exactly.

    With z = max(t - delay, 0) / tau, the position of a degree of freedom solves

        y'' = alpha (alpha/4 (g - y) - y') + sum_i w_i x φ_i(x),    x = exp(-alpha_phase z)

    with normalised Gaussian bumps φ_i in x. A weight scales its basis function's response, which is
    normalised to a maximum of `weights_scale`; the last weight of each degree of freedom is its goal g
    times `goal_scale`, from the initial position if `relative_goal`. A weight vector [..., W] lists
    the nb + 1 weights of the first degree of freedom, then those of the second, and so on.

    During the delay the initial position is held with zero velocity; a robot should be at rest then.

    Args:
        config: shape and scaling.
        num_dof: D, degrees of freedom.

    Raises:
        ConfigError: no degree of freedom, or constants at which a basis function moves nothing.

    Source: ProDMP (arXiv 2210.01531, section III).

    Example:
        >>> motion = ProDMP(ProDMPConfig(num_basis=3, tau=1.0, relative_goal=True), num_dof=1)
        >>> weights = torch.tensor([0.0, 0.0, 0.0, 0.5], dtype=torch.float64)
        >>> start, still = torch.tensor([2.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        >>> positions, velocities = motion.trajectory(weights, start, still, [0.0, 3.0])
        >>> [round(value, 3) for value in positions[:, 0].tolist()]
        [2.0, 2.5]
    """

    def __init__(self, config: ProDMPConfig, num_dof: int) -> None:
        if num_dof < 1:
            raise ConfigError(f"num_dof must be at least 1, got {num_dof}.")
        self.config = config
        self.num_dof = num_dof
        spacing = config.alpha_phase * np.linspace(
            0.0, 1.0 + 1 / (config.num_basis - 1), config.num_basis + 1
        )
        centres = np.exp(-spacing)
        self._centres = centres[:-1]
        self._precision = config.bandwidth_factor / np.diff(centres) ** 2
        scales = np.full(config.num_basis + 1, config.weights_scale)
        scales[-1] = config.goal_scale
        peaks = self._peaks()
        if not (peaks > 0).all():
            raise ConfigError(
                f"A basis function moves nothing at alpha={config.alpha}, alpha_phase={config.alpha_phase} "
                f"and bandwidth_factor={config.bandwidth_factor}: its peak is {peaks.min():.3g}. Use others."
            )
        self._scale = scales / peaks

    @property
    def num_weights(self) -> int:
        """W = D (nb + 1)."""
        return self.num_dof * (self.config.num_basis + 1)

    def basis(self, times: Sequence[float] | Array | Tensor, init_time: float = 0.0) -> MotionBasis:
        """The coefficients at some times [T] of a motion whose boundary condition holds at `init_time`.

        Raises:
            InvalidInputError: times that are not finite or lie before `init_time`.
        """
        at = np.asarray(times, dtype=np.float64)
        if at.ndim != 1 or not np.isfinite(at).all() or at.min(initial=init_time) < init_time:
            raise InvalidInputError(
                f"times must be finite, one-dimensional and not before init_time={init_time}, got shape "
                f"{at.shape} with a minimum of {at.min(initial=np.inf)}."
            )
        config = self.config
        start = self._phase_time(np.array([init_time]))[0]
        phase_times = self._phase_time(at)
        positions, velocities = self._response(start, phase_times)
        own = _propagator(phase_times - start, config.alpha / 2)
        own[1] *= np.where(at < config.delay, 0.0, 1.0)[:, None]
        velocities[at < config.delay] = 0.0
        if config.relative_goal:
            own[0, :, 0] += positions[:, -1]
            own[1, :, 0] += velocities[:, -1]
        return MotionBasis(
            positions=torch.from_numpy(positions * self._scale),
            velocities=torch.from_numpy(velocities * self._scale / config.tau),
            position_from_position=torch.from_numpy(own[0, :, 0].copy()),
            position_from_velocity=torch.from_numpy(own[0, :, 1] * config.tau),
            velocity_from_position=torch.from_numpy(own[1, :, 0] / config.tau),
            velocity_from_velocity=torch.from_numpy(own[1, :, 1].copy()),
        )

    def trajectory(
        self,
        weights: Tensor,
        init_position: Tensor,
        init_velocity: Tensor,
        times: Sequence[float] | Array | Tensor | MotionBasis,
        init_time: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Position and velocity at some times, both [..., T, D], differentiable in everything but time.

        To replan in mid-motion, pass the present position, velocity and time as the boundary condition. A
        relative goal would be measured from there: take the motion that `with_fixed_goal` returns.

        Args:
            weights: [..., W].
            init_position, init_velocity: [..., D], reached exactly at `init_time`. Where that lies within the
                delay, the position is held with a velocity of 0, and `init_velocity` is what the motion sets
                out with at the delay's end, in a jump.
            times: [T] in seconds, or what `basis` returned for them.
            init_time: when the boundary condition holds; ignored if `times` is a basis.

        Raises:
            InvalidInputError: sizes that do not fit, or as `basis`.
        """
        self._check_sizes(weights, init_position, init_velocity)
        basis = times if isinstance(times, MotionBasis) else self.basis(times, init_time)
        table = weights.unflatten(-1, (self.num_dof, self.config.num_basis + 1))

        def at(coefficients: Tensor, from_position: Tensor, from_velocity: Tensor) -> Tensor:
            driven = torch.einsum("tk,...dk->...td", coefficients.to(weights), table)
            return (
                driven
                + from_position.to(weights)[:, None] * init_position[..., None, :]
                + from_velocity.to(weights)[:, None] * init_velocity[..., None, :]
            )

        return (
            at(basis.positions, basis.position_from_position, basis.position_from_velocity),
            at(basis.velocities, basis.velocity_from_position, basis.velocity_from_velocity),
        )

    def with_fixed_goal(self, weights: Tensor, goal_from: Tensor) -> tuple[ProDMP, Tensor]:
        """The primitive without a relative goal, and the weights that mean the same motion to it, [..., W].

        Args:
            weights: [..., W].
            goal_from: [..., D], the position from which a relative goal is measured.

        Example:
            >>> relative = ProDMP(ProDMPConfig(num_basis=3, relative_goal=True), num_dof=1)
            >>> weights, start = torch.tensor([0.1, -0.2, 0.3, 0.5]).double(), torch.tensor([2.0]).double()
            >>> fixed, same = relative.with_fixed_goal(weights, start)
            >>> own, _ = relative.trajectory(weights, start, 0 * start, [0.7])
            >>> bool((own - fixed.trajectory(same, start, 0 * start, [0.7])[0]).abs() < 1e-12)
            True
        """
        if not self.config.relative_goal:
            return self, weights
        table = weights.unflatten(-1, (self.num_dof, self.config.num_basis + 1)).clone()
        table[..., -1] += goal_from / self._scale[-1]
        return ProDMP(replace(self.config, relative_goal=False), self.num_dof), table.flatten(-2)

    def accelerations(
        self,
        weights: Tensor,
        init_position: Tensor,
        positions: Tensor,
        velocities: Tensor,
        times: Sequence[float] | Array | Tensor,
    ) -> Tensor:
        """What the system's equation says of a trajectory's accelerations, [..., T, D] per second squared.

        Args:
            weights: [..., W].
            init_position: [..., D], as given to `trajectory`; only a relative goal depends on it.
            positions, velocities: [..., T, D], what `trajectory` returned at these times.
            times: [T] in seconds. At the end of the delay itself the motion already accelerates.
        """
        config = self.config
        at = np.asarray(times, dtype=np.float64)
        moving = torch.from_numpy((at >= config.delay).astype(np.float64)).to(weights)
        forcing = torch.from_numpy(self._forcing(self._phase_time(at)) * self._scale).to(weights)
        table = weights.unflatten(-1, (self.num_dof, config.num_basis + 1))
        push = torch.einsum("tk,...dk->...td", forcing, table)
        if config.relative_goal:
            push = push + (config.alpha / 2) ** 2 * init_position[..., None, :]
        pull = config.alpha * (config.alpha / 4 * positions + config.tau * velocities)
        return (push - pull) / config.tau**2 * moving[:, None]

    def _phase_time(self, times: Array) -> Array:
        phase_time: Array = np.maximum(times - self.config.delay, 0.0) / self.config.tau
        return phase_time

    def _forcing(self, z: Array) -> Array:
        """Right-hand sides of the nb + 1 systems at phase times [..., n] -> [..., n, nb + 1]."""
        x = np.exp(-self.config.alpha_phase * z)[..., None]
        exponent = -0.5 * (x - self._centres) ** 2 * self._precision
        bumps = np.exp(exponent - exponent.max(axis=-1, keepdims=True))
        bumps = x * bumps / bumps.sum(axis=-1, keepdims=True)
        goal = np.full_like(x, (self.config.alpha / 2) ** 2)
        return np.concatenate((bumps, goal), axis=-1)

    def _peaks(self) -> Array:
        """The maximum of every response, [nb + 1]: from a grid, then by Newton steps on the velocity."""
        grid = np.linspace(0.0, _SCALED_OVER, 501)
        coarse = self._response(0.0, grid)[0]
        at = grid[coarse.argmax(axis=0)]
        for _ in range(2):
            position, velocity = (values.diagonal() for values in self._response(0.0, at))
            pull = self.config.alpha * (self.config.alpha / 4 * position + velocity)
            acceleration = self._forcing(at).diagonal() - pull
            with np.errstate(divide="ignore", invalid="ignore"):
                step = velocity / acceleration
            at = np.clip(at - np.nan_to_num(step, nan=0.0, posinf=np.inf, neginf=-np.inf), 0.0, _SCALED_OVER)
        peaks: Array = self._response(0.0, at)[0].diagonal().copy()
        # A response that still rises at the end, or is flat there to rounding, has no peak to step to.
        highest: Array = coarse.max(axis=0)
        return np.where(peaks < (1 - 1e-9) * highest, highest, peaks)

    def _piece(self) -> float:
        """Phase time over which neither the impulse response nor a basis function changes by much."""
        config = self.config
        narrowest = 1 / (config.bandwidth_factor * max(config.num_basis - 1, 2 * config.alpha_phase))
        return max(min(_LONGEST_PIECE, 2 / config.alpha, narrowest), _SHORTEST_PIECE)

    def _response(self, start: float, z: Array) -> tuple[Array, Array]:
        """Position and velocity of the systems at phase times z [T], at rest in zero at `start`."""
        targets, index = np.unique(np.concatenate(([start], z)), return_inverse=True)
        pieces = np.maximum(np.ceil(np.diff(targets) / self._piece()).astype(int), 1)
        step = np.repeat(np.diff(targets) / pieces, pieces)
        edges = np.repeat(targets[:-1], pieces) + step * _ramps(pieces)
        # What the forcing within each piece adds at the piece's end: the impulse response u e^(-a u).
        rate = self.config.alpha / 2
        left = 0.5 * step[:, None] * (1 - _NODES)  # from each node to the end of its piece
        forcing = self._forcing(edges[:, None] + step[:, None] - left)
        weight = 0.5 * step[:, None] * _NODE_WEIGHTS * np.exp(-rate * left)
        pushed = np.stack(
            (
                np.einsum("pn,pnk->pk", weight * left, forcing),
                np.einsum("pn,pnk->pk", weight * (1 - rate * left), forcing),
            )
        )
        carried = _propagator(step, rate)
        state = np.zeros((2, forcing.shape[-1]))
        states = np.zeros((len(step) + 1, 2, forcing.shape[-1]))
        for i in range(len(step)):
            state = carried[:, i] @ state + pushed[:, i]
            states[i + 1] = state
        at = states[np.concatenate(([0], np.cumsum(pieces)))][index.reshape(-1)[1:]]
        return at[:, 0], at[:, 1]

    def _check_sizes(self, weights: Tensor, init_position: Tensor, init_velocity: Tensor) -> None:
        if weights.shape[-1:] != (self.num_weights,):
            raise InvalidInputError(
                f"weights must be [..., {self.num_weights}] ({self.num_dof} degrees of freedom of "
                f"{self.config.num_basis} weights and a goal), got {tuple(weights.shape)}."
            )
        for name, value in (("init_position", init_position), ("init_velocity", init_velocity)):
            if value.shape[-1:] != (self.num_dof,):
                raise InvalidInputError(f"{name} must be [..., {self.num_dof}], got {tuple(value.shape)}.")


def _propagator(duration: Array, rate: float) -> Array:
    """What an undriven critically damped system makes of (position, velocity), [2, n, 2]."""
    decay = np.exp(-rate * duration)
    return np.stack(
        (
            np.stack((decay * (1 + rate * duration), decay * duration), axis=-1),
            np.stack((-decay * rate**2 * duration, decay * (1 - rate * duration)), axis=-1),
        )
    )


def _ramps(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ..., n - 1 for every n, one after the other."""
    starts = np.cumsum(lengths) - lengths
    ramps: NDArray[np.int64] = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    return ramps
