"""Motions within a robot's limits: exact accelerations, the least slowing down, refusals, replanning."""

import csv
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.episodic.plans import MotionLimits, Plan, plan_motion
from tether.episodic.prodmp import ProDMP, ProDMPConfig
from tether.errors import ConfigError, InvalidInputError, MotionLimitError

CONFIG = ProDMPConfig(num_basis=4, tau=1.5, alpha=12.0, weights_scale=0.5, goal_scale=0.5)
CONFIGS = [CONFIG, replace(CONFIG, relative_goal=True), replace(CONFIG, delay=0.3, relative_goal=True)]
DT = 0.02


def problem(config=CONFIG, seed=0, still=True, num_dof=2):
    generator = torch.Generator().manual_seed(seed)
    motion = ProDMP(config, num_dof)
    weights = torch.randn(motion.num_weights, generator=generator, dtype=torch.float64)
    position = torch.randn(num_dof, generator=generator, dtype=torch.float64)
    velocity = torch.randn(num_dof, generator=generator, dtype=torch.float64) * (not still)
    return motion, weights, position, velocity


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("still", [True, False])
def test_accelerations_are_the_velocities_derivative(config, still):
    motion, weights, position, velocity = problem(config, still=still)
    # Times away from the delay's end, where the acceleration jumps.
    times, h = np.array([0.1, 0.45, 0.9, 1.4, 2.0]), 1e-5
    positions, velocities = motion.trajectory(weights, position, velocity, times)
    found = motion.accelerations(weights, position, positions, velocities, times)
    _, after = motion.trajectory(weights, position, velocity, times + h)
    _, before = motion.trajectory(weights, position, velocity, times - h)
    torch.testing.assert_close(found, (after - before) / (2 * h), rtol=1e-6, atol=1e-6)


def test_without_limits_a_plan_is_the_trajectory():
    motion, weights, position, velocity = problem(still=False)
    plan = plan_motion(motion, weights, position, velocity, DT, 2.0)
    positions, velocities = motion.trajectory(weights, position, velocity, DT * np.arange(1, 101))
    assert plan.slowed == 1.0
    assert plan.times == pytest.approx(DT * np.arange(1, 101), abs=1e-12)
    assert np.array_equal(plan.positions, positions.numpy())
    assert np.array_equal(plan.velocities, velocities.numpy())


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    config=st.sampled_from(CONFIGS),
    speed=st.floats(0.05, 20),
    push=st.floats(0.05, 200),
)
def test_from_rest_the_least_factor_keeps_the_path(seed, config, speed, push):
    motion, *state = problem(config, seed)
    limits = MotionLimits(velocity=speed, acceleration=push)
    free = plan_motion(motion, *state, DT, 2.0)
    plan = plan_motion(motion, *state, DT, 2.0, limits=limits)
    assert np.abs(plan.velocities).max() <= speed * (1 + 1e-4)
    assert np.abs(plan.accelerations).max() <= push * (1 + 1e-4)
    times = np.linspace(0.0, 2.0, 4001)  # holds the delay's end
    positions, velocities = motion.trajectory(*state, times)
    accelerations = motion.accelerations(state[0], state[1], positions, velocities, times)
    need = max(velocities.abs().max().item() / speed, math.sqrt(accelerations.abs().max().item() / push))
    assert plan.slowed == pytest.approx(max(1.0, need), rel=1e-4)
    # The path is the same: what was at t is at slowed * t.
    again, _ = ProDMP(
        replace(config, tau=config.tau * plan.slowed, delay=config.delay * plan.slowed), 2
    ).trajectory(*state, plan.slowed * free.times)
    assert again.numpy() == pytest.approx(free.positions, abs=1e-9 * max(1, np.abs(free.positions).max()))


def test_one_joint_can_have_a_limit_of_its_own():
    motion, *state = problem()
    free = plan_motion(motion, *state, DT, 2.0)
    half = np.abs(free.velocities).max(axis=0) / 2
    plan = plan_motion(motion, *state, DT, 2.0, limits=MotionLimits(velocity=(half[0], math.inf)))
    assert np.abs(plan.velocities[:, 0]).max() <= half[0] * (1 + 1e-4)
    assert plan.slowed == pytest.approx(2, rel=0.01)


