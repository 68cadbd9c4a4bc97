"""How far the network is from its sampler, by the age of the data; and metrics of all processes and
micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tether.projection import ProjectedTokens

#: The smallest lag of each group; a token belongs to the last that is not above its own.
LAGS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
_MEASURED = ("kl", "projected", "uncertain")


def lag_names() -> dict[str, str]:
    """What `lag_means` returns, and short names for tables."""
    return {f"lag_{lag}/{name}": f"lag_{lag}_{name}" for lag in LAGS for name in _MEASURED}


def lag_sums(tokens: ProjectedTokens, lag: Tensor, mask: Tensor) -> Tensor:
    """Sums over tokens by group of lags: their number, KL, projected and uncertain ones, [G, 4].

    Args:
        tokens: [B, T], measured from the sampler.
        lag: [B], in optimizer steps.
        mask: [B, T].
    """
    counted = mask > 0
    uncertain = torch.full_like(tokens.kl, torch.nan) if tokens.uncertain is None else tokens.uncertain
    columns = torch.stack((torch.ones_like(tokens.kl), tokens.kl.detach(), tokens.projected, uncertain), -1)
    return sum_by_lag(torch.where(counted[..., None], columns, 0.0).sum(1), lag)


def sum_by_lag(values: Tensor, lag: Tensor) -> Tensor:
    """Sums of the rows [B, ...] of each group of lags [B]: [G, ...]."""
    group = torch.bucketize(lag, torch.tensor(LAGS, device=lag.device), right=True) - 1
    return values.new_zeros(len(LAGS), *values.shape[1:]).index_add_(0, group, values)


def lag_means(sums: Tensor) -> dict[str, float]:
    """Means over the tokens of each group that has any, from `lag_sums`, which may be added up before.

    Example:
        >>> sums = torch.zeros(len(LAGS), 4, dtype=torch.float64)
        >>> sums[5] = torch.tensor([10.0, 2.0, 5.0, 1.0])
        >>> lag_means(sums)
        {'lag_16/kl': 0.2, 'lag_16/projected': 0.5, 'lag_16/uncertain': 0.1}
    """
    return {name: total / count for name, (total, count) in lag_totals(sums).items()}


def lag_totals(sums: Tensor) -> dict[str, tuple[float, float]]:
    """The same as sums over tokens and their number, for means over more of them."""
    totals: dict[str, tuple[float, float]] = {}
    for lag, (count, *values) in zip(LAGS, sums.tolist(), strict=True):
        if count:
            named = zip(_MEASURED, values, strict=True)
            totals |= {f"lag_{lag}/{name}": (total, count) for name, total in named if total == total}
    return totals


def lag_metrics(accelerator: Any, tokens: ProjectedTokens, lag: Tensor, mask: Tensor) -> dict[str, float]:
    """`lag_means` over all processes, and the oldest sequence's ``lag``. Arguments as for `lags_of_all`."""
    sums, oldest = lags_of_all(accelerator, tokens, lag, mask)
    return {**lag_means(sums), "lag": oldest}


def lags_of_all(accelerator: Any, tokens: ProjectedTokens, lag: Tensor, mask: Tensor) -> tuple[Tensor, float]:
    """`lag_sums` over all processes, and the oldest sequence's lag.

    Args:
        accelerator: of the trainer.
        tokens, lag, mask: as for `lag_sums`.
    """
    sums = accelerator.gather(lag_sums(tokens, lag, mask)[None]).sum(0)
    return sums, float(accelerator.gather(lag.max()).max().item())


def by_process(
    accelerator: Any, metrics: Mapping[str, Tensor], tokens: ProjectedTokens, mask: Tensor
) -> Iterator[tuple[str, list[float], list[float]]]:
    """Each metric's name, its values by process, and what these weigh: tokens, or those the region acted on.

    One column a process and one wait: the numbers that follow are plain Python.
    """
    acted = (tokens.projected & (mask > 0)).sum()
    row = torch.stack([mask.sum(), acted, *metrics.values()]).float()
    counted_by, acted_by, *columns = accelerator.gather(row[None]).t().tolist()
    for name, values in zip(metrics, columns, strict=True):
        yield name, values, acted_by if name == "mean_step" else counted_by


def weighted_mean(name: str, values: list[float], weights: list[float]) -> float:
    """Over processes. Where nothing weighs anything all report the same default; no step was made by none."""
    total = sum(weights)
    if total == 0:
        return math.nan if name == "mean_step" else values[0]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total


def largest_of_logged(metrics: Mapping[str, list[float]]) -> None:
    """Before TRL averages over the micro-batches since the last log: largest values stay the largest.

    The mean step is over micro-batches in which some token was projected; 1 if there was none.

    >>> logged = {"trust_region/kl_max": [0.1, 0.7], "trust_region/mean_step": [0.5, math.nan]}
    >>> largest_of_logged(logged)
    >>> logged
    {'trust_region/kl_max': [0.7], 'trust_region/mean_step': [0.5]}
    """
    for name, values in metrics.items():
        if not name.startswith("trust_region/") or not values:
            continue
        if name.endswith("_max") or name == "trust_region/lag":
            values[:] = [max(values)]
        elif name == "trust_region/mean_step":
            values[:] = [value for value in values if value == value] or [1.0]
