"""What the old policy left behind stays with its completion, and nothing else stays behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_language_model import largest_difference, make_prompts, make_tiny_model
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from tether.errors import TetherError
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer


class _Recorder(TROLLTrainer):
    """Keeps the inputs of every loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[dict[str, Any]] = []
        self.rows_then: list[list[dict[str, Any]]] = []

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self.seen.append(dict(inputs))
        self.rows_then.append(self.rollout_rows)
        return super()._compute_loss(model, inputs)


def test_supports_stay_aligned_with_their_completions(train: Callable[..., Any]) -> None:
    """The model does not learn (rate 0), so a dense forward of each micro-batch gives the old policy."""
    trainer = train(
        _Recorder, TROLLConfig, learning_rate=0.0, weight_decay=0.0, troll_top_k=5, troll_mass=1.0
    )
    model = make_tiny_model()
    rows_seen = []
    for inputs in trainer.seen:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        length = inputs["completion_ids"].shape[1]
        with torch.no_grad():
            dense = model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1].log_softmax(-1)
        counted = inputs["completion_mask"] > 0
        support = inputs["old_support_ids"].long()
        held = support >= 0
        expected = dense.gather(-1, support.clamp_min(0))
        assert support.dtype == torch.long
        assert inputs["old_support_ids"].dtype == torch.int32
        assert (held.any(-1) == counted).all()
        torch.testing.assert_close(
            inputs["old_support_log_probs"][held], expected[held], atol=1e-5, rtol=1e-5
        )
        # The sampled token is in the support, with the log-probability TRL keeps for it.
        sampled = support == inputs["completion_ids"][..., None]
        assert (sampled.sum(-1)[counted] == 1).all()
        kept = torch.where(sampled, inputs["old_support_log_probs"], 0.0).sum(-1)
        assert torch.equal(kept[counted], inputs["old_per_token_logps"][counted])
        rows_seen.append(inputs["rollout_row"].tolist())
    # Six updates over batches of four: TRL shuffled, and every row served once a batch.
    first_batch = [row for rows in rows_seen[:4] for row in rows]
    assert sorted(first_batch) == list(range(32))
    assert first_batch != list(range(32))


def test_rollout_rows_name_the_problem_of_each_completion(train: Callable[..., Any], tokenizer: Any) -> None:
    trainer = train(_Recorder, TROLLConfig, trainer_arguments={"eval_dataset": make_prompts().select([63])},
                    eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)  # fmt: skip
    updates = 0
    for inputs, rows in zip(trainer.seen, trainer.rows_then, strict=True):
        if "rollout_row" not in inputs:  # of the evaluations in between
            continue
        updates += 1
        for prompt, row in zip(inputs["prompt_ids"], inputs["rollout_row"].tolist(), strict=True):
            text = tokenizer.decode(prompt, skip_special_tokens=True).replace(" ", "")
            assert text == rows[row]["prompt"]
    assert updates == 6
    assert len(trainer.seen) == 12


@pytest.mark.parametrize(
    ("trainer_class", "config_class"), [(TROLLTrainer, TROLLConfig), (OldPolicyTrainer, GRPOConfig)]
)
def test_one_scoring_pass_a_loss_and_none_more_than_trl_a_rollout(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, trainer_class: Any, config_class: Any
) -> None:
    calls = {"score": 0, "loss": 0, "rollout": 0}

    def count(owner: Any, method: str, name: str) -> None:
        original = getattr(owner, method)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, method, counted)

    count(GRPOTrainer, "_get_per_token_logps_and_entropies", "score")
    count(GRPOTrainer, "_compute_loss", "loss")
    count(GRPOTrainer, "_generate_and_score_completions", "rollout")
    train(trainer_class, config_class)
    assert calls == {"loss": 6, "rollout": 2, "score": 8}


