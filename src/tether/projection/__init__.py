"""Trust-region projections: pure maths on tensors, nothing but torch. Start reading here."""

from tether.projection.categorical import CategoricalProjection, kl_categorical, project_categorical
from tether.projection.gaussian import (
    GaussianProjection,
    gaussian_entropy,
    kl_gaussian,
    project_diagonal_gaussian,
    project_gaussian,
)
from tether.projection.sparse import SparseLogProbs, SparseProjection, project_sparse

__all__ = [
    "CategoricalProjection",
    "GaussianProjection",
    "SparseLogProbs",
    "SparseProjection",
    "gaussian_entropy",
    "kl_categorical",
    "kl_gaussian",
    "project_categorical",
    "project_diagonal_gaussian",
    "project_gaussian",
    "project_sparse",
]
