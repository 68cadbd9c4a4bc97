"""Responses of a model to problems, in batches, without disturbing anybody else's random numbers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tether.errors import ConfigError
from tether.integrations.decoding import decode
from tether.llm.tasks import Problem, Prompt, Task, Verdict
from tether.llm.tasks.training import verify_all

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# A model's own generation settings would otherwise reshape the policy that is measured: Qwen2.5's, for one,
# ask for a penalty on repetition, which training samples without.
_UNSHAPED = {
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_p": None, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "min_new_tokens": None, "min_length": 0, "num_beams": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Response:
    """What a model said."""

    text: str
    """Decoded without special tokens."""
    ids: list[int]
    """The tokens, with the one that ended it."""
    truncated: bool
    """Whether it was cut off at the longest length instead of ending by itself."""


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    max_response_tokens: int,
    temperature: float | None,
    batch_size: int,
    seed: int,
    chat_template_options: Mapping[str, Any] | None = None,
    compact: bool = False,
) -> list[Response]:
    """Answer each prompt once.

    Prompts of similar length are answered together, and results come back in the order of the prompts.

    Args:
        model, tokenizer: as `tether.llm.models.load_model_and_tokenizer` gives them. A response ends at any
            end token of the model's generation settings; what these say of penalties and cut-offs is not
            heeded.
        prompts: texts, or conversations for the chat template.
        max_response_tokens: longest response.
        temperature: of sampling; None for the most likely token each time.
        batch_size: responses at a time.
        seed: of sampling. The global random state is left as it was found.
        chat_template_options: variables of the chat template.
        compact: use `tether.integrations.decoding`: the same distributions, other random numbers, faster.

    >>> from tether.llm.models import load_model_and_tokenizer
    >>> model, tokenizer = load_model_and_tokenizer("embedded")
    >>> responses = answer(model, tokenizer, ["37+58="], max_response_tokens=4,
    ...                    temperature=None, batch_size=1, seed=0)
    >>> len(responses)
    1
    """
    encoded = [encode_prompt(tokenizer, prompt, chat_template_options) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(encoded[index]))
    responses: dict[int, Response] = {}
    write = functools.partial(
        _write_compactly if compact else _write, model, tokenizer, max_response_tokens, temperature
    )
    with _generating(model, seed):
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            said = write([encoded[index] for index in batch])
            for index, ids in zip(batch, said, strict=True):
                responses[index] = _response(model, tokenizer, ids)
    return [responses[index] for index in range(len(prompts))]


def answer_and_judge(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    problems: Sequence[Problem],
    *,
    max_response_tokens: int | None = None,
    **sampling: Any,
) -> list[tuple[Response, Verdict]]:
    """Answer each problem once, as `answer` does, and check the answers; at the task's length by default."""
    length = max_response_tokens or task.max_response_tokens
    prompts = [problem.prompt for problem in problems]
    responses = answer(model, tokenizer, prompts, max_response_tokens=length, **sampling) if prompts else []
    texts = [response.text for response in responses]
    verdicts = verify_all(task, texts, [problem.answer for problem in problems])
    return list(zip(responses, verdicts, strict=True))


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, chat_template_options: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a prompt, a conversation through the chat template, as TRL encodes it."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"The tokenizer of {tokenizer.name_or_path or 'this model'!r} has no chat template, and the task "
            "asks in conversations. Use an instruction-tuned model, or set chat_template."
        )
    return list(
        tokenizer.apply_chat_template(
            prompt,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **(chat_template_options or {}),
        )
    )


def _write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    temperature: float | None,
    prompts: list[list[int]],
) -> list[list[int]]:
    """The responses of Transformers' `generate`, each followed by padding."""
    rows = tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(model.device)
    produced = model.generate(
        **rows,
        max_new_tokens=length,
        do_sample=temperature is not None,
        temperature=temperature,
        top_k=0 if temperature is not None else None,
        top_p=1.0 if temperature is not None else None,
        pad_token_id=tokenizer.pad_token_id,
        **_UNSHAPED,
    )
    said: list[list[int]] = produced[:, rows["input_ids"].shape[1] :].tolist()
    return said


def _write_compactly(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    temperature: float | None,
    prompts: list[list[int]],
) -> list[list[int]]:
    """Those of `decode`."""
    return decode(model, prompts, max_new_tokens=length, temperature=temperature, end_ids=_end_ids(model))


def _end_ids(model: PreTrainedModel) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set(ends if isinstance(ends, list) else [ends])


def _response(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> Response:
    """Cut a row where the response ended; what follows is padding."""
    ends = _end_ids(model)
    length = next((place + 1 for place, token in enumerate(ids) if token in ends), None)
    kept = ids[:length]
    return Response(tokenizer.decode(kept, skip_special_tokens=True), kept, truncated=length is None)


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