def test_the_old_policy_is_scored_in_chunks_without_mixing_rows_up(make_trainer: Callable[..., Any]) -> None:
    """TRL scores 32 completions 8 at a time; all at once gives the same supports."""
    trainer = make_trainer(TROLLTrainer, TROLLConfig)
    trainer.model.train()
    torch.manual_seed(7)
    chunked = trainer._generate_and_score_completions([trainer.train_dataset[i // 4] for i in range(32)])
    trainer.args.per_device_train_batch_size = 32
    torch.manual_seed(7)
    at_once = trainer._generate_and_score_completions([trainer.train_dataset[i // 4] for i in range(32)])
    assert torch.equal(chunked["completion_ids"], at_once["completion_ids"])
    same = chunked["old_support_ids"] == at_once["old_support_ids"]
    assert same.float().mean() > 0.999  # the last of 64 may fall on either side of the mass threshold
    torch.testing.assert_close(
        chunked["old_support_log_probs"].exp()[same], at_once["old_support_log_probs"].exp()[same]
    )


def _tensors_with_a_graph() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) and thing.grad_fn is not None for thing in gc.get_objects())


def test_nothing_of_a_batch_is_held_after_its_loss(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(TROLLTrainer, TROLLConfig)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4)
    keys = set(inputs)
    before = _tensors_with_a_graph()
    loss = trainer._compute_loss(trainer.model, inputs)
    assert loss.grad_fn is not None
    del loss
    assert _tensors_with_a_graph() == before
    assert set(inputs) == keys, "the buffered batch was altered, and it serves other updates too"


def test_a_failure_in_the_middle_leaves_no_state_behind(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an exception that the caller survives, the next loss is what it would have been."""
    trainer = make_trainer(TROLLTrainer, TROLLConfig)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4)
    inputs["ref_per_token_logps"] = inputs["old_per_token_logps"]
    trainer.beta = 0.1
    expected = trainer._compute_loss(trainer.model, inputs).item()
    before = _tensors_with_a_graph()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(trainer.accelerator, "reduce", fail)  # TRL calls it while it gathers metrics
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer._compute_loss(trainer.model, inputs)
    assert trainer.beta == 0.1
    assert _tensors_with_a_graph() == before
    assert trainer._compute_loss(trainer.model, inputs).item() == expected

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_generate", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4)
    assert trainer._recorded is None


class _Copying(_Recorder):
    """Hands on copies of what it gets."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        log_probs, *rest = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return (log_probs.clone(), *rest)


@pytest.mark.parametrize("reference", ["none", "adapters"])
def test_an_override_may_return_tensors_of_its_own(
    train: Callable[..., Any], course_rounding: Any, reference: str
) -> None:
    """With adapters the reference policy is the same model: its pass must not be taken for the old one's."""
    settings: dict[str, Any] = {"max_steps": 8}
    if reference == "adapters":
        settings |= {
            "beta": 0.2,
            "learning_rate": 1e-3,  # at 1e-2 roundings grow a hundredfold in eight updates
            "trainer_arguments": {"peft_config": LoraConfig(target_modules="all-linear")},
        }
    plain, copying = train(_Recorder, TROLLConfig, **settings), train(_Copying, TROLLConfig, **settings)
    # With a penalty the gradients of the copy and of what was copied are added up in another order.
    allowed = course_rounding(plain).weights if reference == "adapters" else 0.0
    assert largest_difference(plain.model, copying.model) <= allowed
    for inputs in copying.seen:
        support = inputs["old_support_ids"].long()
        sampled = support == inputs["completion_ids"][..., None]
        kept = torch.where(sampled, inputs["old_support_log_probs"], 0.0).sum(-1)
        counted = inputs["completion_mask"] > 0
        assert torch.equal(kept[counted], inputs["old_per_token_logps"][counted])
    if reference == "adapters":  # after the first batch the two policies differ
        later = copying.seen[-1]
        assert not torch.equal(later["ref_per_token_logps"], later["old_per_token_logps"])


def test_an_override_may_change_the_log_probabilities(train: Callable[..., Any]) -> None:
    class Rounding(TROLLTrainer):
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            log_probs, *rest = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return (log_probs.half().float(), *rest)

    trainer = train(Rounding, TROLLConfig)
    assert max(row.get("trust_region/projected", 0) for row in trainer.state.log_history) > 0.1


def test_an_override_that_scores_without_us_is_reported(train: Callable[..., Any]) -> None:
    class Own(TROLLTrainer):
        def _get_per_token_logps_and_entropies(
            self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *_: Any, **__: Any
        ) -> Any:
            logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[
                :, -logits_to_keep - 1 : -1
            ]
            ids = input_ids[:, -logits_to_keep:, None]
            return logits.log_softmax(-1).gather(-1, ids).squeeze(-1), None, None

    with pytest.raises(TetherError, match=r"must call super\(\) with the model and the whole batch"):
        train(Own, TROLLConfig)
