"""Running mean and standard deviation of what a network sees."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tether.errors import InvalidInputError


class RunningStatistics(nn.Module):
    """Normalise inputs by the mean and standard deviation of everything seen so far.

    Counts and moments are float64 buffers, so they are saved with the network and a resumed run
    continues exactly. Batches are merged by Chan's formula, whose result does not depend on how the data
    was cut into batches (up to rounding).

    Args:
        size: number of features.
        clip: normalised values are limited to [-clip, clip]; a feature that never varied before may jump
            by any number of its tiny standard deviations.

    Example:
        >>> statistics = RunningStatistics(1)
        >>> statistics.update(torch.tensor([[1.0], [3.0]]))
        >>> statistics(torch.tensor([[4.0]])).item()
        2.0
    """

    count: Tensor
    mean: Tensor
    squared_deviations: Tensor

    def __init__(self, size: int, clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("squared_deviations", torch.zeros(size, dtype=torch.float64))

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Take rows [..., size] into account.

        Raises:
            InvalidInputError: another number of features, no rows, or values that are not finite.
        """
        size = self.mean.shape[0]
        if rows.shape[-1:] != (size,) or rows.numel() == 0:
            raise InvalidInputError(f"Rows must be [..., {size}] and not empty, got {tuple(rows.shape)}.")
        rows = rows.reshape(-1, size).double()
        if not bool(torch.isfinite(rows).all()):
            raise InvalidInputError("Rows hold NaN or infinity; the statistics would never recover.")
        count, mean = rows.shape[0], rows.mean(0)
        total = self.count + count
        gap = mean - self.mean
        self.squared_deviations += (rows - mean).square().sum(0) + gap.square() * self.count * count / total
        self.mean += gap * count / total
        self.count.copy_(total)

    def forward(self, rows: Tensor) -> Tensor:
        """(rows - mean) / std, clipped; rows as they are before the first `update`."""
        if self.count == 0:
            return rows
        scaled = (rows.double() - self.mean) / self._deviation()
        return scaled.clamp(-self.clip, self.clip).to(rows.dtype)

    def invert(self, rows: Tensor) -> Tensor:
        """What `forward` maps to these rows (the clip aside); differentiable."""
        if self.count == 0:
            return rows
        return rows * self._deviation().to(rows.dtype) + self.mean.to(rows.dtype)

    def _deviation(self) -> Tensor:
        deviation = (self.squared_deviations / self.count).sqrt()
        # A constant feature carries no information; dividing by its rounding error would invent some.
        known = deviation > 1e-8 * (1 + self.mean.abs())
        return torch.where(known, deviation, 1.0)
