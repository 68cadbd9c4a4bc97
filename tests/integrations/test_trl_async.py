"""TROLL in TRL's asynchronous trainer, without a GPU or vLLM: rollouts and transfers in the process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from async_rollouts import WeightsInProcess, WorkerInProcess
from tests.oracles import project_by_root
from tiny_language_model import make_prompts, make_tiny_model, make_tokenizer
from trl.experimental.async_grpo.packing import TreeRow

from rounding import SUMMED_ANOTHER_WAY, unit_of
from tether.errors import ConfigError, InvalidInputError, TetherWarning
from tether.integrations.trl_async import AsyncTROLLConfig, AsyncTROLLTrainer
from tether.integrations.trl_async_cpu import who_sees_whom


@pytest.fixture
def make_async(tmp_path: Path) -> Callable[..., Any]:
    """make_async(lag=..., setting=...) -> a trainer whose rollouts are that many versions old."""

    def make(lag: int = 0, *, reports: int = 6, truncates: bool = False, **overrides: Any) -> Any:
        folder = tmp_path / "model"
        make_tiny_model().save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        settings: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"), "use_cpu": True, "bf16": False, "report_to": "none",
            "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "token_budget": 0,
            "per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 4, "max_staleness": 8,
            "learning_rate": 1e-2, "gradient_checkpointing": False, "seed": 3,
        }  # fmt: skip
        weights = WeightsInProcess()
        return AsyncTROLLTrainer(
            model=str(folder), reward_funcs=None, args=AsyncTROLLConfig(**{**settings, **overrides}),
            train_dataset=make_prompts(), processing_class=make_tokenizer(),
            weight_transfer=weights,
            rollout_worker=WorkerInProcess(weights, lag=lag, top_k=reports, truncates=truncates),
        )  # fmt: skip

    return make


@pytest.mark.parametrize("lag", [0, 2])
def test_trains_on_data_of_any_age(make_async: Callable[..., Any], lag: int) -> None:
    trainer = make_async(lag, max_steps=5, troll_kl_bound=0.01)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 5
    assert any(not torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
    # Batches are fetched one ahead of the update they serve.
    assert all(lag <= log["trust_region/lag"] + 1e-9 for log in logs[2 + lag :])
    assert all(log["trust_region/lag"] <= lag + 2 for log in logs)
    assert max(log["trust_region/projected"] for log in logs) > 0
    assert logs[0]["trust_region/kl_max"] < 1e-5  # the weights that sampled, in another attention
    assert logs[0]["trust_region/lag_0/kl"] < 1e-5
    if lag:
        assert logs[-1]["trust_region/lag_2/projected"] > 0
    assert all(log["trust_region/kl_projected_max"] <= 0.01 * 1.001 for log in logs)
    assert all(log["clip_ratio/region_mean"] == 0 for log in logs)


def test_the_lag_that_is_logged_is_of_the_oldest_sequence(make_async: Callable[..., Any]) -> None:
    """Over all updates and micro-batches since the last log, as in the synchronous trainer."""
    trainer = make_async(2, max_steps=6, logging_steps=6, gradient_accumulation_steps=2)
    seen = []
    real = trainer._log_tokens
    trainer._log_tokens = lambda tokens, metrics, lag, mask: (
        seen.append(float(lag.max())), real(tokens, metrics, lag, mask)
    )  # fmt: skip
    trainer.train()
    assert len(set(seen)) > 1
    assert trainer.state.log_history[0]["trust_region/lag"] == max(seen)


def test_means_are_over_tokens_however_these_are_spread_over_micro_batches(
    make_async: Callable[..., Any],
) -> None:
    """Also those of the few that are projected, and those by lag."""
    trainer = make_async(2, max_steps=6, logging_steps=6, gradient_accumulation_steps=4, troll_kl_bound=0.02)
    seen = []
    real = trainer._log_tokens
    trainer._log_tokens = lambda tokens, metrics, lag, mask: (
        seen.append((tokens, lag, mask > 0)), real(tokens, metrics, lag, mask)
    )  # fmt: skip
    trainer.train()
    logged = trainer.state.log_history[0]

    def mean(values: list[Any], chosen: list[Any]) -> float:
        return float(torch.cat([one[here] for one, here in zip(values, chosen, strict=True)]).double().mean())

    projected = [tokens.projected & mask for tokens, _, mask in seen]
    assert 0 < sum(not some.any() for some in projected) < len(seen)
    steps = mean([tokens.step for tokens, _, _ in seen], projected)
    assert logged["trust_region/mean_step"] == pytest.approx(steps, abs=SUMMED_ANOTHER_WAY * unit_of(steps))
    of_lag = [(lag.amax(1, keepdim=True) >= 2) & (lag.amax(1, keepdim=True) < 4) & m for _, lag, m in seen]
    kl = mean([tokens.kl for tokens, _, _ in seen], of_lag)
    assert logged["trust_region/lag_2/kl"] == pytest.approx(kl, abs=SUMMED_ANOTHER_WAY * unit_of(kl))


def test_where_no_token_is_projected_all_steps_are_whole(make_async: Callable[..., Any]) -> None:
    trainer = make_async(max_steps=1, troll_kl_bound=math.inf)
    trainer.train()
    assert trainer.state.log_history[0]["trust_region/mean_step"] == 1.0


@pytest.mark.parametrize(("budget", "behind"), [(0, 1), (60, 2)])
def test_data_are_older_than_the_staleness_by_what_the_page_says(
    make_async: Callable[..., Any], budget: int, behind: int
) -> None:
    """TRL looks at an age when it fetches, which is before the update; docs/async.md."""
    trainer = make_async(token_budget=budget, max_staleness=0, max_steps=5)
    trainer.train()
    lags = [log["trust_region/lag"] for log in trainer.state.log_history if "loss" in log]
    assert max(lags) == behind


def _moved_batch(trainer: Any) -> dict[str, Any]:
    """A batch of rollouts, and then a network that has moved away from their sampler."""
    trainer._sync_weight()
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.double().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.5 * noise * parameter.abs().mean())
    return batch


def _projection(new: torch.Tensor, old: torch.Tensor, bound: float) -> torch.Tensor:
    """Log-probabilities of one row's projection; the root by Brent's method, its slope implicit."""
    root = project_by_root(new.detach().numpy(), old.numpy(), bound)[1]
    if root == 1.0:
        return new

    def mixed(s: torch.Tensor) -> torch.Tensor:
        return ((1 - s) * old + s * new).log_softmax(-1)

    s = torch.tensor(root, dtype=torch.float64, requires_grad=True)
    kl = (mixed(s).exp() * (mixed(s) - old)).sum()
    (slope,) = torch.autograd.grad(kl, s, retain_graph=True)
    at = mixed(s.detach())
    kl = (at.exp() * (at - old)).sum()
    return mixed(s.detach() - (kl - kl.detach()) / slope.detach())


def _reference(model: Any, samples: list[Any], bound: float) -> torch.Tensor:
    """TROLL's loss over samples one by one, from whole logits in float64."""
    losses = []
    for sample in samples:
        ids, records = torch.as_tensor(sample.input_ids), sample.old_log_probs
        log_probs = model(ids[None]).logits[0].double().log_softmax(-1)
        for row, position in enumerate(records.positions):
            kept = records.ids[row] >= 0
            some = torch.from_numpy(records.ids[row][kept])
            old = torch.from_numpy(records.log_probs[row][kept]).double().exp()
            new = log_probs[position - 1, some].exp()
            old, new = (torch.cat((side, 1 - side.sum(0, keepdim=True))).log() for side in (old, new))
            target = _projection(new, old, bound)
            drawn = some.tolist().index(int(ids[position]))
            regression = (new.exp() * (new - target.detach())).sum()
            if target is new:
                regression = torch.zeros(())
            losses.append(-(target[drawn] - old[drawn]).exp() * sample.advantage + regression)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("bound", [0.002, 0.05, 1e6])
