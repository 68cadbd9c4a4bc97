from __future__ import annotations

from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest
from PIL import Image

from tether.episodic.environments import make_position_controlled
from tether.episodic.render import Film, opengl_candidates, render_motions
from tether.errors import ConfigError, InvalidInputError, MissingDependencyError

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
