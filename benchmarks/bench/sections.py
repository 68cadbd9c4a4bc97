"""What is measured: a function a section, each giving findings."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from benchmarks.bench import bars, contestants, correctness
from benchmarks.bench.bars import Bar, Finding
from benchmarks.bench.memory import peak_bytes
from benchmarks.bench.shapes import EMBEDDED, SMALL, SMALL_LONG, TINY
from benchmarks.bench.timing import Ratio, Times, ratio, run_in_turns
from benchmarks.bench.workload import Regime, Shape, Workload, make_workloads

from benchmarks import projection

Findings = list[Finding | None]


@dataclass(frozen=True)
class Asked:
    """On which device, how small, and which of a GPU's LM heads."""

    device: torch.device
    quick: bool
    heads: Sequence[Shape]

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"


CHECKS = {
    "clip": (contestants.tether_clip, correctness.dense_clip),
    "TROLL": (contestants.tether_troll, correctness.dense_bucket),
    "TROLL exact": (contestants.tether_exact, correctness.dense_exact),
    "clip in one pass": (contestants.fused_clip, correctness.dense_clip),
    "TROLL in one pass": (contestants.fused_troll, correctness.dense_bucket),
    "exact in one pass": (contestants.fused_exact, correctness.dense_exact),
    "paper-style": (contestants.paper_style_troll, correctness.dense_paper),
    "TRL clip": (contestants.trl_clip, correctness.dense_clip),
    "Liger clip": (contestants.liger_clip, correctness.dense_clip),
}
RIVALS = ("paper-style", "TRL clip", "Liger clip")
RATES = (0.0, 0.001, 0.01, 0.1, 1.0)
FEW, ALL = 0.001, 1.0
_SAME_LOSS = (("clip", "TRL clip"), ("clip in one pass", "Liger clip"), ("TROLL in one pass", "paper-style"))
MEMORY_OF = ("TROLL", "TROLL in one pass", "exact in one pass", "clip", "paper-style", "Liger clip")


def main_shapes(asked: Asked) -> Findings:
    """Bars 1 to 5 and 8 on peaked rows: every path, at every rate of violations."""
    if asked.quick:
        return _heads(TINY, asked.device, turns=1)
    if asked.on_cpu:
        return _heads(SMALL, asked.device, turns=5)
    return [finding for shape in asked.heads for finding in _heads(shape, asked.device, turns=7)]


