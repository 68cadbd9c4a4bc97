"""Movement primitives against the differential equation they solve, closed forms and hand numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from tether.episodic.prodmp import ProDMP, ProDMPConfig
from tether.errors import ConfigError, InvalidInputError

SETTINGS = {
    "metaworld": (ProDMPConfig(8, 5.0, 10.0, 5.0, 0.1, 0.1, relative_goal=True), 4, 0.0125, 500),
    "box": (ProDMPConfig(8, 2.0, 10.0, 3.0, 0.3, 0.3), 7, 0.02, 100),
    "hopper": (ProDMPConfig(3, 0.8, 10.0, 3.0), 3, 0.008, 250),
    "table tennis": (
        ProDMPConfig(3, 0.75, 25.0, 3.0, 0.7, 0.1, relative_goal=True, delay=0.3),
        7,
        0.008,
        300,
    ),
}


def draw(motion: ProDMP, *batch: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (motion.num_weights, motion.num_dof, motion.num_dof)
    weights, position, velocity = (
        torch.randn(*batch, size, generator=generator, dtype=torch.float64) for size in sizes
    )
    return weights, position, velocity


def forcing(config: ProDMPConfig, z: float) -> np.ndarray:
    """The basis functions written down once more, from the definition."""
    x = np.exp(-config.alpha_phase * z)
    at = np.linspace(0, 1, config.num_basis)
    centres = np.exp(-config.alpha_phase * at)
    following = np.append(centres[1:], np.exp(-config.alpha_phase * (1 + at[1])))
    bumps = np.exp(-0.5 * config.bandwidth_factor * ((x - centres) / (following - centres)) ** 2)
    return x * bumps / bumps.sum()


def integrate(
    config: ProDMPConfig,
    weights: np.ndarray,
    goal: float,
    position: float,
    velocity: float,
    times: np.ndarray,
) -> np.ndarray:
    """y'' = alpha (alpha/4 (g - y) - y') + f, in phase time, by an adaptive Runge-Kutta method."""

    def rates(z: float, state: np.ndarray) -> list[float]:
        pull = config.alpha * (config.alpha / 4 * (goal - state[0]) - state[1])
        return [state[1], pull + float(forcing(config, z) @ weights)]

    z = times / config.tau
    found = solve_ivp(
        rates,
        (0, z[-1]),
        [position, config.tau * velocity],
        t_eval=z,
        rtol=1e-11,
        atol=1e-12,
        method="DOP853",
    )
    return np.stack((found.y[0], found.y[1] / config.tau), axis=-1)


def peak(config: ProDMPConfig, weights: np.ndarray) -> float:
    """The highest point of a basis function's response: a parabola through the best of a fine grid."""
    times = np.linspace(0, 5 * config.tau, 2001)[1:]
    heights = integrate(config, weights, 0.0, 0.0, 0.0, times)[:, 0]
    at = slice(heights.argmax() - 2, heights.argmax() + 3)
    quartic = np.polynomial.Polynomial.fit(times[at], heights[at], 4)
    return float(quartic(np.linspace(times[at][1], times[at][3], 2001)).max())


@pytest.mark.parametrize("name", SETTINGS)
def test_motion_solves_its_differential_equation(name: str) -> None:
    """Against numerical integration, with the scaling undone by one integration of each basis function."""
    config, _, dt, horizon = SETTINGS[name]
    motion = ProDMP(config, num_dof=1)
    weights, position, velocity = draw(motion, seed=1)
    if config.delay:
        velocity = torch.zeros(1, dtype=torch.float64)
    times = np.arange(1, horizon + 1) * dt
    late = times[times > config.delay] - config.delay
    peaks = [peak(config, unit) for unit in np.eye(config.num_basis)]
    raw = weights.numpy()[:-1] * config.weights_scale / np.array(peaks)
    goal = weights[-1].item() * config.goal_scale + (position.item() if config.relative_goal else 0.0)
    expected = integrate(config, raw, goal, position.item(), velocity.item(), late)
    ours = torch.stack(motion.trajectory(weights, position, velocity, times), -1)[:, 0].numpy()
    moving = times > config.delay
    assert np.abs(ours[moving] - expected).max() < 1e-6
    assert (ours[~moving] == [position.item(), 0.0]).all()


@pytest.mark.parametrize(
    "shape",
    [
        {"num_basis": 50, "bandwidth_factor": 20.0},
        {"num_basis": 10, "bandwidth_factor": 50.0},
        {"alpha": 3000.0},
        {"alpha_phase": 20.0},
    ],
)
def test_narrow_bases_and_stiff_springs_are_integrated_as_exactly(
    shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same motion from pieces of a sixteenth, in units of the basis functions' peaks."""
    config, times = ProDMPConfig(**shape), np.linspace(0, 1.5, 51)
    found = ProDMP(config, 1).basis(times)
    usual = ProDMP._piece
    monkeypatch.setattr(ProDMP, "_piece", lambda self: usual(self) / 16)
    finer = ProDMP(config, 1).basis(times)
    rounding = 2**16 * np.finfo(np.float64).eps  # of sums over thousands of pieces; up to 9,900 eps measured
    assert (found.positions - finer.positions).abs().max() < rounding
    assert (found.velocities - finer.velocities).abs().max() < rounding * finer.velocities.abs().max()


def test_without_weights_the_motion_is_the_critically_damped_closed_form() -> None:
    motion = ProDMP(ProDMPConfig(num_basis=4, tau=0.8, alpha=12.0), num_dof=1)
    weights = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.7], dtype=torch.float64)
    start, speed = torch.tensor([0.4], dtype=torch.float64), torch.tensor([-2.0], dtype=torch.float64)
    times = np.linspace(0, 3, 50)
    z = times / 0.8
    decay = np.exp(-6 * z)
    expected = 1.7 + decay * ((1 + 6 * z) * (0.4 - 1.7) + z * 0.8 * -2.0)
    slope = decay * (-36 * z * (0.4 - 1.7) + (1 - 6 * z) * 0.8 * -2.0) / 0.8
    positions, velocities = motion.trajectory(weights, start, speed, times)
    # The goal's basis function reaches 1 - 3e-12 in the five time constants it is scaled over.
    assert np.abs(positions[:, 0].numpy() - expected).max() < 1e-10
    assert np.abs(velocities[:, 0].numpy() - slope).max() < 1e-10


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("init_time", [0.0, 0.5])
def test_boundary_position_and_velocity_are_met_exactly(name: str, init_time: float) -> None:
    config, num_dof, _, _ = SETTINGS[name]
    motion = ProDMP(config, num_dof)
    weights, position, velocity = draw(motion, 3)
    init_time += config.delay
    positions, velocities = motion.trajectory(weights, position, velocity, [init_time], init_time)
    assert torch.equal(positions[:, 0], position)
    assert torch.equal(velocities[:, 0], velocity)


