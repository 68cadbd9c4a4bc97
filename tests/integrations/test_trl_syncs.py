"""What the host waits for in training steps with TRL on a GPU: ours place by place, whatever TRL's own are.

Generation, scoring, the loss, its gradient and the metrics run on the pretended GPU; only what was sampled is
handed in, so that both devices train on the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tiny_language_model import make_tiny_model
from torch import Tensor
from trl import GRPOConfig

from device_steps import Waits, assert_waits
from pretend_gpu import DEVICE, FROM_HOST, ROWS, TO_HOST, VALUE, PretendGPU, values_of
from rounding import SUMMED_ANOTHER_WAY, unit_of
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer
from tether.integrations.trl_losses import PolicyLossTrainer

# One wait that every loss has: which positions of the padded batch are tokens.
TOKENS = ("integrations/sparse_head.py:_Rows.of", ROWS)
# Where the loss is computed with the logits, it is there; a ratio of sequences asks for their lengths too.
IN_ONE_PASS: Waits = {("losses/linear.py:_Rows.__init__", ROWS): 1}
BY_SEQUENCE: Waits = IN_ONE_PASS | {("losses/linear.py:linear_policy_loss", TO_HOST): 1}
AFTERWARDS: Waits = {TOKENS: 1}
#: Once a training: whether the head alone makes the model's logits.
CHECKED: Waits = {
    ("integrations/head_check.py:_plain_tokens", FROM_HOST): 1,
    ("integrations/head_check.py:check_head", TO_HOST): 1,
}
METRICS = ("integrations/lag_metrics.py:by_process", TO_HOST)
#: Once a batch of rollouts, whatever keeps an old policy: the slots that are filled, of two micro-batches.
PACKED: Waits = {
    ("projection/compact.py:CompactLogProbs.pack", ROWS): 2,
    ("projection/compact.py:CompactLogProbs.pack", VALUE): 2,
    ("integrations/trl_old_policy.py:bytes_a_token", VALUE): 1,
}
PACKED_HIDDEN: Waits = PACKED | {("integrations/trl_old_policy.py:pack", ROWS): 2}
#: Which rows need work, forward and backward: of a network that has not moved, and of one that has.
UNMOVED: Waits = {
    ("ops/trust_region.py:evaluate_block", ROWS): 1,
    ("ops/dense_rows.py:to_gradient", ROWS): 1,
}
MOVED: Waits = UNMOVED | {
    ("ops/dense_rows.py:by_reference", ROWS): 1,
    ("ops/dense_rows.py:_part_gradient", VALUE): 1,
}


def _noise(model: torch.nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [0.04 * torch.randn(parameter.shape, generator=generator) for parameter in model.parameters()]


class _Rehearsal:
    """Two updates on a batch of rollouts, the network moved between them."""

    def __init__(
        self, trainer: Any, generate: Callable[..., Tensor], put: Callable[[Tensor], Tensor]
    ) -> None:
        self.trainer, self.put = trainer, put
        trainer.current_gradient_accumulation_steps = 1
        trainer._step = 0
        trainer.model.generate = generate
        self.batch = [trainer.train_dataset[i] for i in (3, 17) for _ in range(8)]

    def update(self) -> list[Tensor]:
        """Loss and gradients."""
        self.trainer.model.zero_grad()
        torch.manual_seed(2)  # TRL shuffles
        loss = self.trainer.training_step(self.trainer.model, self.batch, len(self.batch))
        return [loss.detach(), *(p.grad for p in self.trainer.model.parameters() if p.grad is not None)]

    def move(self) -> None:
        with torch.no_grad():
            for parameter, noise in zip(
                self.trainer.model.parameters(), _noise(self.trainer.model), strict=True
            ):
                parameter.add_(self.put(noise))


def _both_updates(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Waits, Waits]:
    """The waits of the first update, which samples and scores, and of the second; the numbers are checked."""
    sampled: list[Tensor] = []
    on_cpu = make()
    generate = on_cpu.model.generate

    def record(*args: Any, **kwargs: Any) -> Tensor:
        torch.manual_seed(1)
        sampled.append(generate(*args, **kwargs))
        torch.manual_seed(2)
        return sampled[0]

    rehearsal = _Rehearsal(on_cpu, record, torch.clone)
    expected = rehearsal.update()
    rehearsal.move()
    expected += rehearsal.update()
    on_gpu = make()
    monkeypatch.setattr(Accelerator, "device", property(lambda self: DEVICE))
    with PretendGPU() as gpu:
        gpu.put_module(on_gpu.model)
        rehearsal = _Rehearsal(on_gpu, lambda *_, **__: gpu.put(sampled[0]), gpu.put)
        found = rehearsal.update()
        first = gpu.ours()
        rehearsal.move()
        gpu.waits.clear()
        found += rehearsal.update()
        second = gpu.ours()
    for ours, theirs in zip(found, expected, strict=True):
        atol = SUMMED_ANOTHER_WAY * unit_of(theirs, terms=1000)
        torch.testing.assert_close(values_of(ours), theirs, rtol=0, atol=atol)
    assert on_gpu._metrics["train"].keys() == on_cpu._metrics["train"].keys()
    return first, second


def _clip(**settings: Any) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    return OldPolicyTrainer, GRPOConfig, settings, {}


def _troll(support: str, **settings: Any) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    return TROLLTrainer, TROLLConfig, {"troll_support": support, "troll_top_k": 4, **settings}, {}


def _rival(name: str) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    return PolicyLossTrainer, GRPOConfig, {}, {"policy_loss": name}


@pytest.mark.parametrize(
    ("kind", "update", "first", "second"),
    [
        (_troll("exact"), IN_ONE_PASS, PACKED_HIDDEN | UNMOVED, MOVED),
        (_troll("bucket"), IN_ONE_PASS, PACKED, {}),
        (_troll("bucket", loss_type="grpo", importance_sampling_level="sequence"), BY_SEQUENCE, PACKED, {}),
        (_troll("paper"), AFTERWARDS, PACKED, {}),
        (_clip(), AFTERWARDS, PACKED, {}),
        (_rival("ppo_clip"), IN_ONE_PASS, PACKED, {}),
        (_rival("gspo"), BY_SEQUENCE, PACKED, {}),
    ],
    ids=["exact", "bucket", "gspo-troll", "paper", "clip", "ppo_clip", "gspo"],
)
def test_waits_of_an_update(
    make_trainer: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    kind: tuple[Any, Any, dict[str, Any], dict[str, Any]],
    update: Waits,
    first: Waits,
    second: Waits,
) -> None:
    trainer_class, config_class, settings, arguments = kind

    def make() -> Any:
        model = make_tiny_model()
        model.set_attn_implementation("eager")
        return make_trainer(
            trainer_class, config_class, model=model, steps_per_generation=2, temperature=0.9,
            trainer_arguments=arguments, **settings,
        )  # fmt: skip

    of_first, of_second = _both_updates(make, monkeypatch)
    # Besides the loss, two micro-batches are scored by the policy that sampled them.
    scored = {**update, TOKENS: 2 + update.get(TOKENS, 0)}
    assert_waits(of_first, {**scored, **CHECKED, METRICS: 1, **first})
    assert_waits(of_second, {**update, METRICS: 1, **second})
