"""Seeds, and random states that survive a restart."""

from __future__ import annotations

import io
import os
import pickle
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tether.errors import CheckpointError, InvalidInputError
from tether.experiments.files import atomic_write_bytes


def seed_everything(seed: int) -> None:
    """Make a run repeatable: seed Python's, numpy's and torch's generators (all devices).

    Operations that are not deterministic themselves (some CUDA kernels) stay so; see
    ``torch.use_deterministic_algorithms``.

    Raises:
        InvalidInputError: a seed outside [0, 2^32), which numpy cannot take.

    >>> seed_everything(3); first = torch.rand(2)
    >>> seed_everything(3); torch.equal(first, torch.rand(2))
    True
    """
    if not 0 <= seed < 2**32:
        raise InvalidInputError(f"A seed lies in [0, 2^32); got {seed}.")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@dataclass(frozen=True)
class RandomState:
    """Where every global random generator stands: what an exact resume needs beside weights and optimiser.

    Saved without pickle and read with ``torch.load(weights_only=True)``.

    >>> seed_everything(0); state = RandomState.capture()
    >>> first = random.random(), float(np.random.rand()), float(torch.rand(()))
    >>> state.restore()
    >>> first == (random.random(), float(np.random.rand()), float(torch.rand(())))
    True
    """

    python: tuple[Any, ...]
    """`random.getstate`: version, internal integers, the pending Gaussian."""

    numpy: dict[str, Any]
    """The legacy global generator of numpy: key (uint32 values as int64), position, pending Gaussian."""

    torch_cpu: torch.Tensor

    torch_cuda: list[torch.Tensor]
    """One state a CUDA device, empty without."""

    @classmethod
    def capture(cls) -> RandomState:
        """The present states."""
        legacy = np.random.get_state(legacy=False)
        assert isinstance(legacy, dict)
        return cls(
            python=random.getstate(),
            numpy={
                "generator": legacy["bit_generator"],
                "key": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
                "position": int(legacy["state"]["pos"]),
                "has_gauss": int(legacy["has_gauss"]),
                "gauss": float(legacy["gauss"]),
            },
            torch_cpu=torch.get_rng_state(),
            torch_cuda=torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        )

    def restore(self) -> None:
        """Put every generator back.

        Raises:
            CheckpointError: saved with another number of CUDA devices.
        """
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if len(self.torch_cuda) != devices:
            raise CheckpointError(
                f"The random state was saved with {len(self.torch_cuda)} CUDA devices and there are "
                f"{devices} now, so the run cannot continue exactly. Resume on the same number of devices."
            )
        version, internal, pending = self.python
        random.setstate((version, tuple(internal), pending))
        np.random.set_state(
            {
                "bit_generator": self.numpy["generator"],
                "state": {
                    "key": self.numpy["key"].numpy().astype(np.uint32),
                    "pos": self.numpy["position"],
                },
                "has_gauss": self.numpy["has_gauss"],
                "gauss": self.numpy["gauss"],
            }
        )
        torch.set_rng_state(self.torch_cpu)
        if devices:
            torch.cuda.set_rng_state_all(self.torch_cuda)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the states to a file, whole or not at all. In distributed training: one file a rank."""
        buffer = io.BytesIO()
        torch.save(vars(self), buffer)
        return atomic_write_bytes(path, buffer.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RandomState:
        """Read what `save` wrote.

        Raises:
            CheckpointError: no such file, or not a saved random state.
        """
        try:
            return cls(**torch.load(path, map_location="cpu", weights_only=True))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"No random state at {os.fspath(path)}: the checkpoint is incomplete."
            ) from error
        except (RuntimeError, TypeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            # Torch's own message advises to unpickle: not repeated.
            raise CheckpointError(
                f"{os.fspath(path)} is not a saved random state ({type(error).__name__}). "
                "Resume from another checkpoint."
            ) from error
