"""Data sets of any size either train or are refused with the numbers; nothing ends at step 0."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from tiny_language_model import make_prompts
from trl import GRPOConfig

from tether.errors import ConfigError, TetherWarning
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Nobody chooses how many updates a batch serves; 8 completions are two prompts with 4 each."""
    return {
        name: value for name, value in settings.items() if name not in ("steps_per_generation", "max_steps")
    }


def _few(count: int) -> Any:
    return make_prompts().select(range(count))


def _updates(trainer: Any) -> int:
    return len([row for row in trainer.state.log_history if "loss" in row])


@pytest.mark.parametrize(
    ("count", "given", "updates", "taken"),
    [
        (15, {}, 7, 14),
        (5, {}, 2, 4),
        (3, {}, 1, 2),
        (9, {"gradient_accumulation_steps": 2}, 2, 8),
        (5, {"num_generations": 8}, 5, 5),
        # Half an update's completions would be one prompt and a half.
        (5, {"num_generations": 16, "gradient_accumulation_steps": 2}, 5, 5),
        (4, {"num_generations": 16}, 8, 4),
    ],
)
def test_a_small_set_gets_the_most_updates_that_it_fills_and_a_warning(
    make_trainer: Callable[..., Any], count: int, given: dict[str, int], updates: int, taken: int
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TetherWarning)
        trainer = make_trainer(
            TROLLTrainer, TROLLConfig, train_dataset=_few(count), num_train_epochs=2, **given
        )
    messages = [str(w.message) for w in caught]
    steps = updates * given.get("gradient_accumulation_steps", 1)
    assert trainer.args.steps_per_generation == steps
    if updates < 8:
        (message,) = [text for text in messages if "fewer than the" in text]
        assert f"has {count} prompts" in message
        assert f"{taken} prompts and serves {updates} update" in message
        assert f"(steps_per_generation={steps})" in message
    assert any("serves a single update" in text for text in messages) == (updates == 1)
    trainer.train()
    assert _updates(trainer) == 2 * updates


def test_the_callers_settings_are_left_alone(make_trainer: Callable[..., Any], settings: Any) -> None:
    args = TROLLConfig(**settings)
    with pytest.warns(TetherWarning, match="has 5 prompts"):
        small = make_trainer(TROLLTrainer, lambda **_: args, train_dataset=_few(5))
    assert (small.args.steps_per_generation, args.steps_per_generation) == (2, 8)
    assert make_trainer(TROLLTrainer, lambda **_: args).args is args


@pytest.mark.parametrize("max_steps", [-1, 5])
@pytest.mark.parametrize(
    ("count", "given", "numbers"),
    [
        (
            4,
            {"steps_per_generation": 4},
            ["has 4 prompts, fewer than the 8", "steps_per_generation=2 is the most"],
        ),
        (4, {"generation_batch_size": 32}, ["fewer than the 8", "= 32 completions, 4 a prompt"]),
        (1, {}, ["has 1 prompts, fewer than the 16", "Lower per_device_train_batch_size"]),
        (0, {}, ["has 0 prompts"]),
        (1, {"num_iterations": 8}, ["has 1 prompts, fewer than the 2"]),
        (
            5,
            {"gradient_accumulation_steps": 4},
            ["steps_per_generation=2", "lower gradient_accumulation_steps"],
        ),
    ],
)
def test_a_set_that_fills_no_batch_is_refused_with_the_numbers(
    make_trainer: Callable[..., Any], count: int, given: dict[str, int], numbers: list[str], max_steps: int
) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_trainer(TROLLTrainer, TROLLConfig, train_dataset=_few(count), max_steps=max_steps, **given)
    for part in [*numbers, "Not a single update"]:
        assert part in str(refusal.value)


def test_the_baseline_refuses_it_too(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="has 4 prompts, fewer than the 8"):
        make_trainer(OldPolicyTrainer, GRPOConfig, train_dataset=_few(4), max_steps=5, steps_per_generation=4)


@pytest.mark.parametrize(("shuffle", "which"), [(True, "others in each epoch"), (False, "always the last")])
def test_prompts_left_over_are_warned_of(make_trainer: Callable[..., Any], shuffle: bool, which: str) -> None:
    with pytest.warns(
        TetherWarning, match=rf"takes 16 .*uses 16 of the 20 prompts and leaves 4 over, {which}"
    ):
        trainer = make_trainer(
            TROLLTrainer, TROLLConfig, train_dataset=_few(20), num_train_epochs=1, shuffle_dataset=shuffle
        )
    trainer.train()
    assert _updates(trainer) == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error", TetherWarning)
        make_trainer(TROLLTrainer, TROLLConfig)  # 64 prompts are four batches


def test_a_stream_too_short_for_a_batch_is_an_error(make_trainer: Callable[..., Any]) -> None:
    def trainer(count: int) -> Any:
        stream = _few(count).to_iterable_dataset()
        return make_trainer(TROLLTrainer, TROLLConfig, train_dataset=stream, max_steps=4)

    with pytest.raises(ConfigError, match=r"ended without an update.*before the 16 of one batch"):
        trainer(15).train()
    enough = trainer(16)
    enough.train()
    assert _updates(enough) == 4


@pytest.mark.parametrize(
    ("count", "given", "message"),
    [
        (0, {}, "evaluation set is empty"),
        (3, {"per_device_eval_batch_size": 6}, r"6 x 1 processes = 6 completions, no multiple of the 4"),
        (1, {"dataloader_drop_last": True}, r"has 1 prompts with 4 completions each, fewer than the 8"),
    ],
)
def test_an_evaluation_that_would_fail_or_see_nothing_is_refused(
    make_trainer: Callable[..., Any], count: int, given: dict[str, Any], message: str
) -> None:
    given = {"per_device_eval_batch_size": 8, **given}
    extra = {"trainer_arguments": {"eval_dataset": _few(count)}}
    with pytest.raises(ConfigError, match=message):
        make_trainer(TROLLTrainer, TROLLConfig, **given, **extra).evaluate()


def test_passes_over_trls_own_batch_keep_its_size_and_score_it_once(make_trainer: Callable[..., Any]) -> None:
    """num_iterations=8: two prompts a batch of rollouts as in TRL, each completion used eight times."""
    trainer = make_trainer(TROLLTrainer, TROLLConfig, num_iterations=8, max_steps=16)
    sizes, generate = [], trainer._generate_and_score_completions

    def count(inputs: Any) -> Any:
        sizes.append(len(inputs))
        return generate(inputs)

    trainer._generate_and_score_completions = count
    trainer.train()
    assert sizes == [8, 8]
    rows = [row for row in trainer.state.log_history if "loss" in row]
    moved = [row["trust_region/kl_mean"] for row in rows]
    assert [moved[0], moved[8]] == [0.0, 0.0], "the first pass over a batch is on policy"
    assert min(moved[1:8]) > 0
    assert max(row["trust_region/projected"] for row in rows) > 0.5
