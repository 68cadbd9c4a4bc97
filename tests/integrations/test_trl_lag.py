"""Completions of the policy of some updates ago, in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trl_resume import _assert_same, _resume
from trl import GRPOConfig

from tether.errors import CheckpointError, ConfigError
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer
from tether.integrations.trl_losses import PolicyLossTrainer


class _Lagged(TROLLTrainer):
    """Notes the weights of every step, and those that sample."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.of_step: dict[int, torch.Tensor] = {}
        self.sampled: list[tuple[int, torch.Tensor]] = []
        self.lags: list[list[int]] = []
        super().__init__(*args, **kwargs)

    @contextmanager
    def _sampling_weights(self) -> Any:
        self.of_step[self.state.global_step] = self.model.lm_head.weight.detach().clone()
        with super()._sampling_weights() as version:
            self.sampled.append((version, self.model.lm_head.weight.detach().clone()))
            yield version
        assert torch.equal(self.model.lm_head.weight, self.of_step[self.state.global_step])

    def _project(self, evaluation: Any, inputs: dict[str, Any]) -> Any:
        self.lags.append(self._lag(inputs).tolist())
        return super()._project(evaluation, inputs)


def _make(
    make_trainer: Callable[..., Any], trainer: Any = _Lagged, config: Any = TROLLConfig, **settings: Any
) -> Any:
    lag = settings.pop("lag", 3)
    anchor = {"troll_anchor": "sampler"} if config is TROLLConfig else {}
    defaults = {"steps_per_generation": 1, **anchor, "learning_rate": 3e-3}
    return make_trainer(trainer, config, **{**defaults, **settings, "trainer_arguments":
                        {"lag": lag, **settings.get("trainer_arguments", {})}})  # fmt: skip


@pytest.mark.parametrize(("updates", "versions"), [(1, [0, 0, 0, 0, 1, 2, 3]), (2, [0, 0, 0, 2, 4])])
def test_the_sampler_is_exactly_so_many_updates_old(
    make_trainer: Callable[..., Any], updates: int, versions: list[int]
) -> None:
    trainer = _make(make_trainer, steps_per_generation=updates, max_steps=updates * len(versions))
    trainer.train()
    assert [version for version, _ in trainer.sampled] == versions
    for version, weights in trainer.sampled:
        assert torch.equal(weights, trainer.of_step[version])
    steps = range(updates * len(versions))
    assert [lags[0] for lags in trainer.lags] == [step - versions[step // updates] for step in steps]
    assert len(trainer._versions) <= 3 // updates + 2
    moved = [log["trust_region/kl_mean"] for log in trainer.state.log_history if "loss" in log]
    assert moved[0] < 1e-5 < min(moved[3:])


def test_what_the_region_does_is_measured_by_lag(make_trainer: Callable[..., Any]) -> None:
    trainer = _make(make_trainer, lag=4, max_steps=6, troll_kl_bound=1e-4)
    trainer.train()
    rows = [log for log in trainer.state.log_history if "loss" in log]
    assert [row["trust_region/lag"] for row in rows] == [0, 1, 2, 3, 4, 4]
    for row, group in zip(rows, (0, 1, 2, 2, 4, 4), strict=True):
        found = {name.split("/")[1] for name in row if "/lag_" in name}
        assert found == {f"lag_{group}"}
        for ours, known in (("kl", "kl_mean"), ("projected", "projected"), ("uncertain", "uncertain")):
            assert row[f"trust_region/lag_{group}/{ours}"] == pytest.approx(row[f"trust_region/{known}"])


def test_without_a_lag_it_is_the_trainer_itself(make_trainer: Callable[..., Any]) -> None:
    lagged = _make(make_trainer, lag=0, max_steps=3)
    lagged.train()
    settings = {"steps_per_generation": 1, "max_steps": 3, "learning_rate": 3e-3}
    plain = make_trainer(TROLLTrainer, TROLLConfig, troll_anchor="sampler", **settings)
    plain.train()
    assert torch.equal(lagged.model.lm_head.weight, plain.model.lm_head.weight)


@pytest.mark.parametrize("step", [2, 6])
def test_a_resumed_run_has_the_samplers_it_had(
    make_trainer: Callable[..., Any], tmp_path: Path, step: int
) -> None:
    whole, resumed = _resume(lambda **s: _make(make_trainer, **s), tmp_path, step)
    _assert_same(whole, resumed)
    assert [v for v, _ in resumed.sampled] == [v for v, _ in whole.sampled][step:]


def test_a_checkpoint_without_samplers_is_refused(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    settings = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    _make(make_trainer, lag=0, **settings).train()
    with pytest.raises(CheckpointError, match="written with lag=0"):
        _make(make_trainer, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize(
    ("base", "chosen"),
    [
        (OldPolicyTrainer, {}),
        (PolicyLossTrainer, {"policy_loss": "dppo", "loss_options": {"divergence": "top-k-kl"}}),
    ],
)
def test_rivals_see_stale_data_too(
    make_trainer: Callable[..., Any], base: Any, chosen: dict[str, Any]
) -> None:
    chosen = {**chosen, "anchor": "sampler"}
    trainer = _make(make_trainer, base, GRPOConfig, max_steps=5, trainer_arguments=chosen)
    trainer.train()
    assert [log["trust_region/kl_mean"] for log in trainer.state.log_history if "loss" in log][-1] > 1e-5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lag": -1}, "lag counts updates"),
        ({"lag": 1.5}, "lag counts updates"),
        ({"num_iterations": 2}, "num_iterations=2 would use each stale batch several times"),
    ],
)
def test_what_is_no_lag_is_refused(
    make_trainer: Callable[..., Any], wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _make(make_trainer, **wrong)


def test_a_sampler_in_half_precision_is_another_policy_and_the_trainer_is_left_as_it_is(
    make_trainer: Callable[..., Any],
) -> None:
    trainer = _make(make_trainer, lag=0, max_steps=3, trainer_arguments={"sampler_dtype": torch.bfloat16})
    trainer.train()
    assert {weights.dtype for _, weights in trainer.sampled} == {torch.bfloat16}
    for version, weights in trainer.sampled:
        assert torch.equal(weights, trainer.of_step[version].bfloat16())
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    rows = [log for log in trainer.state.log_history if "loss" in log]
    # Every batch serves one update: but for the arithmetic, the network would be the policy that sampled.
    assert all(row["trust_region/lag"] == 0 < 1e-9 < row["trust_region/kl_mean"] for row in rows)
