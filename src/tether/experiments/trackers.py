"""Where a run's numbers can be watched while it trains: TensorBoard, Weights & Biases, Trackio.

A run writes its numbers to its own folder; each tracker asked for gets the same ones under the same names,
whatever the method and whether a language model or a robot learns: ``train/<metric>``, ``eval/<metric>``, and
``trl/<name>`` for what TRL calls its own. Packages are imported when the first number comes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from tether.errors import MissingDependencyError
from tether.experiments.run_config import RunConfig

TrackerName = Literal["tensorboard", "trackio", "wandb"]

#: The project runs go to, unless ``WANDB_PROJECT`` or ``TRACKIO_PROJECT`` says otherwise.
PROJECT = "tether"

_INSTALLED_BY = {"tensorboard": "'tether-rl[cli]'", "trackio": "trackio", "wandb": "wandb"}

#: TensorBoard's tab "Custom scalars". TRL's `clip_ratio/*` tells nothing of a method without TRL's clip; the
#: share of tokens or contexts on which a trust region acted is one of these.
DASHBOARD: dict[str, dict[str, list[Any]]] = {
    "Success": {
        "held-out problems, or evaluation episodes": ["Multiline", ["eval/success", "eval/success_greedy"]],
        "while training": ["Multiline", ["train/success", "train/reward$", "train/return_mean"]],
    },
    "Trust region": {
        "share on which it acted": ["Multiline", ["train/projected", "train/clipped", "train/stopped"]],
        "KL before it (nats)": ["Multiline", ["train/kl_mean$", "train/kl_mean_part", "train/kl_cov_part"]],
        "largest KL before and after it (nats)": ["Multiline", ["train/kl_max", "train/kl_projected_max"]],
        "network kept": ["Multiline", ["train/network_kept"]],
    },
    "Policy": {
        "entropy (nats)": ["Multiline", ["train/entropy"]],
        "how old the sampler is (updates)": ["Multiline", ["train/lag$"]],
    },
}


#: The same for TRL's own TensorBoard files, where a trainer of `tether.integrations.trl` reports by itself.
TRL_DASHBOARD: dict[str, dict[str, list[Any]]] = {
    "Trust region": {
        "share of tokens on which it acted": [
            "Multiline",
            ["train/trust_region/(projected|clipped|stopped)"],
        ],
        "KL before it (nats)": ["Multiline", ["train/trust_region/kl_mean$"]],
        "largest KL before and after it (nats)": ["Multiline", ["train/trust_region/kl_(projected_)?max"]],
    },
    "Policy": {
        "reward": ["Multiline", ["train/reward$", "eval/reward$"]],
        "entropy (nats)": ["Multiline", ["train/entropy"]],
    },
}


class Tracker(Protocol):
    """One place that numbers go to."""

    def log(self, group: str, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers of a step, named within their group."""

    def flush(self) -> None:
        """Have them arrive."""

    def close(self) -> None:
        """No more will come."""


def check_trackers(names: Collection[str]) -> None:
    """Refuse a tracker that is not installed, before time is spent.

    Raises:
        MissingDependencyError: with the command that installs it.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise MissingDependencyError(
                f"report_to names {name}, which is not installed: pip install {_INSTALLED_BY[name]}"
            )


class Trackers:
    """All trackers of a run, begun with the first number."""

    def __init__(self, names: Collection[str], folder: Path, config: RunConfig) -> None:
        self._names = tuple(dict.fromkeys(names))
        check_trackers(self._names)
        self._folder, self._config = folder, config
        self._begun: list[Tracker] | None = None

    def log(self, group: str, step: int, numbers: Mapping[str, float]) -> None:
        """To each of them."""
        if self._begun is None:
            self._begun = [_BEGIN[name](self._folder, self._config, step) for name in self._names]
        for tracker in self._begun:
            tracker.log(group, step, numbers)

    def flush(self) -> None:
        """Have everything arrive."""
        for tracker in self._begun or ():
            tracker.flush()

    def close(self) -> None:
        """End them; doing it twice is harmless."""
        begun, self._begun = self._begun or [], None
        for tracker in begun:
            tracker.close()


class TensorBoard:
    """Event files in ``<run>/tensorboard``, with `DASHBOARD` as the layout of custom scalars."""

    def __init__(self, folder: Path, config: RunConfig, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # Those from `step` on, of a run cut off, are hidden.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step)
        self._writer.add_custom_scalars(DASHBOARD)

    def log(self, group: str, step: int, numbers: Mapping[str, float]) -> None:
        """As scalars."""
        for name, value in numbers.items():
            self._writer.add_scalar(f"{group}/{name}", float(value), step)

    def flush(self) -> None:
        """To the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases; a resumed run goes on with it. ``WANDB_MODE=offline`` needs no network."""

    def __init__(self, folder: Path, config: RunConfig, step: int) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=_title(folder, config),
            id=_identity(config),
            resume="allow",
            reinit="create_new",
            dir=str(folder),
            config=_settings(config),
        )
        # Evaluations come at steps of their own, so steps are a number among others.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, group: str, step: int, numbers: Mapping[str, float]) -> None:
        """As one row."""
        self._run.log({"step": step, **{f"{group}/{name}": float(v) for name, v in numbers.items()}})

    def flush(self) -> None:
        """Weights & Biases writes each row at once."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Trackio:
    """A run of Trackio, kept on this machine (``TRACKIO_DIR``); ``trackio show`` draws it."""

    def __init__(self, folder: Path, config: RunConfig, step: int) -> None:
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{_title(folder, config)} {_identity(config)}",
            resume="allow",
            config=_settings(config),
        )

    def log(self, group: str, step: int, numbers: Mapping[str, float]) -> None:
        """As one row."""
        self._run.log({f"{group}/{name}": float(value) for name, value in numbers.items()}, step=step)

    def flush(self) -> None:
        """Trackio sends rows by itself."""

    def close(self) -> None:
        """Finish the run, once all rows are kept."""
        self._run.finish()


_BEGIN: dict[str, Any] = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": WandB}


def _title(folder: Path, config: RunConfig) -> str:
    return f"{folder.name}, {config.label}, seed {config.seed}"


def _settings(config: RunConfig) -> dict[str, Any]:
    return {"kind": config.kind, "label": config.label, "seed": config.seed, **config.settings}


def _identity(config: RunConfig) -> str:
    """The same for a run whenever it goes on."""
    return hashlib.sha256(
        f"{config.kind} {config.label} {config.seed} {config.started}".encode()
    ).hexdigest()[:12]
