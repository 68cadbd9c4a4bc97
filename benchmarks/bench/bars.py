"""What is promised: ratios of times, or of peak memory, that must not be exceeded in the median."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.bench.timing import Ratio


@dataclass(frozen=True)
class Bar:
    """A promise, with its limits on a CPU and on a data-centre GPU."""

    number: int
    claim: str
    cpu: float
    gpu: float


TROLL_FEW = Bar(1, "TROLL / our clip, LM head + loss, forward and backward, 0.1 % violations", 1.05, 1.02)
TROLL_ALL = Bar(2, "the same, every row violating", 1.15, 1.05)
OLD_PASS = Bar(3, "old-policy pass with top-K / plain log-probabilities", 1.05, 1.05)
THIRD_PARTY = Bar(4, "our clip / the fastest third-party clip", 1.0, 1.0)
PAPER_TIME = Bar(5, "TROLL in one pass over the head / paper-style, time", 0.75, 0.5)
PAPER_TIME_LONG = Bar(5, "the same, more tokens than the workspace holds", 0.85, 0.5)
FUSED_CLIP = Bar(9, "our clip in one pass over the head / Liger's fused GRPO loss", 0.65, 1.0)
FUSED_CLIP_LONG = Bar(9, "the same, more tokens than the workspace holds", 0.85, 1.0)
PAPER_MEMORY = Bar(5, "TROLL in one pass / paper-style, peak memory", 0.25, 0.15)
BRACKETING = Bar(6, "Newton projection / bracketing, same tolerance", 0.15, 0.1)
TRAINING_STEP = Bar(7, "training step of the embedded model, TROLL / clip", 1.03, 1.02)
EXACT_ALL = Bar(8, "exact mode / bucket mode, LM head + loss, every row violating", 1.4, 1.4)
EXACT_CLEARED = Bar(8, "the same, 0.1 % violating, certificates clear most rows", 1.1, 1.1)
EXACT_UNCLEARED = Bar(8, "the same, certificates clear none", 1.35, 1.4)


@dataclass(frozen=True)
class Finding:
    """One measured ratio."""

    ours: str
    against: str
    where: str
    """Shape, regime and what else the workload was."""
    ratio: Ratio
    ours_cost: float
    against_cost: float
    unit: str = "s"
    bar: Bar | None = None
    """What it is judged by; None for what is reported besides."""

    def limit(self, device_type: str) -> float | None:
        if self.bar is None:
            return None
        return self.bar.cpu if device_type == "cpu" else self.bar.gpu

    def verdict(self, device_type: str) -> str:
        limit = self.limit(device_type)
        if limit is None:
            return "-"
        return "met" if self.ratio.median <= limit else "MISSED"
