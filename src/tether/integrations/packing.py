"""Padded rows go through a model's backbone without their padding; what is around it does not notice.

TRL pads every prompt on the left and every response on the right to the longest of a micro-batch. With
`add_packing`, and ``pack_sequences=True`` among the keywords of a forward, the backbone sees the same
sequences back to back, and its hidden states are put where padded ones would be. LM heads, losses and
whatever wraps the model (PEFT, DDP, FSDP, DeepSpeed) work as before.
"""

from __future__ import annotations

import functools
import inspect
import types
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.errors import ConfigError, InvalidInputError
from tether.integrations.decoding import beyond_attention
from tether.integrations.grouped_attention import grouped_attention
from tether.integrations.head_check import evaluated, rounding_of
from tether.integrations.shared_prefixes import RowLayout, SharedLayout

_OFF = (
    "Switch packing off: pack_sequences=False, --no-pack-sequences on the command line, "
    "troll_pack_sequences=False in TROLLConfig."
)

Packing = bool | Literal["shared"]
"""Whether a pass leaves padding out; "shared": and computes once what sequences begin with alike."""

# Layers whose only way from one token to another is a mask that position ids can split.
_PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})

# What a backbone is given by those who want hidden states of a whole sequence.
_KNOWN_KEYWORDS = frozenset({"use_cache", "output_router_logits", "return_dict"})


@dataclass(frozen=True)
class PackedLayout(RowLayout):
    """Where the N tokens of padded rows [B, W] stand in packed rows [R, L].

    A packed row holds whole sequences, one after the other. Position ids begin at 0 with each, which is how
    Transformers tells them apart: it lets no token attend to one of another sequence. What follows a row's
    last sequence counts on, and nobody attends to it.

    Example:
        >>> mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [0, 1, 0, 0]])
        >>> layout = PackedLayout.of(mask)
        >>> layout.position_ids
        tensor([[0, 1, 2],
                [0, 1, 0]])
        >>> packed = layout.pack(torch.tensor([[0, 1, 2, 3], [4, 5, 0, 0], [0, 6, 0, 0]]))
        >>> packed
        tensor([[1, 2, 3],
                [4, 5, 6]])
        >>> layout.unpack(packed)
        tensor([[0, 1, 2, 3],
                [4, 5, 0, 0],
                [0, 6, 0, 0]])
    """

    @classmethod
    def of(cls, attention_mask: Tensor, *, one_row: bool = False) -> PackedLayout:
        """The layout of rows whose tokens are marked in `attention_mask`, [B, W].

        Args:
            attention_mask: 1 or true for tokens, which must be neighbours in their row; padding may be on
                either side or both, and a row may be empty.
            one_row: put all sequences into one row, for attention that costs nothing between them. By
                default there are several, none longer than padded rows: attention that computes a whole
                square and masks it then costs no more than on those.

        Raises:
            InvalidInputError: a mask that is no matrix, or has padding between tokens.
        """
        if attention_mask.dim() != 2:
            raise InvalidInputError(
                f"The attention mask to pack by must be a matrix [B, W], got {tuple(attention_mask.shape)}."
            )
        mask = attention_mask.detach().cpu() != 0  # the layout is planned on the host: one transfer
        lengths = mask.sum(1)
        first = mask.int().argmax(1)
        rows, columns = mask.nonzero(as_tuple=True)
        positions = columns - first[rows]
        torn = (positions >= lengths[rows]).nonzero()
        if torn.numel():
            row = int(rows[torn[0]])
            raise InvalidInputError(
                f"Row {row} of the attention mask has padding between its tokens; position ids that count "
                "through a gap cannot be packed. Pad on the left, on the right, or both."
            )
        row_of, start_of, count, length = _plan(lengths.tolist(), mask.shape[1], one_row)
        starts, packed_rows = torch.tensor(start_of), torch.tensor(row_of)
        last_start = torch.zeros(count, dtype=torch.long)
        filled = lengths > 0
        last_start.scatter_reduce_(0, packed_rows[filled], starts[filled], "amax")
        position_ids = torch.arange(length) - last_start[:, None]
        packed = packed_rows[rows], starts[rows] + positions
        position_ids[packed] = positions
        device = attention_mask.device
        return cls(
            (rows.to(device), columns.to(device)),
            (packed[0].to(device), packed[1].to(device)),
            position_ids.to(device),
            (mask.shape[0], mask.shape[1]),
        )


