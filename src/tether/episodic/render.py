"""Films motions without a screen: the untrained policy beside the trained one, as mp4 or gif.

Pictures are made in a process of their own: MuJoCo chooses its OpenGL when it is first imported, long before
pictures are wanted, and a graphics driver that crashes must not end a training run.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import ArrayLike, NDArray

from tether.episodic.adapters import PositionControlledEnv, check_trajectory
from tether.episodic.environments import make_position_controlled
from tether.episodic.episodes import Episode, FloatArray
from tether.episodic.workers import environment_variables
from tether.errors import ConfigError, InvalidInputError, MissingDependencyError, SimulationError, TetherError

Picture = NDArray[np.uint8]

FORMATS = (".mp4", ".gif")
# A .gif counts in hundredths of a second, and what shows it takes a single one for ten.
_FASTEST_GIF = 50


@dataclass(frozen=True)
class Film:
    """How a film looks."""

    width: int = 400
    """Pixels of one motion's picture; an environment that cannot be told sizes takes its own."""

    height: int = 300

    frames_per_second: int = 30
    """At most 50 in a .gif, whose pictures stay for whole hundredths of a second."""

    speed: float = 1.0
    """Film seconds run this many times as fast as simulated ones; below 1 is slow motion."""

    hold_seconds: float = 1.0
    """How long the last picture stays."""

    def __post_init__(self) -> None:
        if not (
            min(self.width, self.height, self.frames_per_second) >= 1
            and 0 < self.speed < math.inf
            and 0 <= self.hold_seconds < math.inf
        ):
            raise InvalidInputError(f"Sizes, rate and speed of a film are positive; got {self}.")


def render_motions(
    env_id: str,
    motions: Mapping[str, tuple[ArrayLike, ArrayLike]],
    seed: int,
    out: str | os.PathLike[str],
    *,
    film: Film | None = None,
    env_options: Mapping[str, Any] | None = None,
) -> Path:
    """Show what desired trajectories look like when the robot executes them, side by side from one start.

    Needs no screen: OpenGL is reached through EGL, or OSMesa where that is missing. ``MUJOCO_GL``, if set,
    decides.

    Args:
        env_id: an environment whose pictures can be taken (all of Tether's but PointReach).
        motions: caption -> (positions [T, D], velocities [T, D] per second), left to right.
        seed: of the episode every motion is executed in.
        out: the file to write, .mp4 or .gif; it appears when it is complete.
        film: size, rate and speed.
        env_options: keywords of `make_position_controlled`.

    Returns:
        The path written.

    Raises:
        ConfigError: another file format, one that cannot show the rate, an unknown environment, or one
            without pictures.
        InvalidInputError: no motion, or a trajectory of the wrong shape.
        MissingDependencyError: no OpenGL that works without a screen; the message says what to install.
        SimulationError: the simulator or the process that takes the pictures failed.
    """
    path, film, options = Path(out), film or Film(), dict(env_options or {})
    if path.suffix not in FORMATS:
        raise ConfigError(f"A film is written as one of {FORMATS}; got {path.name!r}.")
    if path.suffix == ".gif" and film.frames_per_second > _FASTEST_GIF:
        raise ConfigError(
            f"A .gif shows at most {_FASTEST_GIF} pictures a second, not {film.frames_per_second}. Lower the "
            "rate, or write an .mp4."
        )
    if not motions:
        raise InvalidInputError("There is no motion to render.")
    arrays = {
        caption: (np.asarray(positions, dtype=np.float64), np.asarray(velocities, dtype=np.float64))
        for caption, (positions, velocities) in motions.items()
    }
    with make_position_controlled(env_id, **options) as env:  # refused before a process is started
        if "rgb_array" not in env.env.unwrapped.metadata.get("render_modes", []):
            raise ConfigError(f"{env_id} has no pictures: its render_modes lack 'rgb_array'.")
        for positions, velocities in arrays.values():
            check_trajectory(env.spec, positions, velocities)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(suffix=path.suffix, prefix=".film-", dir=path.parent)
    os.close(handle)
    try:
        _run_with_some_opengl(env_id, options, arrays, seed, film, Path(scratch))
        with open(scratch, "rb") as written:
            os.fsync(written.fileno())
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    finally:
        Path(scratch).unlink(missing_ok=True)
    return path


class _NoOpenGLError(Exception):
    """A way to reach OpenGL does not work on this computer; the next one is tried."""


def opengl_candidates() -> list[str | None]:
    """The values of ``MUJOCO_GL`` worth trying without a screen; None leaves the choice to MuJoCo."""
    if chosen := os.environ.get("MUJOCO_GL"):
        return [chosen]
    return ["egl", "osmesa"] if sys.platform == "linux" else [None]


def _run_with_some_opengl(env_id: str, *arguments: Any) -> None:
    refusals = []
    for candidate in opengl_candidates():
        try:
            return _run_in_child(candidate, env_id, *arguments)
        except _NoOpenGLError as error:
            refusals.append(f"{candidate or 'default'}: {error}")
    raise MissingDependencyError(
        f"No OpenGL that works without a screen was found ({'; '.join(refusals)}). On Debian or Ubuntu: "
        "apt-get install libegl1 libgl1-mesa-dri (EGL, also what NVIDIA's driver offers) or libosmesa6; then "
        "set MUJOCO_GL to egl or osmesa if the choice is not found by itself."
    )


