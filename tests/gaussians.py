"""Random Gaussians and textbook formulas for the tests of their projection."""

from __future__ import annotations

import math

import torch
from torch import Tensor

F64 = torch.float64


def random_factor(*shape: int, seed: int, spread: float = 1.0, dtype: torch.dtype = F64) -> Tensor:
    """Cholesky factors of random covariances, [*shape, W, W] with W the last entry of `shape`."""
    generator = torch.Generator().manual_seed(seed)
    *batch, size = shape
    root = torch.randn(*batch, size, size, generator=generator, dtype=F64) * spread / math.sqrt(size)
    return torch.linalg.cholesky(root @ root.mT + torch.eye(size, dtype=F64)).to(dtype)


def random_mean(*shape: int, seed: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def divergence_by_slogdet(new: Tensor, old: Tensor) -> Tensor:
    """KL(N(0, new newᵀ) ‖ N(0, old oldᵀ)) from the textbook formula, in float64."""
    new_cov, old_cov = new.double() @ new.double().mT, old.double() @ old.double().mT
    trace = torch.linalg.solve(old_cov, new_cov).diagonal(dim1=-2, dim2=-1).sum(-1)
    logs = torch.linalg.slogdet(old_cov)[1] - torch.linalg.slogdet(new_cov)[1]
    return 0.5 * (trace - new.shape[-1] + logs)


def tril_parameter(raw: Tensor) -> Tensor:
    diagonal = torch.nn.functional.softplus(raw.diagonal(dim1=-2, dim2=-1)) + 0.3
    return raw.tril(-1) + diagonal.diag_embed()