def add_packing(model: PreTrainedModel) -> None:
    """Teach a model's backbone the keyword `pack_sequences`: true, or "shared" for `SharedLayout`.

    With ``pack_sequences=True`` beside `input_ids` and `attention_mask` [B, W], the backbone runs on packed
    rows; `last_hidden_state` [B, W, D] and router logits come back in the places of padded ones, zero where
    there is padding. Equal, up to rounding, to the padded pass of any model that knows relative positions
    alone; a model with absolute positions sees each sequence begin at 0, as it does when it generates. The
    first packed pass is preceded by a check on a few tokens that this is so.

    A copy of the model or of its backbone keeps the ability.

    Args:
        model: a causal language model of Transformers, before it is wrapped.

    Raises:
        ConfigError: a model whose layers carry something from one packed sequence to the next, that does
            not take position ids, or that reads more than text.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_attention_heads=2, **sizes))
        >>> add_packing(model)
        >>> ids, mask = torch.tensor([[1, 2, 3], [0, 4, 0]]), torch.tensor([[1, 1, 1], [0, 1, 0]])
        >>> model.base_model(ids, attention_mask=mask, pack_sequences=True).last_hidden_state.shape
        torch.Size([2, 3, 8])
    """
    _check_packable(model)
    backbone: Any = model.base_model
    if hasattr(backbone, "_padded_forward"):
        return
    # On the backbone and not in a closure, so that a deep copy of it calls its own.
    backbone._padded_forward = backbone.forward
    backbone._packing_checked = False

    @functools.wraps(type(backbone).forward)
    def forward(self: Any, *args: Any, pack_sequences: Packing = False, **kwargs: Any) -> Any:
        if not pack_sequences:
            return self._padded_forward(*args, **kwargs)
        if not self._packing_checked:
            _check_sequences_stay_apart(self)
            self._packing_checked = True
        return _run_packed(self, *args, shared=pack_sequences == "shared", **kwargs)

    backbone.forward = types.MethodType(forward, backbone)


def _run_packed(
    backbone: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    shared: bool = False,
    **kwargs: Any,
) -> Any:
    foreign = [name for name, value in kwargs.items() if name not in _KNOWN_KEYWORDS and _is_given(value)]
    if input_ids is None or attention_mask is None or foreign:
        given = f"also {', '.join(foreign)}" if foreign else "one of them missing"
        raise ConfigError(
            f"A packed pass takes input_ids and attention_mask of padded rows; got {given}. {_OFF}"
        )
    layout: PackedLayout | SharedLayout
    if shared:
        layout = _shared_layout(backbone, input_ids, attention_mask)
    else:
        layout = PackedLayout.of(attention_mask, one_row=_attends_within_sequences(backbone))
    shared = isinstance(layout, SharedLayout)
    with _attention_of(backbone, shared=shared):
        output = backbone._padded_forward(
            input_ids=layout.pack(input_ids),
            attention_mask=layout.attention_mask if isinstance(layout, SharedLayout) else None,
            position_ids=layout.position_ids,
            **{**kwargs, "use_cache": False},
        )
    output.last_hidden_state = layout.unpack(output.last_hidden_state)
    if output.get("router_logits") is not None:
        packed = layout.position_ids.shape
        output.router_logits = tuple(
            layout.unpack(logits.view(*packed, -1)).flatten(0, 1) for logits in output.router_logits
        )
    return output


def _attention_of(backbone: Any, *, shared: bool) -> AbstractContextManager[None]:
    """A checkpointed layer is computed again in the backward pass, outside of what is entered here."""
    return grouped_attention(backbone) if shared and not backbone.is_gradient_checkpointing else nullcontext()


def _shared_layout(backbone: Any, input_ids: Tensor, attention_mask: Tensor) -> PackedLayout | SharedLayout:
    """The layout, if this backbone's attention takes a tree's mask; packed rows where they take less."""
    config = backbone.config
    if config._attn_implementation != "sdpa":
        raise ConfigError(
            "Beginnings are shared under PyTorch's attention alone; the model has attn_implementation="
            f"{config._attn_implementation!r}. Load it with 'sdpa', or leave share_prefixes off."
        )
    window = _window(config)
    if window is not None and (longest := int((attention_mask != 0).sum(1).max())) > window:
        raise ConfigError(
            f"Beginnings are shared up to the window of the model's attention, {window} tokens, and a "
            f"sequence has {longest}. Shorten prompts or responses, or leave share_prefixes off."
        )
    packed, shared = PackedLayout.of(attention_mask), SharedLayout.of(input_ids, attention_mask)
    return shared if shared.cost < packed.cost else packed