def test_a_moving_robot_keeps_its_velocity_and_the_limits():
    motion, *state = problem(still=False)
    limit = 1.05 * max(state[2].abs().max().item(), 0.5)
    free = plan_motion(motion, *state, DT, 2.0)
    assert np.abs(free.velocities).max() > limit  # or this would show nothing
    plan = plan_motion(motion, *state, DT, 2.0, limits=MotionLimits(velocity=limit))
    assert np.abs(plan.velocities).max() <= limit * (1 + 1e-4)
    first = plan_motion(motion, *state, 1e-6, 1e-5)
    assert first.velocities[0] == pytest.approx(state[2].numpy(), abs=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_from_a_state_in_motion_a_thousandth_faster_is_too_fast(seed):
    """The limits are looked up in steps of their own, finer than those of the search."""
    motion, weights, position, velocity = problem(seed=seed, still=False)
    limits = MotionLimits(velocity=1.05 * max(velocity.abs().max().item(), 0.5), acceleration=20.0)
    plan = plan_motion(motion, weights, position, velocity, DT, 2.0, limits=limits)
    assert plan.slowed > 1.01

    def worst(slowed):
        slower = ProDMP(replace(CONFIG, tau=CONFIG.tau * slowed), 2)
        times = np.linspace(0.0, 2.0 * slowed, 2501)
        positions, velocities = slower.trajectory(weights, position, velocity, times)
        accelerations = slower.accelerations(weights, position, positions, velocities, times)
        return max(velocities.abs().max() / limits.velocity, accelerations.abs().max() / limits.acceleration)

    # DT does not divide the slowed motion, and the row past its end may ask for up to a step more.
    step = 1 + DT / (2.0 * plan.slowed)
    assert worst(plan.slowed) <= 1 + 1e-4
    assert worst(plan.slowed / step * (1 - 2e-3)) > 1


def test_a_robot_that_moves_while_the_delay_holds_its_position_is_refused():
    """It would have to stand still at once, and to set out with that velocity at once."""
    motion, weights, position, velocity = problem(CONFIGS[2], still=False)
    with pytest.raises(InvalidInputError, match=r"delay of 0\.3 s, but at start_time=0\.0 the robot moves"):
        plan_motion(motion, weights, position, velocity, DT, 2.0, limits=MotionLimits(acceleration=10.0))
    with pytest.raises(InvalidInputError, match=r"start_time=0\.2 the robot moves"):
        plan_motion(motion, weights, position, velocity, DT, 2.0, start_time=0.2, goal_from=position)
    still = plan_motion(motion, weights, position, 0 * velocity, DT, 2.0)
    assert np.array_equal(still.positions[:14], np.tile(position.numpy(), (14, 1)))
    state = weights, position, velocity
    later = plan_motion(motion, *state, 1e-6, 2.0, start_time=1.99999, goal_from=position)
    assert later.velocities[0] == pytest.approx(velocity.numpy(), abs=1e-3)


def test_replanning_goes_on_without_a_jump():
    motion, weights, position, velocity = problem(CONFIGS[2])
    whole = plan_motion(motion, weights, position, velocity, DT, 2.0)
    here = 39  # the state after 40 steps
    state = torch.from_numpy(whole.positions[here]), torch.from_numpy(whole.velocities[here])
    same = plan_motion(motion, weights, *state, DT, 2.0, start_time=40 * DT, goal_from=position)
    assert same.positions == pytest.approx(whole.positions[40:], abs=1e-10)
    assert same.accelerations == pytest.approx(whole.accelerations[40:], abs=1e-8)
    with pytest.raises(InvalidInputError, match=r"start_time=0\.8 on\. Give that position as goal_from"):
        plan_motion(motion, weights, *state, DT, 2.0, start_time=40 * DT)
    absolute = ProDMP(CONFIG, 2)
    whole = plan_motion(absolute, weights, position, velocity, DT, 2.0)
    state = torch.from_numpy(whole.positions[here]), torch.from_numpy(whole.velocities[here])
    same = plan_motion(absolute, weights, *state, DT, 2.0, start_time=40 * DT)
    assert same.positions == pytest.approx(whole.positions[40:], abs=1e-10)
    other = plan_motion(absolute, -weights, *state, 1e-6, 2.0, start_time=2.0 - 1e-5)
    assert other.positions[0] == pytest.approx(whole.positions[here], abs=1e-4)


def test_a_relative_goal_can_be_measured_from_another_place():
    motion, weights, position, velocity = problem(CONFIGS[1], still=False)
    absolute, *_ = problem(CONFIG)
    free = plan_motion(motion, weights, position, velocity, DT, 9.0, goal_from=position + 0.25)
    there = plan_motion(absolute, weights, position, velocity, DT, 9.0)
    assert free.positions[-1] - there.positions[-1] == pytest.approx(position.numpy() + 0.25, abs=1e-6)


@pytest.mark.parametrize(
    ("tau", "dt", "duration", "limits"),
    [
        (3.0, 0.02, 1.0, MotionLimits(velocity=0.6, position_high=0.5)),
        (3.0, 0.1, 1.05, MotionLimits(position_high=0.53)),
        (10.0, 0.1, 1.0, MotionLimits(velocity=0.05)),
        (10.0, 0.3, 1.0, MotionLimits(acceleration=0.2)),
    ],
)
def test_the_row_past_the_motions_end_keeps_the_limits_too(tau, dt, duration, limits):
    """These motions are still on their way when they end, so that a part of a step matters."""
    motion = ProDMP(ProDMPConfig(num_basis=3, tau=tau), 1)
    weights, still = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.zeros(1)
    plan = plan_motion(motion, weights, still, still, dt, duration, limits=limits)
    assert plan.times[-1] >= plan.slowed * duration * (1 - 1e-9)
    assert plan.positions.max() <= limits.position_high + 1e-8
    assert plan.velocities.max() <= limits.velocity * (1 + 1e-8)
    assert plan.accelerations.max() <= limits.acceleration * (1 + 1e-8)
    # What meets the limits up to its end is slowed by a step at most.
    fine = plan_motion(motion, weights, still, still, duration / 1000, duration, limits=limits)
    assert plan.slowed * duration <= fine.slowed * duration + dt


@pytest.mark.parametrize("speed", [0.34, 0.4, 0.51, 0.8, 0.97])
def test_a_row_on_the_peak_keeps_the_limit_and_can_be_replanned_from(speed):
    """At these factors a row comes nearer to the peak than any instant between rows."""
    motion = ProDMP(ProDMPConfig(num_basis=4, tau=1.0, alpha=12.0), 1)
    weights, still = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.float64), torch.zeros(1).double()
    limits = MotionLimits(velocity=speed)
    plan = plan_motion(motion, weights, still, still, DT, 2.0, limits=limits)
    fastest = int(plan.velocities.argmax())
    assert plan.velocities[fastest, 0] == pytest.approx(speed, rel=1e-4)
    assert plan.velocities[fastest, 0] <= speed * (1 + 1e-9)
    state = torch.from_numpy(plan.positions[fastest]), torch.from_numpy(plan.velocities[fastest])
    resting = torch.tensor([0.0, 0.0, 0.0, 0.0, state[0].item()], dtype=torch.float64)
    bent = plan_motion(motion, resting, *state, DT, 2.0, start_time=1.0, limits=limits)
    assert bent.velocities.max() <= speed


