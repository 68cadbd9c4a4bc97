"""PPO with a critic in TRL's GRPO trainer: a value model, GAE, and a checkpoint that holds both.

TRL has no PPO trainer any more. Here the critic is a copy of the policy's backbone with one output,
trained beside the policy: one step of its own optimizer for each of the policy's, on the same
responses. The policy's update is whatever a trainer makes of the advantages, so every trust region can be had
with a critic.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tether.advantages import gae, whiten
from tether.errors import CheckpointError, ConfigError, TrainingStoppedError, replaced
from tether.integrations.packing import Packing
from tether.integrations.trl_advantages import Estimator, rewards_at_the_end
from tether.integrations.trl_old_policy import loss_mask
from tether.integrations.trl_resume import write_tensors
from tether.losses import value_clip

# isort: split
from accelerate.utils import is_peft_model
from safetensors.torch import load_file

_CRITIC_FILE = "critic.safetensors"
_OPTIMIZER_FILE = "critic_optimizer.safetensors"

__getattr__ = replaced(__name__, CriticTrainer="the keyword estimator=CriticOptions() of every trainer")


@dataclass(frozen=True)
class CriticOptions:
    """PPO's critic: give it to a trainer as `estimator`. Advantages are GAE's, whitened over the batch.

    Logs `critic/value_loss`, `critic/explained_variance` (of the returns of fresh responses by the values
    before learning from them: 1 is perfect, 0 no better than a constant), `critic/clipped` and
    `critic/grad_norm`. Checkpoints hold the critic and its optimizer; a resumed run goes on bit for bit.

    Its loss is the mean over an update's tokens, however many micro-batches these come in. It goes on
    learning from a batch on which `kl_stop` has ended the policy's updates.

    One process only, since the critic is no part of what DDP or FSDP wraps, and models of text.

    Raises:
        ConfigError: a value out of range, several processes, or a model that reads more than text.
        CheckpointError: on resuming from a checkpoint without a critic.
        TrainingStoppedError: a gradient of the critic that is NaN or infinite, before it is used.

    Source: PPO (arXiv 1707.06347), GAE (arXiv 1506.02438).

    Example:
        ```python
        trainer = TROLLTrainer(
            model, reward, args, train_dataset=dataset, estimator=CriticOptions(gae_lambda=0.95)
        )
        ```
    """

    name: ClassVar[str] = "gae"

    learning_rate: float = 3e-4
    """Of its AdamW, constant; larger than the policy's, because the critic has to follow it."""
    gamma: float = 1.0
    """Discount a token."""
    gae_lambda: float = 1.0
    """1 for the whole response's reward, lower for the critic's own judgement (less variance, more bias)."""
    clip_range: float | None = 0.5
    """How far a value may move in one batch of responses; None for no clip."""
    max_grad_norm: float = 1.0
    """The critic's gradients are clipped to this norm."""
    weight_decay: float = 0.0
    """Of its AdamW."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of the critic must be positive, got {getattr(self, name)!r}.")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must lie in [0, 1], got {getattr(self, name)!r}.")
        if self.clip_range is not None and not self.clip_range > 0:
            raise ConfigError(
                f"clip_range of the critic must be positive, got {self.clip_range!r}. None switches it off."
            )
        if not self.weight_decay >= 0:
            raise ConfigError(f"weight_decay must not be negative, got {self.weight_decay!r}.")

    def start(self, trainer: Any) -> Critic:
        """A critic for the trainer's model."""
        return Critic(trainer, self)


class ValueModel(nn.Module):
    """How much reward is still to come, before each token of a response.

    Args:
        policy: a causal language model; its backbone is copied, in float32, without any adapters.
        pack_sequences: leave padding out of the backbone's pass; for a policy that went through
            `tether.integrations.packing.add_packing`.

    The output layer starts at zero, so every value does.
    """

    def __init__(self, policy: nn.Module, *, pack_sequences: Packing = False) -> None:
        super().__init__()
        self._packing = {"pack_sequences": pack_sequences} if pack_sequences else {}
        self.backbone = _backbone_of(policy).float().requires_grad_(True)
        width: Any = self.backbone.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, device=next(self.backbone.parameters()).device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, response_length: int) -> Tensor:
        """Values [B, T] before each of the last T = `response_length` tokens of `input_ids` [B, P + T]."""
        output = self.backbone(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **self._packing
        )
        before = output.last_hidden_state[:, -response_length - 1 : -1]
        return self.head(before.to(self.head.weight.dtype)).squeeze(-1)


