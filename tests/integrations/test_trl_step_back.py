"""The network's bound in TRL: measured again by hand after every batch, resumed, with adapters, refused."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from tiny_language_model import largest_difference, make_tiny_model
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig

from rounding import SUMMED_ANOTHER_WAY, rounding_of
from tether.errors import CheckpointError, ConfigError
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer
from tether.integrations.trl_critic import CriticOptions
from tether.integrations.trl_losses import PolicyLossTrainer
from tether.integrations.trl_old_policy import unpack
from tether.integrations.trl_step_back import StepBackCallback, StepBackOptions

SETTINGS = {"max_steps": 8, "learning_rate": 3e-3}
BUDGET = 5e-3


class ByHand(TrainerCallback):
    """Measures each batch with dense logits of two whole models, as whoever reads a checkpoint would."""

    def __init__(self, trainer: Any, updates: int) -> None:
        self._trainer, self._updates = trainer, updates
        self.exact: list[Tensor] = []
        """KL of every response token after each batch, in float64."""
        self.rounding: list[float] = []
        self.weights: list[list[Tensor]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._updates == 0:
            self._old = copy.deepcopy(self._trainer.model)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.weights.append([p.detach().clone() for p in self._trainer.model.parameters()])
        if state.global_step % self._updates == 0:
            exact, rough = self._measure(torch.float64), self._measure(torch.float32)
            self.exact.append(exact)
            self.rounding.append(SUMMED_ANOTHER_WAY * rounding_of(rough, exact))

    @torch.no_grad()
    def _measure(self, dtype: torch.dtype) -> Tensor:
        policies = [_bare(copy.deepcopy(model).to(dtype)) for model in (self._trainer.model, self._old)]
        found = []
        for batch in map(unpack, self._trainer._buffered_inputs):
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            length = batch["completion_ids"].shape[1]
            new, old = (
                forward(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1].log_softmax(-1)
                for forward in policies
            )
            found.append((new.exp() * (new - old)).sum(-1)[batch["completion_mask"] > 0])
        return torch.cat(found)


def _bare(model: Any) -> Callable[..., Any]:
    """The forward of Transformers' class: the model's own was replaced, and belongs to the original."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return functools.partial(type(base).forward, base)


def column(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "troll": (TROLLTrainer, TROLLConfig, {}),
    "bucket": (TROLLTrainer, TROLLConfig, {"troll_support": "bucket", "troll_top_k": 3}),
    "clip": (OldPolicyTrainer, GRPOConfig, {}),
    "sapo": (PolicyLossTrainer, GRPOConfig, {"trainer_arguments": {"policy_loss": "sapo"}}),
}


def bounded(
    make: Callable[..., Any], method: str, *, step_back: Any = BUDGET, updates: int = 4, **more: Any
) -> tuple[Any, ByHand]:
    trainer_class, config_class, settings = METHODS[method]
    merged = {**SETTINGS, **settings, **more}
    keywords = {**settings.get("trainer_arguments", {}), **more.get("trainer_arguments", {})}
    merged["trainer_arguments"] = {**keywords, "step_back": step_back}
    trainer = make(trainer_class, config_class, **merged)
    by_hand = ByHand(trainer, updates)
    trainer.add_callback(by_hand)
    return trainer, by_hand


def share_within(kl: Tensor, budget: float) -> float:
    return float((kl <= budget).double().mean())


@pytest.mark.parametrize(
    ("method", "statistic"),
    [("troll", "mean"), ("bucket", "max"), ("clip", "max"), ("sapo", 0.9)],
)
def test_after_64_updates_the_network_is_within_its_budget(
    make_trainer: Callable[..., Any], method: str, statistic: Any
) -> None:
    trainer, by_hand = bounded(
        make_trainer, method, updates=64, step_back=StepBackOptions(BUDGET, statistic), max_steps=128,
        learning_rate=1e-3, per_device_train_batch_size=4, steps_per_generation=64,
    )  # fmt: skip
    trainer.train()
    after, before = column(trainer, "step_back/kl"), column(trainer, "step_back/kl_before")
    assert len(by_hand.exact) == len(after) == 2
    assert min(before) > 2 * BUDGET  # or nothing had to be done
    for exact, within, logged in zip(by_hand.exact, by_hand.rounding, after, strict=True):
        assert 0 < logged <= BUDGET
        if statistic == "mean":
            assert float(exact.mean()) == pytest.approx(logged, abs=within)
        elif statistic == "max":
            assert float(exact.max()) == pytest.approx(logged, abs=within)
        else:
            assert share_within(exact, logged + within) >= statistic > share_within(exact, logged - within)


