"""On a GPU nothing asks for a value, which would stall its queue: run on tensors that have none.

PyTorch's meta device knows shapes and types but no values, so asking for one is an error, and like a GPU it
is no CPU. Kernels are replaced by notes of their launches.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tether.losses import troll
from tether.ops import head, linear_log_probs, memory
from tether.projection import SparseLogProbs, project_categorical, project_sparse

N, D, V, K = 9000, 16, 5000, 8

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels refuse this device there")


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision is multiplied as it is. The device knows nothing of autocast, which is off anyway."""
    monkeypatch.setattr(torch, "autocast", lambda *_, enabled: nullcontext())
    halves = (torch.float16, torch.bfloat16)
    monkeypatch.setattr(head, "_tensor_cores_take", lambda a, b: a.dtype == b.dtype and a.dtype in halves)


def _note_launches(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[str]:
    launched: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            assert all(size > 0 for size in grid)
            return lambda *_, **__: launched.append(self.name)

    for name in [name for name in vars(module) if name.endswith("_kernel")]:
        monkeypatch.setattr(module, name, Noted(name))
    return launched


def _valueless(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


def test_asking_such_a_tensor_for_a_value_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        bool((_valueless(3) > 0).any())


def _run_linear(backend: Any, dtype: torch.dtype) -> None:
    leaves = [_valueless(N, D, dtype=dtype), _valueless(V, D, dtype=dtype), _valueless(V, dtype=dtype)]
    ids = _valueless(N, 3, dtype=torch.long)
    result = linear_log_probs(
        leaves[0], leaves[1], ids, bias=leaves[2], top_k=K, with_min=True, temperature=0.7, softcap=30.0,
        vocabulary_size=V - 100, backend=backend,
    )  # fmt: skip
    assert result.log_probs.dtype == torch.float32
    gradients = torch.autograd.grad(result.log_probs.sum() + result.entropy.sum(), leaves)
    assert [(g.shape, g.dtype) for g in gradients] == [(leaf.shape, dtype) for leaf in leaves]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plain_lm_head(dtype: torch.dtype) -> None:
    _run_linear("torch", dtype)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lm_head_on_triton(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the Triton path needs the package", exc_type=ImportError)
    from tether.ops import rows_triton

    launched = _note_launches(monkeypatch, rows_triton)
    _run_linear("triton", dtype)
    blocks = -(-N // max(memory.ACCELERATOR_ROWS, memory.WORKSPACE_ELEMENTS // V))
    assert blocks > 1
    forward = ["reduce_kernel", "select_kernel", "select_kernel"]
    backward = ["gradient_at_ids_kernel", "gradient_kernel", "scatter_kernel"]
    assert launched == forward * blocks + backward * blocks


@pytest.mark.parametrize("region", ["token", "sequence"])
def test_the_plain_projection(region: Any) -> None:
    new, old = _valueless(8, 12, 65), _valueless(8, 12, 65)
    mask = _valueless(8, 12, dtype=torch.bool) if region == "sequence" else None
    result = project_categorical(new, old, 0.05, region=region, mask=mask)
    assert torch.autograd.grad(result.log_probs.sum(), new)[0].shape == new.shape


def _support() -> SparseLogProbs:
    return SparseLogProbs(_valueless(4, 8, 5, dtype=torch.long), _valueless(4, 8, 5), _valueless(4, 8))


def test_the_projection_on_a_sparse_support() -> None:
    new = _support()
    result = project_sparse(new, _support().detach(), 0.05)
    (gradient,) = torch.autograd.grad(result.log_probs.log_probs.sum(), new.log_probs)
    assert gradient.shape == (4, 8, 5)


def test_the_loss_and_its_metrics() -> None:
    log_probs, new = _valueless(4, 8), _support()
    result = troll(
        log_probs, _valueless(4, 8).detach(), _valueless(4, 8).detach(), _valueless(4, 8, dtype=torch.bool),
        response_ids=_valueless(4, 8, dtype=torch.long), new=new, old=_support().detach(),
    )  # fmt: skip
    assert torch.autograd.grad(result.loss, log_probs)[0].shape == (4, 8)


@interpreted
def test_the_projection_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the kernel needs the package", exc_type=ImportError)
    from tether.projection import categorical_triton

    launched = _note_launches(monkeypatch, categorical_triton)
    new = _valueless(64, 65)
    result = project_categorical(new, _valueless(64, 65), 0.05, backend="triton")
    torch.autograd.grad(result.log_probs.sum(), new)
    assert launched == ["project_kernel", "project_backward_kernel"]
