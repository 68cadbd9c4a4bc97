"""Where a model's turn ends, read from its own chat template."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from tether.errors import TetherWarning

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MARKER = "the marker 7f3a"
_CONVERSATION = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _MARKER}]


def end_of_turn_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that closes an assistant's turn; None without a chat template or such a token.

    A model that was taught conversations says this token where it is done, and not always the tokenizer's
    end token: Gemma 3 ends a turn with ``<end_of_turn>`` and a document with ``<eos>``, Llama 3 with
    ``<|eot_id|>`` and ``<|end_of_text|>``. A conversation is rendered and what follows the assistant's words
    is looked at, so no list of model families is needed.

    Warns:
        TetherWarning: a template that cannot render a question and an answer, or leaves out the answer.
    """
    if tokenizer.chat_template is None:
        return None
    from jinja2 import TemplateError

    try:
        text = str(tokenizer.apply_chat_template(_CONVERSATION, tokenize=False))
    except TemplateError as error:
        warnings.warn(
            f"The chat template cannot render a question and its answer ({error}), so it is not known which "
            "token ends a turn; the tokenizer's end token is used.",
            TetherWarning,
            stacklevel=2,
        )
        return None
    _, marker, following = text.rpartition(_MARKER)
    if not marker:
        warnings.warn(
            "The chat template leaves out what the assistant said, so it is not known which token ends a "
            "turn; the tokenizer's end token is used.",
            TetherWarning,
            stacklevel=2,
        )
        return None
    ids = tokenizer(following, add_special_tokens=False)["input_ids"]
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return int(ids[0]) if ids and ids[0] in special else None


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a response: the tokenizer's, the model's own, and the chat template's.

    The tokenizer's end token comes first; no token is named twice.
    """
    generation = model.generation_config
    own = [] if generation is None else generation.eos_token_id
    listed = [
        tokenizer.eos_token_id,
        *(own if isinstance(own, list) else [own]),
        end_of_turn_token(tokenizer),
    ]
    return list(dict.fromkeys(int(token) for token in listed if token is not None))
