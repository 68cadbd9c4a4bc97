"""TRL's trainers with the loss computed where the logits are: the numbers of the path that does so after."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_language_model import make_tiny_model
from torch import Tensor
from trl import GRPOConfig

from rounding import SUMMED_ANOTHER_WAY, unit_of
from tether.errors import TetherError
from tether.integrations import trl_one_pass, trl_trainer
from tether.integrations.trl import TROLLConfig, TROLLTrainer
from tether.integrations.trl_losses import PolicyLossTrainer
from tether.ops import head, memory

VOCABULARY = 29
Kind = tuple[Any, Any, dict[str, Any], dict[str, Any]]


def troll(**settings: Any) -> Kind:
    return TROLLTrainer, TROLLConfig, {"troll_top_k": 4, **settings}, {}


def rival(name: str, **settings: Any) -> Kind:
    return PolicyLossTrainer, GRPOConfig, settings, {"policy_loss": name}


@pytest.fixture(autouse=True)
def _blocks_of_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch has some 60, in sequences of 8."""
    monkeypatch.setattr(memory, "WORKSPACE_ELEMENTS", VOCABULARY * 18)


class _Updates:
    """The loss of one batch of rollouts, the network moved since."""

    def __init__(self, make_trainer: Callable[..., Any], kind: Kind) -> None:
        trainer_class, config_class, own, arguments = kind
        self.trainer = make_trainer(
            trainer_class, config_class, trainer_arguments=arguments,
            **{"steps_per_generation": 2, "temperature": 0.9, **own},
        )  # fmt: skip
        self.trainer.model.train()
        self.trainer.current_gradient_accumulation_steps = 1
        self.model = self.trainer.model
        self.inputs = self.trainer._generate_and_score_completions(
            [self.trainer.train_dataset[i] for i in (3, 17) for _ in range(4)]
        )
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.04)

    def run(self, **inputs: Any) -> tuple[Tensor, dict[str, float], Tensor]:
        """Loss, what was logged of it, and the gradient."""
        self.trainer._metrics["train"].clear()
        self.model.zero_grad()
        loss = self.trainer._compute_loss(self.model, {**self.inputs, **inputs})
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])
        return loss.detach(), {k: v[-1] for k, v in self.trainer._metrics["train"].items()}, gradient


