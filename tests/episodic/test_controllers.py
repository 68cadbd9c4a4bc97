from __future__ import annotations

import numpy as np
import pytest

from tether.episodic.controllers import MocapController, PDController
from tether.errors import InvalidInputError


def test_pd_control_of_a_unit_mass_follows_the_damped_oscillator_in_closed_form() -> None:
    controller = PDController(position_gains=4.0, velocity_gains=4.0)  # critically damped, omega = 2
    position, velocity, dt = np.array([1.0]), np.array([0.0]), 1e-5
    for _ in range(100_000):
        force = controller(np.zeros(1), np.zeros(1), position, velocity)
        velocity = velocity + dt * force
        position = position + dt * velocity
    assert position[0] == pytest.approx((1 + 2 * 1.0) * np.exp(-2 * 1.0), abs=1e-4)


def test_pd_gains_belong_to_their_joints() -> None:
    controller = PDController(position_gains=[1.0, 10.0], velocity_gains=[0.1, 0.0])
    action = controller(
        np.array([1.0, 1.0]), np.array([2.0, 2.0]), np.array([0.5, 0.8]), np.array([1.0, 0.0])
    )
    np.testing.assert_allclose(action, [1.0 * 0.5 + 0.1 * 1.0, 10.0 * 0.2])


@pytest.mark.parametrize("wrong", range(4))
def test_pd_refuses_arrays_of_different_shapes(wrong: int) -> None:
    arrays = [np.zeros(3) for _ in range(4)]
    arrays[wrong] = np.zeros(2)
    with pytest.raises(InvalidInputError, match="one shape"):
        PDController(1.0, 1.0)(*arrays)


@pytest.mark.parametrize("gains", [-1.0, [1.0, np.nan], [[1.0]]])
def test_gains_that_make_no_sense_are_refused(gains: object) -> None:
    with pytest.raises(InvalidInputError, match="velocity_gains"):
        PDController(1.0, gains)  # type: ignore[arg-type]


def test_mocap_asks_for_the_remaining_way_and_passes_the_gripper_on() -> None:
    hand = np.array([0.0, 0.6, 0.2])
    action = MocapController(scale=100.0)(np.array([0.004, 0.6, 0.19, 0.7]), hand)
    np.testing.assert_allclose(action, [0.4, 0.0, -1.0, 0.7])
    np.testing.assert_array_equal(hand, [0.0, 0.6, 0.2])


def test_mocap_refuses_other_shapes() -> None:
    with pytest.raises(InvalidInputError, match=r"x, y, z, gripper"):
        MocapController()(np.zeros(3), np.zeros(3))
