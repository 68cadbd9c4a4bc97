"""Every part of verl the plug-in stands on, and which of them a verl nobody has tested lacks.

`tests/verl/test_verl_contract.py` asks all of it of the verl that is installed there.
"""

from __future__ import annotations

from tether.integrations import seams

_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
_WORKERS = "verl.workers.engine_workers"
_TRAINER = "verl.trainer.ppo.v1.trainer_base"
# Ray's actor class, from which nothing can be derived, and what it was made of.
_AGENT_LOOPS = "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ.__ray_actor_class__"

#: Functions that are called or overridden, and the names of their parameters.
SIGNATURES: dict[str, list[str]] = {
    "verl.workers.engine:BaseEngine.train_batch": ["self", "data", "loss_function"],
    "verl.workers.engine:BaseEngine.infer_batch": ["self", "data", "loss_function"],
    "verl.workers.engine:BaseEngine.initialize": ["self"],
    f"{_ENGINE}:FSDPEngine.disable_adapter": ["self"],
    f"{_ENGINE}:FSDPEngine.get_data_parallel_rank": ["self"],
    f"{_ENGINE}:FSDPEngine.forward_backward_batch": ["self", "data", "loss_function", "forward_only"],
    f"{_ENGINE}:FSDPEngineWithLMHead.prepare_model_outputs": [
        "self", "output", "output_args", "micro_batch", "logits_processor_func",
    ],
    f"{_ENGINE}:FSDPEngine.__init__": [
        "self", "model_config", "engine_config", "optimizer_config", "checkpoint_config",
    ],
    f"{_ENGINE}:FSDPEngine.lr_scheduler_step": ["self"],
    f"{_ENGINE}:FSDPEngine.optimizer_step": ["self"],
    "verl.workers.rollout.replica:RolloutReplicaRegistry.register": ["name", "loader"],
    "verl.workers.engine:EngineRegistry.register": ["model_type", "backend", "device", "vendor"],
    "verl.trainer.ppo.core_algos:register_policy_loss": ["name"],
    "verl.workers.utils.losses:ppo_loss": ["config", "model_output", "data", "dp_group"],
    "verl.trainer.ppo.core_algos:agg_loss": [
        "loss_mat", "loss_mask", "loss_agg_mode", "dp_size", "batch_num_tokens", "global_batch_size",
        "loss_scale_factor",
    ],
    "verl.trainer.ppo.core_algos:kl_penalty": ["logprob", "ref_logprob", "kl_penalty"],
    "verl.trainer.ppo.core_algos:compute_policy_loss_vanilla": [
        "old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config",
        "rollout_is_weights",
    ],
    "verl.workers.utils.padding:no_padding_2_padding": ["tensor", "data"],
    "verl.trainer.ppo.utils:need_critic": ["config"],
    "verl.utils.metric:Metric.__init__": ["self", "aggregation", "value"],
    "verl.utils.tensordict_utils:assign_non_tensor": ["tensor_dict", "kwargs"],
    "verl.utils.ulysses:get_ulysses_sequence_parallel_rank": ["group"],
    "verl.utils.ulysses:get_ulysses_sequence_parallel_world_size": ["group"],
    "verl.utils.ulysses:get_ulysses_sequence_parallel_group": [],
    "verl.utils.ulysses:gather_outputs_and_unpad": [
        "x", "gather_dim", "unpad_dim", "padding_size", "grad_scaler", "group",
    ],
}  # fmt: skip

