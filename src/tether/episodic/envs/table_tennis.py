"""Table Tennis: a seven-joint arm returns a served ball to a target on the other half of the table.

Ported from fancy_gym (MIT licence, see NOTICE), in two versions: that of its release 0.3.0, and that of its
later development which TCE was published with. Same model, starts, observations and rewards. Release 0.3.0
ends an episode when the ball's fate is decided; here it runs on to a fixed horizon, with rewards of zero from
then on, because trajectories are compared over one length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import gymnasium
import mujoco
import numpy as np

from tether.episodic.controllers import PDController
from tether.episodic.envs.simulation import JointAdapter, MujocoTaskEnv
from tether.episodic.episodes import FloatArray
from tether.errors import SimulationError, check_option

TableTennisReward = Literal["dense", "final"]
Violations = Literal["executed", "refused"]

JOINT_LOW = np.array([-2.6, -2.0, -2.8, -0.9, -4.8, -1.6, -2.2])
JOINT_HIGH = np.array([2.6, 2.0, 2.8, 3.1, 1.3, 1.6, 2.2])

# How far starts lie from the middle one, as a fraction of each joint's range.
_START_SPREAD = 0.1
_START_JOINTS = np.array([0.0, 0.0, 0.0, 1.5, 0.0, 0.0, 1.5])
_PLACE_LOW, _PLACE_HIGH = np.array([-1.0, -0.65]), np.array([-0.2, 0.65])
_BALL_HEIGHT = 1.75
_BALL_VELOCITY = np.array([2.5, 0.0, 0.5])
_TABLE_HEIGHT, _NET_HEIGHT, _TABLE_END, _TABLE_SIDE, _GRAVITY = 0.77, 0.1, 1.1, 0.6, 9.81
_SUCCESS_DISTANCE = 0.2
_NOT_LANDED = 10.0
_BROKEN = -25.0


class TableTennisEnv(MujocoTaskEnv):
    """Seven joints, torques in [-1, 1] times the motors' gears, 300 steps of 8 ms.

    Observation [19]: joint positions (7) and velocities (7), ball position (3), target on the table (2).
    Where the ball is served from and the target are drawn anew. Success: returned to the other half, within
    20 cm of the target.

    A motion so violent that MuJoCo gives up is paid -25, as in the original, if the ball's fate was open; arm
    and ball then stand still to the end of the episode.

    Args:
        reward: "final" comes once, when the ball's fate is decided (it lands after the hit, or reaches the
            floor) or at the last step. "dense" pays at every step, with d the smallest distance so far:
            0.005 (1 - tanh d²) of ball and bat until the hit, 2 at the hit, 0.02 (1 - tanh d²) of ball and
            target in flight, at the landing 4 (1 - tanh d²) of its place and target, and 1 if over the net.
        random_init: draw the joints' start, too, within a tenth of each joint's range about the middle one.
        violations: what becomes of a trajectory that leaves the joints' range; see `TableTennisAdapter`.
        options: of `MujocoTaskEnv`: render_mode, width, height, camera.
    """

    metadata = MujocoTaskEnv.metadata | {"render_fps": 125}
    horizon = 300

    def __init__(
        self,
        *,
        reward: TableTennisReward = "final",
        random_init: bool = False,
        violations: Violations = "refused",
        **options: Any,
    ) -> None:
        check_option("reward", reward, get_args(TableTennisReward))
        check_option("violations", violations, get_args(Violations))
        self.reward = reward
        self.random_init = random_init
        self.violations = violations
        options.setdefault("camera", "overview")
        super().__init__("table_tennis.xml", frame_skip=4, action_size=7, observation_size=19, **options)
        self._target_body = self.model.body("target_point").id
        self._ball_position = self.data.xpos[self.model.body("target_ball").id]  # a view, like the next
        self._bat_position = self.data.geom_xpos[self.model.geom("bat").id]
        self._ball = self.model.geom("target_ball_contact").id
        self._bats = {self.model.geom("bat").id, self.model.geom("bat_back").id}
        self._floor = self.model.geom("floor").id
        self._table = self.model.geom("table_tennis_table").id
        self._target = [0.0, 0.0]

    def _begin(self) -> None:
        place = self.np_random.uniform(low=_PLACE_LOW, high=_PLACE_HIGH)
        while not _serve_is_playable(*place):
            place = self.np_random.uniform(low=_PLACE_LOW, high=_PLACE_HIGH)
        self._target = self.np_random.uniform(low=_PLACE_LOW, high=_PLACE_HIGH).tolist()
        self.model.body_pos[self._target_body] = [*self._target, _TABLE_HEIGHT]
        joints = _START_JOINTS
        if self.random_init:
            reach = _START_SPREAD * (JOINT_HIGH - JOINT_LOW)
            drawn = joints + reach * self.np_random.uniform(-1.0, 1.0, 7)
            joints = np.clip(drawn, JOINT_LOW, JOINT_HIGH)
        self.data.qpos[:] = [*joints, *place, _BALL_HEIGHT]
        self.data.qvel[:] = [*np.zeros(7), *_BALL_VELOCITY]
        mujoco.mj_forward(self.model, self.data)
        self._hit = self._bounced = self._returned = self._decided = self._broken = False
        self._landing: list[float] | None = None
        self._nearest_bat = self._nearest_target = math.inf

    def _advance(self, action: FloatArray) -> tuple[float, dict[str, Any]]:
        broken, hit, decided = self._broken, self._hit, self._decided
        if not broken:
            self._play(action, decided)
        reward = 0.0
        if self._broken:
            reward = 0.0 if broken or decided else _BROKEN
        elif self.reward == "dense":
            reward = self._dense_reward(hit, decided)
        elif not decided and (self._decided or self._steps >= self.horizon):
            self._decided = True
            reward = self._final_reward()
        miss = _NOT_LANDED if self._landing is None else math.dist(self._landing[:2], self._target)
        return reward, {
            "success": self._returned and miss < _SUCCESS_DISTANCE,
            "hit_ball": self._hit,
            "returned": self._returned,
            "landing_error": miss,
            "broken": self._broken,
        }

    def _play(self, action: FloatArray, decided: bool) -> None:
        """Simulate one step, and where the simulation breaks go back to its beginning and stay there."""
        before = self.data.qpos.copy(), self.data.qvel.copy()
        self.data.ctrl[:] = action
        try:
            if self._nothing_to_watch(decided):
                self._simulate_on(self.frame_skip)
                return
            for _ in range(self.frame_skip):
                self._simulate_on(1)
                self._watch_ball()
        except SimulationError:
            self._broken = self._decided = True
            self._returned = self._returned and decided
            self.data.qpos[:], self.data.qvel[:] = before
            mujoco.mj_forward(self.model, self.data)

    def _nothing_to_watch(self, decided: bool) -> bool:
        # A ball that was missed still earns a dense reward for being near the bat.
        return decided and (self._hit or self.reward == "final")

    def _watch_ball(self) -> None:
        """Follow hit and landing, and how near the ball has come to bat and target, one simulator step."""
        ball = self._ball_position.tolist()
        final = self.reward == "final"
        # In release 0.3.0 the rest of the deciding step still counts.
        if self.data.ncon and (final or not self._decided):
            self._watch_contacts(ball, self._ball_touches())
        # The dense reward asks for the bat up to the hit, and for the target afterwards.
        if final or not self._hit:
            self._nearest_bat = min(self._nearest_bat, math.dist(ball, self._bat_position.tolist()))
        if final or self._hit:
            self._nearest_target = min(self._nearest_target, math.dist(ball[:2], self._target))

    def _watch_contacts(self, ball: list[float], touching: set[int]) -> None:
        if not self._hit:
            self._hit = bool(touching & self._bats)
            if not self._hit and self._floor in touching:
                self._land(ball)
        if self._hit and not self._bounced and touching & {self._floor, self._table}:
            self._bounced = True
            self._land(ball)
            self._returned = self._floor not in touching and ball[0] < 0.0

    def _land(self, position: list[float]) -> None:
        self._landing = position
        self._decided = True

    def _ball_touches(self) -> set[int]:
        """The geoms in contact with the ball."""
        others: set[int] = set()
        for first, second in self.data.contact.geom.tolist():
            if first == self._ball:
                others.add(second)
            elif second == self._ball:
                others.add(first)
        return others

    def _dense_reward(self, hit_before: bool, decided_before: bool) -> float:
        if not self._hit:
            return 0.005 * (1.0 - math.tanh(self._nearest_bat**2))
        if not hit_before:
            self._nearest_target = math.inf  # what came before the hit does not count
            return 2.0
        if self._landing is None:
            return 0.02 * (1.0 - math.tanh(self._nearest_target**2))
        return 0.0 if decided_before else self._landing_reward()

    def _landing_reward(self) -> float:
        assert self._landing is not None
        miss = math.dist(self._landing[:2], self._target)
        return 4.0 * (1.0 - math.tanh(miss**2)) + float(self._landing[0] < 0.0)

    def _final_reward(self) -> float:
        nearness = 1.0 - math.tanh(self._nearest_bat**2)
        if not self._hit:
            return 0.2 * nearness
        if self._landing is None:
            return 2.0 * nearness + 1.0 - math.tanh(self._nearest_target**2)
        return 2.0 * nearness + self._landing_reward()

    def _observation(self) -> FloatArray:
        positions = self.data.qpos
        observation = np.empty(19)
        observation[:7], observation[7:14] = positions[:7], self.data.qvel[:7]
        observation[14:17], observation[17:] = positions[7:10], self._target
        return observation


def _serve_is_playable(x: float, y: float) -> bool:
    """Whether a ball served from (x, y) flies over the net and bounces on the robot's half of the table."""
    height = _BALL_HEIGHT - _TABLE_HEIGHT + 0.1
    speed, _, climb = _BALL_VELOCITY
    over_net = (climb + math.sqrt(climb**2 - 2.0 * _GRAVITY * (_NET_HEIGHT - height))) / _GRAVITY
    bounce = (climb + math.sqrt(climb**2 + 2.0 * _GRAVITY * height)) / _GRAVITY
    return x + speed * over_net >= 0.05 and x + speed * bounce <= _TABLE_END and abs(y) <= _TABLE_SIDE


