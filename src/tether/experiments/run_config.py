"""What a run was asked to do: the content of ``config.json``."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tether.errors import CheckpointError, ConfigError
from tether.experiments.files import load_json

CONFIG_FILE = "config.json"

_PACKAGES = ("tether-rl", "torch", "numpy", "transformers", "trl", "gymnasium", "mujoco", "metaworld")


@dataclass(frozen=True)
class RunConfig:
    """Everything needed to repeat a run."""

    kind: str
    """Which metrics the run writes and how its report looks: the name of a `RunKind`."""

    label: str
    """The method, as it is called in legends and tables: runs of one label are seeds of one method."""

    seed: int

    settings: dict[str, Any] = field(default_factory=dict)
    """The options of the training command; nested dicts, lists, numbers, strings."""

    versions: dict[str, str] = field(default_factory=dict)
    """Python and packages the run was started with."""

    started: str = ""
    """When, in ISO 8601."""

    def as_dict(self) -> dict[str, Any]:
        """The fields as they stand in ``config.json``."""
        return asdict(self)


def read_config(path: Path) -> RunConfig:
    """The configuration of the run in the folder ``path``.

    Raises:
        CheckpointError: no such folder, not a run folder, or a damaged ``config.json``.
    """
    file = path / CONFIG_FILE
    if not path.exists():
        raise CheckpointError(f"No run at {path}: there is no such folder. Check the path.")
    if not file.is_file():
        hint = _runs_below(path)
        raise CheckpointError(f"{path} is not a run folder: it has no {CONFIG_FILE}. {hint}")
    try:
        content = load_json(file.read_bytes())
        config = RunConfig(**content)
    except (ValueError, TypeError) as error:
        if not holds_run(path) and (path / "report.html").is_file():
            raise CheckpointError(
                f"{path} is an evaluation, and no run: its page is report.html. Give another folder."
            ) from error
        raise CheckpointError(
            f"{file} is not a run's configuration ({error}). Restore it, or start the run again elsewhere."
        ) from error
    return config


def holds_run(folder: Path) -> bool:
    """Whether the ``config.json`` of a folder is a run's: evaluations and saved models have one, too.

    A damaged one counts, so that whoever reads it says what is wrong.
    """
    try:
        content = load_json((folder / CONFIG_FILE).read_bytes())
    except ValueError:
        return True
    return isinstance(content, dict) and {"kind", "label", "seed"} <= content.keys()


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's numbers, without importing them.

    >>> {"numpy", "python", "torch"} <= installed_versions().keys()
    True
    """
    versions = {"python": platform.python_version()}
    installed = {name: _version(name) for name in _PACKAGES}
    return versions | {name: version for name, version in installed.items() if version is not None}


def now() -> str:
    """The present time in ISO 8601, to the second, with its zone."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level with dotted names.

    >>> flatten_settings({"model": {"width": 64}, "seed": 1})
    {'model.width': 64, 'seed': 1}
    """
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten_settings(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


NOT_SET = "(not set)"


def differences(
    old: RunConfig, new: RunConfig, may_change: Collection[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """What asks for another run: name -> (old value, new value) of kind, label, seed and settings.

    Settings are compared by their dotted names; those in ``may_change`` (as a whole, or below it) are left
    out.
    """
    before = {"kind": old.kind, "label": old.label, "seed": old.seed} | flatten_settings(old.settings)
    after = {"kind": new.kind, "label": new.label, "seed": new.seed} | flatten_settings(new.settings)
    changed = {}
    for name in sorted(before.keys() | after.keys()):
        allowed = any(name == free or name.startswith(f"{free}.") for free in may_change)
        pair = before.get(name, NOT_SET), after.get(name, NOT_SET)
        if not allowed and not _same(*pair):
            changed[name] = pair
    return changed


def refuse_other_settings(path: Path, changed: Mapping[str, tuple[Any, Any]], remedy: str) -> None:
    """Refuse to take a kept run for one of other settings.

    Args:
        path: where it is.
        changed: name -> (the run's value, the one that is asked for), as `differences` finds them.
        remedy: what else the comparison may be given: "another output folder".

    Raises:
        ConfigError: with what has changed.
    """
    if changed:
        listed = "; ".join(f"{name}: {old!r} there, {new!r} here" for name, (old, new) in changed.items())
        raise ConfigError(f"{path} was run with other settings ({listed}). Give the comparison {remedy}.")


def _same(left: Any, right: Any) -> bool:
    return bool(left == right) or (left != left and right != right)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _runs_below(path: Path) -> str:
    if not path.is_dir():
        return "It is a file; give the folder that holds config.json."
    runs = sorted(str(file.parent) for file in path.glob(f"*/{CONFIG_FILE}") if holds_run(file.parent))
    if runs:
        return f"It holds {len(runs)} runs one level down; give those, such as {runs[0]}."
    return "Give the folder a training command wrote."
