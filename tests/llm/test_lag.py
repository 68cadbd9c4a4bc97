"""Stale data on purpose through `tether llm train`: the same run twice, resumed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import short_run

from tether.errors import ConfigError
from tether.experiments import RunFolder
from tether.llm.callbacks import MetricsCallback
from tether.llm.config import TrainConfig
from tether.llm.train import train


def config(output: Path, **changes: object) -> TrainConfig:
    stale = {"steps": 8, "updates_per_rollout": 1, "prompts_per_rollout": 2, "lag": 3, "anchor": "sampler",
             "eval_every": 0, "eval_problems": 2}  # fmt: skip
    return short_run.config(output, **{**stale, **changes})


def test_a_run_on_stale_data_resumes_with_the_samplers_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {"name": "troll", "lag_growth": "linear", "lag_rate": 0.5, "kl_bound": 0.02}
    train(config(tmp_path / "whole", method=method))
    log = MetricsCallback.on_log

    def break_off(self: Any, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == 6:
            raise RuntimeError("the power went")
        log(self, args, state, control, **rest)

    with monkeypatch.context() as broken:
        broken.setattr(MetricsCallback, "on_log", break_off)
        with pytest.raises(RuntimeError, match="the power went"):
            train(config(tmp_path / "parts", method=method))
    train(config(tmp_path / "parts", method=method, resume=True))
    short_run.assert_same_run(tmp_path / "parts", tmp_path / "whole")
    rows = RunFolder.open(tmp_path / "whole").metrics()
    assert [row["lag"] for row in rows] == [0, 1, 2, 3, 3, 3, 3, 3]
    assert [name for name in rows[-1] if name.startswith("lag_")] == [
        "lag_2_kl",
        "lag_2_projected",
        "lag_2_uncertain",
    ]


@pytest.mark.parametrize("method", ["clip", "trm"])
def test_rivals_are_anchored_at_the_sampler_by_the_same_setting(tmp_path: Path, method: str) -> None:
    train(config(tmp_path / "run", method=method, steps=2, lag=1))
    assert [row["lag"] for row in RunFolder.open(tmp_path / "run").metrics()] == [0, 1]


def test_settings_of_lag_out_of_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lag counts updates"):
        train(config(tmp_path / "run", lag=-1))
    with pytest.raises(ConfigError, match="growth must be one of"):
        config(tmp_path / "run", method={"name": "troll", "lag_growth": "cubic"})
    method = {"name": "troll", "lag_growth": "linear", "lag_rate": 0.5}
    with pytest.raises(ConfigError, match="troll_lag_growth='linear' bounds"):
        train(config(tmp_path / "run", method=method, anchor="trainer"))
    assert not (tmp_path / "run").exists()
