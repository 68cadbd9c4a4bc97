"""Another engine on purpose, through `tether llm train`: half precision and truncated sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import short_run
import torch

from tether.errors import ConfigError
from tether.experiments import RunFolder
from tether.llm.config import TrainConfig
from tether.llm.train import train


# Rounding of the bound's KL: of a sum of log-probabilities down to -10 in float32 where three ids are kept.
@pytest.mark.parametrize(
    ("sampling", "rounding"),
    [({"top_p": 0.9}, 1e-7), ({"sampling_top_k": 3}, 4 * 10 * torch.finfo(torch.float32).eps)],
)
def test_a_truncated_sampler_in_half_precision_is_the_anchor(
    tmp_path: Path, sampling: dict[str, Any], rounding: float
) -> None:
    stale = {"steps": 4, "updates_per_rollout": 2, "prompts_per_rollout": 2, "lag": 2, "eval_every": 0}
    anchor = {"anchor": "sampler", "method": {"name": "troll", "kl_bound": 0.01}, "eval_problems": 2}
    other = {"sampler_dtype": "bfloat16", **sampling}
    train(short_run.config(tmp_path / "run", **stale, **anchor, **other, learning_rate=3e-3))
    rows = RunFolder.open(tmp_path / "run").metrics()
    assert rows[0]["lag"] == 0 < 1e-9 < rows[0]["kl_mean"]  # the arithmetic alone
    assert all(row["tail_mass"] == 0 and row["kl_projected_max"] <= 0.01 + rounding for row in rows)


def test_a_share_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"top_p must lie in \(0, 1\], got 1.5"):
        TrainConfig(top_p=1.5)
    with pytest.raises(ConfigError, match=r"sampling_top_k counts tokens, from 1; got 0"):
        TrainConfig(sampling_top_k=0)
