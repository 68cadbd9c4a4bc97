"""Responses of a model to problems, in batches, without disturbing anybody else's random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from tether.llm.tasks import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def generate_responses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    max_response_tokens: int,
    temperature: float | None,
    batch_size: int,
    seed: int,
) -> list[str]:
    """Answer each prompt once, decoded without special tokens.

    Prompts of similar length are answered together, and results come back in the order of the prompts.

    Args:
        model, tokenizer: as `tether.llm.models.load_model_and_tokenizer` gives them.
        prompts: texts, or conversations for the chat template.
        max_response_tokens: longest response.
        temperature: of sampling; None for the most likely token each time.
        batch_size: responses at a time.
        seed: of sampling. The global random state is left as it was found.

    Raises:
        ConfigError: conversations for a tokenizer without a chat template.

    >>> from tether.llm.models import load_model_and_tokenizer
    >>> model, tokenizer = load_model_and_tokenizer("embedded")
    >>> answers = generate_responses(model, tokenizer, ["37+58="], max_response_tokens=4,
    ...                              temperature=None, batch_size=1, seed=0)
    >>> len(answers)
    1
    """
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(encoded[index]))
    responses = [""] * len(prompts)
    with _generating(model, seed):
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            rows = tokenizer.pad({"input_ids": [encoded[index] for index in batch]}, return_tensors="pt")
            rows = rows.to(model.device)
            produced = model.generate(
                **rows,
                max_new_tokens=max_response_tokens,
                do_sample=temperature is not None,
                temperature=temperature,
                top_k=0 if temperature is not None else None,
                top_p=1.0 if temperature is not None else None,
                pad_token_id=tokenizer.pad_token_id,
            )
            texts = tokenizer.batch_decode(
                produced[:, rows["input_ids"].shape[1] :], skip_special_tokens=True
            )
            for index, text in zip(batch, texts, strict=True):
                responses[index] = text
    return responses


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, a conversation through the chat template, as TRL encodes it."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return list(
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
    )


@contextmanager
def _generating(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Evaluation mode, no gradients, random numbers of its own; everything as before afterwards."""
    was_training = model.training
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)
