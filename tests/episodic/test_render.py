from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import imageio.v3 as imageio
import numpy as np
import pytest
from PIL import Image

from tether.episodic import render
from tether.episodic.adapters import PositionControlledEnv, register_adapter
from tether.episodic.environments import make_position_controlled
from tether.episodic.render import Film, opengl_candidates, render_motions
from tether.errors import ConfigError, InvalidInputError, MissingDependencyError, SimulationError

HOPPER = "tether/HopperJump-v0"
SMALL = Film(width=64, height=48, frames_per_second=10, hold_seconds=0.5)
Motion = tuple[np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def motions() -> dict[str, Motion]:
    """Standing still, and bending the knee."""
    with make_position_controlled(HOPPER) as env:
        position = env.reset(1).position
    still = np.tile(position, (250, 1))
    bent = still + np.array([-0.4, -0.9, 0.0]) * np.linspace(0, 1, 250)[:, None]
    return {"untrained": (still, np.zeros_like(still)), "trained": (bent, np.zeros_like(bent))}


@pytest.fixture(scope="module")
def gif(motions: dict[str, Motion], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("film") / "new" / "motion.gif"
    return render_motions(HOPPER, motions, 1, path, film=SMALL)


def test_a_gif_lasts_the_episode_and_holds_its_last_picture(gif: Path) -> None:
    with Image.open(gif) as film:
        milliseconds = []
        for number in range(film.n_frames):  # type: ignore[attr-defined]
            film.seek(number)
            milliseconds.append(film.info["duration"])
    # The start, 2 s of simulation at 10 pictures a second, and half a second of hold in the last picture.
    assert sum(milliseconds) == pytest.approx(100 + 2000 + 500, abs=110)
    assert set(milliseconds[:-1]) == {100}
    assert milliseconds[-1] == 100 + 500


def test_motions_stand_side_by_side_under_their_captions(gif: Path) -> None:
    frames = imageio.imread(gif)[..., :3].astype(int)
    assert frames.shape[2] == 2 * 64
    bar = frames.shape[1] - 48
    assert frames[0, :bar].max() == 255  # a white bar
    assert frames[0, :bar, :64].min() < 128  # with dark letters, over both
    assert frames[0, :bar, 64:].min() < 128
    left, right = frames[:, bar:, :64], frames[:, bar:, 64:]
    difference = np.abs(left - right).mean(axis=(1, 2, 3))
    assert difference[0] < 1.0  # one start
    assert difference[12:].max() > 2.0  # and two motions


def test_an_mp4_can_be_read_back(motions: dict[str, Motion], tmp_path: Path) -> None:
    path = render_motions(HOPPER, {"alone": motions["trained"]}, 1, tmp_path / "motion.mp4", film=SMALL)
    video = imageio.imread(path)
    assert video.shape[0] == pytest.approx(26, abs=1)
    assert video.shape[2:] == (64, 3)
    assert [file.name for file in tmp_path.iterdir()] == ["motion.mp4"]


def test_without_opengl_the_remedy_is_named_and_no_file_appears(
    motions: dict[str, Motion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUJOCO_GL", "no-such-backend")
    with pytest.raises(MissingDependencyError, match=r"no-such-backend.*libegl1"):
        render_motions(HOPPER, motions, 1, tmp_path / "motion.gif", film=SMALL)
    assert list(tmp_path.iterdir()) == []


def test_the_users_choice_of_opengl_is_the_only_one_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert opengl_candidates() == ["osmesa"]


def test_a_trajectory_of_the_wrong_length_is_refused(motions: dict[str, Motion], tmp_path: Path) -> None:
    short = {"short": (motions["trained"][0][:-1], motions["trained"][1][:-1])}
    with pytest.raises(InvalidInputError, match="horizon 250"):
        render_motions(HOPPER, short, 1, tmp_path / "motion.gif", film=SMALL)


def test_an_environment_without_pictures_says_so(tmp_path: Path) -> None:
    still = np.zeros((50, 2))
    with pytest.raises(ConfigError, match=r"PointReach.*no pictures"):
        render_motions("tether/PointReach-v0", {"still": (still, still)}, 1, tmp_path / "motion.gif")


def test_what_cannot_be_filmed_is_refused(motions: dict[str, Motion], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.mp4"):
        render_motions(HOPPER, motions, 1, tmp_path / "motion.avi")
    with pytest.raises(InvalidInputError, match="no motion"):
        render_motions(HOPPER, {}, 1, tmp_path / "motion.gif")
    with pytest.raises(InvalidInputError, match="positive"):
        Film(speed=0.0)
    with pytest.raises(InvalidInputError, match="positive"):
        Film(speed=float("nan"))
    with pytest.raises(
        ConfigError, match=r"at most 50 pictures a second, not 60\. Lower the rate, or write an \.mp4"
    ):
        render_motions(HOPPER, motions, 1, tmp_path / "motion.gif", film=Film(frames_per_second=60))


class Drawn(gymnasium.Env[Any, Any]):
    """Draws how many steps it has taken, and counts how often it is asked to."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as gymnasium declares it
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))

    def __init__(self, render_mode: str | None = None, kind: str = "plain") -> None:
        self.render_mode = render_mode
        self.kind = kind
        self.drawn = 0

    def reset(self, **_: Any) -> Any:
        self.steps = 0
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(1), 0.0, False, False, {}

    def render(self) -> Any:
        self.drawn += 1
        return np.full((6, 8, 3), self.steps, dtype=np.uint8)


class DrawnAdapter(PositionControlledEnv):
    num_dof, horizon, dt = 1, 5, 0.1

    def joint_positions(self) -> np.ndarray:
        return np.zeros(1)

    joint_velocities = joint_positions

    def action(self, desired_position: np.ndarray, desired_velocity: np.ndarray) -> np.ndarray:
        return desired_position


@pytest.mark.parametrize("speed", [0.1, 0.5, 1.0, 3.0])
def test_a_film_has_the_speed_that_was_asked_for(speed: float) -> None:
    """Two seconds of steps of 20 ms at 30 pictures a second; slow motion shows pictures more than once."""
    env = Drawn()
    camera = render._Filming(env, 0.02 * 30 / speed)
    camera.reset()
    for _ in range(100):
        camera.step(None)
    assert len(camera.pictures) - 1 == pytest.approx(2.0 / speed * 30, abs=1)
    assert env.drawn <= min(101, len(camera.pictures))
    shown = [int(picture[0, 0, 0]) for picture in camera.pictures]
    expected = np.ceil(np.arange(len(shown)) * speed / 30 / 0.02 - 1e-9)
    assert np.abs(shown - expected).max() <= 1


@pytest.mark.parametrize("rate", [12, 20, 30, 50])
def test_a_gif_plays_at_its_rate(rate: int, tmp_path: Path) -> None:
    frames = [np.full((20, 20, 3), 10 * i, dtype=np.uint8) for i in range(20)]
    render._write(tmp_path / "a.gif", frames, rate)
    with Image.open(tmp_path / "a.gif") as film:
        seconds, number = 0.0, film.n_frames
        for frame in range(number):
            film.seek(frame)
            seconds += film.info["duration"] / 1000
    assert (number, seconds) == (20, pytest.approx(20 / rate, abs=0.005))


def test_an_environment_that_cannot_be_told_a_size_is_filmed_at_its_own() -> None:
    gymnasium.register("test/drawn-v0", entry_point=Drawn)
    register_adapter("test/drawn-v0", DrawnAdapter)
    with render._with_pictures("test/drawn-v0", {"kind": "other"}, SMALL) as env:
        env.env.reset()
        assert np.shape(env.env.render()) == (6, 8, 3)
        assert env.env.unwrapped.kind == "other"
    with render._with_pictures(HOPPER, {}, SMALL) as env:
        assert env.env.unwrapped._camera._size == (48, 64)


def test_what_goes_wrong_while_filming_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    class Link:
        send = sent.append

    def fail(*_: Any) -> None:
        raise ValueError("boom")

    monkeypatch.setattr(render, "_probe_opengl", lambda: None)
    monkeypatch.setattr(render, "_write_film", fail)
    render._serve(Link(), "test/drawn-v0")  # type: ignore[arg-type]
    assert isinstance(sent[0], SimulationError)
    assert "test/drawn-v0: filming failed with ValueError: boom" in str(sent[0])