def _assert_same(ours: Any, afterwards: Any) -> None:
    (loss, logged, gradient), (expected, wanted, ordinary) = ours, afterwards
    assert float(ordinary.abs().max()) > 1e-3
    atol = SUMMED_ANOTHER_WAY * unit_of(ordinary, terms=1000)
    torch.testing.assert_close(gradient, ordinary, rtol=0, atol=atol)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert logged.keys() == wanted.keys()
    for name, value in logged.items():
        assert value == pytest.approx(wanted[name], rel=1e-4, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize(
    "kind",
    [
        troll(),
        troll(troll_support="bucket"),
        troll(loss_type="grpo", importance_sampling_level="sequence"),
        troll(loss_type="luspo", troll_support="bucket", importance_sampling_level="sequence"),
        troll(loss_type="bnpo", troll_pack_sequences=True),
        troll(loss_type="dr_grpo", troll_support="bucket"),
        rival("ppo_clip"),
        rival("gspo", loss_type="grpo"),
        rival("cispo", loss_type="bnpo"),
        rival("gmpo", loss_type="dr_grpo"),
    ],
    ids=lambda kind: " ".join(str(value) for value in (*kind[2].values(), *kind[3].values())),
)
@pytest.mark.parametrize("with_tools", [False, True])
def test_the_loss_is_that_of_the_path_that_computes_it_afterwards(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kind: Kind, with_tools: bool
) -> None:
    updates = _Updates(make_trainer, kind)
    given: dict[str, Any] = {}
    if with_tools:
        mask = (torch.arange(updates.inputs["completion_ids"].numel()) % 5 > 1).long()
        given["tool_mask"] = mask.view_as(updates.inputs["completion_ids"])
        given["tool_mask"][2] = 0  # a completion none of whose tokens count
    formed: list[int] = []
    monkeypatch.setattr(head, "raw_logits", _counting(head.raw_logits, formed))
    ours, early = updates.run(**given), sum(formed)
    formed.clear()
    monkeypatch.setattr(trl_trainer, "loss_in_forward", lambda *_: None)
    _assert_same(ours, updates.run(**given))
    assert early < sum(formed)  # they are formed again for the gradient


def _counting(form: Callable[..., Tensor], counted: list[int]) -> Callable[..., Tensor]:
    def count(hidden: Tensor, *arguments: Any) -> Tensor:
        counted.append(len(hidden))
        return form(hidden, *arguments)

    return count


@pytest.mark.parametrize("kind", [troll(), troll(troll_support="bucket"), rival("ppo_clip")])
def test_a_training_is_the_same_to_a_millionth(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    trainer_class, config_class, settings, arguments = kind

    def run() -> list[dict[str, float]]:
        trainer = train(
            trainer_class, config_class, model=make_tiny_model().double(), max_steps=10,
            trainer_arguments=arguments, **settings,
        )  # fmt: skip
        return [row for row in trainer.state.log_history if "loss" in row]

    ours = run()
    monkeypatch.setattr(trl_trainer, "loss_in_forward", lambda *_: None)
    for row, expected in zip(ours, run(), strict=True):
        assert row.keys() == expected.keys()
        for name in row.keys() - {"step_time", "epoch"}:
            assert row[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-9, nan_ok=True), name


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (troll(entropy_coef=0.1), "TRL adds its own entropy bonus"),
        (troll(top_entropy_quantile=0.5), "top_entropy_quantile=0.5 compares"),
        (troll(troll_support="paper"), "both policies"),
        (troll(troll_region="sequence"), "one step"),
        (rival("clip_cov"), "clip_cov is not known to depend"),
        (rival("ppo_clip", steps_per_generation=1), "the policy is its own old policy"),
        (rival("ppo_clip"), None),
    ],
)
@pytest.mark.filterwarnings("ignore:Every batch of rollouts serves a single update")
def test_the_reason_against_it_is_logged_once(
    make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture, kind: Kind, reason: str | None
) -> None:
    updates = _Updates(make_trainer, kind)
    with caplog.at_level(logging.INFO, logger=trl_one_pass.__name__):
        updates.run()
        updates.run()
    (message,) = (r.getMessage() for r in caplog.records if r.name == trl_one_pass.__name__)
    assert ("in one pass over the LM head" if reason is None else reason) in message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"beta": 0.1}, "beta=0.1 adds TRL's own penalty"),
        ({"anchor": "sampler"}, "what its sampler could sample"),
        ({"args": SimpleNamespace(torch_compile=True)}, "torch_compile traces the forward"),
        ({"is_deepspeed_enabled": True}, "DeepSpeed"),
        ({"accelerator": SimpleNamespace(mixed_precision="fp16")}, "fp16 scales a loss"),
    ],
)
def test_what_a_trainer_may_be_set_to_besides(
    make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture, change: dict[str, Any], reason: str
) -> None:
    updates = _Updates(make_trainer, rival("ppo_clip"))
    vars(updates.trainer).update(change)
    with caplog.at_level(logging.INFO, logger=trl_one_pass.__name__):
        assert trl_one_pass.loss_in_forward(updates.trainer, updates.inputs) is None
    assert reason in caplog.text


def test_a_batch_that_is_split_on_its_way_is_refused(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = _Updates(make_trainer, rival("ppo_clip"))
    score = type(updates.trainer)._get_per_token_logps_and_entropies

    def split(*args: Any, **kwargs: Any) -> Any:
        return score(*args, batch_size=2, **kwargs)

    monkeypatch.setattr(type(updates.trainer), "_get_per_token_logps_and_entropies", split)
    with pytest.raises(TetherError, match="of 8 sequences was to be computed in a forward pass of 2"):
        updates.run()
