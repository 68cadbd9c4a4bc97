"""Trust-region projections: pure maths on tensors, nothing but torch. Start reading here."""

from tether.projection.categorical import CategoricalProjection, project_categorical
from tether.projection.certificate import Certificate, certify
from tether.projection.compact import CompactLogProbs
from tether.projection.divergence import kl_categorical
from tether.projection.gaussian import (
    GaussianProjection,
    diagonal_gaussian_entropy,
    gaussian_entropy,
    kl_diagonal_gaussian,
    kl_gaussian,
    project_diagonal_gaussian,
    project_gaussian,
)
from tether.projection.sampled import SampledPolicy
from tether.projection.sparse import SparseLogProbs, SparseProjection, project_sparse
from tether.projection.tokens import ProjectedTokens
from tether.settings import LagBound, TROLLSettings

__all__ = [
    "CategoricalProjection",
    "Certificate",
    "CompactLogProbs",
    "GaussianProjection",
    "LagBound",
    "ProjectedTokens",
    "SampledPolicy",
    "SparseLogProbs",
    "SparseProjection",
    "TROLLSettings",
    "certify",
    "diagonal_gaussian_entropy",
    "gaussian_entropy",
    "kl_categorical",
    "kl_diagonal_gaussian",
    "kl_gaussian",
    "project_categorical",
    "project_diagonal_gaussian",
    "project_gaussian",
    "project_sparse",
]
