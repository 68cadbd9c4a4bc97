"""Differentiable KL trust regions for policy updates, from LLM tokens to robot trajectories."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tether.errors import TetherError

if TYPE_CHECKING:
    from tether.integrations.trl import TROLLConfig, TROLLTrainer
    from tether.losses import aggregate, ppo_clip, troll, unclipped
    from tether.ops import linear_log_probs
    from tether.projection import (
        SparseLogProbs,
        kl_categorical,
        project_categorical,
        project_sparse,
    )

__version__ = "0.2.0"

__all__ = [
    "SparseLogProbs",
    "TROLLConfig",
    "TROLLTrainer",
    "TetherError",
    "aggregate",
    "kl_categorical",
    "linear_log_probs",
    "ppo_clip",
    "project_categorical",
    "project_sparse",
    "troll",
    "unclipped",
]

# Imported when first asked for: TRL is an extra, and the command decides how torch's threads wait, which it
# can only before torch is loaded.
_ON_DEMAND = {
    "TROLLConfig": "tether.integrations.trl",
    "TROLLTrainer": "tether.integrations.trl",
    "SparseLogProbs": "tether.projection",
    "kl_categorical": "tether.projection",
    "project_categorical": "tether.projection",
    "project_sparse": "tether.projection",
    "linear_log_probs": "tether.ops",
    "aggregate": "tether.losses",
    "ppo_clip": "tether.losses",
    "troll": "tether.losses",
    "unclipped": "tether.losses",
}


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return getattr(import_module(_ON_DEMAND[name]), name)
    if name in ("losses", "ops", "projection"):
        return import_module(f"tether.{name}")
    raise AttributeError(f"module 'tether' has no attribute {name!r}")