def test_loss_and_gradient_are_those_of_whole_logits(make_async: Callable[..., Any], bound: float) -> None:
    """Of packed rows with shared beginnings and tools' tokens, against one sample at a time."""
    trainer = make_async(troll_kl_bound=bound)
    batch = _moved_batch(trainer)
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    dense = make_tiny_model().double()
    dense.load_state_dict(trainer.model.state_dict())
    expected = _reference(dense, trainer.rollout_worker.sent[:8], bound)
    expected.backward()
    assert abs(loss.item() - expected.item()) < 1e-6
    assert (trainer._metrics["train"]["trust_region/projected"][0][0] > 0) == (bound < 1)
    largest = max(float(p.grad.abs().max()) for p in dense.parameters())
    assert largest > 0.01
    for name, parameter in dense.named_parameters():
        apart = float((trainer.model.get_parameter(name).grad - parameter.grad).abs().max())
        assert apart < 1e-6 * largest, name


def test_bounds_follow_the_lag_of_each_sample(make_async: Callable[..., Any]) -> None:
    trainer = make_async(troll_kl_bound=1e-4, troll_lag_growth="linear", troll_lag_rate=1.0)
    batch = _moved_batch(trainer)
    for lag in (0, 3):
        trainer.state.global_step = lag
        trainer.compute_loss(trainer.model, batch)
        assert trainer._metrics["train"]["trust_region/lag"][-1] == lag
        largest = trainer._metrics["train"]["trust_region/kl_projected_max"][-1]
        assert largest == pytest.approx(1e-4 * (1 + lag), rel=1e-3)


def test_truncated_sampling_needs_the_whole_set(make_async: Callable[..., Any]) -> None:
    trainer = make_async(top_k=4)
    trainer._sync_weight()
    with pytest.raises(InvalidInputError, match=r"truncated=True says that nothing else could be sampled"):
        next(iter(trainer.get_train_dataloader()))


