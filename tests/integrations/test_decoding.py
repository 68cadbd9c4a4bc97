"""Compact decoding says what Transformers' `generate` says, and draws from the model's distributions."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from packed_models import SIZES, UNFIT, make
from transformers import Llama4ForCausalLM, Llama4TextConfig

from tether.errors import ConfigError, InvalidInputError
from tether.integrations.decoding import decode, draw

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


@pytest.mark.parametrize("kind", ["states", "convolutions"])
def test_models_that_remember_more_than_keys_and_values_are_refused(kind: str) -> None:
    build, reason = UNFIT[kind]
    with pytest.raises(ConfigError, match=reason):
        decode(build().eval(), PROMPTS, max_new_tokens=2, temperature=1.0, end_ids={2})


def test_chunked_attention_is_decoded() -> None:
    config = Llama4TextConfig(**SIZES, num_local_experts=2, attention_chunk_size=2)
    torch.manual_seed(0)
    model = Llama4ForCausalLM(config).eval()
    wanted = [greedy_alone(model, prompt, 4, set()) for prompt in PROMPTS]
    assert decode(model, PROMPTS, max_new_tokens=4, temperature=None, end_ids={99}) == wanted


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


def test_outcomes_are_drawn_in_proportion_to_their_weights() -> None:
    """Held to the chi-square bound: weights of many sizes, zeros between them, more than one strip."""
    torch.manual_seed(0)
    weights = torch.rand(600).pow(8)
    weights[::3] = 0
    drawn = 200_000
    counts = draw(weights.expand(drawn, -1)).bincount(minlength=600).double()
    expected = drawn * weights.double() / weights.sum(dtype=torch.float64)
    assert counts[weights == 0].sum() == 0
    often = expected > 5
    rest = torch.stack((counts[~often].sum(), expected[~often].sum()))
    square = ((counts - expected).square() / expected)[often].sum() + (rest[0] - rest[1]) ** 2 / rest[1]
    free = int(often.sum())
    assert abs(square - free) < 5 * (2 * free) ** 0.5


@pytest.mark.parametrize("number", [0.0, 0.25, 1 - 2.0**-53])
@pytest.mark.parametrize("first", [0, 255, 256, 511, 700])
def test_an_outcome_without_weight_is_never_drawn(
    monkeypatch: pytest.MonkeyPatch, first: int, number: float
) -> None:
    monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, number))
    weights = torch.zeros(3, 1000)
    weights[:, first] = torch.tensor([1e-38, 0.1, 3e7])
    weights[:, first + 40] = torch.tensor([1e-38, 1e-9, 1.0])
    chosen = draw(weights)
    assert set(chosen.tolist()) <= {first, first + 40}
    assert chosen[0] == (first if number < 0.5 else first + 40)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_weights_that_are_no_distribution_are_named(bad: float) -> None:
    with pytest.raises(InvalidInputError, match="row 1 sum to"):
        draw(torch.tensor([[1.0, 2.0], [0.0, bad]]))
