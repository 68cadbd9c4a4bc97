"""Trust-region projections: pure maths on tensors, nothing but torch. Start reading here."""

from tether.projection.categorical import CategoricalProjection, kl_categorical, project_categorical
from tether.projection.sparse import SparseLogProbs, SparseProjection, project_sparse

__all__ = [
    "CategoricalProjection",
    "SparseLogProbs",
    "SparseProjection",
    "kl_categorical",
    "project_categorical",
    "project_sparse",
]