@pytest.mark.parametrize("method", ["bucket", "clip"])
def test_a_budget_that_is_never_reached_changes_nothing(
    make_trainer: Callable[..., Any], method: str
) -> None:
    trainer_class, config_class, settings = METHODS[method]
    plain = make_trainer(trainer_class, config_class, **{**SETTINGS, **settings})
    plain.train()
    ours, _ = bounded(make_trainer, method, step_back=1e6)
    ours.train()
    assert largest_difference(plain.model, ours.model) == 0
    assert column(ours, "step_back/fraction") == [1.0, 1.0]
    assert column(ours, "step_back/passes") == [1.0, 1.0]
    assert column(ours, "step_back/kl") == column(ours, "step_back/kl_before")


CASES: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2, "steps_per_generation": 8},
    "passes over TRL's batch": {"steps_per_generation": 1, "num_iterations": 4},
    "packing": {"trainer_arguments": {"pack_sequences": True}},
    "checkpointing": {"gradient_checkpointing": True},
    "a critic": {"trainer_arguments": {"estimator": CriticOptions()}},
    "tied weights": {"tied": True},
    "a reference policy that follows": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 4},
}


@pytest.mark.parametrize("case", CASES)
def test_it_holds_with(make_trainer: Callable[..., Any], tmp_path: Path, case: str) -> None:
    settings = dict(CASES[case])
    tied = settings.pop("tied", False)
    model: Any = make_tiny_model(tie_word_embeddings=tied)
    if tied:  # a head that is sharpened is no embedding
        with torch.no_grad():
            model.lm_head.weight.mul_(0.2)
    if settings.get("beta"):
        model.save_pretrained(tmp_path / "model")  # TRL loads the reference from there
        model = str(tmp_path / "model")
    trainer, by_hand = bounded(make_trainer, "clip", model=model, **settings)
    trainer.train()
    after = column(trainer, "step_back/kl")
    assert len(after) == 2
    assert max(after) <= BUDGET < min(column(trainer, "step_back/kl_before"))
    for exact, within, logged in zip(by_hand.exact, by_hand.rounding, after, strict=True):
        assert float(exact.mean()) == pytest.approx(logged, abs=within)


@pytest.mark.parametrize("method", ["troll", "clip"])
def test_adapters_go_back_and_what_is_under_them_stays(make_trainer: Callable[..., Any], method: str) -> None:
    lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
    trainer, by_hand = bounded(
        make_trainer, method, trainer_arguments={"peft_config": lora}, learning_rate=3e-2
    )
    trainer.train()
    assert max(column(trainer, "step_back/fraction")) < 1
    for exact, within, logged in zip(
        by_hand.exact, by_hand.rounding, column(trainer, "step_back/kl"), strict=True
    ):
        assert float(exact.mean()) == pytest.approx(logged, abs=within)
    (callback,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, StepBackCallback)]
    kept = callback._at_work.state_dict().values()
    adapters = [p for name, p in trainer.model.named_parameters() if "lora_" in name]
    assert sum(tensor.numel() for tensor in kept) == sum(p.numel() for p in adapters)


def test_every_so_many_updates_begins_with_the_same_old_policy(make_trainer: Callable[..., Any]) -> None:
    trainer, by_hand = bounded(make_trainer, "clip", step_back=StepBackOptions(BUDGET, every=2))
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    measured = ["step_back/kl" in row for row in rows]
    assert measured == [False, True] * 4
    assert max(column(trainer, "step_back/kl")) <= BUDGET
    for exact, within, logged in zip(
        by_hand.exact, by_hand.rounding, column(trainer, "step_back/kl")[1::2], strict=True
    ):
        assert float(exact.mean()) == pytest.approx(logged, abs=within)


def test_training_that_ends_inside_a_batch_ends_within_the_budget(make_trainer: Callable[..., Any]) -> None:
    trainer, _ = bounded(make_trainer, "clip", max_steps=7)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert ["step_back/kl" in row for row in rows] == [False, False, False, True, False, False, True]


def test_training_that_a_callback_ends_inside_a_batch_does_too(make_trainer: Callable[..., Any]) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 6

    trainer, by_hand = bounded(make_trainer, "clip", learning_rate=1e-2)
    trainer.add_callback(Stop())
    trainer.train()
    assert trainer.state.global_step == 6
    last = trainer.state.log_history[-1]
    assert last["step_back/kl"] <= BUDGET < last["step_back/kl_before"]
    exact, rough = by_hand._measure(torch.float64), by_hand._measure(torch.float32)
    within = SUMMED_ANOTHER_WAY * rounding_of(rough, exact)
    assert float(exact.mean()) == pytest.approx(last["step_back/kl"], abs=within)


