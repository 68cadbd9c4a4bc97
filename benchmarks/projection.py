"""The projection against the papers' root search, on the same rows, to the same tolerance.

    python benchmarks/projection.py [--threads 1] [--repeats 9]

TROLL and the trust-region layers before it find the dual variable eta by n-ary bracketing: eight points
in the bracket [1e-7, 1e2], twenty rounds. `by_bracketing` does that with every advantage of ours but
the search itself: only violating rows, in the same cache-sized blocks, one fused pass an evaluation. It is
timed twice: as published, with all of its 160 evaluations, and stopping as soon as every row of a block meets
the tolerance that ours has to meet.

First all are checked against float64. Then they run in turns, in an order that alternates, and ours
twice a turn, so that the spread of ours against itself (A/A) shows what the machine's noise is.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether import project_categorical

RESULTS = Path(__file__).parent / "results" / "projection"
KL_BOUND = 0.05
TOLERANCE = 1e-5
POINTS, ROUNDS = 8, 20
SMALLEST_ETA, LARGEST_ETA = 1e-7, 1e2
# Rows are worked on in blocks that fit a CPU's cache; on a GPU, in as few launches as its memory allows.
BLOCK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 28}


@dataclass(frozen=True)
class Shape:
    """One workload: rows of distributions, some of which leave the ball."""

    name: str
    rows: int
    outcomes: int
    violating: float


SHAPES = (
    Shape("support of 64 and tail, every row violates", 20_000, 65, 1.0),
    Shape("support of 64 and tail, 0.1 % violate", 20_000, 65, 0.001),
    Shape("1000 outcomes, every row violates", 20_000, 1000, 1.0),
    Shape("150k outcomes, every row violates", 64, 150_000, 1.0),
)


def make_rows(shape: Shape) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(shape.rows, shape.outcomes, generator=generator) * 2
    violating = torch.rand(shape.rows, 1, generator=generator) < shape.violating
    shift = torch.where(violating, 1.5, 0.01)
    new = old + shift * torch.randn(shape.rows, shape.outcomes, generator=generator)
    return new.log_softmax(-1), old.log_softmax(-1)


def by_bracketing(new: Tensor, old: Tensor, *, stop_early: bool = True) -> Tensor:
    """Projected log-probabilities by the papers' search."""
    output = new.clone()
    for rows in violating_blocks(new, old):
        log_q, ratio = old[rows], new[rows] - old[rows]
        s = bracket(log_q, ratio, stop_early=stop_early)
        output[rows] = torch.log_softmax(log_q + s[:, None] * ratio, -1)
    return output


def as_published(new: Tensor, old: Tensor) -> Tensor:
    """All twenty rounds, whether they are needed or not."""
    return by_bracketing(new, old, stop_early=False)