#: What happens inside functions of verl: what it is, where, and lines that say so.
SOURCES: list[tuple[str, str, list[str]]] = [
    (
        "the engine hands scaled logits to the loss function when the batch asks for it",
        f"{_ENGINE}:FSDPEngineWithLMHead.prepare_model_outputs",
        [
            'key="distillation_use_topk"',
            "logits_processor_func(student_logits=logits_rmpad.unsqueeze(0), data=micro_batch)",
            "model_output[k] = torch.nested.nested_tensor_from_jagged(v, cu_seqlens)",
        ],
    ),
    (
        "distillation_only leaves the sampled tokens' log-probabilities to the loss function",
        f"{_ENGINE}:FSDPEngineWithLMHead.prepare_model_outputs",
        ['key="distillation_only"', 'if not distillation_only: model_output["log_probs"] = log_probs'],
    ),
    (
        "temperature and entropy are asked for by the batch",
        f"{_ENGINE}:FSDPEngineWithLMHead",
        ['temperature = micro_batch["temperature"]', 'key="calculate_entropy", default=False'],
    ),
    (
        "activation offload wraps the forward of each unit of FSDP2, and can wrap another one",
        "verl.utils.activation_offload:ActivationHandler.wrap_module_forward_method",
        ["orig_method = module.forward", "nonlocal handler", "module.forward = wrapped_method.__get__"],
    ),
    (
        "what the second call adds to model_output is returned to the caller",
        f"{_ENGINE}:FSDPEngineWithLMHead.forward_step",
        ["model_output=model_output, data=micro_batch", '"model_output":'],
    ),
    (
        "the passes of a batch end before the optimiser steps",
        "verl.workers.engine:BaseEngine.train_batch",
        ["self.forward_backward_batch(data, loss_function, forward_only=False) "
         "grad_norm = self.optimizer_step()"],
    ),
    (
        "a step whose gradient's norm is not finite is skipped, and the norm returned",
        f"{_ENGINE}:FSDPEngine.optimizer_step",
        ["if not torch.isfinite(grad_norm):", "return grad_norm.item()"],
    ),
    (
        "an actor's settings are made before its engine, and its loss is a partial of ppo_loss",
        f"{_WORKERS}:ActorRolloutRefWorker.init_model",
        [
            "actor_config: ActorConfig = omega_conf_to_dataclass(self.config.actor)",
            "self.loss_fn = partial(ppo_loss, config=actor_config)",
            "self.actor = self.actor_worker_cls(config=actor_training_config)",
            'actor_config.model_config.get("model_type", "language_model")',
        ],
    ),
    (
        "distillation's loss is a partial with the actor's configuration too",
        f"{_WORKERS}:ActorRolloutRefWorker.init_model",
        ["distillation_ppo_loss, config=actor_config"],
    ),
    (
        "the reference pass of a LoRA actor runs inside disable_adapter",
        f"{_WORKERS}:TrainingWorker.infer_batch",
        ["self.engine.disable_adapter() if no_lora_adapter", "self.engine.infer_batch(data, loss_function="],
    ),
    (
        "the old pass and the updates of a batch reach the workers by the same rule",
        f"{_WORKERS}:ActorRolloutRefWorker",
        [
            'make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")) '
            '@DistProfiler.annotate(color="blue", role="actor_compute_log_prob")',
            "def update_actor(self, data: TensorDict) -> TensorDict:",
        ],
    ),
    (
        "every tensor a worker returns is written to TransferQueue",
        "verl.utils.transferqueue_utils:_async_update_meta_with_output",
        ["isinstance(v, torch.Tensor | NonTensorStack)", "output.select(*fields)"],
    ),
    (
        "the old pass is compute_log_prob without a loss, before the reference pass",
        f"{_TRAINER}:PPOTrainer._compute_old_log_prob",
        ['"compute_loss": False', "self.actor_rollout_wg.compute_log_prob(batch)", "bypass_mode"],
    ),
    (
        "a batch is balanced over the workers before the old pass",
        f"{_TRAINER}:PPOTrainer._step_once",
        ["batch = self._balance_batch(batch, metrics=metrics) # 4. compute old_log_prob"],
    ),
    (
        "a batch is filled up until actor and critic have whole mini-batches",
        f"{_TRAINER}:PPOTrainer._get_required_batch_multiple",
        [
            "math.lcm(required_multiple, critic_global_mini_batch_size)",
            "math.lcm(required_multiple, actor_global_mini_batch_size)",
        ],
    ),
    (
        "in bypass mode the engine's log-probabilities are the old ones",
        f"{_TRAINER}:PPOTrainer._compute_old_log_prob",
        ['data["old_log_probs"] = data.pop("rollout_log_probs")'],
    ),
    (
        "the parts of an interrupted answer become one list",
        "verl.workers.rollout.llm_server:FullyAsyncLLMServerClient",
        ["final_output.log_probs.extend(output.log_probs)"],
    ),
    (
        "a trajectory's dictionary becomes the fields of the batch",
        _AGENT_LOOPS,
        [
            "self, output: AgentLoopOutput | list[AgentLoopOutput], validate, **kwargs",
            "field = output.as_dict()", "list_of_dict_to_tensordict(fields)",
        ],
    ),
    (
        "a trajectory's sampling asks for log-probabilities, and the trajectory says whether it validates",
        _AGENT_LOOPS,
        [
            "logprobs=config.calculate_log_probs,",
            "self._run_agent_loop( run_sampling_params, trajectory=trajectory,",
            'trajectory["validate"]',
        ],
    ),
    (
        "the schedule steps once in each call of update_actor",
        f"{_WORKERS}:TrainingWorker.train_mini_batch",
        ["update_lr_scheduler=batch_idx == total_num_iterations - 1"],
    ),
    (
        "the update carries every field of the batch",
        f"{_TRAINER}:PPOTrainer._update_actor",
        ["self.actor_rollout_wg.update_actor(batch)"],
    ),
    (
        "ppo_loss finds the policy loss by name and passes its configuration",
        "verl.workers.utils.losses:ppo_loss",
        ['config.policy_loss.get("loss_mode", "vanilla")', "get_policy_loss_fn(loss_mode)", "config=config"],
    ),
    (
        "ppo_loss is a policy loss, an entropy bonus and a reference penalty, each averaged by agg_loss",
        "verl.workers.utils.losses:ppo_loss",
        [
            "policy_loss = pg_loss", "policy_loss -= entropy_coeff * entropy_loss",
            "policy_loss += kl_loss * config.kl_loss_coef",
        ],
    ),
]  # fmt: skip

#: Fields that are read from verl's configurations.
FIELDS: dict[str, set[str]] = {
    "verl.workers.config:ActorConfig": {
        "policy_loss", "loss_agg_mode", "loss_scale_factor", "global_batch_info",
        "entropy_coeff", "use_kl_loss", "kl_loss_coef", "kl_loss_type",
    },
    "verl.workers.config:FSDPEngineConfig": {
        "forward_only", "use_fused_kernels", "pad_to_length", "strategy", "reshard_after_forward",
    },
    "verl.workers.config:HFModelConfig": {"model_type", "external_lib", "use_remove_padding"},
    "verl.workers.config:PolicyLossConfig": {"loss_mode"},
    "verl.workers.config:RolloutConfig": {"custom", "calculate_log_probs", "logprobs_mode", "disaggregation"},
}  # fmt: skip


def moved() -> list[str]:
    """What the installed verl does not have, or does otherwise."""
    return seams.moved(SIGNATURES, SOURCES, FIELDS)
