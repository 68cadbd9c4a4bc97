"""The seed of a run."""

from __future__ import annotations

import random

import numpy as np
import torch

from tether.errors import InvalidInputError


def seed_everything(seed: int) -> None:
    """Make a run repeatable: seed Python's, numpy's and torch's generators (all devices).

    Operations that are not deterministic themselves (some CUDA kernels) stay so; see
    ``torch.use_deterministic_algorithms``.

    >>> seed_everything(3); first = torch.rand(2)
    >>> seed_everything(3); torch.equal(first, torch.rand(2))
    True
    """
    if not 0 <= seed < 2**32:
        raise InvalidInputError(f"A seed lies in [0, 2^32); got {seed}.")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
