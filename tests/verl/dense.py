"""The same model without any of verl, on whole distributions in float64: what the engine is compared with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from actor import Rollouts, gradients, parameters
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3ForCausalLM
from verl.workers.engine_workers import TrainingWorker

from tether.losses import troll
from tether.losses.base import PolicyLoss
from tether.projection import SparseLogProbs

#: So small that it matters after two small steps.
KL_BOUND = 0.0005


class Dense:
    """The same model without any of verl: one sequence at a time, float64, the whole vocabulary."""

    def __init__(self, folder: Path, state: dict[str, Tensor], lora: dict[str, Any] | None = None) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
        if lora:
            adapters = LoraConfig(
                r=lora["lora_rank"], lora_alpha=lora["lora_alpha"], target_modules="all-linear"
            )
            self.model = get_peft_model(self.model, adapters)
        self.model.double().load_state_dict({name: value.double() for name, value in state.items()})

    def log_probs(self, rollouts: Rollouts) -> Tensor:
        """[B, T, V] of the response tokens."""
        rows = []
        for prompt, response in zip(rollouts.prompts, rollouts.responses, strict=True):
            logits = self.model(torch.cat((prompt, response))[None]).logits[0] / rollouts.temperature
            rows.append(logits[len(prompt) - 1 : -1].log_softmax(-1))
        return pad_sequence(rows, batch_first=True)

    def loss(self, rollouts: Rollouts, old: Tensor, top_k: int | None, **settings: Any) -> PolicyLoss:
        ids, mask = (pad_sequence(part, batch_first=True) for part in (rollouts.responses, rollouts.masks))
        advantages = pad_sequence(rollouts.advantages, batch_first=True)
        new = self.log_probs(rollouts)
        sampled, old_sampled = (side.gather(-1, ids[..., None]).squeeze(-1) for side in (new, old))
        distributions: dict[str, Any] = {"new": new, "old": old}
        if top_k is not None:
            keep = {"mass": 1 - 1e-5, "keep_ids": ids}
            sparse_old = SparseLogProbs.from_logits(old, top_k, **keep)
            sparse_old = replace(sparse_old, log_tail_min=old.amin(-1))
            sparse_new = (
                SparseLogProbs.from_logits(new, sparse_old.ids.shape[-1] - 1, **keep)
                if settings.get("support") == "paper"
                else SparseLogProbs.at_ids(new, sparse_old.ids)
            )
            distributions = {"new": sparse_new, "old": sparse_old}
        return troll(sampled, old_sampled, advantages, mask, response_ids=ids, **distributions, **settings)


def worst_gradient(
    folder: Path, actor: TrainingWorker, mine: Rollouts, whole: Rollouts, lora: dict[str, Any] | None = None
) -> tuple[float, float]:
    """The third update of a batch: how far its gradient is off, as a share of the largest, and what acted.

    Args:
        mine: of this process.
        whole: of all processes together.
    """
    old_policy = Dense(folder, parameters(actor), lora).log_probs(whole).detach()
    old, processes = mine.score(actor), len(whole.prompts) // len(mine.prompts)
    for _ in range(2):
        mine.update(actor, old, processes)
    reference = Dense(folder, parameters(actor), lora)
    metrics = mine.update(actor, old, processes)
    reference.loss(whole, old_policy, None, kl_bound=KL_BOUND).loss.backward()
    expected = {name: p.grad for name, p in reference.model.named_parameters() if p.grad is not None}
    found = gradients(actor)
    assert found.keys() == expected.keys()
    largest = max(value.abs().max() for value in expected.values())
    worst = max((found[name] - expected[name]).abs().max() for name in expected)
    return float(worst / largest), metrics["actor/troll/projected"]
