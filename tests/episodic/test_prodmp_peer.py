"""Movement primitives against mp_pytorch, which computes them on a grid of time steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tether.episodic.prodmp import ProDMP, ProDMPConfig

pytest.importorskip("mp_pytorch")

# The published motions with their time steps; the fourth's tau and delay are no multiples of its step.
METAWORLD = (ProDMPConfig(8, 5.0, 10.0, 5.0, 0.1, 0.1, relative_goal=True), 0.0125, 500)
BOX = (ProDMPConfig(8, 2.0, 10.0, 3.0, 0.3, 0.3), 0.02, 100)
HOPPER = (ProDMPConfig(3, 0.8, 10.0, 3.0), 0.008, 250)
TENNIS = (ProDMPConfig(3, 0.75, 25.0, 3.0, 0.7, 0.1, relative_goal=True, delay=0.3), 0.008, 300)
DOF = 2


def inputs(config: ProDMPConfig) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = (ProDMP(config, DOF).num_weights, DOF, DOF)
    weights, position, velocity = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes
    )
    # mp_pytorch wants a robot that waits to stand still.
    return weights, position, velocity * (config.delay == 0.0)


def ours(config: ProDMPConfig, times: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return ProDMP(config, DOF).trajectory(*inputs(config), times)


def theirs(config: ProDMPConfig, dt: float, times: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """mp_pytorch's trajectory on a grid of `dt`."""
    from mp_pytorch.basis_gn import ProDMPBasisGenerator
    from mp_pytorch.mp import ProDMP as Peer
    from mp_pytorch.phase_gn import ExpDecayPhaseGenerator

    phase = ExpDecayPhaseGenerator(
        tau=config.tau, delay=config.delay, alpha_phase=config.alpha_phase, dtype=torch.float64
    )
    basis = ProDMPBasisGenerator(
        phase, config.num_basis, config.bandwidth_factor, 0, dt, config.alpha,
        pre_compute_length_factor=5, dtype=torch.float64,
    )  # fmt: skip
    peer = Peer(
        basis, DOF, weights_scale=config.weights_scale, goal_scale=config.goal_scale, auto_scale_basis=True,
        relative_goal=config.relative_goal, dtype=torch.float64,
    )  # fmt: skip
    weights, position, velocity = inputs(config)
    peer.update_inputs(
        times=torch.as_tensor(times),
        params=weights,
        init_time=torch.zeros((), dtype=torch.float64),
        init_pos=position,
        init_vel=velocity,
    )
    return peer.get_traj_pos(), peer.get_traj_vel()


def gap(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> list[float]:
    """The largest difference of positions and of velocities, as a fraction of the largest of them."""
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize(("config", "dt", "horizon"), [METAWORLD, BOX, HOPPER], ids=["meta", "box", "hopper"])
def test_equals_mp_pytorch_up_to_its_grid_where_tau_is_a_multiple_of_the_step(
    config: ProDMPConfig, dt: float, horizon: int
) -> None:
    """Its integrals are trapezoids on the grid, so half the step leaves a quarter of the difference."""
    times = np.arange(1, horizon + 1) * dt
    exact = ours(config, times)
    coarse, fine = (gap(theirs(config, step, times), exact) for step in (dt, dt / 2))
    assert max(coarse) < 5e-3
    for before, after in zip(coarse, fine, strict=True):
        assert after < 0.35 * before


def test_differs_where_tau_is_no_multiple_of_the_step_because_mp_pytorch_warps_time() -> None:
    """It counts steps of dt, but lays round(tau / dt) of them into tau: 94 of 8 ms into 0.75 s, as if tau
    were 0.752 s. With a step that divides tau and delay, the difference is that of the grid again."""
    config, dt, horizon = TENNIS
    times = np.arange(1, horizon + 1) * dt
    found = theirs(config, dt, times)
    exact = ours(config, times)
    warped = ours(replace(config, tau=dt * round(config.tau / dt)), times)
    assert 0.005 < gap(found, exact)[0] < 0.05
    assert gap(found, warped)[0] < 0.5 * gap(found, exact)[0]
    assert gap(theirs(config, 0.0005, times), exact)[0] < 1e-4
