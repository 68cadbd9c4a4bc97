"""What a run computes in, on the processor at hand."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from tether.errors import warn
from tether.llm.config import TrainConfig

if TYPE_CHECKING:
    import torch

_WORTH_IT = 1.2
"""How many times as fast bfloat16 has to be. A processor with AVX2 alone was measured at 0.2."""


def computes_in_bfloat16(config: TrainConfig, on_cpu: bool) -> bool:
    """Whether a run computes in bfloat16 while its weights keep their type.

    A processor without instructions for bfloat16 imitates them, several times slower than it computes in
    float32. There a run that asked for mixed precision computes in float32, and is told so.

    Args:
        config: of the run.
        on_cpu: whether it trains on a processor; accelerators compute in bfloat16 for every type but float32.
    """
    if not on_cpu:
        return config.mixed_precision or config.dtype != "float32"
    if not config.mixed_precision or config.dtype != "float32" or bfloat16_pays():
        return config.mixed_precision
    warn(
        "mixed_precision: this processor computes in bfloat16 slower than in float32, so the run computes in "
        "float32. Processors with AVX512-BF16 or AMX train several times as fast."
    )
    return False


@functools.cache
def bfloat16_pays() -> bool:
    """Whether this processor multiplies matrices faster in bfloat16 than in float32, found by doing it.

    >>> bfloat16_pays() in (True, False)
    True
    """
    import torch

    return _seconds(torch.float32) > _WORTH_IT * _seconds(torch.bfloat16)


def _seconds(dtype: torch.dtype) -> float:
    """A product of the size of a small model's layer; the best of a few, because others compute here too."""
    import torch

    left, right = torch.ones(256, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        torch.nn.functional.linear(left, right)
        taken.append(time.perf_counter() - start)
    return min(taken)