def _heads(shape: Shape, device: torch.device, turns: int) -> Findings:
    work = make_workloads(shape, "peaked", RATES, device)
    errors = _check(work, f"{shape.name}, peaked")
    running: dict[str, Callable[[], object]] = {
        "clip": contestants.step(contestants.tether_clip, work[FEW]),
        "TROLL": contestants.step(contestants.tether_troll, work[FEW]),
        "TROLL all": contestants.step(contestants.tether_troll, work[ALL]),
        "clip again": contestants.step(contestants.tether_clip, work[FEW]),
        "paper-style": contestants.step(contestants.paper_style_troll, work[FEW]),
        "paper-style all": contestants.step(contestants.paper_style_troll, work[ALL]),
        "TRL clip": contestants.step(contestants.trl_clip, work[FEW]),
        "Liger clip": contestants.step(contestants.liger_clip, work[FEW]),
        "exact": contestants.step(contestants.tether_exact, work[FEW]),
        "exact all": contestants.step(contestants.tether_exact, work[ALL]),
        "clip on all": contestants.step(contestants.tether_clip, work[ALL]),
        "clip in one pass": contestants.step(contestants.fused_clip, work[FEW]),
        "TROLL in one pass": contestants.step(contestants.fused_troll, work[FEW]),
        "exact in one pass": contestants.step(contestants.fused_exact, work[FEW]),
        "exact in one pass, all": contestants.step(contestants.fused_exact, work[ALL]),
    }
    times = run_in_turns(running, turns, device)
    third_parties = [name for name in ("TRL clip", "Liger clip") if name in times]
    fastest = min(third_parties, key=lambda name: statistics.median(times[name]))
    few = _where(shape, "peaked", work[FEW])
    every = _where(shape, "peaked", work[ALL])
    others = {
        f"TROLL {rate:.0%}": contestants.step(contestants.tether_troll, work[rate])
        for rate in RATES
        if rate not in (FEW, ALL)
    }
    other = run_in_turns({"clip": running["clip"]} | others, max(1, turns // 2), device)
    return [
        _finding(times, "clip", "clip again", f"{few} (A/A, the noise)"),
        _finding(times, "TROLL", "clip", few, bars.TROLL_FEW),
        _finding(times, "TROLL all", "clip", f"{every}; the clip acts on few tokens", bars.TROLL_ALL),
        _finding(times, "TROLL all", "clip on all", f"{every}; the clip drops its tokens", None),
        *(_finding(other, name, "clip", _where(shape, "peaked", None)) for name in others),
        _finding(times, "clip", fastest, few, bars.THIRD_PARTY),
        *(_finding(times, "clip", name, few) for name in third_parties if name != fastest),
        _finding(times, "TROLL", "paper-style", few),
        _finding(times, "TROLL all", "paper-style all", every),
        _finding(times, "exact", "TROLL", few),
        _finding(times, "exact all", "TROLL all", every),
        _finding(times, "TROLL in one pass", "paper-style", few, bars.PAPER_TIME),
        _finding(times, "clip in one pass", "Liger clip", few, bars.FUSED_CLIP),
        _finding(times, "exact in one pass", "TROLL in one pass", few, bars.EXACT_CLEARED),
        _finding(times, "exact in one pass, all", "TROLL all", every, bars.EXACT_ALL),
        *(_errors_finding(errors[FEW], ours, rival, few) for ours, rival in _SAME_LOSS),
    ]


def long_batch(asked: Asked) -> Findings:
    """More tokens than the workspace holds: the backward pass forms the logits again."""
    if asked.quick or not asked.on_cpu:
        return []
    device = asked.device
    work = make_workloads(SMALL_LONG, "peaked", (FEW,), device)[FEW]
    one_pass = ("clip in one pass", "TROLL in one pass", "exact in one pass")
    names = ("clip", "TROLL", "paper-style", "Liger clip", "TROLL exact", *one_pass)
    times = run_in_turns({name: contestants.step(CHECKS[name][0], work) for name in names}, 2, device)
    where = _where(SMALL_LONG, "peaked", work)
    return [
        _finding(times, "TROLL", "clip", where, bars.TROLL_FEW),
        _finding(times, "clip", "Liger clip", where, bars.THIRD_PARTY),
        _finding(times, "TROLL", "paper-style", where),
        _finding(times, "TROLL exact", "TROLL", where),
        _finding(times, "TROLL in one pass", "paper-style", where, bars.PAPER_TIME_LONG),
        _finding(times, "clip in one pass", "Liger clip", where, bars.FUSED_CLIP_LONG),
        _finding(times, "exact in one pass", "TROLL in one pass", where, bars.EXACT_CLEARED),
    ]


def near_uniform(asked: Asked) -> Findings:
    """Rows on which every id is about as likely: the support holds next to nothing."""
    shape = TINY if asked.quick else SMALL if asked.on_cpu else asked.heads[0]
    work = make_workloads(shape, "uniform", (FEW, ALL), asked.device)
    _check(work, f"{shape.name}, near-uniform")
    turns = 1 if asked.quick else 4
    findings = _troll_and_exact(shape, "uniform", work, turns, asked.device)
    # A CPU keeps all logits of so few tokens, and makes no other pass.
    return findings if asked.on_cpu else [*findings, *_in_one_pass(shape, work, turns, asked.device)]


def _in_one_pass(shape: Shape, work: Mapping[float, Workload], turns: int, device: torch.device) -> Findings:
    steps = {
        "exact in one pass": contestants.step(contestants.fused_exact, work[FEW]),
        "TROLL in one pass": contestants.step(contestants.fused_troll, work[FEW]),
        "exact in one pass, all": contestants.step(contestants.fused_exact, work[ALL]),
        "TROLL in one pass, all": contestants.step(contestants.fused_troll, work[ALL]),
    }
    times = run_in_turns(steps, turns, device)
    few, every = _where(shape, "uniform", work[FEW]), _where(shape, "uniform", work[ALL])
    return [
        _finding(times, "exact in one pass", "TROLL in one pass", few, bars.EXACT_UNCLEARED),
        _finding(times, "exact in one pass, all", "TROLL in one pass, all", every, bars.EXACT_ALL),
    ]


def embedded_shape(asked: Asked) -> Findings:
    """The embedded model's head is so small that the projection is not small beside it: no bar, a report."""
    if asked.quick:
        return []
    work = make_workloads(EMBEDDED, "peaked", (FEW, ALL), asked.device)
    findings = _troll_and_exact(EMBEDDED, "peaked", work, 9, asked.device)
    return [finding and replace(finding, bar=None) for finding in findings]


def _troll_and_exact(
    shape: Shape, regime: Regime, work: Mapping[float, Workload], turns: int, device: torch.device
) -> Findings:
    times = run_in_turns(
        {
            "clip": contestants.step(contestants.tether_clip, work[FEW]),
            "TROLL": contestants.step(contestants.tether_troll, work[FEW]),
            "TROLL all": contestants.step(contestants.tether_troll, work[ALL]),
            "exact": contestants.step(contestants.tether_exact, work[FEW]),
            "exact all": contestants.step(contestants.tether_exact, work[ALL]),
        },
        turns, device,
    )  # fmt: skip
    few, every = _where(shape, regime, work[FEW]), _where(shape, regime, work[ALL])
    return [
        _finding(times, "TROLL", "clip", few, bars.TROLL_FEW),
        _finding(times, "TROLL all", "clip", every, bars.TROLL_ALL),
        _finding(times, "exact", "TROLL", few, bars.EXACT_UNCLEARED),
        _finding(times, "exact all", "TROLL all", every, bars.EXACT_ALL),
    ]


def old_policy(asked: Asked) -> Findings:
    """Bar 3: what it costs to keep the most likely ids while the old policy is scored."""
    findings = []
    for shape in (TINY,) if asked.quick else (SMALL,) if asked.on_cpu else asked.heads:
        work = make_workloads(shape, "peaked", (0.0,), asked.device)[0.0]
        times = run_in_turns(
            {
                "with top-K": contestants.old_policy_pass(work, with_support=True),
                "plain": contestants.old_policy_pass(work, with_support=False),
                "plain again": contestants.old_policy_pass(work, with_support=False),
            },
            1 if asked.quick else 11, asked.device,
        )  # fmt: skip
        where = _where(shape, "peaked", None)
        findings += [
            _finding(times, "plain", "plain again", f"{where} (A/A, the noise)"),
            _finding(times, "with top-K", "plain", where, bars.OLD_PASS),
        ]
    return findings


def root_search(asked: Asked) -> Findings:
    """Bar 6: the projection against the papers' search, as published and stopping early."""
    findings = []
    shapes = [projection.Shape("tiny", 300, 65, 1.0)] if asked.quick else projection.SHAPES
    for shape in shapes:
        new, old = (rows.to(asked.device) for rows in projection.make_rows(shape))
        projection.check(new, old)
        methods = {
            "Newton": projection.by_newton,
            "published": projection.as_published,
            "stopped early": projection.by_bracketing,
            "Newton again": projection.by_newton,
        }
        running = {name: functools.partial(method, new, old) for name, method in methods.items()}
        times = run_in_turns(running, 1 if asked.quick else 3, asked.device)
        bar = bars.BRACKETING if shape.violating == 1.0 else None
        findings += [
            _finding(times, "Newton", "published", shape.name, bar),
            _finding(times, "Newton", "stopped early", shape.name),
            _finding(times, "Newton", "Newton again", f"{shape.name} (A/A, the noise)"),
        ]
    return findings


def memory(asked: Asked) -> Findings:
    """Bar 5's other half: peaks in processes of their own."""
    shapes = {f"gpu {shape.name}": shape for shape in asked.heads}
    if asked.on_cpu:
        shapes = {"cpu tiny": TINY} if asked.quick else {"cpu": SMALL_LONG}
    findings = []
    for name, shape in shapes.items():
        measured = {c: peak_bytes(c, name) for c in MEMORY_OF}
        peaks = {contestant: float(peak) for contestant, peak in measured.items() if peak is not None}
        where = f"{shape.name}, {shape.tokens} tokens"
        findings += [
            _memory_finding(peaks, "TROLL", "paper-style", where),
            _memory_finding(peaks, "TROLL in one pass", "paper-style", where, bars.PAPER_MEMORY),
            _memory_finding(peaks, "TROLL", "clip", where),
            _memory_finding(peaks, "exact in one pass", "TROLL in one pass", where),
            _memory_finding(peaks, "clip", "Liger clip", where),
        ]
    return findings


def training_step(asked: Asked) -> Findings:
    """Bar 7: the whole training step, through the real trainers."""
    from benchmarks.bench import training_step as training

    if asked.quick:
        return []
    times = training.run_in_turns(4, 1, asked.device)
    where = "512 responses, then 8 updates of 64"
    return [
        _finding(times, "clip", "clip again", f"{where} (A/A, the noise)"),
        _finding(times, "TROLL", "clip", where, bars.TRAINING_STEP),
        _finding(times, "clip measured by Tether", "clip", where),
    ]


SECTIONS = {
    function.__name__: function
    for function in (
        main_shapes, long_batch, near_uniform, embedded_shape, old_policy, root_search, memory, training_step,
    )
}  # fmt: skip


def _check(work: Mapping[float, Workload], name: str) -> dict[float, dict[str, float]]:
    """Relative errors of every contestant's gradients, in the precision of the workload."""
    # What Liger compiles for one number of tokens PyTorch 2.11 fails to compile again for another.
    torch.compiler.reset()
    errors = {}
    for rate, workload in work.items():
        if rate in (FEW, ALL):
            errors[rate] = correctness.check(CHECKS, workload, rivals=RIVALS)
            print(f"checked on {name}, {rate:.1%} violating: gradients are off by", end=" ")
            print(", ".join(f"{error:.0e} ({name})" for name, error in errors[rate].items()), flush=True)
    torch.compiler.reset()
    return errors


def _where(shape: Shape, regime: Regime, work: Workload | None) -> str:
    head = f"{shape.name}, {shape.tokens} tokens, {'peaked' if regime == 'peaked' else 'near-uniform'}"
    return head if work is None else f"{head}, {work.violating:.1%} violating"


def _finding(times: Times, ours: str, against: str, where: str, bar: Bar | None = None) -> Finding | None:
    """None where one of them did not fit into memory."""
    if ours not in times or against not in times:
        return None
    return Finding(
        ours, against, where, ratio(times, ours, against),
        statistics.median(times[ours]), statistics.median(times[against]), bar=bar,
    )  # fmt: skip


def _errors_finding(errors: Mapping[str, float], ours: str, against: str, where: str) -> Finding:
    value = errors[ours] / errors[against]
    return Finding(
        ours, against, f"{where}: error of the gradient", Ratio(value, value, value),
        errors[ours], errors[against], "of its norm",
    )  # fmt: skip


def _memory_finding(
    peaks: Mapping[str, float], ours: str, against: str, where: str, bar: Bar | None = None
) -> Finding | None:
    if ours not in peaks or against not in peaks:
        return None
    value = peaks[ours] / peaks[against]
    mebibytes = {name: peak / 2**20 for name, peak in peaks.items()}
    return Finding(
        ours, against, where, Ratio(value, value, value), mebibytes[ours], mebibytes[against], "MiB", bar
    )