class Critic(Estimator):
    """A critic that learns beside a trainer's policy."""

    name = CriticOptions.name

    def __init__(self, trainer: Any, options: CriticOptions) -> None:
        if trainer.accelerator.num_processes > 1:
            raise ConfigError(
                f"A critic is trained in one process, this is one of {trainer.accelerator.num_processes}. "
                "Start without a launcher, or choose an estimator without a critic, such as rloo."
            )
        if getattr(trainer, "_is_vlm", False):
            raise ConfigError(
                "A critic reads text alone, and this model reads more. Choose an estimator without a critic, "
                "such as rloo."
            )
        self.options = options
        model = ValueModel(trainer.model, pack_sequences=trainer.pack_sequences)
        self.model = model.to(trainer.accelerator.device).train(trainer.model.training)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay
        )
        #: Tokens of the update's micro-batches so far.
        self._tokens = torch.zeros((), device=trainer.accelerator.device)

    def advantages(self, trainer: Any, rewards: Tensor, output: dict[str, Any]) -> Tensor:
        """GAE with the values before learning from this batch."""
        mask = loss_mask(output)
        values = self._old_values(trainer, output)
        advantages, returns = gae(
            rewards_at_the_end(rewards.to(values), mask), values, mask,
            gamma=self.options.gamma, gae_lambda=self.options.gae_lambda,
        )  # fmt: skip
        # Row by row, so that TRL's shuffle takes them along.
        output["old_values"], output["returns"] = values, returns
        _log(trainer, "explained_variance", explained_variance(values, returns, mask))
        return whiten(advantages, mask)

    @torch.no_grad()
    def _old_values(self, trainer: Any, output: dict[str, Any]) -> Tensor:
        rows = len(output["completion_ids"])
        size = trainer.args.per_device_train_batch_size
        keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        parts = [
            self._values(trainer, {key: output[key][start : start + size] for key in keys})
            for start in range(0, rows, size)
        ]
        return torch.cat(parts)

    def _values(self, trainer: Any, inputs: dict[str, Any]) -> Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with trainer.accelerator.autocast():
            values: Tensor = self.model(ids, attention_mask, inputs["completion_ids"].shape[1])
        return values.float()

    def learn(self, trainer: Any, inputs: dict[str, Any]) -> None:
        """A micro-batch towards the returns; a step of the optimizer where the policy makes one."""
        mask = loss_mask(inputs)
        result = value_clip(
            self._values(trainer, inputs), inputs["old_values"], inputs["returns"], mask,
            clip_range=self.options.clip_range,
        )  # fmt: skip
        tokens = mask.sum()
        (result.loss * tokens).backward()  # a sum, whose mean is over the whole update
        self._tokens += tokens
        _log(trainer, "value_loss", result.loss)
        _log(trainer, "clipped", result.metrics["clipped"])
        if trainer.accelerator.sync_gradients:  # the last micro-batch of an update
            self._update(trainer)

    def _update(self, trainer: Any) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self._tokens.clamp_min(1)
        self._tokens.zero_()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.options.max_grad_norm)
        if not math.isfinite(_log(trainer, "grad_norm", norm)):
            raise TrainingStoppedError(
                "The critic's gradient is NaN or infinite; neither it nor the policy was updated. Lower the "
                f"critic's learning_rate ({self.options.learning_rate!r}) or max_grad_norm "
                f"({self.options.max_grad_norm!r})."
            )
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        """The weights and the optimizer's state, as plain tensors."""
        write_tensors(folder / _CRITIC_FILE, dict(self.model.state_dict()))
        write_tensors(folder / _OPTIMIZER_FILE, self._optimizer_tensors())

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """AdamW's state by parameter and name: plain tensors, so that no pickle is needed."""
        return {
            f"{parameter}/{name}": value.detach()
            for parameter, tensor in self.model.named_parameters()
            for name, value in self.optimizer.state.get(tensor, {}).items()
        }

    def load(self, folder: Path) -> None:
        """What `save` wrote."""
        missing = [name for name in (_CRITIC_FILE, _OPTIMIZER_FILE) if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"The checkpoint {folder} has no {' and no '.join(missing)}: it was not written with a "
                "critic. Continue from one that was, or begin a new run."
            )
        device = str(self.model.head.weight.device)
        self.model.load_state_dict(load_file(folder / _CRITIC_FILE, device=device))
        state = load_file(folder / _OPTIMIZER_FILE, device=device)
        for parameter, tensor in self.model.named_parameters():
            prefix = f"{parameter}/"
            own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            if "step" in own:
                own["step"] = own["step"].cpu()  # where AdamW keeps it
            self.optimizer.state[tensor] = own


def _log(trainer: Any, name: str, value: Tensor) -> float:
    number = float(value.detach())
    trainer._metrics["train"][f"critic/{name}"].append(number)
    return number


def explained_variance(values: Tensor, returns: Tensor, response_mask: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over the tokens that count; 0 where all returns are equal.

    Example:
        >>> returns, mask = torch.tensor([[0.0, 2.0]]), torch.ones(1, 2)
        >>> explained_variance(torch.tensor([[0.0, 1.0]]), returns, mask).item()
        0.75
    """
    counted = response_mask > 0
    if int(counted.sum()) < 2:
        return returns.new_zeros(())
    total = returns[counted].var()
    left = (returns - values)[counted].var()
    return torch.where(total > 0, 1 - left / total, 0.0)


def _backbone_of(policy: nn.Module) -> Any:
    """A copy of a causal language model's decoder, without the head and without adapters."""
    if is_peft_model(policy):
        model: Any = copy.deepcopy(policy)
        return model.unload().base_model
    return copy.deepcopy(policy.base_model)
