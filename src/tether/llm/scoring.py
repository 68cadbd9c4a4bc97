"""How likely each token of a response was, and how undecided the model was before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOGITS_BYTES = 2**28
"""Most memory for logits at a time; one sequence may need more."""


@dataclass(frozen=True)
class TokenScores:
    """Of one response, a number a token."""

    log_probs: list[float]
    """Log-probability of the token that was said, in nats, at temperature 1."""
    entropies: list[float]
    """Entropy of the distribution it was drawn from, in nats."""


@torch.no_grad()
def score_tokens(
    model: PreTrainedModel, prompts: Sequence[list[int]], responses: Sequence[list[int]]
) -> list[TokenScores]:
    """Log-probability and entropy of every token of the responses, given prompt and earlier tokens.

    >>> from tether.llm.models import load_model_and_tokenizer
    >>> model, tokenizer = load_model_and_tokenizer("embedded")
    >>> scores = score_tokens(model, [tokenizer("37+58=").input_ids], [tokenizer("95").input_ids])
    >>> len(scores[0].log_probs), max(scores[0].log_probs) <= 0
    (2, True)
    """
    scores: list[TokenScores] = []
    vocabulary = model.config.get_text_config().vocab_size
    start = 0
    while start < len(prompts):
        stop, longest = start, 0
        while stop < len(prompts):
            longest = max(longest, len(prompts[stop]) + len(responses[stop]))
            if stop > start and (stop + 1 - start) * longest * vocabulary * 4 > _LOGITS_BYTES:
                break
            stop += 1
        scores += _score_batch(model, prompts[start:stop], responses[start:stop])
        start = stop
    return scores


def _score_batch(
    model: PreTrainedModel, prompts: Sequence[list[int]], responses: Sequence[list[int]]
) -> list[TokenScores]:
    """Padded on the right, where a causal model does not look."""
    sequences = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits
    found = []
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        places = slice(len(prompt) - 1, len(prompt) - 1 + len(response))
        log_probs = torch.log_softmax(logits[row, places].float(), dim=-1)
        said = torch.tensor(response, dtype=torch.long, device=log_probs.device)
        entropies = torch.special.entr(log_probs.exp()).sum(-1)
        found.append(TokenScores(log_probs.gather(-1, said[:, None])[:, 0].tolist(), entropies.tolist()))
    return found
