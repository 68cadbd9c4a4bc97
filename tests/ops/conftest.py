"""What tests of the kernels share."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def bfloat16_rounded_as_hardware_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter cuts float32 to bfloat16, which doubles the error of the real thing."""
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def to_nearest(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(values, source, target, mode)
        return torch.tensor(values).bfloat16().view(torch.uint16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", to_nearest)
