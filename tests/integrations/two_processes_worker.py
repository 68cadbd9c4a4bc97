"""One of two processes that train together over gloo; started by test_trl_two_processes.py.

    python two_processes_worker.py OUT      with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set

Writes OUT/numbers-RANK.json and OUT/<scenario>-RANK.safetensors.
"""

from __future__ import annotations

import functools
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from courses import CourseRounding, nudge
from safetensors.torch import save_file
from tiny_language_model import (
    largest_difference,
    make_prompts,
    make_settings,
    make_tiny_model,
    make_tokenizer,
    reward_digits,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import maybe_gather_lm_head_ctx
from trl_head import fuse_head

from ranks import end_rank
from tether.integrations.exact_head import OldTokens, take_snapshot
from tether.integrations.packing import add_packing
from tether.integrations.sparse_head import add_sparse_head
from tether.integrations.trl import TROLLConfig, TROLLTrainer

DESCENT: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.02, "max_grad_norm": 1e9}

#: Trained by two processes with half the batch each, and by one with all of it.
SAME_GLOBAL_BATCH: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "dapo-one-empty": {"loss_type": "dapo", "mask_truncated_completions": True},
}


def scripted_rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions that depend on the prompt and the how-manieth of its group alone, not on the process."""
    tokenizer = trainer.processing_class
    ends = tokenizer.eos_token_id
    seen: dict[str, int] = {}
    prompt_ids, completion_ids = [], []
    for prompt in prompts:
        seen[prompt] = seen.get(prompt, 0) + 1
        draw = random.Random(f"{prompt}{seen[prompt]}")
        tokens = [draw.randrange(ends - 1) for _ in range(draw.randint(2, 7))]
        # Every second problem is never answered to the end.
        completion_ids.append(tokens if int(prompt[0]) % 2 else [*tokens, ends])
        prompt_ids.append(tokenizer(prompt)["input_ids"])
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def scripted_trainer(output: Path, per_device: int, **settings: Any) -> Any:
    """TROLL on scripted rollouts, each used three times, with a bound that acts."""
    # One odd and one even problem a batch, so that with masked truncation one process has nothing.
    pairs = [f"{a}+{b}=" for b in range(8) for a in (2 * (b % 4), 2 * (b % 4) + 1)]
    return TROLLTrainer(
        model=make_tiny_model(),
        reward_funcs=reward_digits,
        args=TROLLConfig(
            **{
                **make_settings(output),
                **DESCENT,
                "learning_rate": 0.004,
                "per_device_train_batch_size": per_device,
                "steps_per_generation": 1,
                "num_iterations": 3,
                "shuffle_dataset": False,
                "troll_kl_bound": 0.01,
                **settings,
            }
        ),
        train_dataset=make_prompts().from_dict({"prompt": pairs}),
        processing_class=make_tokenizer(),
        rollout_func=scripted_rollouts,
    )


def _train(
    trainer_class: Any, config_class: Any, output: Path, *, nudged: bool = False, **settings: Any
) -> Any:
    model = make_tiny_model()
    if nudged:
        nudge(model)
    trainer = trainer_class(
        model=model,
        reward_funcs=reward_digits,
        args=config_class(
            **{
                **make_settings(output),
                **DESCENT,
                "per_device_train_batch_size": 4,
                "ddp_backend": "gloo",
                **settings,
            }
        ),
        train_dataset=make_prompts(),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    return trainer


def compare_with_grpo(output: Path) -> dict[str, float]:
    """Largest parameter difference to GRPO without its clip, the bound being infinite."""
    differences = {}
    for name, settings in {
        "dapo": {"loss_type": "dapo"},
        "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        "checkpointing": {"loss_type": "grpo", "gradient_checkpointing": True},
        "accumulation": {"loss_type": "dapo", "gradient_accumulation_steps": 2},
        "packing": {"loss_type": "bnpo"},
    }.items():
        plain = _train(GRPOTrainer, GRPOConfig, output, epsilon=math.inf, **settings)
        off = {"troll_kl_bound": math.inf, "troll_alpha": 0.0, "troll_pack_sequences": name == "packing"}
        ours = _train(TROLLTrainer, TROLLConfig, output, **off, **settings)
        nudged = _train(GRPOTrainer, GRPOConfig, output, nudged=True, epsilon=math.inf, **settings)
        differences[f"rounding, {name}"] = CourseRounding.between(plain, nudged).weights
        assert ours.accelerator.num_processes == 2
        differences[f"to GRPO, {name}"] = largest_difference(plain.model, ours.model)
        differences[f"moved, {name}"] = largest_difference(make_tiny_model(), ours.model)
    return differences


def train_scripted(output: Path) -> dict[str, float]:
    """Save the parameters and the numbers logged, for comparison with one process."""
    numbers = {}
    for name, settings in SAME_GLOBAL_BATCH.items():
        trainer = scripted_trainer(output, 4, ddp_backend="gloo", **settings)
        trainer.train()
        parameters = {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}
        save_file(parameters, output / f"{name}-{dist.get_rank()}.safetensors")
        for step, row in enumerate(row for row in trainer.state.log_history if "loss" in row):
            for key in ("kl_mean", "kl_max", "projected", "mean_step", "regression"):
                numbers[f"{name} {step} {key}"] = row[f"trust_region/{key}"]
    return numbers


def _batch(rank: int) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, 27, (2, 7), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    mask = torch.ones_like(ids)
    mask[1, :2] = 0  # a shorter prompt
    return {"input_ids": ids, "attention_mask": mask}, labels


def _extended() -> Any:
    model = make_tiny_model().double()
    fuse_head(model)
    add_sparse_head(model, 1.0, maybe_gather_lm_head_ctx)
    add_packing(model)
    return model


def _score(model: Any, rank: int, packed: bool = False) -> Tensor:
    """Forward and backward of a loss that uses everything the sparse head returns."""
    inputs, labels = _batch(rank)
    if packed:
        model = functools.partial(model, pack_sequences=True)
    recorded = model(**inputs, labels=labels, support_top_k=4)
    output = model(**inputs, labels=labels, support_ids=recorded.support_ids[:, -4:].int())
    counted = output.support_ids >= 0
    loss = output.log_probs.sum() + torch.where(counted, output.support_log_probs, 0.0).sum()
    (loss + output.entropy.sum() + output.support_log_tail.exp().sum()).backward()
    head = model.func.lm_head if packed else model.lm_head
    exact = model(**inputs, labels=labels, old_tokens=_old_tokens(model, head, inputs, labels))
    assert 0 < exact.projected[:, -4:].float().mean() < 1
    (exact.projected_log_probs.sum() + exact.regression.sum()).backward()
    return output.log_probs.detach()


@torch.no_grad()
def _old_tokens(model: Any, head: Any, inputs: dict[str, Tensor], labels: Tensor) -> OldTokens:
    """A policy some way off: other hidden states, and a head that is a snapshot."""
    recorded = model(**inputs, labels=labels, support_top_k=4, keep_hidden=True)
    hidden = recorded.hidden[:, -4:]
    snapshot = take_snapshot(head.weight, None, maybe_gather_lm_head_ctx)
    return OldTokens(
        hidden=hidden * torch.tensor([1.0, 0.99, 0.6, 0.3])[:, None],
        support=recorded.support(4),
        mask=torch.ones(hidden.shape[:2]),
        head=snapshot,
        kl_bound=0.05,
        region="token",
    )


def compare_sharded(head_apart: bool, packed: bool = False) -> dict[str, float]:
    """FSDP2's log-probabilities and gradients against those of an unsharded model.

    FSDP averages gradients over processes, each of which sees other data.
    """
    rank = dist.get_rank()
    expected = []
    gradients: dict[str, Tensor] = {}
    for process in range(2):
        model = _extended()
        expected.append(_score(model, process))
        for name, parameter in model.named_parameters():
            gradients[name] = gradients.get(name, 0.0) + parameter.grad / 2
    model = _extended()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if head_apart:
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    log_probs = _score(model, rank, packed)
    worst = 0.0
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        error = (parameter.grad.full_tensor() - gradients[name]).abs().max() / gradients[name].abs().max()
        worst = max(worst, error.item())
    kind = "packed" if packed else "head apart" if head_apart else "head in the root"
    return {
        f"sharded log-probs, {kind}": (log_probs - expected[rank]).abs().max().item(),
        f"sharded gradient, {kind}": worst,
    }


def main() -> None:
    output = Path(sys.argv[1])
    torch.set_num_threads(1)
    numbers = compare_with_grpo(output / "trainers")
    numbers |= train_scripted(output)
    numbers |= compare_sharded(head_apart=False)
    numbers |= compare_sharded(head_apart=True)
    numbers |= compare_sharded(head_apart=False, packed=True)
    (output / f"numbers-{dist.get_rank()}.json").write_text(json.dumps(numbers))
    end_rank()


if __name__ == "__main__":
    main()