@pytest.mark.parametrize("goal", [1.2, 2.0])
@pytest.mark.parametrize("row", [13, 14, 15])
def test_from_its_speed_limit_a_robot_can_be_sent_farther(row, goal):
    """There an excess of speed is small however much slower the motion has to be."""
    motion = ProDMP(ProDMPConfig(num_basis=3, tau=1.0), 1)
    still, limits = torch.zeros(1).double(), MotionLimits(velocity=0.5)

    def to(place, *state, **options):
        weights = torch.tensor([0.0, 0.0, 0.0, place], dtype=torch.float64)
        return plan_motion(motion, weights, *state, 0.05, 2.0, limits=limits, **options)

    plan = to(1.0, still, still)
    assert plan.velocities[14, 0] == pytest.approx(0.5, rel=1e-3)
    state = torch.from_numpy(plan.positions[row]), torch.from_numpy(plan.velocities[row])
    farther = to(goal, *state, start_time=plan.times[row] / plan.slowed)
    assert farther.velocities.max() <= 0.5 * (1 + 1e-9)
    assert 4 < farther.slowed < 9


def test_a_row_past_the_end_is_named_where_slowing_down_is_not_allowed():
    motion = ProDMP(ProDMPConfig(num_basis=3, tau=3.0), 1)
    weights, still = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.zeros(1)
    limits = MotionLimits(position_high=0.53)
    with pytest.raises(
        MotionLimitError, match=r"ends after 1\.05 s, within the limits, but .* at 1\.1 s.*whole steps"
    ):
        plan_motion(motion, weights, still, still, 0.1, 1.05, limits=limits, on_violation="refuse")


