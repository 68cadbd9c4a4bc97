"""The Triton kernels against float64, as compiled here; and that an update never waits for the device."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu_check.outcome import Figure, NotHere
from benchmarks.gpu_check.plan import Plan
from torch import Tensor

from tether.ops import linear_log_probs, linear_trust_region
from tether.projection import kl_categorical, project_categorical

ROOT = Path(__file__).parents[2]
KL_BOUND = 0.05

# A kernel's error in multiples of the plain path's on the same inputs: adding in another order makes it up to
# four times as large, a wrong formula hundreds.
_ERROR_BAR = 16
# Tokens of which a whole vocabulary is compared in float64 by plain PyTorch, a dozen copies of each.
_TRUST_REGION_TOKENS = 64
# The solver's tolerance on the divergence is 1e-5 in float32; sums over outcomes round by as much again.
_BOUND_BAR = 1e-4


def run(plan: Plan) -> list[Figure]:
    """All of it.

    Raises:
        NotHere: Triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise NotHere("Triton is not installed: pip install triton.")
    figures = [figure for dtype in (torch.float32, torch.bfloat16) for figure in _head(plan, dtype)]
    figures += [*_projection(plan), *_trust_region(plan), *_tests(plan)]
    if plan.device.type == "cuda":
        figures.append(_waits(plan))
    return figures


def _head_numbers(inputs: tuple[Tensor, ...], backend: Any, top_k: int) -> dict[str, Tensor]:
    hidden, weight = (leaf.detach().requires_grad_() for leaf in inputs[:2])
    found = linear_log_probs(hidden, weight, inputs[2], top_k=top_k, backend=backend)
    assert found.top_log_probs is not None
    loss = found.log_probs.sum() + found.entropy.sum() + found.top_log_probs.sum()
    gradients = torch.autograd.grad(loss, (hidden, weight))
    return {
        "log-probabilities": found.log_probs, "entropies": found.entropy, "top-K": found.top_log_probs,
        "gradient of hidden states": gradients[0], "gradient of the head": gradients[1],
    }  # fmt: skip


def _head(plan: Plan, dtype: torch.dtype) -> list[Figure]:
    """Errors of each output, kernels' over the plain path's."""
    tokens, width, vocabulary, top_k = plan.head
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator) / width**0.5 * 3
    ids = torch.randint(vocabulary, (tokens, 3), generator=generator).to(plan.device)
    inputs = tuple(tensor.to(plan.device, dtype) for tensor in (hidden, weight))
    exact = _head_numbers((*(tensor.double() for tensor in inputs), ids), "torch", top_k)
    plain = _head_numbers((*inputs, ids), "torch", top_k)
    kernels = _head_numbers((*inputs, ids), "triton", top_k)
    where = f"LM head, {str(dtype).removeprefix('torch.')}"
    return [_compared(f"{where}: {name}", kernels[name], plain[name], exact[name]) for name in exact]


def _compared(what: str, kernel: Tensor, plain: Tensor, exact: Tensor) -> Figure:
    """A kernel's error in multiples of the plain path's, or of one rounding of the largest value."""
    errors = [float((found.double() - exact).detach().abs().max()) for found in (kernel, plain)]
    unit = float(exact.detach().abs().max()) * torch.finfo(plain.dtype).eps
    return Figure(f"{what}, kernel's error / plain path's", errors[0] / max(errors[1], unit), _ERROR_BAR)


