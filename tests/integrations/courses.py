"""How far apart two trainings may end that do the same: what one rounding of the weights makes of a course.

Each step passes on the roundings of those before it, by a factor that only the course itself can tell. So the
reference is trained a second time, from weights that are each one rounding off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from tiny_language_model import largest_difference

from rounding import SUMMED_ANOTHER_WAY, unit_of


@dataclass(frozen=True)
class CourseRounding:
    """The largest differences to a course that began one rounding off, times SUMMED_ANOTHER_WAY."""

    weights: float
    """Of any parameter at the end."""
    logged: dict[str, float]
    """Of each logged number at any step."""

    @classmethod
    def between(cls, reference: Any, nudged: Any) -> CourseRounding:
        largest = max(float(p.detach().abs().max()) for p in reference.model.parameters())
        weights = max(unit_of(largest), largest_difference(reference.model, nudged.model))
        logged: dict[str, float] = {}
        for expected, found in zip(log_of(reference), log_of(nudged), strict=True):
            for name, value in expected.items():
                if math.isfinite(value):
                    apart = max(unit_of(value), unit_of(1.0), abs(found[name] - value))
                    logged[name] = max(logged.get(name, 0.0), SUMMED_ANOTHER_WAY * apart)
        chaotic = f"One rounding grows to {weights:.1e}: this course tells nothing. Lower its learning rate."
        assert weights < 1e-5, chaotic
        return cls(SUMMED_ANOTHER_WAY * weights, logged)

    def assert_same_log(self, reference: Any, other: Any) -> None:
        """Every number the reference logged, at each step."""
        for step, (expected, found) in enumerate(zip(log_of(reference), log_of(other), strict=True)):
            for name, value in expected.items():
                if math.isfinite(value):
                    assert abs(found[name] - value) <= self.logged[name], f"log line {step}, {name}"
                else:
                    assert str(found[name]) == str(value), f"log line {step}, {name}"


def log_of(trainer: Any) -> list[dict[str, float]]:
    """What TRL logged at each step, without what measures time."""
    rows = []
    for row in trainer.state.log_history:
        kept = {
            k: v for k, v in row.items() if not any(word in k for word in ("time", "runtime", "per_second"))
        }
        if kept:
            rows.append(kept)
    return rows


def nudge(model: torch.nn.Module) -> None:
    """Move every weight by one rounding, up or down."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * up.to(parameter.dtype))
