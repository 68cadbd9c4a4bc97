"""Responses of a Transformers model, written together: no prompt is read twice, no row outlives its response.

`generate` of Transformers reads a prompt once for each of its responses, and goes on with rows that have
ended until the longest has. On a processor that costs more than the tokens that are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from tether.errors import ConfigError, InvalidInputError
from tether.integrations.grouped_attention import grouped_attention

# Leaving rows out copies what the model remembers of the others; it pays once so many of them have ended.
_SHARE_ENDED = 1 / 8
# Outcomes whose weights are summed together before one is looked for.
_STRIP = 256
_BELOW_ONE = 1 - 2.0**-52
#: Types of layers that remember keys and values of tokens, and nothing else.
KEYS_AND_VALUES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})

Watch = Callable[[Tensor, Tensor, Tensor], None]
"""Told of each step: rows [n] that are written, log-probabilities [n, V] they are drawn from, tokens [n]."""


@torch.no_grad()
def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float | None,
    end_ids: Collection[int],
    watch: Watch | None = None,
) -> list[list[int]]:
    """Continue each prompt by tokens drawn from the model's distributions, cut by nothing but temperature.

    Args:
        model: a causal language model of Transformers with a key-value cache, in evaluation mode.
        prompts: token ids; prompts that are equal are read once.
        max_new_tokens: longest response.
        temperature: logits are divided by it; None for the most likely token each time.
        end_ids: tokens that end a response, and belong to it.
        watch: called at each step that draws; of a row that has ended it may be told more, which is not of
            the response.

    Returns:
        The responses, in the order of the prompts.

    Raises:
        InvalidInputError: no prompt, an empty one, or no room for a response.
        ConfigError: a model whose layers remember more than keys and values.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_attention_heads=2, **sizes)).eval()
        >>> said = decode(model, [[3, 4], [3, 4], [5]], max_new_tokens=2, temperature=1.0, end_ids={2})
        >>> [1 <= len(ids) <= 2 for ids in said]
        [True, True, True]
    """
    if not prompts or not all(prompts) or max_new_tokens < 1:
        raise InvalidInputError(
            f"Give at least one prompt, none of them empty, and max_new_tokens of at least 1; got "
            f"{len(prompts)} prompts and max_new_tokens={max_new_tokens}."
        )
    if (other := beyond_attention(model)) is not None:
        raise ConfigError(
            f"{type(model).__name__} remembers more of a row than keys and values, which is all that is kept "
            f"here: {other}. Have its responses written by Transformers' generate (rollouts: transformers)."
        )
    with grouped_attention(model):
        return _decode(model, prompts, max_new_tokens, temperature, end_ids, watch)


def beyond_attention(model: Any, layers: frozenset[str] = KEYS_AND_VALUES) -> str | None:
    """What a model says it has besides layers of these types, if anything."""
    if getattr(model, "_is_stateful", False):
        return "it carries a state from token to token"
    others = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - layers
    return f"it has layers of type {', '.join(sorted(others))}" if others else None


def _decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float | None,
    end_ids: Collection[int],
    watch: Watch | None,
) -> list[list[int]]:
    distinct = {prompt: place for place, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    which = torch.tensor([distinct[tuple(prompt)] for prompt in prompts], device=model.device)
    ids, mask = _padded(list(distinct), model.device)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    output = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1
    )
    cache, logits = output.past_key_values, output.logits[which, -1]
    cache.batch_select_indices(which)
    mask, position = mask[which], positions[which, -1:]
    ends = torch.tensor(sorted(end_ids), device=model.device)
    rows, ended = torch.arange(len(prompts)), torch.zeros(len(prompts), dtype=torch.bool)
    responses: list[list[int]] = [[] for _ in prompts]
    for step in range(max_new_tokens):
        tokens = _choose(logits, temperature, rows, watch)
        for row, token, over in zip(rows.tolist(), tokens.tolist(), ended.tolist(), strict=True):
            if not over:
                responses[row].append(token)
        ended |= torch.isin(tokens, ends).cpu()
        if step + 1 == max_new_tokens or ended.all():
            break
        if ended.float().mean() >= _SHARE_ENDED:
            kept = (~ended).nonzero()[:, 0].to(model.device)
            cache.batch_select_indices(kept)
            tokens, mask, position = tokens[kept], mask[kept], position[kept]
            rows, ended = rows[~ended], ended[~ended]
        position = position + 1
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        output = model(
            input_ids=tokens[:, None], attention_mask=mask, position_ids=position, past_key_values=cache,
            use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        logits = output.logits[:, -1]
    return responses


def _padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask, padded on the left, where generated tokens are not."""
    width = max(map(len, prompts))
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def _choose(logits: Tensor, temperature: float | None, rows: Tensor, watch: Watch | None) -> Tensor:
    """A token of each row, [n]."""
    if temperature is None:
        return logits.argmax(-1)
    log_probs = (logits.float() / temperature).log_softmax(-1)
    tokens = draw(log_probs.exp())
    if watch is not None:
        watch(rows, log_probs, tokens)
    return tokens


def draw(weights: Tensor) -> Tensor:
    """An outcome of each row, drawn in proportion to its weights.

    One uniform number a row and sums in float64. `torch.multinomial` draws a number for each outcome, which
    for a vocabulary costs more than the layers of a small model.

    Args:
        weights: [B, V], not negative, with a positive sum in each row.

    Returns:
        Indices [B]; never one of weight zero.

    Raises:
        InvalidInputError: a row whose weights are not finite, or all zero.

    Example:
        >>> draw(torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.5]]))
        tensor([1, 2])
    """
    strips = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % _STRIP)).unflatten(-1, (-1, _STRIP))
    sums = strips.sum(-1, dtype=torch.float64)
    up_to = sums.cumsum(-1)
    total = up_to[:, -1:]
    bad = ~(total.isfinite() & (total > 0))[:, 0]
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise InvalidInputError(
            "Weights to draw by must be finite with a positive sum in each row; those of row "
            f"{row} sum to {total[row].item()}. Where a model made them, look at its logits."
        )
    at = (torch.rand_like(total) * total).clamp_max(_BELOW_ONE * total)
    strip = torch.searchsorted(up_to, at, right=True)
    within = strips[torch.arange(len(weights), device=weights.device), strip[:, 0]].double().cumsum(-1)
    # Rounding may put the number just before the strip, or at its end behind the last outcome with a weight.
    rest = (at - up_to.gather(-1, strip) + sums.gather(-1, strip)).clamp_min(0)
    rest = torch.minimum(rest, _BELOW_ONE * within[:, -1:])
    return (strip * _STRIP + torch.searchsorted(within, rest, right=True))[:, 0]