def _window(config: Any) -> int | None:
    """Tokens that some layer's attention reaches back over, the token itself among them; None for all."""
    types = getattr(config, "layer_types", None)
    # Mistral and others that have no types of layers use the window in every layer.
    if types is not None and "sliding_attention" not in types:
        return None
    return getattr(config, "sliding_window", None)


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


def _attends_within_sequences(backbone: Any) -> bool:
    """Whether attention takes sequences of any length from one row: flash attention, by its boundaries.

    It does so for a single row only; all others form a square of queries and keys and mask it.
    """
    return "flash" in (backbone.config._attn_implementation or "")


def _plan(lengths: list[int], width: int, one_row: bool) -> tuple[list[int], list[int], int, int]:
    """Packed row and start of each sequence, the number of packed rows and their length (at least 1 x 1)."""
    longest = max(lengths, default=0)
    if one_row:
        capacities = [sum(lengths)]
    else:
        # A little more room than the longest needs may save a row. No more than padded rows have: then
        # neither the places nor the square of queries and keys of a row are larger than theirs.
        capacities = sorted({longest + (width - longest) * step // 8 for step in range(9)})
    row_of, start_of, used = min(
        (_first_fit(lengths, capacity) for capacity in capacities),
        key=lambda plan: len(plan[2]) * max(plan[2]),
    )
    # Without any token one is computed all the same: the result must hang on the model's graph.
    return row_of, start_of, len(used), max(*used, 1)


def _first_fit(lengths: list[int], capacity: int) -> tuple[list[int], list[int], list[int]]:
    """Each sequence, longest first, into the first row with room for it; and how full rows are then."""
    row_of, start_of, used = [0] * len(lengths), [0] * len(lengths), [0]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        row = next((r for r, taken in enumerate(used) if taken + length <= capacity), len(used))
        if row == len(used):
            used.append(0)
        row_of[index], start_of[index] = row, used[row]
        used[row] += length
    return row_of, start_of, used


# ---------------------------------------------------------------------- which models


def _check_packable(model: PreTrainedModel) -> None:
    reason = _reason_against(model)
    if reason is not None:
        raise ConfigError(f"{type(model).__name__} cannot train on packed sequences: {reason}. {_OFF}")


def _reason_against(model: PreTrainedModel) -> str | None:
    """What is known from the model's class and configuration alone."""
    config: Any = model.config
    if config.get_text_config() is not config:
        return "it reads more than text, and what belongs to an image or a sound is not packed"
    if config.is_encoder_decoder:
        return "it has an encoder"
    if (other := beyond_attention(model, _PACKABLE_LAYERS)) is not None:
        return f"{other}, and what that carries on does not stop where a sequence ends"
    backbone: Any = model.base_model
    if backbone is model:
        return "its backbone is not to be had apart from its head"
    if "position_ids" not in inspect.signature(type(backbone).forward).parameters:
        return f"{type(backbone).__name__} takes no position_ids, by which sequences are told apart"
    return None


@torch.no_grad()
def _check_sequences_stay_apart(backbone: Any) -> None:
    """Compare a sequence behind another one with the same sequence alone; catches what no flag tells.

    Here and not when the model is built, because only inside a forward are sharded weights at hand.

    Raises:
        ConfigError: hidden states differ by more than rounding.
    """
    embeddings = backbone.get_input_embeddings()
    ids = torch.arange(9, device=embeddings.weight.device)[None] * 7 % backbone.config.vocab_size
    alone = torch.arange(5, device=ids.device)[None]
    both = torch.cat((torch.arange(4, device=ids.device)[None], alone), 1)
    with evaluated(backbone):
        packed, single = (
            backbone._padded_forward(
                input_ids=tokens, attention_mask=None, position_ids=positions, use_cache=False
            ).last_hidden_state[:, -5:]
            for tokens, positions in ((ids, both), (ids[:, -5:], alone))
        )
    difference, size = (packed - single).double().norm().item(), single.double().norm().item()
    limit = rounding_of(single) ** 0.5
    if difference > limit * size:  # never so for NaN, which is another failure and told elsewhere
        raise ConfigError(
            f"{type(backbone).__name__} cannot train on packed sequences: the hidden states of a sequence "
            f"change by {difference / size:.1e} of their size when another one stands before it, although "
            f"its position ids begin anew (rounding explains {limit:.1e}). {_OFF}"
        )
