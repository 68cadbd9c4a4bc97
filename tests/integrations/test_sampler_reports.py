"""Records of a sampler through TRL's lists, and an engine that reports as vLLM does."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_language_model import make_tiny_model

from tether.errors import ConfigError, InvalidInputError, StaleSamplerError, TetherWarning
from tether.integrations.sampler_check import Mismatch, SamplerCheck, Tolerance
from tether.integrations.sampler_reports import collect, report_sequence
from tether.integrations.trl import TROLLConfig, TROLLTrainer
from tether.integrations.trl_sampler import report_top_k


def test_records_stay_with_their_tokens_through_turns_and_cuts() -> None:
    """As TRL's tool loop treats lists: cut at a length, zeros for what a tool wrote, then a second turn."""
    half = [[-0.7, -0.7]]
    first = report_sequence([3, 4, 5], [[3, 1], [4, 1], [5, 1]], half * 3, 0)[:2]
    second = report_sequence([6, 7], [[6, 2, 9], [2, 7, 9]], [[-0.2, -2.0, -4.0], [-0.3, -1.4, -5.0]], 0)
    other = report_sequence([8], [[8, 0]], [[-0.1, -3.0]], 1)
    ids = torch.tensor([[3, 4, 0, 6, 7], [8, 0, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 0, 0, 0]])
    policy = collect([[*first, 0.0, *second], other], ids, mask, truncated=False)
    assert policy.support.ids[0, :, 0].tolist() == [3, 4, -1, 6, 2]
    assert policy.log_probs[0].tolist()[3:] == pytest.approx([-0.2, -1.4])
    assert policy.log_probs[1, 0].item() == pytest.approx(-0.1)
    with pytest.raises(InvalidInputError, match="sequence 0, position 2: the sampler left no record"):
        collect([[*first, 0.0, *second], other], ids, torch.ones_like(mask), truncated=False)


def test_a_drawn_id_that_was_not_reported_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=re.escape("sequence 4, position 1: the engine drew id 9")):
        report_sequence([3, 9], [[3, 1], [4, 1]], [[-0.1, -3.0]] * 2, 4)


def test_an_engine_that_reports_nothing_is_refused_with_the_remedy() -> None:
    engine = SimpleNamespace(generate=lambda **_: ([[1]], [[2]], None, None))
    report_top_k(engine, 8)
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        engine.generate()


def test_the_limit_of_a_colocated_engine_is_raised() -> None:
    for limit, expected in ((20, 64), (100, 100), (-1, -1)):
        model_config = SimpleNamespace(max_logprobs=limit)
        llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=model_config))
        engine = SimpleNamespace(llm=llm, generate=None)
        report_top_k(engine, 64)
        assert (engine.logprobs, model_config.max_logprobs) == (64, expected)


class _Engine:
    """Another copy of the model that samples and reports the top N and the drawn id, by rank, as TRL's
    `VLLMGeneration` hands it on; `late` transfers do not arrive."""

    late = False
    step = 0.0  # what logits are rounded to

    def __init__(self, model: Any, temperature: float, max_completion_length: int, **settings: Any) -> None:
        self.trained, self.mine = model, make_tiny_model()  # no copy: forwards are patched
        self.temperature, self.length, self.logprobs = (
            temperature,
            max_completion_length,
            settings["logprobs"],
        )
        self.top_k = settings["top_k"]
        self.transfers = 0

    def sync_weights(self) -> None:
        if not (self.late and self.transfers):
            self.mine.load_state_dict(self.trained.state_dict())
        self.transfers += 1

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
        end = self.mine.config.eos_token_id
        drawn, numbers, ids = [], [], []
        for prompt in prompts:
            tokens, own, rows = list(prompt), [], []
            while len(tokens) < len(prompt) + self.length and tokens[-1] != end:
                logits = self.mine(torch.tensor([tokens])).logits[0, -1] / self.temperature
                if self.step:
                    logits = (logits / self.step).round() * self.step
                if self.top_k:
                    logits[logits < logits.topk(self.top_k).values[-1]] = -torch.inf
                log_probs = logits.log_softmax(-1)
                token = int(log_probs.exp().multinomial(1))
                top = {*log_probs.topk(self.logprobs).indices.tolist(), token}
                ranked = sorted(top, key=lambda i: -float(log_probs[i]))
                rows.append(ranked)
                own.append(log_probs[ranked].tolist())
                tokens.append(token)
            drawn.append(tokens[len(prompt) :])
            numbers.append(own)
            ids.append(rows)
        return prompts, drawn, numbers, ids


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[_Engine]:
    kind = type("Engine", (_Engine,), {})
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", kind)
    return kind


