"""Reinforcement learning from start to end on verl's engine: the embedded model learns its task.

Every part of an update is verl's: worker, FSDP2 engine, GRPO's advantages, mini-batches, metrics. The
rollouts are not; a plain Transformers model with the actor's weights samples here.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from actor import Rollouts, make_actor, parameters
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils import tensordict_utils as tu

from tether.integrations.verl import TROLLPolicyLossConfig
from tether.llm.models import embedded_model_path
from tether.llm.tasks.chained import ChainedTask

pytestmark = pytest.mark.slow

STEPS, PROMPTS, SAMPLES, MINI_BATCH = 10, 32, 8, 64


class Sampler:
    """The policy as a plain model, and the task it is asked."""

    def __init__(self, folder: Path) -> None:
        self.task = ChainedTask()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def sample(self, prompts: list[str], count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """`count` responses to each prompt, cut after the end token, and the prompts they belong to."""
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True)
        with torch.no_grad():
            whole = self.model.generate(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=True,
                temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=count,
                max_new_tokens=self.task.max_response_tokens,
            )  # fmt: skip
        width, end = batch["input_ids"].shape[1], self.tokenizer.eos_token_id
        masks = batch["attention_mask"].bool()
        inputs = [row[mask] for row, mask in zip(batch["input_ids"], masks, strict=True)]
        responses = []
        for row in whole[:, width:]:
            ends = (row == end).nonzero()
            responses.append(row[: int(ends[0]) + 1] if len(ends) else row)
        return [inputs[i // count] for i in range(len(responses))], responses

    def rewards(self, responses: list[torch.Tensor], answers: list[str]) -> torch.Tensor:
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        verdicts = [self.task.verify(text, answer) for text, answer in zip(texts, answers, strict=True)]
        return torch.tensor([verdict.reward for verdict in verdicts])

    def success(self, problems: list[Any]) -> float:
        _, responses = self.sample([problem.prompt for problem in problems], 1)
        return self.rewards(responses, [problem.answer for problem in problems]).mean().item()


def _rollouts(sampler: Sampler, problems: list[Any]) -> tuple[Rollouts, float]:
    prompts, responses = sampler.sample([problem.prompt for problem in problems], SAMPLES)
    rewards = sampler.rewards(responses, [p.answer for p in problems for _ in range(SAMPLES)])
    masks = [torch.ones(len(response), dtype=torch.int64) for response in responses]
    mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
    scores = torch.zeros(mask.shape)
    scores[torch.arange(len(rewards)), mask.sum(-1) - 1] = rewards
    groups = np.repeat(np.arange(len(problems)), SAMPLES)
    advantages, _ = compute_grpo_outcome_advantage(scores, mask, groups)
    cut = [row[: len(response)] for row, response in zip(advantages, responses, strict=True)]
    return Rollouts(prompts, responses, masks, cut), rewards.mean().item()


def test_the_embedded_model_learns() -> None:
    torch.manual_seed(0)
    folder = embedded_model_path()
    sampler = Sampler(folder)
    actor = make_actor(folder, TROLLPolicyLossConfig(), learning_rate=1e-4, micro_batch=32)
    training = iter(sampler.task.problems("train", limit=STEPS * PROMPTS))
    held_out = list(sampler.task.problems("validation", limit=200))
    before, rewards, last = sampler.success(held_out), [], {}
    for _ in range(STEPS):
        rollouts, reward = _rollouts(sampler, list(islice(training, PROMPTS)))
        rewards.append(reward)
        batch = rollouts.batch(
            rollouts.score(actor),
            calculate_entropy=False,
            global_batch_size=MINI_BATCH,
            mini_batch_size=MINI_BATCH,
            epochs=1,
            dataloader_kwargs={"shuffle": True},
        )
        last = tu.get(actor.train_mini_batch(batch), "metrics")
        sampler.model.load_state_dict(parameters(actor))
    after = sampler.success(held_out)
    assert after > before + 0.1, (before, after, rewards)
    kl = [float(value) for value in last["actor/troll/kl_mean"]]
    assert len(kl) == PROMPTS * SAMPLES // MINI_BATCH
    assert kl[0] < 1e-4 < kl[-1]  # each batch starts at the policy that made it
