"""Every part of verl the plug-in stands on. After an upgrade, a failure here names what moved."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import verl.workers.engine_workers as engine_workers
from verl.trainer.distillation import distillation_ppo_loss
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss, register_policy_loss
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils import transferqueue_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import AggregationType, Metric
from verl.utils.ulysses import (
    gather_outputs_and_unpad,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_rank,
    get_ulysses_sequence_parallel_world_size,
)
from verl.workers.config import ActorConfig, FSDPEngineConfig, HFModelConfig, PolicyLossConfig
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

import verl
from tether.integrations.verl.environment import VERL_VERSION


def test_the_version_is_the_tested_one() -> None:
    assert verl.__version__ == VERL_VERSION


SIGNATURES: dict[Callable[..., Any], list[str]] = {
    BaseEngine.train_batch: ["self", "data", "loss_function"],
    BaseEngine.infer_batch: ["self", "data", "loss_function"],
    FSDPEngine.disable_adapter: ["self"],
    FSDPEngineWithLMHead.prepare_model_outputs: [
        "self", "output", "output_args", "micro_batch", "logits_processor_func",
    ],
    FSDPEngine.__init__: ["self", "model_config", "engine_config", "optimizer_config", "checkpoint_config"],
    EngineRegistry.register: ["model_type", "backend", "device", "vendor"],
    register_policy_loss: ["name"],
    ppo_loss: ["config", "model_output", "data", "dp_group"],
    agg_loss: [
        "loss_mat", "loss_mask", "loss_agg_mode", "dp_size", "batch_num_tokens", "global_batch_size",
        "loss_scale_factor",
    ],
    POLICY_LOSS_REGISTRY["vanilla"]: [
        "old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config",
        "rollout_is_weights",
    ],
    no_padding_2_padding: ["tensor", "data"],
    Metric.__init__: ["self", "aggregation", "value"],
    tu.assign_non_tensor: ["tensor_dict", "kwargs"],
    get_ulysses_sequence_parallel_rank: ["group"],
    get_ulysses_sequence_parallel_world_size: ["group"],
    get_ulysses_sequence_parallel_group: [],
    gather_outputs_and_unpad: ["x", "gather_dim", "unpad_dim", "padding_size", "grad_scaler", "group"],
}  # fmt: skip


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signature(function: Callable[..., Any]) -> None:
    assert list(inspect.signature(function).parameters) == SIGNATURES[function]


SOURCE_FACTS: list[tuple[str, Any, list[str]]] = [
    (
        "the engine hands scaled logits to the loss function when the batch asks for it",
        FSDPEngineWithLMHead.prepare_model_outputs,
        [
            'key="distillation_use_topk"',
            "logits_processor_func(student_logits=logits_rmpad.unsqueeze(0), data=micro_batch)",
            "model_output[k] = torch.nested.nested_tensor_from_jagged(v, cu_seqlens)",
        ],
    ),
    (
        "distillation_only leaves the sampled tokens' log-probabilities to the loss function",
        FSDPEngineWithLMHead.prepare_model_outputs,
        [
            'key="distillation_only"',
            'if not distillation_only:\n            model_output["log_probs"] = log_probs',
        ],
    ),
    (
        "what the second call adds to model_output is returned to the caller",
        FSDPEngineWithLMHead.forward_step,
        ["model_output=model_output, data=micro_batch", '"model_output": detach_tree(model_output)'],
    ),
    (
        "an actor's settings are made before its engine, and its loss is a partial of ppo_loss",
        engine_workers.ActorRolloutRefWorker.init_model,
        [
            "actor_config: ActorConfig = omega_conf_to_dataclass(self.config.actor)",
            "self.loss_fn = partial(ppo_loss, config=actor_config)",
            "self.actor = self.actor_worker_cls(config=actor_training_config)",
            'actor_config.model_config.get("model_type", "language_model")',
        ],
    ),
    (
        "distillation's loss is a partial with the actor's configuration too",
        engine_workers.ActorRolloutRefWorker.init_model,
        ["distillation_ppo_loss, config=actor_config"],
    ),
    (
        "the reference pass of a LoRA actor runs inside disable_adapter",
        engine_workers.TrainingWorker.infer_batch,
        ["self.engine.disable_adapter() if no_lora_adapter", "self.engine.infer_batch(data, loss_function="],
    ),
    (
        "every tensor a worker returns is written to TransferQueue",
        transferqueue_utils._async_update_meta_with_output,
        ["isinstance(v, torch.Tensor | NonTensorStack)", "output.select(*fields)"],
    ),
    (
        "the old pass is compute_log_prob without a loss, before the reference pass",
        PPOTrainer._compute_old_log_prob,
        ['"compute_loss": False', "self.actor_rollout_wg.compute_log_prob(batch)", "bypass_mode"],
    ),
    (
        "the update carries every field of the batch",
        PPOTrainer._update_actor,
        ["self.actor_rollout_wg.update_actor(batch)"],
    ),
    (
        "ppo_loss finds the policy loss by name and passes its configuration",
        ppo_loss,
        ['config.policy_loss.get("loss_mode", "vanilla")', "get_policy_loss_fn(loss_mode)", "config=config"],
    ),
]


@pytest.mark.parametrize(("fact", "where", "lines"), SOURCE_FACTS, ids=[fact for fact, _, _ in SOURCE_FACTS])
def test_source(fact: str, where: Any, lines: list[str]) -> None:
    source = inspect.getsource(where)
    missing = [line for line in lines if line not in source]
    assert not missing, f"{where.__qualname__}: {fact}; gone: {missing}"


def test_the_fields_read_from_configurations_exist() -> None:
    for config, names in (
        (ActorConfig, {"policy_loss", "loss_agg_mode", "loss_scale_factor", "global_batch_info"}),
        (FSDPEngineConfig, {"forward_only", "use_fused_kernels", "pad_to_length"}),
        (HFModelConfig, {"model_type", "external_lib", "use_remove_padding"}),
        (PolicyLossConfig, {"loss_mode"}),
    ):
        assert names <= set(config.__dataclass_fields__), config
    assert {kind.value for kind in AggregationType} >= {"sum", "max"}


def test_what_is_compared_by_identity_is_one_object() -> None:
    assert engine_workers.ppo_loss is ppo_loss
    assert engine_workers.distillation_ppo_loss is distillation_ppo_loss
    assert callable(omega_conf_to_dataclass)


MEGATRON_FACTS = {
    "workers/engine/megatron/transformer_impl.py": [
        "logits_processor_func(student_logits=logits_bak, data=batch, data_format=data_format)",
        'if not distillation_only:\n            ret["log_probs"]',
        'data_format = "thd" if self.engine_config.use_remove_padding else "bshd"',
        "class MegatronEngineWithLMHead(MegatronEngine)",
    ],
    "models/mcore/util.py": [
        "align_size = tp_size * cp_size * cp_layout_factor",
        "pad_size = (align_size - seqlens_in_batch % align_size) % align_size",
    ],
}


@pytest.mark.parametrize("file", MEGATRON_FACTS)
def test_megatron_source(file: str) -> None:
    """Read, not imported: Megatron is not installed here."""
    source = (Path(verl.__file__).parent / file).read_text()
    missing = [line for line in MEGATRON_FACTS[file] if line not in source]
    assert not missing, f"{file}; gone: {missing}"