def _run_in_child(opengl: str | None, env_id: str, *arguments: Any) -> None:
    """Write the film in a process that reaches OpenGL in the given way; raise what it raised."""
    context = get_context("spawn")
    parent_end, child_end = context.Pipe(duplex=False)
    process = context.Process(
        target=_serve, args=(child_end, env_id, *arguments), name="tether-film", daemon=True
    )
    with environment_variables({"MUJOCO_GL": opengl} if opengl else {}):
        process.start()
    child_end.close()
    with parent_end:
        try:
            error = parent_end.recv()
        except EOFError:
            process.join()
            error = SimulationError(
                f"{env_id}: the process that takes the pictures (MUJOCO_GL={opengl}) ended with exit code "
                f"{process.exitcode}. If the graphics driver is at fault, try another value of MUJOCO_GL."
            )
    process.join()
    if error is not None:
        raise error


# What happens in the child.


def _serve(link: Connection, env_id: str, *arguments: Any) -> None:
    answer: Exception | None = None
    try:
        _probe_opengl()
        _write_film(env_id, *arguments)
    except (TetherError, _NoOpenGLError) as error:
        answer = error
    except Exception as error:  # noqa: BLE001 - not swallowed: the parent raises it
        answer = SimulationError(
            f"{env_id}: filming failed with {type(error).__name__}: {error}\n"
            f"In the process that takes the pictures:\n{traceback.format_exc()}"
        )
    link.send(answer)


def _probe_opengl() -> None:
    try:
        import mujoco

        context = mujoco.GLContext(16, 16)
        context.make_current()
        context.free()
    except Exception as error:
        raise _NoOpenGLError(f"{type(error).__name__}: {error}") from error


def _write_film(
    env_id: str,
    env_options: dict[str, Any],
    motions: dict[str, tuple[FloatArray, FloatArray]],
    seed: int,
    film: Film,
    out: Path,
) -> None:
    columns = []
    with _with_pictures(env_id, env_options, film) as env:
        camera = _Filming(env.env, env.dt * film.frames_per_second / film.speed)
        env.env = camera
        for caption, (positions, velocities) in motions.items():
            episode = env.execute(seed, positions, velocities)
            verdict = _verdict(env.headline, episode)
            columns.append([_captioned(picture, caption, verdict) for picture in camera.pictures])
    _write(out, _side_by_side(columns, film), film.frames_per_second)


def _with_pictures(env_id: str, env_options: dict[str, Any], film: Film) -> PositionControlledEnv:
    """The environment, with pictures of the film's size if it can be told one, or of its own."""
    picture = {"render_mode": "rgb_array"}
    size = {"width": film.width, "height": film.height}
    try:
        return make_position_controlled(env_id, **picture | size | env_options)
    except ConfigError:  # whatever else it refuses it will refuse again
        return make_position_controlled(env_id, **picture | env_options)


class _Filming(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes a picture whenever the film's clock moves on by a frame, for as many as it moves on by."""

    def __init__(self, env: gymnasium.Env[Any, Any], frames_per_step: float) -> None:
        super().__init__(env)
        self.pictures: list[Picture] = []
        self._frames_per_step = frames_per_step
        self._steps = 0

    def reset(self, **options: Any) -> Any:
        answer = self.env.reset(**options)
        self._steps = 0
        self.pictures = [self._picture()]
        return answer

    def step(self, action: Any) -> Any:
        answer = self.env.step(action)
        self._steps += 1
        due = int(self._steps * self._frames_per_step) + 1 - len(self.pictures)
        if due > 0:
            self.pictures += [self._picture()] * due
        return answer

    def _picture(self) -> Picture:
        picture = self.env.render()
        assert isinstance(picture, np.ndarray)
        return picture


def _verdict(headline: str, episode: Episode) -> str:
    """The number the task is judged by, in words."""
    if headline == "success":
        return "success" if episode.success else "no success"
    return f"{headline.replace('_', ' ')} {episode.extras[headline]:.2f}"


def _captioned(picture: Picture, caption: str, verdict: str) -> Picture:
    """A picture with a line of text above it."""
    from PIL import Image, ImageDraw, ImageFont

    size = max(10, picture.shape[0] // 20)
    bar = 2 * size
    canvas = Image.new("RGB", (picture.shape[1], picture.shape[0] + bar), "white")
    canvas.paste(Image.fromarray(picture), (0, bar))
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size)
    draw.text((size // 2, bar // 2), caption, fill="black", font=font, anchor="lm")
    draw.text((picture.shape[1] - size // 2, bar // 2), verdict, fill="dimgray", font=font, anchor="rm")
    return np.asarray(canvas)


def _side_by_side(columns: list[list[Picture]], film: Film) -> list[Picture]:
    """Frames of the whole film: shorter columns keep their last picture, and so does the end."""
    length = max(len(column) for column in columns) + round(film.hold_seconds * film.frames_per_second)
    rows = []
    for t in range(length):
        row = np.concatenate([column[min(t, len(column) - 1)] for column in columns], axis=1)
        rows.append(row[: row.shape[0] // 2 * 2, : row.shape[1] // 2 * 2])  # video needs even sizes
    return rows


def _write(path: Path, frames: list[Picture], frames_per_second: int) -> None:
    import imageio.v3 as imageio

    options: dict[str, Any] = {"fps": frames_per_second, "codec": "libx264", "macro_block_size": 2}
    if path.suffix == ".gif":
        options = {"duration": _gif_durations(len(frames), frames_per_second), "loop": 0}
    imageio.imwrite(path, np.stack(frames), extension=path.suffix, **options)


def _gif_durations(frames: int, frames_per_second: int) -> list[int]:
    """Milliseconds each picture stays: whole hundredths of a second that add up to the rate.

    >>> _gif_durations(4, 30)
    [30, 40, 30, 30]
    """
    ends = [round(100 * frame / frames_per_second) for frame in range(frames + 1)]
    return [10 * (end - begin) for begin, end in pairwise(ends)]
