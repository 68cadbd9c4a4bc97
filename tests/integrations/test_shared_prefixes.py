"""What sequences begin with alike, computed once, gives what each sequence gives alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from packed_models import FAMILIES, PRECISION, SIZES, WINDOW, WINDOWS, batch, inputs, make
from torch import Tensor
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from rounding import SUMMED_ANOTHER_WAY, unit_of
from tether.errors import ConfigError, InvalidInputError
from tether.integrations.packing import PackedLayout, add_packing
from tether.integrations.shared_prefixes import SharedLayout

WITHOUT_WINDOWS = [name for name in FAMILIES if name not in ("Gemma-3", "Qwen2 with windows")]
#: Models with a window, and some that have one in their settings and do not use it.
WINDOWED: dict[str, tuple[Callable[..., Any], bool]] = {
    "Gemma-3": (FAMILIES["Gemma-3"], True),
    "Qwen2": (FAMILIES["Qwen2 with windows"], True),
    "Qwen2, unused": (lambda **s: FAMILIES["Qwen2.5"](sliding_window=WINDOW, **s), False),
    "Qwen3-MoE": (lambda **s: FAMILIES["Qwen3 with experts"](**WINDOWS, **s), True),
    "Qwen3-MoE, unused": (lambda **s: FAMILIES["Qwen3 with experts"](sliding_window=WINDOW, **s), False),
    "Mistral": (lambda **s: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW, **s)), True),
    "Mistral, none": (
        lambda **s: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None, **s)),
        False,
    ),
    "Mixtral": (
        lambda **s: MixtralForCausalLM(
            MixtralConfig(**SIZES, num_local_experts=2, sliding_window=WINDOW, **s)
        ),
        True,
    ),
    "Phi-3": (lambda **s: Phi3ForCausalLM(Phi3Config(**SIZES, sliding_window=WINDOW, **s)), True),
    "Starcoder2": (
        lambda **s: Starcoder2ForCausalLM(Starcoder2Config(**SIZES, sliding_window=WINDOW, **s)),
        True,
    ),
}


def alike() -> tuple[Tensor, Tensor]:
    """Rows of which some begin alike, at other places of the padded rows."""
    ids, mask = batch()
    ids[2, :5] = ids[6, 1:6]
    ids[0, 2:5] = ids[3, 6:9]
    return ids, mask


@pytest.mark.parametrize("family", WITHOUT_WINDOWS)
def test_log_probs_and_gradients_are_those_of_packed_rows(family: str) -> None:
    """Which `test_packing` compares with each sequence alone."""
    model = make(family, attn_implementation="sdpa")
    ids, mask = alike()
    found = {}
    for packing in (True, "shared"):
        model.zero_grad()
        log_probs = model(**inputs(ids, mask), pack_sequences=packing, support_top_k=4).log_probs
        log_probs.square().sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found[packing] = log_probs.detach(), gradients
    (wanted, wanted_gradients), (shared, shared_gradients) = found[True], found["shared"]
    tolerance = max(PRECISION.get(family, (None, 0.0))[1], SUMMED_ANOTHER_WAY * unit_of(wanted))
    torch.testing.assert_close(shared, wanted, atol=tolerance, rtol=0)
    for name, gradient in wanted_gradients.items():
        allowed = tolerance * max(1.0, gradient.abs().max().item())
        assert (shared_gradients[name] - gradient).abs().max().item() <= allowed, name


def test_each_beginning_is_computed_once() -> None:
    prompt, responses = [7, 8, 9, 10], [[11, 12], [11, 13], [14]]
    rows = [prompt + response for response in responses]
    ids = torch.tensor([row + [0] * (6 - len(row)) for row in rows])
    layout = SharedLayout.of(ids, ids != 0)
    assert layout.pack(ids).tolist() == [[7, 8, 9, 10, 11, 12, 13, 14]]
    assert layout.unpack(layout.pack(ids)).tolist() == ids.tolist()


def test_a_token_sees_its_own_sequence_and_nothing_else() -> None:
    torch.manual_seed(0)
    ids = torch.randint(1, 4, (9, 8))  # few tokens, so that many begin alike
    layout = SharedLayout.of(ids, torch.ones_like(ids))
    rows, nodes = layout.packed
    packed = layout.pack(ids)
    for row, column, tree, node in zip(*layout.padded, rows, nodes, strict=True):
        seen = layout.attention_mask[tree, 0, node]
        assert packed[tree][seen].tolist() == ids[row, : column + 1].tolist()


def test_long_batches_are_several_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where attention is all that costs anything."""
    monkeypatch.setattr("tether.integrations.shared_prefixes._AS_LONG", 0)
    model = make("Llama-3", attn_implementation="sdpa")
    ids, mask = alike()
    layout = SharedLayout.of(ids, mask)
    assert layout.position_ids.shape[0] > 1
    assert layout.cost < PackedLayout.of(mask).cost  # or it would not be taken
    shared, packed = (
        model(**inputs(ids, mask), pack_sequences=packing, support_top_k=4).log_probs
        for packing in ("shared", True)
    )
    torch.testing.assert_close(shared, packed, atol=SUMMED_ANOTHER_WAY * unit_of(packed), rtol=0)