SERVER = {"use_vllm": True, "vllm_mode": "server", "troll_anchor": "sampler", "troll_top_k": 6}


def test_an_engines_reports_are_the_old_policy(
    make_trainer: Callable[..., Any], engine: type[_Engine]
) -> None:
    """Fewer ids than the vocabulary, drawn ones among the rest."""
    trainer = make_trainer(TROLLTrainer, TROLLConfig, **SERVER, max_steps=5, troll_kl_bound=0.01,
                           troll_sampler_tolerance=1e-3)  # fmt: skip
    trainer.train()
    assert trainer.vllm_generation.transfers == 2
    rows = [row for row in trainer.state.log_history if "loss" in row]
    for step, row in enumerate(rows):
        assert ("trust_region/sampler_mismatch" in row) == (step % 4 == 0)
        assert (row["trust_region/kl_mean"] < 1e-5) == (step % 4 == 0)
    assert max(row["trust_region/sampler_mismatch"] for row in rows[::4]) < 1e-5
    assert max(row["trust_region/kl_projected_max"] for row in rows) <= 0.01 * (1 + 1e-3)
    assert not any("uncertain" in name for name in rows[0])  # nothing is known of the tail


def test_an_engine_that_truncates_is_compared_on_what_it_keeps(
    make_trainer: Callable[..., Any], engine: type[_Engine]
) -> None:
    trainer = make_trainer(
        TROLLTrainer, TROLLConfig, **SERVER, top_k=4, max_steps=4, troll_sampler_tolerance=1e-3
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert rows[0]["trust_region/kl_max"] < 1e-5 < rows[1]["trust_region/kl_max"]
    assert all(row["trust_region/tail_mass"] == 0 for row in rows)


def test_ids_as_likely_as_the_last_one_kept_are_reported_too(
    make_trainer: Callable[..., Any], engine: type[_Engine]
) -> None:
    """Which vLLM keeps, and half precision makes many of: none of what sampling keeps may be missing."""
    engine.step = 0.25
    trainer = make_trainer(
        TROLLTrainer, TROLLConfig, **SERVER, top_k=6, max_steps=2, troll_sampler_tolerance=1.0
    )
    trainer.train()
    assert trainer.vllm_generation.logprobs == 12
    assert all(row["trust_region/tail_mass"] == 0 for row in trainer.state.log_history if "loss" in row)


@pytest.mark.parametrize(
    "sampling", [{"top_p": 0.9}, {"top_p": 0.9, "top_k": 7}, {"generation_kwargs": {"min_p": 0.1}}]
)
def test_an_engine_that_may_keep_more_than_it_reports_is_refused_before_it_samples(
    make_trainer: Callable[..., Any], engine: type[_Engine], sampling: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"more ids of a token than the 6 that .* Set top_k=6"):
        make_trainer(TROLLTrainer, TROLLConfig, **SERVER, **sampling)


def test_weights_that_do_not_arrive_are_an_error(
    make_trainer: Callable[..., Any], engine: type[_Engine]
) -> None:
    engine.late = True
    trainer = make_trainer(TROLLTrainer, TROLLConfig, **SERVER, max_steps=5, troll_sampler_tolerance=1e-3)
    with pytest.raises(StaleSamplerError, match="After the transfer of the weights of step 4") as error:
        trainer.train()
    assert "LM head" in str(error.value)


def test_a_difference_that_grows_is_warned_of_below_the_tolerance(
    make_trainer: Callable[..., Any], engine: type[_Engine]
) -> None:
    engine.late = True
    trainer = make_trainer(TROLLTrainer, TROLLConfig, **SERVER, max_steps=5, troll_sampler_tolerance=100.0)
    with pytest.warns(TetherWarning, match="after the first transfer it was"):
        trainer.train()


@pytest.mark.parametrize(
    "setting",
    [
        {"repetition_penalty": 1.1},
        {"generation_kwargs": {"presence_penalty": 0.5}},
        {"vllm_structured_outputs_regex": "[0-9]+"},
    ],
)
def test_penalties_are_refused_where_the_check_could_not_pass(
    make_trainer: Callable[..., Any], engine: type[_Engine], setting: dict[str, Any]
) -> None:
    """What an engine reports of them is another policy than the network's, whatever its weights."""
    with pytest.warns(TetherWarning), pytest.raises(ConfigError, match="changes every log-probability"):
        make_trainer(TROLLTrainer, TROLLConfig, **SERVER, **setting)
    with pytest.warns(TetherWarning, match="make the sampler a different policy"):
        make_trainer(TROLLTrainer, TROLLConfig, **SERVER, **setting, troll_sampler_tolerance=math.inf)


def test_the_check_can_be_switched_off(make_trainer: Callable[..., Any], engine: type[_Engine]) -> None:
    engine.late = True
    trainer = make_trainer(TROLLTrainer, TROLLConfig, **SERVER, max_steps=5, model=make_tiny_model(),
                           troll_sampler_tolerance=float("inf"))  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 5


def test_what_half_precision_explains_follows_the_first_transfer() -> None:
    """SmolLM2 in bfloat16 differed by 0.07 over ten tokens with the right weights; a stale head by 0.16."""
    half = Tolerance(0.05, 0.15)
    coarse, fine = Mismatch(), Mismatch()
    coarse.judge(1, 10, 0.03, half)
    coarse.judge(2, 10, 0.07, half)
    fine.judge(1, 10, 0.0014, half)
    for mismatch, mean in ((coarse, 0.16), (fine, 0.07), (Mismatch(), 0.16)):
        with pytest.raises(StaleSamplerError, match="arithmetic explains"):
            mismatch.judge(3, 10, mean, half)


def test_a_resumed_runs_first_transfer_does_not_say_what_arithmetic_explains() -> None:
    """Its engine begins with other weights, so that two transfers that never arrived would pass."""
    half = Tolerance(0.05, 0.15)

    def measured(*means: float, history: list[dict[str, float]]) -> None:
        mismatch = Mismatch()
        for step, mean in enumerate(means, 500):
            state = SimpleNamespace(global_step=step, log_history=history)
            trainer = SimpleNamespace(state=state, _metrics={"train": defaultdict(list)})
            mismatch.measured(trainer, 256, mean, half)

    for history in ([{"loss": 0.1}], [{"loss": 0.1}, {"trust_region/sampler_mismatch": 0.004}]):
        with pytest.raises(StaleSamplerError, match=r"step 500, .* arithmetic explains 0\.05"):
            measured(0.12, 0.14, history=history)
    measured(0.1, 0.11, history=[{"trust_region/sampler_mismatch": 0.03}])


def test_rollouts_of_which_nothing_counts_leave_the_check_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their difference of 0 would be taken for what arithmetic explains."""
    trainer = SimpleNamespace(
        state=SimpleNamespace(global_step=1, log_history=[]), model=SimpleNamespace(training=True),
        _metrics={"train": {}},
        accelerator=SimpleNamespace(device="cpu", reduce=lambda values, **_: values),
    )  # fmt: skip
    trainer._metrics["train"] = defaultdict(list)
    check = SamplerCheck(trainer, 0.1)
    monkeypatch.setattr(SamplerCheck, "tolerance", Tolerance(0.05, 0.15))
    found = iter([(0.0, 0.0), (0.6, 20.0), (3.0, 50.0)])
    monkeypatch.setattr(check, "_difference", lambda *_: tuple(map(torch.tensor, next(found))))
    check.after_generation({}, None)  # type: ignore[arg-type]
    assert not trainer._metrics["train"]
    for _ in range(2):  # the second is not measured: the same weights
        check.after_generation({}, None)  # type: ignore[arg-type]
    trainer.state.global_step = 2
    check.after_generation({}, None)  # type: ignore[arg-type]  # 0.06 is twice the first, and no alarm
    assert trainer._metrics["train"]["trust_region/sampler_mismatch"] == pytest.approx([0.03, 0.06])


def test_a_process_whose_batch_has_images_takes_part_in_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it, and compare what they have."""
    others = torch.tensor([0.6, 20.0])
    trainer = SimpleNamespace(
        state=SimpleNamespace(global_step=1, log_history=[]), model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(device="cpu", reduce=lambda values, **_: values + others),
    )  # fmt: skip
    check = SamplerCheck(trainer, 0.1)
    monkeypatch.setattr(SamplerCheck, "tolerance", Tolerance(0.05, 0.15))
    check.after_generation({"pixel_values": torch.zeros(1)}, None)  # type: ignore[arg-type]
    assert trainer._metrics["train"]["trust_region/sampler_mismatch"] == pytest.approx([0.03])
