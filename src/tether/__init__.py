"""Differentiable KL trust regions for policy updates, from LLM tokens to robot trajectories."""

from tether.errors import TetherError
from tether.projection import SparseLogProbs, project_categorical, project_sparse

__version__ = "0.1.0"

__all__ = [
    "SparseLogProbs",
    "TetherError",
    "project_categorical",
    "project_sparse",
]
