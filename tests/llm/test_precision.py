"""Mixed precision is taken where it is faster, and a run is told where it is not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tether.errors import TetherWarning
from tether.llm import precision
from tether.llm.config import TrainConfig
from tether.llm.precision import bfloat16_pays, computes_in_bfloat16


def _config(tmp_path: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(output=tmp_path, **changes)


def test_what_is_measured_is_what_the_processor_says_of_itself() -> None:
    can = getattr(torch.cpu, "get_capabilities", dict)()
    if can.get("amx_bf16") or can.get("avx512_bf16"):
        assert bfloat16_pays()
    elif can.get("avx2") and not can.get("avx512_f"):
        assert not bfloat16_pays()
    else:
        pytest.skip("a processor of which it is not known")


def test_a_processor_without_the_arithmetic_computes_in_float32_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "bfloat16_pays", lambda: False)
    with pytest.warns(TetherWarning, match="the run computes in float32"):
        assert not computes_in_bfloat16(_config(tmp_path, mixed_precision=True), on_cpu=True)


@pytest.mark.parametrize(
    ("changes", "on_cpu", "pays", "expected"),
    [
        ({}, True, True, False),
        ({"mixed_precision": True}, True, True, True),
        ({"mixed_precision": True, "dtype": "bfloat16"}, True, False, True),
        ({"dtype": "bfloat16"}, True, True, False),
        ({}, False, False, False),
        ({"mixed_precision": True}, False, False, True),
        ({"dtype": "auto"}, False, False, True),
    ],
)
def test_elsewhere_a_run_computes_as_it_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    on_cpu: bool,
    pays: bool,
    expected: bool,
) -> None:
    monkeypatch.setattr(precision, "bfloat16_pays", lambda: pays)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert computes_in_bfloat16(_config(tmp_path, **changes), on_cpu) is expected