def test_truncated_sampling_is_compared_on_the_set_it_keeps(make_async: Callable[..., Any]) -> None:
    trainer = make_async(1, reports=4, truncates=True, top_k=4, troll_kl_bound=0.01, max_steps=3,
                         gradient_accumulation_steps=2)  # fmt: skip
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 3
    assert logs[0]["trust_region/kl_max"] < 1e-5  # of the renormalised network: the same weights
    assert logs[0]["trust_region/tail_mass"] == 0
    assert logs[-1]["trust_region/projected"] > 0
    assert all(log["trust_region/kl_projected_max"] <= 0.01 * 1.001 for log in logs)


def _spoiled(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda sample: replace(sample, old_log_probs=change(sample.old_log_probs))


def _without_second(records: Any) -> Any:
    keep = [0, *range(2, len(records.positions))]
    return replace(records, positions=records.positions[keep], own=records.own[keep], ids=records.ids[keep],
                   log_probs=records.log_probs[keep])  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            _without_second,
            InvalidInputError,
            r"prompt group 0, version 1: sequence 0, position 5: the sampler left",
        ),
        (
            lambda r: replace(r, log_probs=r.log_probs * float("nan")),
            InvalidInputError,
            "position 4: .* is NaN",
        ),
        (lambda r: replace(r, ids=r.ids + 1), InvalidInputError, r"sequence 0, position 4: "),
        (lambda r: replace(r, log_probs=np.zeros_like(r.log_probs)), InvalidInputError, "position 4: "),
        (lambda r: replace(r, length=r.length + 1), InvalidInputError, "the records are of 11 tokens"),
        (lambda r: r.own, ConfigError, "needs SamplerRecords"),
    ],
)
def test_bad_records_are_refused(
    make_async: Callable[..., Any], change: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    trainer = make_async()
    trainer.rollout_worker.spoil = _spoiled(change)
    trainer._sync_weight()
    with pytest.raises(error, match=message):
        next(iter(trainer.get_train_dataloader()))


def test_a_version_nobody_published_is_refused(make_async: Callable[..., Any]) -> None:
    trainer = make_async()
    trainer.rollout_worker.spoil = lambda sample: replace(sample, model_version=7)
    trainer._sync_weight()
    with pytest.raises(
        ConfigError, match=r"version 7 of the policy, which was never published \(published: \[1\]"
    ):
        next(iter(trainer.get_train_dataloader()))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"troll_kl_bound": 0.0}, "troll_kl_bound must be"),
        ({"troll_lag_growth": "cubic"}, "troll_lag_growth must be one of"),
        ({"troll_lag_growth": "linear", "troll_lag_rate": -1}, "troll_lag_rate must be"),
        ({"troll_kl_bound_largest": 0.01}, "troll_kl_bound_largest must be at least"),
        ({"troll_lag_rate": 0.25}, "troll_lag_rate is of a bound that grows"),
        ({"troll_sampler_tolerance": -1.0}, "tolerance is a positive difference"),
        ({"epsilon": 0.1}, "belong to the clip"),
        ({"top_k": 100}, r"'top_k': 100.* more ids of a token than the 64.*Set top_k=64"),
        ({"top_p": 0.9}, r"'top_p': 0.9.* more ids of a token than the 64.*Set top_k=64"),
        ({"top_p": 0.9, "top_k": 8, "troll_top_k": 4}, r"more ids of a token than the 4.*Set top_k=4"),
        ({"repetition_penalty": 1.1}, r"'repetition_penalty': 1.1.* changes every log-probability"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AsyncTROLLConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **setting)


def test_a_penalty_is_warned_of_where_the_server_is_not_checked(tmp_path: Path) -> None:
    with pytest.warns(TetherWarning, match="make the sampler a different policy"):
        AsyncTROLLConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, repetition_penalty=1.1,
                         troll_sampler_tolerance=math.inf)  # fmt: skip


def test_other_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs args=AsyncTROLLConfig"):
        AsyncTROLLTrainer(model="nothing")


@pytest.mark.parametrize("window", [None, 2])
def test_tokens_see_their_own_path_alone(window: int | None) -> None:
    """Of two samples with the same first three tokens, each token sees its own sample's before it."""
    row = TreeRow()
    for ids in ([1, 2, 3, 4, 5], [1, 2, 3, 6]):
        row.add({"input_ids": np.array(ids), "completion_mask": np.array([0] + [1] * (len(ids) - 1)),
                 "old_log_probs": np.zeros(len(ids)), "advantage": 1.0, "group_id": 0})  # fmt: skip
    packed = row.pack()
    seen = who_sees_whom(
        packed["tree_kv_index"], packed["tree_cu_seqlens_q"], packed["tree_cu_seqlens_k"], window
    )
    tokens, depths = packed["input_ids"].tolist(), packed["position_ids"].tolist()
    assert len(tokens) == len(seen) == 7  # the last shared one stands there once for each that follows
    for query, (token, depth) in enumerate(zip(tokens, depths, strict=True)):
        found = sorted((depths[key], tokens[key]) for key in seen[query].nonzero()[:, 0].tolist())
        path = [1, 2, 3, 6] if token == 6 else [1, 2, 3, 4, 5]
        first = 0 if window is None else max(0, depth + 1 - window)
        assert found == list(enumerate(path))[first : depth + 1]
