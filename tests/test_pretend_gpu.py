"""The pretended GPU finds what it is for: each finding is shown on code that has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pretend_gpu import FROM_HOST, GRADIENT_OF_MASKED_SCATTER, ROWS, TO_HOST, VALUE, PretendGPU, values_of

HERE = "test_pretend_gpu"


def _filled(x: Tensor) -> None:
    x[x > 0] = 0.0


def _numbered(x: Tensor) -> None:
    x[torch.arange(2, device=x.device)] = 1.0


def _put_rows(x: Tensor) -> None:
    x[x > 0] = torch.ones_like(x)[x > 0]


@pytest.mark.parametrize(
    ("code", "waits"),
    [
        (lambda x: x.sum().item(), {VALUE: 1}),
        (lambda x: bool((x > 0).any()), {VALUE: 1}),
        (lambda x: int(x.argmax()), {VALUE: 1}),
        (lambda x: torch.equal(x, x.clone()), {VALUE: 1}),
        (lambda x: torch.linalg.cholesky(x @ x.T + torch.eye(4, device=x.device)), {VALUE: 1}),
        (lambda x: x.tolist(), {TO_HOST: 1}),
        (lambda x: x.cpu(), {TO_HOST: 1}),
        (lambda x: torch.zeros(4, 4).copy_(x), {TO_HOST: 1}),
        (lambda x: x.nonzero(), {ROWS: 1}),
        (lambda x: x[x > 0], {ROWS: 1}),
        (lambda x: x.masked_select(x > 0), {ROWS: 1}),
        (lambda x: x.unique(), {ROWS: 1}),
        (lambda x: x.long().abs().flatten().bincount(), {ROWS: 1}),
        (lambda x: torch.repeat_interleave(x, torch.arange(4, device=x.device), 0), {ROWS: 1}),
        (_put_rows, {ROWS: 2}),
        (lambda x: torch.tensor([1.0, 2.0], device=x.device), {FROM_HOST: 1}),
        (lambda x: torch.ones(3).to(x.device), {FROM_HOST: 1}),
        (lambda x: x[torch.tensor([0, 2])], {FROM_HOST: 1}),
        (lambda x: torch.where(x > 0, x, torch.tensor(1.0)), {FROM_HOST: 1}),
        (_numbered, {FROM_HOST: 1}),
        # What a GPU does by itself.
        (lambda x: torch.where(x > 0, x, 1.0), {}),
        (lambda x: x * torch.tensor(2.0), {}),
        (lambda x: x[torch.arange(2, device=x.device)].sum() + x[:, 0].amax(), {}),
        (_filled, {}),
        (lambda x: x[1:].fill_(0.5), {}),
        (lambda x: torch.zeros_like(x).masked_scatter(x > 0, x), {}),
        (lambda x: torch._assert_async((x == x).all(), "NaN"), {}),
        (lambda x: x.to(x.device).float().new_zeros(3) + torch.zeros(3, device=x.device), {}),
    ],
)
def test_what_makes_the_host_wait_is_counted(code: Callable[[Tensor], object], waits: dict[str, int]) -> None:
    with PretendGPU() as gpu:
        code(gpu.put(torch.randn(4, 4)))
    assert gpu.waits == {(HERE, cause): count for cause, count in waits.items()}


def test_a_gradient_that_makes_the_host_wait_counts_as_ours() -> None:
    with PretendGPU() as gpu:
        x = gpu.put(torch.randn(4, 4)).requires_grad_()
        (x * 2).masked_scatter(x > 0, x * 3).sum().backward()
    assert gpu.ours() == {GRADIENT_OF_MASKED_SCATTER: 1}


@pytest.mark.parametrize(
    "code",
    [
        lambda x: x + torch.zeros(4),
        lambda x: x @ torch.ones(4, 2),
        lambda x: torch.cat((x, torch.zeros(1, 4))),
        lambda x: x.scatter_(-1, torch.zeros(4, 1, dtype=torch.long), 1.0),
        lambda x: torch.addmm(torch.zeros(4, 4), x, x),
    ],
)
def test_a_factory_without_a_device_is_refused(code: Callable[[Tensor], object]) -> None:
    with PretendGPU() as gpu, pytest.raises(RuntimeError, match=r"same device.*in test_pretend_gpu"):
        code(gpu.put(torch.randn(4, 4)))


def test_random_numbers_need_a_generator_of_the_device() -> None:
    with PretendGPU(), pytest.raises(RuntimeError, match="generator of the CPU"):
        torch.rand(3, device="cuda:0", generator=torch.Generator())


def test_it_says_that_it_is_a_gpu() -> None:
    with PretendGPU() as gpu:
        x = gpu.put(torch.ones(2))
        for made in (x, torch.empty(3, device="cuda"), x.new_ones(3), torch.arange(3, device=x.device) * 2):
            assert made.is_cuda
            assert str(made.device) == "cuda:0"
            with pytest.raises(RuntimeError):
                made.numpy()
        assert not x.cpu().is_cuda


def test_values_and_gradients_are_those_of_the_cpu() -> None:
    inputs = torch.randn(5, 3), torch.randn(7, 3)

    def gradient(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        logits = x @ w.T
        logits[1] = 0.0
        return torch.autograd.grad(logits.log_softmax(-1)[:, 2].sum(), (x, w))

    expected = gradient(*(t.clone().requires_grad_() for t in inputs))
    with PretendGPU() as gpu:
        found = gradient(*(gpu.put(t.requires_grad_()) for t in inputs))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(values_of(ours), theirs, rtol=0, atol=0)


def test_a_module_moves_with_its_tied_weights() -> None:
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight = first.weight
    model = torch.nn.Sequential(first, second)
    with PretendGPU() as gpu:
        gpu.put_module(model)
        assert model[0].weight is model[1].weight
        model(gpu.put(torch.ones(2, 3))).sum().backward()
        assert [parameter.grad.is_cuda for parameter in model.parameters()] == [True] * 3
    assert not gpu.waits