class TableTennisAdapter(JointAdapter):
    """The seven joints follow the trajectory; context: serve and target, and joints that start at random.

    A trajectory that leaves the joints' range is not run where violations are "refused": its return is minus
    the mean excess in radians. Where they are "executed", each step from the first outside on is paid minus
    its own mean excess instead of the task's reward.
    """

    joints = slice(7)
    num_dof = 7
    position_units = ("rad",) * 7
    horizon = TableTennisEnv.horizon
    dt = 0.008
    context_indices = (14, 15, 17, 18)
    event_key = "hit_ball"
    extra_names = ("hit_ball", "returned", "landing_error", "broken")
    refused_extras: ClassVar[Mapping[str, float]] = dict.fromkeys(extra_names, 0.0) | {
        "landing_error": _NOT_LANDED
    }
    controller = PDController(
        position_gains=[0.5, 2.0, 1.0, 2.0, 0.5, 2.0, 0.5],
        velocity_gains=[0.05, 0.2, 0.1, 0.2, 0.05, 0.2, 0.05],
    )

    def __init__(self, env: gymnasium.Env[Any, Any], env_id: str) -> None:
        super().__init__(env, env_id)
        assert isinstance(env.unwrapped, TableTennisEnv)
        self._refuses = env.unwrapped.violations == "refused"
        if env.unwrapped.random_init:
            self.context_indices = (*range(7), *type(self).context_indices)

    def refusal(self, desired_positions: FloatArray, desired_velocities: FloatArray) -> float | None:
        excess = joint_excess(desired_positions) if self._refuses else np.zeros(1)
        return -float(excess.mean()) if excess.any() else None

    def motion_rewards(self, rewards: FloatArray, desired_positions: FloatArray) -> FloatArray:
        excess = joint_excess(desired_positions)
        outside = np.maximum.accumulate(excess > 0.0)
        return np.where(outside, -excess, rewards)


def joint_excess(positions: FloatArray) -> FloatArray:
    """How far positions [T, 7] lie outside of the joints' range, in radians, mean over joints, [T]."""
    above, below = np.maximum(positions - JOINT_HIGH, 0.0), np.maximum(JOINT_LOW - positions, 0.0)
    excess: FloatArray = (above + below).mean(axis=1)
    return excess