def test_between_two_measurements_updates_are_those_of_no_bound(make_trainer: Callable[..., Any]) -> None:
    plain = make_trainer(OldPolicyTrainer, GRPOConfig, **{**SETTINGS, "max_steps": 3})
    plain.train()
    ours, by_hand = bounded(make_trainer, "clip")
    ours.train()
    for a, b in zip(plain.model.parameters(), by_hand.weights[2], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("method", ["troll", "clip"])
@pytest.mark.parametrize("step", [4, 7])
def test_a_resumed_run_takes_the_course_of_the_unbroken_one(
    make_trainer: Callable[..., Any], tmp_path: Path, method: str, step: int
) -> None:
    def trainer(name: str) -> Any:
        folder = str(tmp_path / name)
        made, by_hand = bounded(make_trainer, method, output_dir=folder, save_strategy="steps", save_steps=1)
        made.remove_callback(by_hand)
        return made

    whole, resumed = trainer("whole"), trainer("resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert largest_difference(whole.model, resumed.model) == 0.0
    assert column(whole, "step_back/kl") == column(resumed, "step_back/kl")
    assert max(column(whole, "step_back/fraction")) < 1
    files = sorted(path.parent.name for path in tmp_path.glob("whole/*/step_back-0.safetensors"))
    assert files == [f"checkpoint-{s}" for s in (1, 2, 3, 5, 6, 7)]  # 4 and 8 end their batches


def test_a_checkpoint_inside_a_batch_without_the_old_weights_is_refused(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    settings = {**SETTINGS, "output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 3}
    make_trainer(TROLLTrainer, TROLLConfig, **settings).train()
    trainer, _ = bounded(make_trainer, "troll", output_dir=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"without a bound on the network.*such as 4 or 8"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


def test_weights_of_another_model_are_refused(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 6}
    bounded(make_trainer, "troll", **settings)[0].train()
    file = tmp_path / "checkpoint-6" / "step_back-0.safetensors"
    save_file({"0": torch.zeros(3)}, file)
    trainer, _ = bounded(make_trainer, "troll", **settings)
    with pytest.raises(CheckpointError, match=r"step_back-0\.safetensors: The old weights do not fit"):
        trainer.train(resume_from_checkpoint=str(file.parent))


@pytest.mark.parametrize(
    ("step_back", "more", "message"),
    [
        (0.0, {}, "must be positive and finite.*got 0.0"),
        ({"budget": 0.1, "statistic": "median"}, {}, "got 'median'"),
        ({"budget": 0.1, "passes": 1}, {}, "at least 2 passes"),
        ({"budget": 0.1, "every": 0}, {}, "at least 1, got 0"),
        ({"budget": 0.1, "every": 1.5}, {}, "whole number of updates of at least 1, got 1.5"),
        ({"budget": 0.1, "every": "2"}, {}, "whole number of updates of at least 1, got '2'"),
        ({"budget": 0.1, "every": 5}, {}, "every=5 is more than the 4 updates"),
        (0.1, {"steps_per_generation": 1}, "serves one update here"),
        (0.1, {"gradient_accumulation_steps": 2, "steps_per_generation": 3}, "would learn from two batches"),
        (0.1, {"optim": "schedule_free_adamw"}, "averages weights of its own"),
    ],
)
def test_what_cannot_work_is_refused(
    make_trainer: Callable[..., Any], step_back: Any, more: dict[str, Any], message: str
) -> None:
    def make() -> None:
        options = StepBackOptions(**step_back) if isinstance(step_back, dict) else step_back
        bounded(make_trainer, "clip", step_back=options, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a batch that serves one update
        with pytest.raises(ConfigError, match=message):
            make()


@pytest.mark.parametrize(
    ("what", "message"), [("is_deepspeed_enabled", "DDP or FSDP2"), ("is_fsdp_enabled", "use FSDP2")]
)
def test_trainers_that_keep_weights_of_their_own_are_refused(
    make_trainer: Callable[..., Any], what: str, message: str
) -> None:
    trainer = make_trainer(OldPolicyTrainer, GRPOConfig)
    setattr(trainer, what, True)
    trainer.accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=1)
    with pytest.raises(ConfigError, match=message):
        StepBackCallback(trainer, BUDGET)
