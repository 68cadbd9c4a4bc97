"""Compact decoding says what Transformers' `generate` says, and draws from the model's distributions."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from packed_models import make

from tether.errors import InvalidInputError
from tether.integrations.decoding import decode

PROMPTS = [[5, 6, 7], [9], [5, 6, 7], [8, 4, 11, 3, 21], [9], [5, 6]]


def greedy_alone(model: torch.nn.Module, prompt: list[int], tokens: int, ends: set[int]) -> list[int]:
    """Without a cache, padding or neighbours."""
    ids = list(prompt)
    while len(ids) < len(prompt) + tokens:
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in ends:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["Qwen3", "Llama-3", "SmolLM3", "Gemma-3", "Qwen3 with experts"])
def test_greedy_responses_are_those_of_each_prompt_alone(family: str) -> None:
    model = make(family).eval()
    free = [greedy_alone(model, prompt, 8, set()) for prompt in PROMPTS]
    ends = {free[0][2], free[1][5]}  # so that rows end at different steps, and some never
    wanted = [greedy_alone(model, prompt, 8, ends) for prompt in PROMPTS]
    assert len({len(response) for response in wanted}) > 1
    assert decode(model, PROMPTS, max_new_tokens=8, temperature=None, end_ids=ends) == wanted


def test_samples_follow_the_models_distribution_at_the_temperature() -> None:
    model = make("Llama-3").eval()
    drawn, temperature = 4000, 2.0
    torch.manual_seed(0)
    said = decode(model, [[5, 6, 7]] * drawn, max_new_tokens=1, temperature=temperature, end_ids={2})
    counts = Counter(response[0] for response in said)
    logits = model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].double()
    expected = (logits / temperature).softmax(-1)
    for token, probability in enumerate(expected.tolist()):
        deviation = (probability * (1 - probability) / drawn) ** 0.5
        assert abs(counts[token] / drawn - probability) <= 5 * deviation + 1 / drawn, token


def test_the_end_token_belongs_to_the_response_and_nothing_follows_it() -> None:
    model = make("Llama-3").eval()
    torch.manual_seed(0)
    said = decode(model, [[5, 6, 7]] * 64, max_new_tokens=20, temperature=5.0, end_ids={2, 3, 4, 5, 6})
    assert len({len(response) for response in said}) > 3
    assert all(not set(response[:-1]) & {2, 3, 4, 5, 6} for response in said)
    assert all(len(response) == 20 or response[-1] in {2, 3, 4, 5, 6} for response in said)


@pytest.mark.parametrize(("prompts", "tokens"), [([], 3), ([[1], []], 3), ([[1]], 0)])
def test_nothing_to_write_is_refused(prompts: list[list[int]], tokens: int) -> None:
    with pytest.raises(InvalidInputError, match="at least one prompt"):
        decode(make("Llama-3"), prompts, max_new_tokens=tokens, temperature=None, end_ids={2})
