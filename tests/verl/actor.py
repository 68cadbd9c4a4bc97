"""A tiny actor on verl's real training worker, and batches of scripted rollouts in verl's layout.

A module of its own, because the tests on two processes and on Ray build the same things.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tensordict import TensorDict
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested

from tether.integrations.verl import MODEL_TYPE, TROLLPolicyLossConfig
from tether.integrations.verl.engines import TROLLEngineMixin

VOCABULARY = 61

LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def save_tiny_model(
    folder: Path, *, tied: bool = False, vocabulary: int = VOCABULARY, width: int = 32
) -> Path:
    """Two layers; the head is sharpened, since random heads are nearly uniform."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
        )
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(folder)
    return folder


def make_actor(
    model: Path,
    policy_loss: PolicyLossConfig | None = None,
    *,
    packed: bool = True,
    model_settings: dict[str, Any] | None = None,
    engine_settings: dict[str, Any] | None = None,
    optimizer: str = "AdamW",
    learning_rate: float = 3e-3,
    micro_batch: int = 2,
    **actor_settings: Any,
) -> TrainingWorker:
    """verl's own worker with its FSDP2 engine, in full precision."""
    troll = policy_loss is None or isinstance(policy_loss, TROLLPolicyLossConfig)
    policy_loss = policy_loss or TROLLPolicyLossConfig()
    model_config = HFModelConfig(
        path=str(model),
        load_tokenizer=False,
        use_remove_padding=packed,
        model_type=MODEL_TYPE if troll else "language_model",
        **{
            "override_config": {"attn_implementation": "sdpa"},
            "enable_gradient_checkpointing": False,
            **(model_settings or {}),
        },
    )
    settings: dict[str, Any] = {
        "strategy": "fsdp2",
        "use_torch_compile": False,
        "mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32"},
        "model_dtype": "fp32",
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": micro_batch,
        "infer_micro_batch_size_per_gpu": micro_batch,
        **(engine_settings or {}),
    }
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type=model_config.model_type,
            model_config=model_config,
            engine_config=FSDPEngineConfig(**settings),
            optimizer_config=FSDPOptimizerConfig(
                optimizer=optimizer,
                lr=learning_rate,
                weight_decay=0.0,
                clip_grad=1e6,
                total_training_steps=100,
            ),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=False,
        ppo_micro_batch_size_per_gpu=micro_batch,
        policy_loss=policy_loss,
        **actor_settings,
    )
    worker.set_loss_fn(partial(ppo_loss, config=config))
    _keep_gradients(worker)
    return worker


def _keep_gradients(worker: TrainingWorker) -> None:
    """verl clears gradients when a step ends; `gradients` returns those it stepped with."""
    step = worker.engine.optimizer_step

    def optimizer_step() -> Any:
        named = worker.engine.module.named_parameters()
        worker.gradients = {n: _whole(p.grad).clone() for n, p in named if p.grad is not None}
        return step()

    worker.engine.optimizer_step = optimizer_step


@contextmanager
def in_float64() -> Iterator[None]:
    """Lets verl's engine run in float64: a projection onto a small ball magnifies rounding."""
    build = FSDPEngineWithLMHead._build_fsdp_module

    def without_autocast(engine: Any, module: Any) -> Any:
        built = build(engine, module)
        engine._autocast_dtype = torch.float32  # verl's way of saying none
        return built

    with (
        patch.object(PrecisionType, "to_dtype", staticmethod(lambda name: getattr(torch, name))),
        patch.object(FSDPEngineWithLMHead, "_build_fsdp_module", without_autocast),
    ):
        yield


@contextmanager
def loss_afterwards() -> Iterator[None]:
    """Exact support computes the loss after the LM head, not with it, however many tokens there are."""
    with patch.object(TROLLEngineMixin, "_obstacle", lambda engine: "it was asked for"):
        yield


#: What `make_actor` takes as engine settings then.
FLOAT64: dict[str, Any] = {
    "model_dtype": "float64",
    "mixed_precision": {"param_dtype": "float64", "reduce_dtype": "float64", "buffer_dtype": "float64"},
}


def acting(**settings: Any) -> TROLLPolicyLossConfig:
    """TROLL with a ball so small that one step of the tiny model leaves it."""
    return TROLLPolicyLossConfig(**{"troll_kl_bound": 0.002, **settings})


def unclipped() -> PolicyLossConfig:
    """verl's vanilla loss."""
    return PolicyLossConfig(loss_mode="vanilla")


#: Turns every clip of verl's vanilla loss off.
NO_CLIP: dict[str, Any] = {
    "clip_ratio": 1e9,
    "clip_ratio_low": 1.0,
    "clip_ratio_high": 1e9,
    "clip_ratio_c": 1e9,
}


