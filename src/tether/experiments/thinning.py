"""The numbers of a run, thinned to its evaluations: all that a table or a plot over training needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

# What is a state or a running total: its last value, not its mean.
_LAST = frozenset({"step", "time_s", "tokens", "env_steps", "learning_rate"})


def thinned(records: Iterable[Mapping[str, Any]], ends: Iterable[int]) -> list[dict[str, Any]]:
    """One record for the steps up to each of `ends`: means, of ``..._max`` the largest, of totals the last.

    Values that are not finite are left out of a mean unless there are no others. Thinning twice changes
    nothing.

    >>> thinned([{"step": 1, "kl_max": 1.0, "loss": 2.0}, {"step": 2, "kl_max": 3.0, "loss": 4.0}], [0, 2])
    [{'step': 2, 'kl_max': 3.0, 'loss': 3.0}]
    """
    rest = sorted(records, key=lambda record: int(record["step"]))
    result = []
    for end in sorted(set(ends)):
        block = [record for record in rest if record["step"] <= end]
        rest = rest[len(block) :]
        if block:
            result.append(_combined(block))
    return result


def _combined(block: list[Mapping[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for record in block for name in record)
    return {name: _one(name, [record[name] for record in block if name in record]) for name in names}


def _one(name: str, values: list[Any]) -> Any:
    if name in _LAST:
        return values[-1]
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan
    if name.endswith("_max"):
        return max(known)
    finite = [value for value in known if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else known[-1]