def test_positions_out_of_range_are_refused_by_joint_and_time():
    motion, *state = problem()
    free = plan_motion(motion, *state, DT, 2.0)
    high = free.positions[:, 1].max() - 0.01
    with pytest.raises(MotionLimitError, match=r"Joint 2 would be at .* via-points"):
        plan_motion(motion, *state, DT, 2.0, limits=MotionLimits(position_high=(math.inf, high)))


def test_too_fast_is_refused_where_that_was_chosen():
    motion, *state = problem()
    limits = MotionLimits(velocity=0.1)
    with pytest.raises(MotionLimitError, match="too fast"):
        plan_motion(motion, *state, DT, 2.0, limits=limits, on_violation="refuse")


def test_a_robot_that_is_already_too_fast_is_named():
    motion, weights, position, _ = problem()
    with pytest.raises(MotionLimitError, match="Joint 2 starts at a speed of 3"):
        plan_motion(
            motion, weights, position, torch.tensor([0.0, 3.0]), DT, 2.0, limits=MotionLimits(velocity=1.0)
        )


@pytest.mark.parametrize(
    "values", [{"velocity": 0.0}, {"acceleration": (1.0, -1.0)}, {"position_low": 1.0, "position_high": 1.0},
               {"velocity": math.nan}, {"position_low": (0.0, 0.0), "position_high": (1.0, 1.0, 1.0)}],
)  # fmt: skip
def test_limits_that_make_no_sense(values):
    with pytest.raises(ConfigError):
        MotionLimits(**values)


def test_limits_of_another_robot():
    motion, *state = problem()
    with pytest.raises(ConfigError, match="2 degrees of freedom, but velocity has 3"):
        plan_motion(motion, *state, DT, 2.0, limits=MotionLimits(velocity=(1.0, 1.0, 1.0)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weights": torch.zeros(1, 10)}, r"weights must be \[10\], of one motion; got \[1, 10\]"),
        ({"weights": torch.zeros(9)}, r"weights must be \[10\], of one motion; got \[9\]"),
        ({"weights": torch.full((10,), math.nan)}, r"weights must hold finite numbers, got \[nan"),
        ({"position": torch.zeros(1, 2)}, r"position must be \[2\], of one motion; got \[1, 2\]"),
        ({"velocity": torch.tensor([0.0, math.inf])}, r"velocity must hold finite numbers, got \[0\.0, inf"),
        ({"velocity": torch.zeros(3)}, r"velocity must be \[2\]"),
        ({"goal_from": torch.zeros(3)}, r"goal_from must be \[2\], of one motion; got \[3\]"),
        ({"goal_from": torch.full((2,), math.nan)}, "goal_from must hold finite numbers"),
    ],
)
@pytest.mark.parametrize("limits", [None, MotionLimits(velocity=1.0)])
def test_what_is_no_state_of_this_robot_is_named(values, message, limits):
    motion, weights, position, velocity = problem(CONFIGS[1])
    given = {"weights": weights, "position": position, "velocity": velocity} | values
    with pytest.raises(InvalidInputError, match=message):
        plan_motion(motion, **given, dt=DT, duration=2.0, limits=limits)


def test_weights_straight_from_a_network_are_planned():
    motion, weights, *state = problem()
    plan = plan_motion(motion, weights.clone().requires_grad_(), *state, DT, 2.0)
    assert np.array_equal(plan.positions, plan_motion(motion, weights, *state, DT, 2.0).positions)


@pytest.mark.parametrize("limits", [MotionLimits(velocity=1e-9), MotionLimits(acceleration=1e-300)])
def test_limits_that_make_a_motion_endless_are_refused(limits):
    motion, *state = problem()
    with pytest.raises(MotionLimitError, match=r"times slower, .* more than 1,000,000 steps of 0\.02 s"):
        plan_motion(motion, *state, DT, 2.0, limits=limits)


@pytest.mark.parametrize("times", [{"dt": 0.0}, {"duration": -1.0}, {"start_time": 2.5}])
def test_times_that_make_no_sense(times):
    motion, *state = problem()
    with pytest.raises(InvalidInputError, match="start_time"):
        plan_motion(motion, *state, **({"dt": DT, "duration": 2.0} | times))


def test_csv_holds_every_digit(tmp_path):
    motion, *state = problem()
    plan = plan_motion(motion, *state, DT, 2.0)
    with plan.write_csv(tmp_path / "motion.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(plan.times)
    assert [float(row["velocity_2"]) for row in rows] == plan.velocities[:, 1].tolist()
    assert isinstance(plan, Plan)