@dataclass
class Rollouts:
    """Scripted prompts and responses; nothing here depends on the policy."""

    prompts: list[torch.Tensor]
    responses: list[torch.Tensor]
    masks: list[torch.Tensor]
    advantages: list[torch.Tensor]
    extra: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    temperature: float = 1.0

    @classmethod
    def scripted(cls, sequences: int = 4, seed: int = 1) -> Rollouts:
        generator = torch.Generator().manual_seed(seed)

        def draw(length: int) -> torch.Tensor:
            return torch.randint(1, VOCABULARY, (length,), generator=generator)

        lengths = [(5, 6), (3, 7), (4, 4), (6, 5)] * (sequences // 4)
        masks = [torch.ones(r, dtype=torch.int64) for _, r in lengths]
        masks[1][2] = 0  # what a tool wrote
        return cls(
            prompts=[draw(p) for p, _ in lengths],
            responses=[draw(r) for _, r in lengths],
            masks=masks,
            advantages=[
                torch.full((r,), value)
                for (_, r), value in zip(lengths, [1.0, -1.0, 0.5, -0.5] * (sequences // 4), strict=True)
            ],
        )

    @classmethod
    def long(cls, sequences: int, prompt: int, response: int) -> Rollouts:
        """All of one length."""
        generator = torch.Generator().manual_seed(1)

        def draw(length: int) -> list[torch.Tensor]:
            return list(torch.randint(1, VOCABULARY, (sequences, length), generator=generator))

        signs = [1.0 if i % 2 else -1.0 for i in range(sequences)]
        masks = list(torch.ones(sequences, response, dtype=torch.int64))
        return cls(draw(prompt), draw(response), masks, [torch.full((response,), s) for s in signs])

    def part(self, rows: slice) -> Rollouts:
        """Some of the sequences: what one of several processes has."""
        return Rollouts(
            self.prompts[rows],
            self.responses[rows],
            self.masks[rows],
            self.advantages[rows],
            {name: value[rows] for name, value in self.extra.items()},
            self.temperature,
        )

    def batch(self, tensors: dict[str, torch.Tensor] | None = None, **settings: Any) -> TensorDict:
        """In the layout of verl's v1 trainer: every tensor jagged."""
        whole = [torch.cat(pair) for pair in zip(self.prompts, self.responses, strict=True)]
        lengths = [len(sequence) for sequence in whole]
        fields = {
            "input_ids": jagged(whole),
            "position_ids": jagged([torch.arange(length) for length in lengths]),
            "prompts": jagged(self.prompts),
            "responses": jagged(self.responses),
            "response_mask": jagged(self.masks),
            "loss_mask": jagged(self.masks),
        }
        values = {"temperature": self.temperature, "global_token_num": lengths, **settings}
        return tu.get_tensordict({**fields, **(tensors or {})}, values)

    def score(self, actor: TrainingWorker) -> dict[str, torch.Tensor]:
        """verl's old pass, and what an update needs of it."""
        scored = actor.infer_batch(self.batch(calculate_entropy=True, compute_loss=False))
        mask = jagged(self.masks)
        fields = {name: scored[name] for name in scored.keys() if name.startswith("troll_old_")}  # noqa: SIM118
        fields["old_log_probs"] = response_from_nested(scored["log_probs"], mask)
        fields["advantages"] = jagged(self.advantages)
        return fields | {name: jagged(value) for name, value in self.extra.items()}

    def update(
        self, actor: TrainingWorker, old: dict[str, torch.Tensor], world_size: int = 1, **settings: Any
    ) -> dict[str, float]:
        """One step of verl's optimiser; returns its metrics."""
        values = {
            "calculate_entropy": False,
            "global_batch_size": len(self.prompts) * world_size,
            "update_lr_scheduler": False,
            **settings,
        }
        output = actor.train_batch(self.batch(dict(old), **values))
        return {name: _number(value) for name, value in tu.get(output, "metrics").items()}


class Moved:
    """An actor two updates away from the policy that it recorded, and not moving any more."""

    def __init__(self, actor: TrainingWorker, rollouts: Rollouts, **settings: Any) -> None:
        self.actor = actor
        self.update = partial(rollouts.update, actor, rollouts.score(actor), **settings)
        for _ in range(2):
            self.update()
        for group in actor.engine.optimizer.param_groups:
            group["lr"] = 0.0

    def run(self) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Metrics, loss among them, but for times and memory; and the gradient."""
        metrics = {k: v for k, v in self.update().items() if "_seconds" not in k and "perf/" not in k}
        return metrics, gradients(self.actor)

    def run_afterwards(self) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """The same with the loss after the LM head."""
        with loss_afterwards():
            return self.run()


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def parameters(actor: TrainingWorker) -> dict[str, torch.Tensor]:
    """Copies of the whole parameters, gathered from every process."""
    state = actor.engine.module.state_dict()
    return {name: _whole(value).clone() for name, value in state.items()}


def gradients(actor: TrainingWorker) -> dict[str, torch.Tensor]:
    """Of the last update, by parameter."""
    assert actor.gradients
    return actor.gradients  # type: ignore[no-any-return]


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _number(value: Any) -> float:
    """A metric as verl's trainer would log it."""
    if isinstance(value, list):
        first = value[0]
        return float(type(first).aggregate_dp(value)) if hasattr(first, "aggregate") else float(first[0])
    return float(value)