def violating_blocks(new: Tensor, old: Tensor) -> tuple[Tensor, ...]:
    size = max(1, BLOCK_ELEMENTS[new.device.type] // new.shape[-1])
    kl = torch.cat(
        [(p.exp() * (p - q)).sum(-1) for p, q in zip(new.split(size), old.split(size), strict=True)]
    )
    rows = (kl > KL_BOUND).nonzero().squeeze(-1)
    return rows.split(size) if len(rows) else ()


def bracket(log_q: Tensor, ratio: Tensor, *, stop_early: bool) -> Tensor:
    """s = 1 / (1 + eta) of each row; KL falls with eta."""
    low = log_q.new_full(log_q.shape[:1], math.log(SMALLEST_ETA))
    high = log_q.new_full(log_q.shape[:1], math.log(LARGEST_ETA))
    found = low.new_full(low.shape, math.nan)
    fractions = torch.linspace(0, 1, POINTS + 2)[1:-1].tolist()
    for _ in range(ROUNDS):
        bottom, width = low, high - low
        for fraction in fractions:
            log_eta = bottom + fraction * width
            s = torch.sigmoid(-log_eta)
            kl = divergence(log_q, ratio, s)
            found = torch.where((kl - KL_BOUND).abs() <= TOLERANCE * KL_BOUND, s, found)
            low = torch.where(kl > KL_BOUND, torch.maximum(low, log_eta), low)
            high = torch.where(kl <= KL_BOUND, torch.minimum(high, log_eta), high)
        if stop_early and not bool(found.isnan().any()):
            break
    return torch.where(found.isnan(), torch.sigmoid(-high), found)


def divergence(log_q: Tensor, ratio: Tensor, s: Tensor) -> Tensor:
    """KL(pi_s || q) = s E[z] - A, with A read off the largest probability of a fused softmax."""
    curve = torch.addcmul(log_q, s[:, None], ratio)
    probs = curve.softmax(-1)
    mass = probs.sum(-1)
    log_partition = curve.amax(-1) - (probs.amax(-1) / mass).log()
    return s * probs.mul_(ratio).sum(-1) / mass - log_partition


def by_newton(new: Tensor, old: Tensor) -> Tensor:
    return project_categorical(new, old, KL_BOUND).log_probs


def check(new: Tensor, old: Tensor) -> dict[str, float]:
    """Largest relative distance from the bound over violating rows, in float64, of each."""
    log_q = old.double().log_softmax(-1)
    log_p = new.double().log_softmax(-1)
    outside = (log_p.exp() * (log_p - log_q)).sum(-1) > KL_BOUND * 1.001
    errors = {}
    for name, method in (("newton", by_newton), ("bracketing", by_bracketing), ("published", as_published)):
        log_pi = method(new, old).double().log_softmax(-1)
        kl = (log_pi.exp() * (log_pi - log_q)).sum(-1)
        errors[name] = float((kl[outside] / KL_BOUND - 1).abs().max())
        if errors[name] > 1e-3:
            raise SystemExit(f"{name} misses the bound by {errors[name]:.1e}; its time means nothing.")
    return errors


def seconds(function: Callable[[Tensor, Tensor], Tensor], new: Tensor, old: Tensor) -> float:
    start = time.perf_counter()
    function(new, old)
    return time.perf_counter() - start


def compare(shape: Shape, repeats: int) -> dict[str, Any]:
    new, old = make_rows(shape)
    errors = check(new, old)  # warms all of them up, too
    methods = {
        "newton": by_newton,
        "bracketing": by_bracketing,
        "published": as_published,
        "newton again": by_newton,
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(repeats):
        for name in methods if turn % 2 == 0 else reversed(methods):
            times[name].append(seconds(methods[name], new, old))

    def ratios(other: str) -> list[float]:
        return [a / b for a, b in zip(times["newton"], times[other], strict=True)]

    return {
        "shape": asdict(shape),
        "median_s": {name: statistics.median(values) for name, values in times.items()},
        "ratio_to_bracketing": statistics.median(ratios("bracketing")),
        "ratio_to_published": statistics.median(ratios("published")),
        "a_a_ratio": statistics.median(ratios("newton again")),
        "a_a_range": [min(ratios("newton again")), max(ratios("newton again"))],
        "largest_relative_kl_error": errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{'':44} {'Newton':>9} {'/ stopped':>10} {'/ published':>12} {'A/A':>13} {'KL errors':>26}")
    rows = []
    for shape in SHAPES:
        row: dict[str, Any] = compare(shape, arguments.repeats)
        rows.append(row)
        errors, (low, high) = row["largest_relative_kl_error"], row["a_a_range"]
        print(
            f"{shape.name:44} {row['median_s']['newton']:8.4f}s {row['ratio_to_bracketing']:10.3f} "
            f"{row['ratio_to_published']:12.3f} {low:5.2f} - {high:5.2f}"
            + "".join(f" {error:8.1e}" for error in errors.values()),
            flush=True,
        )
    RESULTS.mkdir(parents=True, exist_ok=True)
    target = RESULTS / "newton_vs_bracketing.json"
    record = {
        "command": "python benchmarks/projection.py"
        f" --threads {arguments.threads} --repeats {arguments.repeats}",
        "torch": torch.__version__,
        "machine": f"{platform.machine()} {platform.system()}, {torch.get_num_threads()} threads, float32",
        "kl_bound": KL_BOUND,
        "tolerance": TOLERANCE,
        "rows": rows,
    }
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    temporary.rename(target)
    print(f"written: benchmarks/results/projection/{target.name}")


if __name__ == "__main__":
    main()