def test_velocity_is_the_derivative_of_the_position() -> None:
    config, num_dof, dt, horizon = SETTINGS["box"]
    motion = ProDMP(config, num_dof)
    weights, position, velocity = draw(motion)
    times, tiny = np.arange(1, horizon) * dt, 1e-5
    ahead, _ = motion.trajectory(weights, position, velocity, times + tiny)
    behind, _ = motion.trajectory(weights, position, velocity, times - tiny)
    _, velocities = motion.trajectory(weights, position, velocity, times)
    assert torch.allclose((ahead - behind) / (2 * tiny), velocities, atol=1e-7)


def test_replanning_from_a_state_of_the_motion_continues_it() -> None:
    config, num_dof, dt, horizon = SETTINGS["hopper"]
    motion = ProDMP(config, num_dof)
    weights, position, velocity = draw(motion, 2)
    times = np.arange(1, horizon + 1) * dt
    positions, velocities = motion.trajectory(weights, position, velocity, times)
    k = 60
    again = motion.trajectory(weights, positions[:, k], velocities[:, k], times[k:], init_time=times[k])
    assert torch.allclose(again[0], positions[:, k:], atol=1e-12)
    assert torch.allclose(again[1], velocities[:, k:], atol=1e-11)


def test_replanning_from_another_state_starts_there_and_still_reaches_the_goal() -> None:
    motion = ProDMP(ProDMPConfig(num_basis=3, tau=0.5), num_dof=1)
    weights = torch.tensor([0.3, -1.0, 2.0, 0.9], dtype=torch.float64)
    here, speed = torch.tensor([-0.2], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    positions, velocities = motion.trajectory(weights, here, speed, [0.3, 0.3 + 1e-6, 8.0], init_time=0.3)
    assert positions[0].item() == -0.2
    assert (positions[1] - positions[0]).item() == pytest.approx(1e-6, rel=1e-4)
    assert positions[2].item() == pytest.approx(0.9, abs=1e-6)
    assert abs(velocities[2].item()) < 1e-6


def test_a_relative_goal_moves_with_the_start_and_an_absolute_one_does_not() -> None:
    weights = torch.tensor([0.0, 0.0, 0.5], dtype=torch.float64)
    still = torch.zeros(1, dtype=torch.float64)
    for relative, expected in ((True, 3.5), (False, 0.5)):
        motion = ProDMP(ProDMPConfig(num_basis=2, relative_goal=relative), num_dof=1)
        positions, _ = motion.trajectory(weights, still + 3.0, still, [6.0])
        assert positions.item() == pytest.approx(expected, abs=1e-9)


def test_delay_holds_the_start_and_then_shifts_the_motion() -> None:
    plain = ProDMPConfig(num_basis=3, tau=0.75, alpha=25.0)
    motion, delayed = ProDMP(plain, 2), ProDMP(replace(plain, delay=0.3), 2)
    weights, position, _ = draw(motion)
    still = torch.zeros(2, dtype=torch.float64)
    times = np.arange(1, 100) * 0.01
    expected = motion.trajectory(weights, position, still, times)
    ours = delayed.trajectory(weights, position, still, times + 0.3)
    assert torch.allclose(ours[0], expected[0], atol=1e-12)
    assert torch.allclose(ours[1], expected[1], atol=1e-11)
    held, speed = delayed.trajectory(weights, position, still, [0.0, 0.1, 0.29])
    assert torch.equal(held, position.expand(3, 2))
    assert not speed.any()


def test_scales_are_the_peak_heights_of_the_basis_functions() -> None:
    config = ProDMPConfig(num_basis=4, weights_scale=0.3, goal_scale=0.7)
    peaks = ProDMP(config, 1).basis(np.linspace(0, 4.99, 2000)).positions.amax(0)
    expected = torch.tensor([0.3, 0.3, 0.3, 0.3, 0.7], dtype=torch.float64)
    assert torch.allclose(peaks, expected, rtol=1e-4)


@pytest.mark.parametrize("alpha", [0.1, 0.3, 2.0, 20.0, 25.0, 30.0, 50.0, 300.0])
def test_scales_are_the_peak_heights_however_stiff_the_motion_is(alpha: float) -> None:
    """Soft motions still rise when they are scaled, stiff ones stand still there."""
    config = ProDMPConfig(num_basis=3, alpha=alpha)
    peaks = ProDMP(config, 1).basis(np.linspace(0, 5, 2001)).positions.amax(0)
    assert torch.allclose(peaks, torch.ones(4, dtype=torch.float64), rtol=1e-3)


def test_weights_of_one_degree_of_freedom_move_no_other() -> None:
    motion = ProDMP(ProDMPConfig(num_basis=3), num_dof=3)
    weights = torch.zeros(12, dtype=torch.float64)
    weights[4:8] = 1.0
    still = torch.zeros(3, dtype=torch.float64)
    positions, _ = motion.trajectory(weights, still, still, [0.5])
    assert positions[0, [0, 2]].tolist() == [0.0, 0.0]
    assert positions[0, 1] > 0.1


def test_times_may_come_in_any_order_and_repeat() -> None:
    motion = ProDMP(ProDMPConfig(num_basis=3), num_dof=2)
    weights, position, velocity = draw(motion)
    ordered, _ = motion.trajectory(weights, position, velocity, [0.1, 0.4, 0.7])
    shuffled, _ = motion.trajectory(weights, position, velocity, [0.7, 0.1, 0.4, 0.1])
    assert torch.allclose(shuffled, ordered[[2, 0, 1, 0]], atol=1e-14)


def test_trajectories_are_differentiable_in_the_weights() -> None:
    motion = ProDMP(ProDMPConfig(num_basis=3), num_dof=2)
    weights, position, velocity = draw(motion)
    basis = motion.basis([0.3, 0.9])
    weights.requires_grad_()
    positions, _ = motion.trajectory(weights, position, velocity, basis)
    (gradient,) = torch.autograd.grad(positions[1, 0], weights)
    assert torch.equal(gradient[:4], basis.positions[1])
    assert not gradient[4:].any()


def test_refuses_impossible_settings_and_sizes() -> None:
    with pytest.raises(ConfigError, match="num_basis must be at least 2, got 1"):
        ProDMPConfig(num_basis=1)
    with pytest.raises(ConfigError, match=r"tau must be a positive number, got 0\.0"):
        ProDMPConfig(tau=0.0)
    with pytest.raises(ConfigError, match="delay"):
        ProDMPConfig(delay=-0.1)
    with pytest.raises(ConfigError, match="basis function moves nothing at alpha=1e"):
        ProDMP(ProDMPConfig(alpha=1e20), 1)
    with pytest.raises(ConfigError, match="num_dof must be at least 1"):
        ProDMP(ProDMPConfig(), 0)
    motion = ProDMP(ProDMPConfig(num_basis=3), num_dof=2)
    zeros = torch.zeros(2)
    with pytest.raises(InvalidInputError, match=r"weights must be \[..., 8\].*\(7,\)"):
        motion.trajectory(torch.zeros(7), zeros, zeros, [1.0])
    with pytest.raises(InvalidInputError, match=r"init_velocity must be \[..., 2\], got \(3,\)"):
        motion.trajectory(torch.zeros(8), zeros, torch.zeros(3), [1.0])
    with pytest.raises(InvalidInputError, match=r"not before init_time=0\.5"):
        motion.basis([0.4], init_time=0.5)
