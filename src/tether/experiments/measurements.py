"""Single numbers of a run, and where they are mirrored."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tether.errors import InvalidInputError, MissingDependencyError

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


def as_number(name: str, value: object) -> float | int | bool:
    """A metric as a plain number.

    >>> as_number("loss", 0.5)
    0.5
    """
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", 0) == 0:
        value = item()
    if not isinstance(value, int | float):
        raise InvalidInputError(
            f"Metric {name!r} must be a number; got a {type(value).__name__}: {value!r:.80}"
        )
    return value


def summary_writer(folder: Path, purge_step: int) -> SummaryWriter:
    """Where TensorBoard finds the numbers; those from ``purge_step`` on, of a run cut off, are hidden."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise MissingDependencyError(
            "Mirroring to TensorBoard needs the package tensorboard: pip install 'tether-rl[cli]'."
        ) from error
    return SummaryWriter(str(folder), purge_step=purge_step)
