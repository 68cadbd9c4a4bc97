"""The trust region around a real engine's policy: vLLM in the trainer's process, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def _mismatch(result: dict[str, Any]) -> list[float]:
    name = "trust_region/sampler_mismatch"
    return [row[name] for row in result["rows"] if name in row]


def test_trains_around_what_vllm_reports_without_a_scoring_pass(train: Callable[..., Any]) -> None:
    result = train(troll_kl_bound=0.01)
    assert result["steps"] == 6
    assert result["scored"] == 0
    assert result["truncated"] == 0
    found = _mismatch(result)
    assert len(found) == 3  # transfers, the first before any update
    assert max(found) < 1e-4  # float32 against float32
    rows = result["rows"]
    fresh, stale = rows[0::2], rows[1::2]
    assert max(row["trust_region/kl_mean"] for row in fresh) < 1e-5
    assert max(row["trust_region/projected"] for row in stale) > 0
    assert result["kl_projected"] <= 0.01 * (1 + 1e-3)


def test_truncated_sampling_is_renormalised_on_what_vllm_keeps(train: Callable[..., Any]) -> None:
    result = train(top_k=4, top_p=0.95, troll_kl_bound=0.01)
    assert result["truncated"] == result["tokens"] > 0
    assert max(_mismatch(result)) < 1e-4
    assert result["kl_projected"] <= 0.01 * (1 + 1e-3)


def test_an_engine_in_half_precision_is_told_from_one_that_is_stale(train: Callable[..., Any]) -> None:
    result = train("bfloat16")
    assert result["error"] is None
    assert 1e-4 < max(_mismatch(result)) < 0.05


@pytest.mark.parametrize("case", ["never", "head"])
def test_weights_that_do_not_arrive_are_an_error(train: Callable[..., Any], case: str) -> None:
    result = train(case)
    assert result["error"] is not None, result["rows"]
    assert "After the transfer of the weights of step 2" in result["error"]
    assert result["steps"] == 2


def test_the_decoupled_form_is_trls_correction(train: Callable[..., Any]) -> None:
    """With vLLM TRL weighs by the sampler itself; the region is then around the policy it scores."""
    result = train(troll_anchor="trainer", max_steps=2)
    assert result["scored"] == 1
    assert result["rows"][0]["sampling/sampling_logp_difference/max"] < 1e-3
