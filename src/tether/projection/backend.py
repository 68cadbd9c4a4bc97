"""Which implementation runs an operation that has a Triton kernel beside its plain PyTorch path."""

from __future__ import annotations

import functools
import importlib.util
from typing import Literal

import torch
from torch import Tensor

from tether.errors import InvalidInputError, MissingDependencyError

Backend = Literal["auto", "torch", "triton"]


def use_triton(backend: Backend, tensor: Tensor, *, unfit: str | None = None) -> bool:
    """Whether the Triton kernels run on `tensor`.

    "auto" takes them on a CUDA device of compute capability 7 or more where Triton is installed (PyTorch
    brings it on Linux), "torch" never, "triton" always or not at all: what it cannot do is refused.

    Args:
        backend: the caller's choice.
        tensor: an input; its device decides.
        unfit: why the kernels cannot do what is asked, if they cannot.

    Raises:
        InvalidInputError: an unknown backend, or "triton" for what the kernels cannot do.
        MissingDependencyError: "triton" where it is not installed.

    Example:
        >>> import torch
        >>> use_triton("auto", torch.zeros(3))
        False
    """
    if backend not in ("auto", "torch", "triton"):
        raise InvalidInputError(f'backend must be "auto", "torch" or "triton", got {backend!r}.')
    if backend == "torch":
        return False
    if backend == "auto":
        return tensor.is_cuda and unfit is None and _installed() and _compiles_for(tensor.get_device())
    if not _installed():
        raise MissingDependencyError(
            'backend="triton" needs the package triton, which is not installed: pip install triton. '
            'backend="auto" does without.'
        )
    if unfit is not None:
        raise InvalidInputError(f'backend="triton": {unfit}. backend="auto" takes the PyTorch path there.')
    if not tensor.is_cuda and not _interpreted():
        raise InvalidInputError(
            f'backend="triton" needs tensors on a CUDA device, got {tensor.device}. Move them there or use '
            'backend="auto". (With TRITON_INTERPRET=1 in the environment from the start, the kernels are '
            "interpreted on a CPU: right, but very slow.)"
        )
    return True


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _compiles_for(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (7, 0)


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)
