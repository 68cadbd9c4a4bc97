"""Settings of runs that were saved by earlier versions, in today's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Settings there are no more -> the value at which a run is what it would be without them.
RETIRED: dict[str, Any] = {
    "alpha_tolerance": None,
    "regression_updates": 0,
    "tail": "bucket",  # of the first runs of the search, when a support was all there was
}


def current_settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a saved run as the same run would be asked for now.

    A retired setting that was in use stays, so that a report shows it and nothing else passes for that run.

    >>> current_settings({"alpha_tolerance": None, "regression_updates": 2})
    {'regression_updates': 2}
    """
    return {name: value for name, value in saved.items() if name not in RETIRED or value != RETIRED[name]}