def _projection(plan: Plan) -> list[Figure]:
    """The projection kernel: its result, its gradient and how well the bound holds."""
    rows, outcomes = plan.rows
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(rows, outcomes, generator=generator, dtype=torch.float64) * 2
    new = (old + torch.randn(rows, outcomes, generator=generator, dtype=torch.float64)).log_softmax(-1)
    old = old.log_softmax(-1)
    upstream = torch.randn(rows, outcomes, generator=generator, dtype=torch.float64)

    def project(dtype: torch.dtype, backend: Any) -> tuple[Tensor, Tensor]:
        leaf = new.to(plan.device, dtype).requires_grad_()
        found = project_categorical(leaf, old.to(plan.device, dtype), KL_BOUND, backend=backend).log_probs
        return found.detach(), torch.autograd.grad(found, leaf, upstream.to(plan.device, dtype))[0]

    exact, plain = project(torch.float64, "torch"), project(torch.float32, "torch")
    kernel = project(torch.float32, "triton")
    reached = kl_categorical(kernel[0].double(), old.to(plan.device))
    outside = kl_categorical(new, old).to(plan.device) > KL_BOUND
    beyond = (reached[outside] / KL_BOUND - 1).abs().max()
    figures = [
        _compared(f"projection: {name}", kernel[at], plain[at], exact[at])
        for at, name in enumerate(("log-probabilities", "gradient"))
    ]
    return [*figures, Figure("projection: divergence reached, off the bound by", float(beyond), _BOUND_BAR)]


def _trust_region(plan: Plan) -> list[Figure]:
    """The exact trust region over a whole vocabulary: projected log-probabilities, gradient and bound."""
    tokens, width, vocabulary, _ = plan.head
    tokens = min(tokens, _TRUST_REGION_TOKENS)
    generator = torch.Generator().manual_seed(0)
    old, moved = torch.randn(2, tokens, width, generator=generator).to(plan.device)
    # From rows inside the bound to rows far beyond it.
    new = old + moved * torch.linspace(0, 0.5, tokens, device=plan.device)[:, None]
    weight = (torch.randn(vocabulary, width, generator=generator) / width**0.5 * 3).to(plan.device)
    ids = (old @ weight.T).argmax(-1)

    def project(dtype: torch.dtype, backend: Any) -> tuple[Tensor, ...]:
        leaf = new.to(dtype).requires_grad_()
        found = linear_trust_region(
            leaf, weight.to(dtype), ids, old.to(dtype), kl_bound=KL_BOUND, backend=backend
        )
        loss = found.projected_log_probs.sum() + found.regression.sum() + found.entropy.sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert found.projected_kl is not None
        return found.projected_log_probs.detach(), gradient, found.projected_kl[found.projected]

    exact, plain = project(torch.float64, "torch"), project(torch.float32, "torch")
    kernel = project(torch.float32, "triton")
    beyond = (kernel[2] / KL_BOUND - 1).abs().max()
    figures = [
        _compared(f"exact trust region: {name}", kernel[at], plain[at], exact[at])
        for at, name in enumerate(("projected log-probabilities", "gradient"))
    ]
    reached = Figure("exact trust region: divergence reached, off the bound by", float(beyond), _BOUND_BAR)
    return [*figures, reached]


def _tests(plan: Plan) -> list[Figure]:
    """The repository's own tests of the kernels, compiled where there is a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plan.kernel_tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-1500:]}")
    failed = sum(line.startswith("FAILED") for line in done.stdout.splitlines())
    return [Figure("tests of the kernels that fail", max(failed, done.returncode), 0)]


def _waits(plan: Plan) -> Figure:
    """How often the host waits for the device in the LM head and in the projection, forward and backward."""
    tokens, width, vocabulary, top_k = plan.head
    inputs = (
        torch.randn(tokens, width, device=plan.device), torch.randn(vocabulary, width, device=plan.device),
        torch.randint(vocabulary, (tokens, 3), device=plan.device),
    )  # fmt: skip
    new, old = (torch.randn(plan.rows, device=plan.device).log_softmax(-1) for _ in range(2))

    def update() -> None:
        _head_numbers(inputs, "auto", top_k)
        leaf = new.clone().requires_grad_()
        project_categorical(leaf, old, KL_BOUND).log_probs.sum().backward()

    update()  # compiles
    return Figure("LM head and projection: times the host waits for the device", _counted(update), 0)


def _counted(update: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)