def test_no_token_at_all_keeps_the_graph() -> None:
    model = make("Llama-3", attn_implementation="sdpa")
    ids, mask = batch()
    loss = model(**inputs(ids, 0 * mask), pack_sequences="shared", support_top_k=4).log_probs.sum()
    loss.backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("family", WINDOWED)
def test_sequences_longer_than_a_window_are_refused(family: str) -> None:
    """Whose own mask the mask of a tree would replace. Shorter ones, and models without one, share."""
    torch.manual_seed(0)
    build, has_window = WINDOWED[family]
    model = build(attn_implementation="sdpa")
    add_packing(model)
    ids, mask = alike()
    for longest in (WINDOW, 13):
        given = {"input_ids": ids, "attention_mask": mask * (mask.cumsum(1) <= longest), "use_cache": False}
        if has_window and longest > WINDOW:
            with pytest.raises(ConfigError, match=f"attention, {WINDOW} tokens, and a sequence has 11"):
                model.base_model(**given, pack_sequences="shared")
            continue
        shared, packed = (
            model.base_model(**given, pack_sequences=packing).last_hidden_state
            for packing in ("shared", True)
        )
        torch.testing.assert_close(shared, packed, atol=SUMMED_ANOTHER_WAY * unit_of(packed), rtol=0)


def test_other_attentions_are_refused() -> None:
    model = make("Llama-3", attn_implementation="eager")
    with pytest.raises(ConfigError, match="attn_implementation='eager'"):
        model(**inputs(*batch()), pack_sequences="shared", support_top_k=4)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"\(1, 2\) and \(1, 3\)"):
        SharedLayout.of(torch.ones(1, 2), torch.ones(1, 3))


def test_a_little_more_than_fits_into_a_row_does_not_double_what_is_computed() -> None:
    ids = torch.arange(1, 17)[:, None] * 100 + torch.arange(50)[None]  # 800 tokens, none of them shared
    rows, length = SharedLayout.of(ids, torch.ones_like(ids)).position_ids.shape
    assert rows * length <= 1.15 * 800


@pytest.mark.parametrize(("prompt", "response"), [(100, 50), (300, 80), (500, 100), (1500, 300)])
def test_a_prompt_of_any_length_is_shared_by_its_responses(prompt: int, response: int) -> None:
    ids = torch.randint(0, 1000, (8, prompt + response))
    ids[:, :prompt] = ids[0, :prompt]
    layout = SharedLayout.of(ids, torch.ones_like(ids))
    assert layout.position_ids.numel() <= 1.01 * (prompt + 8 * response)


def test_where_nothing_is_shared_rows_are_packed_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("Llama-3", attn_implementation="sdpa")
    seen = []
    real = model.base_model._padded_forward
    monkeypatch.setattr(
        model.base_model, "_padded_forward", lambda **given: (seen.append(given), real(**given))[1]
    )
    ids = torch.arange(3, 43).view(4, 10)
    for first in (ids, ids % 10 + 3):  # no token alike, and the same ones
        model(**inputs(first, torch.ones_like(ids)), pack_sequences="shared", support_top_k=4)
    *_, unlike, alike_ones = seen
    assert (unlike["attention_mask"], unlike["input_ids"].numel()) == (None, 40)
    assert alike_ones["input_ids"].numel() == 10
