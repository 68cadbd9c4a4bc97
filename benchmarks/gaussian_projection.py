"""Gaussian projection: this library's batched solver against an optimiser a sample.

    python benchmarks/gaussian_projection.py

The covariance part of 152 policies over 63 weights (one Box Pushing batch with contextual covariances) is
projected onto a KL ball of 0.0005, in float64 on one thread. The rival works as the original implementation
does: a sample at a time, L-BFGS (here scipy's) on the scalar dual of the projection over the multiplier
eta >= 0, started at 1; then the covariance at that multiplier, and its closed-form gradient. A second rival
searches log(eta) instead, which suits L-BFGS better. Times are of the processor, which others on the machine
disturb little; methods take turns, and the table has the medians.

Prints a table and writes benchmarks/results/gaussian_projection/cpu.json.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from scipy import linalg, optimize
from torch import Tensor

from tether.projection import kl_gaussian, project_gaussian

RESULTS = Path(__file__).parent / "results" / "gaussian_projection"
Array = NDArray[np.float64]


def random_factors(batch: int, size: int, spread: float, seed: int) -> Tensor:
    """Cholesky factors of random covariances, [batch, size, size]."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(batch, size, size, generator=generator, dtype=torch.float64) * spread / math.sqrt(size)
    return torch.linalg.cholesky(root @ root.mT + torch.eye(size, dtype=torch.float64))


def multiplier(precision: Array, old_precision: Array, bound: float, *, logarithmic: bool) -> float:
    """The maximiser of the dual, with P and P_o the precisions and Q = (eta P_o + P) / (1 + eta):

    1/2 ((1 + eta) log|Q| - log|P| - eta log|P_o|) - eta bound.
    """
    log_det = np.linalg.slogdet(precision)[1]
    old_log_det = np.linalg.slogdet(old_precision)[1]

    def negative_dual(x: Array) -> tuple[float, Array]:
        eta = math.exp(x[0]) if logarithmic else float(x[0])
        factor = linalg.cholesky((eta * old_precision + precision) / (1 + eta), lower=True)
        mixed = 2 * np.log(np.diag(factor)).sum()
        value = 0.5 * ((1 + eta) * mixed - log_det - eta * old_log_det) - eta * bound
        trace = np.trace(linalg.cho_solve((factor, True), old_precision))
        slope = 0.5 * (trace - len(precision) + mixed - old_log_det) - bound
        return -value, np.array([-slope * (eta if logarithmic else 1.0)])

    found = optimize.minimize(
        negative_dual,
        np.array([0.0 if logarithmic else 1.0]),
        jac=True,
        method="L-BFGS-B",
        bounds=[(-20, 30) if logarithmic else (0, None)],
        options={"ftol": 1e-14, "gtol": 1e-10, "maxiter": 200},
    )
    return math.exp(found.x[0]) if logarithmic else float(found.x[0])


def rival(
    factors: Array, old_factors: Array, bound: float, upstream: Array | None, *, logarithmic: bool = False
) -> tuple[Array, Array | None]:
    """Projected factors a sample at a time and, given an upstream gradient, the gradient by `factors`."""
    projected, gradients = np.empty_like(factors), np.empty_like(factors)
    for i, (factor, old_factor) in enumerate(zip(factors, old_factors, strict=True)):
        precision = np.linalg.inv(factor @ factor.T)
        old_precision = np.linalg.inv(old_factor @ old_factor.T)
        eta = multiplier(precision, old_precision, bound, logarithmic=logarithmic)
        covariance = np.linalg.inv((eta * old_precision + precision) / (1 + eta))
        projected[i] = np.linalg.cholesky(covariance)
        if upstream is None:
            continue
        inner = np.tril(projected[i].T @ upstream[i])
        inner = 0.5 * (np.tril(inner, -1) + np.tril(inner, -1).T + np.diag(np.diag(inner)))
        by_mixed = -projected[i] @ inner @ projected[i].T
        gap = old_precision - precision
        tangent = covariance - covariance @ old_precision @ covariance
        by_precision = by_mixed - tangent * ((by_mixed * gap).sum() / (tangent * gap).sum())
        gradients[i] = np.tril(-2 / (1 + eta) * precision @ by_precision @ precision @ factor)
    return projected, None if upstream is None else gradients


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=152)
    parser.add_argument("--size", type=int, default=63)
    parser.add_argument("--bound", type=float, default=5e-4)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    old = random_factors(options.batch, options.size, 1.0, seed=0)
    new = (old @ random_factors(options.batch, options.size, 0.3, seed=1)).requires_grad_()
    upstream = random_factors(options.batch, options.size, 1.0, seed=2)
    mean = torch.zeros(options.batch, options.size, dtype=torch.float64)
    arrays = new.detach().numpy(), old.numpy()

    def ours(backward: bool) -> tuple[Tensor, Tensor | None]:
        projected = project_gaussian(mean, new, mean, old, 0.1, options.bound).scale_tril
        gradient = torch.autograd.grad(projected, new, upstream)[0] if backward else None
        return projected.detach(), gradient

    methods: dict[str, Callable[[], tuple[Tensor | Array, Tensor | Array | None]]] = {
        "tether, forward": lambda: ours(False),
        "L-BFGS a sample, forward": lambda: rival(*arrays, options.bound, None),
        "L-BFGS a sample on log(eta), forward": lambda: rival(*arrays, options.bound, None, logarithmic=True),
        "tether, forward and backward": lambda: ours(True),
        "L-BFGS a sample, forward and backward": lambda: rival(*arrays, options.bound, upstream.numpy()),
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(options.repeats + 1):  # the first round warms up
        for name, method in methods.items():
            start = time.process_time()
            method()
            times[name].append(time.process_time() - start)
    reference_gradient = ours(True)[1]
    assert reference_gradient is not None
    rows = {}
    print(f"batch {options.batch}, W = {options.size}, bound {options.bound}, float64, one thread")
    print(f"{'method':38} {'CPU s':>9} {'ratio':>6} {'|KL/bound - 1|':>15} {'gradient differs':>17}")
    for name, method in methods.items():
        projected, gradient = (None if value is None else torch.as_tensor(value) for value in method())
        kl = kl_gaussian(mean, projected, mean, old)[1]
        median = statistics.median(times[name][1:])
        own = statistics.median(times[f"tether, {name.rpartition(', ')[2]}"][1:])
        differs = math.nan
        if gradient is not None:
            differs = float((gradient - reference_gradient).norm() / reference_gradient.norm())
        rows[name] = {
            "median_seconds": median,
            "ratio": median / own,
            "worst_relative_kl_error": float((kl / options.bound - 1).abs().max()),
            "relative_gradient_difference": None if gradient is None else differs,
            "seconds": times[name][1:],
        }
        print(
            f"{name:38} {median:9.4f} {median / own:6.1f} {rows[name]['worst_relative_kl_error']:15.1e} "
            f"{'' if gradient is None else format(differs, '.1e'):>17}"
        )
    RESULTS.mkdir(parents=True, exist_ok=True)
    record = {
        "command": "python benchmarks/gaussian_projection.py",
        "settings": vars(options),
        "machine": platform.machine(),
        "versions": {"torch": torch.__version__, "numpy": np.__version__, "scipy": scipy.__version__},
        "rows": rows,
    }
    (RESULTS / "cpu.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
