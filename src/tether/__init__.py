"""Differentiable KL trust regions for policy updates, from LLM tokens to robot trajectories."""

from typing import TYPE_CHECKING, Any

from tether.errors import TetherError
from tether.losses import aggregate, ppo_clip, troll, unclipped
from tether.ops import linear_log_probs
from tether.projection import (
    SparseLogProbs,
    kl_categorical,
    project_categorical,
    project_sparse,
)

if TYPE_CHECKING:
    from tether.integrations.trl import TROLLConfig, TROLLTrainer

__version__ = "0.1.0"

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

# Public names that need an extra; importing them is left to whoever asks.
_ON_DEMAND = {
    "TROLLConfig": "tether.integrations.trl",
    "TROLLTrainer": "tether.integrations.trl",
}


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        import importlib

        return getattr(importlib.import_module(_ON_DEMAND[name]), name)
    raise AttributeError(f"module 'tether' has no attribute {name!r}")
