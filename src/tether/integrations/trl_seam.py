"""Every part of TRL and Transformers the plug-in stands on, and what an older TRL is helped with.

Asked of the installed versions when a trainer of ours is first imported; a version number alone refuses
nothing. `tests/integrations/test_trl_seam.py` shows what a part that moved is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tether.errors import MissingDependencyError
from tether.integrations import seams
from tether.integrations.seams import Tested

# Ends of runs that passed: tests/test_versions.py holds them to `make test-matrix` and to constraints.txt.
TRL = Tested("trl", "1.14.0", "1.16.0")
TRANSFORMERS = Tested("transformers", "5.9.0", "5.24.0")

_GRPO = "trl:GRPOTrainer"
_SCORING = f"{_GRPO}._get_per_token_logps_and_entropies"

#: Functions that are called or overridden; see `seams.Signatures`.
SIGNATURES: dict[str, list[str]] = {
    f"{_GRPO}.__init__": ["self", "model", "reward_funcs", "args", "train_dataset", "..."],
    f"{_GRPO}._prepare_inputs": ["self", "generation_batch", "..."],
    f"{_GRPO}._generate_and_score_completions": ["self", "inputs", "..."],
    f"{_GRPO}._generate": ["self", "prompts", "..."],
    f"{_GRPO}._generate_single_turn": ["self", "prompt_ids", "..."],
    f"{_GRPO}._calculate_rewards": ["self", "inputs", "prompts", "completions", "..."],
    f"{_GRPO}._compute_loss": ["self", "model", "inputs", "..."],
    f"{_GRPO}.get_high_entropy_mask": ["self", "entropies", "mask", "threshold", "..."],
    f"{_GRPO}._get_train_sampler": ["self", "dataset", "..."],
    "trl.trainer.utils:get_config_model_id": ["config", "..."],
    "trl.trainer.utils:maybe_gather_lm_head_ctx": ["params"],
    "transformers:Trainer._save_checkpoint": ["self", "model", "trial", "..."],
    "transformers:Trainer._load_optimizer_and_scheduler": ["self", "checkpoint", "..."],
    "transformers:Trainer.training_step": ["self", "model", "inputs", "..."],
    "transformers:Trainer._get_output_dir": ["self", "trial", "..."],
    "transformers:TrainerCallback.on_step_end": ["self", "args", "state", "control", "..."],
}

#: What happens inside functions of TRL: what it is, where, and lines that say so.
SOURCES: list[tuple[str, str, list[str]]] = [
    (
        "the old policy is scored with self.model, before any reference policy, into old_per_token_logps",
        f"{_GRPO}._generate_and_score_completions",
        [
            "generate_every = self.args.steps_per_generation * self.num_iterations",
            "if self.args.gradient_accumulation_steps % generate_every != 0 or "
            "( self.use_vllm and self.vllm_importance_sampling_correction ):",
            "old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies( self.model, "
            "prompt_completion_ids, attention_mask, logits_to_keep,",
            'output["old_per_token_logps"] = old_per_token_logps',
        ],
    ),
    (
        "log-probabilities of the sampled tokens are the fifth of what generation returns",
        f"{_GRPO}._generate",
        [
            "completion_ids, logprobs = self._generate_single_turn(",
            "return prompt_ids, completion_ids, tool_mask, completions, logprobs,",
        ],
    ),
    (
        "every entry of a batch of rollouts is shuffled and split alike, and served by the step's number",
        f"{_GRPO}._prepare_inputs",
        [
            "if self._step % generate_every == 0 or self._buffered_inputs is None:",
            "shuffle_sequence_dict(generation_batch)",
            "split_tensor_dict(generation_batch, self.args.steps_per_generation)",
            "self._buffered_inputs[self._step % self.args.steps_per_generation]",
        ],
    ),
    (
        "the loss hands the model it is given to the scoring helper, once",
        f"{_GRPO}._compute_loss",
        [
            "per_token_logps, entropies, aux_loss = self._get_per_token_logps_and_entropies( model, "
            "input_ids, attention_mask, logits_to_keep, compute_entropy=True,",
        ],
    ),
    (
        "advantages of zero make the clipped surrogate vanish",
        f"{_GRPO}._compute_loss",
        [
            'old_per_token_logps = inputs.get("old_per_token_logps")',
            "per_token_loss1 = coef_1 * advantages",
            "per_token_loss2 = coef_2 * advantages",
            "per_token_loss = -torch.min(per_token_loss1, per_token_loss2)",
        ],
    ),
    (
        "losses are averaged as AVERAGES of trl_trainer says",
        f"{_GRPO}._compute_loss",
        [
            "loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()",
            "loss = (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)",
            "(per_token_loss * mask).sum() / (per_token_loss.size(0) * self.max_completion_length)",
            'normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes',
            "normalizer * self.current_gradient_accumulation_steps / self.args.steps_per_generation",
            "loss = (per_token_loss * mask).sum(-1).mean()",
        ],
    ),
    (
        "a trainer keeps its numbers under these names",
        f"{_GRPO}.__init__",
        [
            "self._step = 0",
            "self._buffered_inputs = None",
            'self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}',
            "self._entropy_bonus_enabled =",
            "self.top_entropy_quantile =",
        ],
    ),
]

#: Fields that are read from TRL's configuration.
FIELDS: dict[str, set[str]] = {
    "trl:GRPOConfig": {
        "beta", "delta", "epsilon", "epsilon_high", "generation_batch_size", "generation_kwargs",
        "importance_sampling_level", "loss_type", "max_completion_length", "num_generations",
        "num_generations_eval", "num_iterations", "off_policy_mask_threshold", "ref_model_sync_steps",
        "shuffle_dataset", "steps_per_generation", "sync_ref_model", "temperature", "top_entropy_quantile",
        "use_bias_correction_kl", "use_vllm",
        "vllm_importance_sampling_correction",
    },
}  # fmt: skip

#: TRL's asynchronous trainer beside it: rows that fold samples with a common beginning, since 1.16.
ASYNC_SIGNATURES: dict[str, list[str]] = {
    "trl.experimental.async_grpo.packing:TreeRow": ["..."],
    "trl.experimental.async_grpo.async_grpo_trainer:AsyncGRPOTrainer.__init__": [
        "self", "model", "reward_funcs", "args", "...",
    ],
    "trl.experimental.async_grpo.async_grpo_trainer:AsyncGRPOTrainer._sync_weight": ["self"],
    "trl.experimental.async_grpo.async_grpo_trainer:get_peak_flops_per_device": ["..."],
    "trl.experimental.async_grpo.async_rollout_worker:_AsyncRolloutLoop._post": [
        "self", "path", "payload", "...",
    ],
    "trl.experimental.async_grpo.async_rollout_worker:_AsyncRolloutLoop._score_group": [
        "self", "group", "...",
    ],
}  # fmt: skip

#: How a TRL scores: a model that is handed labels answers with log-probabilities, since 1.15.
_ASKS_WITH_LABELS = [
    (
        "the model is called with labels, once for each chunk of rows, in order",
        _SCORING,
        [
            "model(**model_inputs, labels=labels, fused_lm_head=True)",
            "outputs.log_probs[:, -logits_to_keep:]",
        ],
    )
]
#: Or the model answers with logits, up to 1.14; `score_with_labels` takes its place.
_ASKS_FOR_LOGITS = [
    (
        "the helper whose place `score_with_labels` takes",
        f"{_GRPO}._full_logits_logps",
        ["outputs = model(**model_inputs)"],
    )
]


def check() -> None:
    """Ask the installed TRL and Transformers for everything TRL's trainers of ours stand on.

    Raises:
        MissingDependencyError: with what moved, and the command that installs a tested version.
    """
    import transformers
    import trl

    troubles = [*seams.moved(SIGNATURES, SOURCES, FIELDS), *_scoring()]
    seams.require("tether.integrations.trl", TRL, trl.__version__, troubles)
    seams.require("tether.integrations.trl", TRANSFORMERS, transformers.__version__, [])


def check_async() -> None:
    """The same of its asynchronous trainer.

    Raises:
        MissingDependencyError: with what is missing or moved, and the command.
    """
    import trl

    troubles = moved_async()
    if troubles:
        raise MissingDependencyError(
            f"AsyncTROLLTrainer stands on TRL's asynchronous trainer as of 1.16, and this is "
            f"{trl.__version__}:\n  - " + "\n  - ".join(troubles) + f"\nInstall it with: "
            f"pip install 'trl=={TRL.newest}'. TROLLTrainer runs with this one."
        )


def moved_async() -> list[str]:
    """What the installed TRL lacks of an asynchronous trainer as ours stands on it."""
    return seams.moved(ASYNC_SIGNATURES, [], {})


@functools.cache
def asks_with_labels() -> bool:
    """Whether the installed TRL scores by handing labels to the model."""
    return not seams.moved({}, _ASKS_WITH_LABELS, {})


def _scoring() -> list[str]:
    """What is missing of either way to score."""
    with_labels = seams.moved({}, _ASKS_WITH_LABELS, {})
    return with_labels if with_labels and seams.moved({}, _ASKS_FOR_LOGITS, {}) else []


def scoring_of(trainer: Any, of_trl: Callable[..., Any]) -> Callable[..., Any]:
    """How an `Evaluation` is scored: as TRL does, or for one that asks for logits, as later ones do."""
    return of_trl if asks_with_labels() else functools.partial(score_with_labels, trainer)


def score_with_labels(
    trainer: Any,
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probabilities of the last tokens [B, logits_to_keep], and entropies and auxiliary loss if asked.

    In the place of a scoring helper of TRL that makes [B, T, V] logits. What belongs to images is passed in
    one piece, so rows that come with any are not split by `batch_size`.
    """
    inputs = {
        name: value
        for name, value in others.items()
        if value is not None and name not in ("num_images", "num_tiles")
    }
    rows = len(input_ids) if inputs or not batch_size else batch_size
    router = {"output_router_logits": True} if compute_aux_loss else {}
    outputs = []
    for start in range(0, len(input_ids), rows):
        chunk = slice(start, start + rows)
        ids, mask = input_ids[chunk], attention_mask[chunk]
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :-logits_to_keep] = -100
        with trainer.accelerator.autocast():
            outputs.append(model(input_ids=ids, attention_mask=mask, labels=labels, **router, **inputs))
    log_probs = torch.cat([output.log_probs[:, -logits_to_keep:] for output in outputs])
    entropy = (
        torch.cat([output.entropy[:, -logits_to_keep:] for output in outputs]) if compute_entropy else None
    )
    aux_loss = torch.stack([output.aux_loss for output in outputs]).mean() if compute_aux_loss else None
    return log_probs, entropy, aux_loss
