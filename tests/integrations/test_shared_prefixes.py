"""What sequences begin with alike, computed once, gives what each sequence gives alone."""

from __future__ import annotations

import pytest
import torch
from packed_models import FAMILIES, PRECISION, batch, inputs, make
from torch import Tensor

from rounding import SUMMED_ANOTHER_WAY, unit_of
from tether.errors import ConfigError, InvalidInputError
from tether.integrations.packing import add_packing
from tether.integrations.shared_prefixes import SharedLayout

WITHOUT_WINDOWS = [name for name in FAMILIES if name not in ("Gemma-3", "Qwen2 with windows")]


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
    monkeypatch.setattr("tether.integrations.shared_prefixes._CAPACITIES", (10,))
    model = make("Llama-3", attn_implementation="sdpa")
    ids, mask = alike()
    assert SharedLayout.of(ids, mask).position_ids.shape[0] > 1
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


def test_sequences_longer_than_a_window_and_other_attentions_are_refused() -> None:
    ids, mask = batch()
    for family, settings, reason in (
        ("Gemma-3", {"attn_implementation": "sdpa"}, "window of the model's attention, 3 tokens"),
        ("Llama-3", {"attn_implementation": "eager"}, "attn_implementation='eager'"),
    ):
        model = make(family, **settings)
        add_packing(model)
        with pytest.raises(ConfigError, match=reason):
            model(**inputs(ids, mask), pack_sequences="shared", support_top_k=4)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"\(1, 2\) and \(1, 3\)"):
        SharedLayout.of(torch.ones(1, 2), torch.ones(1, 3))


def test_a_little_more_than_fits_into_a_row_does_not_double_what_is_computed() -> None:
    ids = torch.arange(1, 17)[:, None] * 100 + torch.arange(50)[None]  # 800 tokens, none of them shared
    rows, length = SharedLayout.of(ids, torch.ones_like(ids)).position_ids.shape
    assert rows * length <= 1.15 * 800
