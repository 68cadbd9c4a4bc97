"""Packed sequences give what each sequence gives alone, whatever stands beside it."""

from __future__ import annotations

import copy

import pytest
import torch
from packed_models import FAMILIES, PRECISION, ROWS, batch, inputs, make
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_flash_attention_utils import (
    _is_packed_sequence,
    prepare_fa_kwargs_from_position_ids,
)
from trl.trainer.utils import maybe_gather_lm_head_ctx
from trl_head import FUSED, fuse_head

from rounding import SUMMED_ANOTHER_WAY, unit_of
from tether.integrations import packing
from tether.integrations.packing import PackedLayout, add_packing
from tether.integrations.sparse_head import add_sparse_head


def scored_alone(model: torch.nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Log-probabilities of the labels, every row by itself and without padding, from the model's logits."""
    labels = inputs(ids, mask)["labels"]
    found = torch.zeros(ids.shape[0], ids.shape[1] - 1, dtype=torch.float64)
    for row, (length, left) in enumerate(ROWS):
        if length < 2:
            continue
        logits = model(input_ids=ids[row : row + 1, left : left + length]).logits[0, :-1].double()
        own = logits.log_softmax(-1).gather(-1, ids[row, left + 1 : left + length, None])[:, 0]
        kept = labels[row, left + 1 : left + length] != -100
        found[row, left : left + length - 1] = torch.where(kept, own, 0.0)
    return found


def gradients(model: torch.nn.Module, log_probs: Tensor) -> dict[str, Tensor]:
    """Of a loss with another weight for each token."""
    model.zero_grad()
    weights = torch.linspace(-1, 2, log_probs.numel(), dtype=log_probs.dtype).view_as(log_probs)
    (weights * log_probs).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        assert (found[name] - gradient).abs().max().item() <= tolerance * max(scale, 1.0), name


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_each_sequence_alone(family: str, attention: str) -> None:
    model = make(family, attn_implementation=attention)
    ids, mask = batch()
    expected = scored_alone(model, ids, mask)
    dtype, tolerance = PRECISION.get(family, (torch.float64, 1e-9))
    wanted = gradients(model, expected)
    ours = model(**inputs(ids, mask), pack_sequences=True, support_top_k=4).log_probs
    exact = 1e-9 if dtype == torch.float64 else tolerance
    if attention == "eager":  # whose softmax Transformers computes in float32, whatever the model is in
        in_float32 = SUMMED_ANOTHER_WAY * unit_of(expected)
        exact, tolerance = max(exact, in_float32), max(tolerance, in_float32)
    torch.testing.assert_close(ours.double(), expected, atol=exact, rtol=0)
    assert_close(gradients(model, ours), wanted, tolerance)
    if FUSED:
        trl = model(**inputs(ids, mask), pack_sequences=True, fused_lm_head=True).log_probs
        torch.testing.assert_close(trl.double(), expected, atol=1e-4, rtol=0)  # it sums in float32


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_padded(family: str) -> None:
    """In float32; padded rows begin at other positions, which rotary embeddings tell only in rounding."""
    model = make(family, torch.float32)
    ids, mask = batch()
    padded = model(**inputs(ids, mask), support_top_k=4, keep_hidden=True)
    packed = model(**inputs(ids, mask), support_top_k=4, keep_hidden=True, pack_sequences=True)
    torch.testing.assert_close(packed.log_probs, padded.log_probs, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(packed.entropy, padded.entropy, atol=1e-3, rtol=1e-4)
    counted = inputs(ids, mask)["labels"][:, 1:] != -100
    torch.testing.assert_close(packed.hidden[counted], padded.hidden[counted], atol=1e-3, rtol=1e-3)
    assert padded.log_probs.abs().max() > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_do_not_see_each_other(family: str) -> None:
    """Another sequence in the same packed row changes not one bit, in the forward or the backward pass."""
    model = make(family, torch.float32)
    ids, mask = batch()
    changed = ids.clone()
    changed[3] = (changed[3] + 11) % 50
    others = torch.arange(len(ROWS)) != 3
    found = []
    for tokens in (ids, changed):
        embedded: list[Tensor] = []
        with model.get_input_embeddings().register_forward_hook(
            lambda _m, _i, output, kept=embedded: kept.append(output)
        ):
            log_probs = model(**inputs(tokens, mask), support_top_k=4, pack_sequences=True).log_probs
        (gradient,) = torch.autograd.grad(log_probs[others].sum(), embedded[-1])
        found.append((log_probs[others], PackedLayout.of(mask).unpack(gradient)))
    assert not torch.equal(ids, changed)
    if family == "Qwen3 with experts":  # which multiplies the tokens of an expert together
        torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-5)
    else:
        assert torch.equal(found[0][0], found[1][0])
    for _, gradient in found:
        assert (gradient[3] == 0).all(), "the loss of others reached the sequence that was changed"
        assert gradient[others].abs().max() > 0


def test_one_row_for_all_is_the_same_as_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout for flash attention, computed by the attention that runs on a CPU."""
    model = make("Gemma-3")
    ids, mask = batch()
    several = model(**inputs(ids, mask), support_top_k=4, pack_sequences=True).log_probs
    monkeypatch.setattr(packing, "_attends_within_sequences", lambda backbone: True)
    shapes = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _m, args: shapes.append(args[0].shape))
    one = model(**inputs(ids, mask), support_top_k=4, pack_sequences=True).log_probs
    assert shapes == [(1, sum(length for length, _ in ROWS))]
    torch.testing.assert_close(one, several, atol=1e-9, rtol=0)


def test_flash_attention_finds_the_sequences_of_one_row() -> None:
    _, mask = batch()
    layout = PackedLayout.of(mask, one_row=True)
    assert _is_packed_sequence(layout.position_ids, batch_size=1)
    (bounds, _), (longest, _) = prepare_fa_kwargs_from_position_ids(layout.position_ids)
    assert sorted(bounds.diff().tolist()) == sorted(length for length, _ in ROWS if length)
    assert longest == 11


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"])
def test_flash_attention_is_known_by_its_name(name: str) -> None:
    model = make("Qwen3")
    assert not packing._attends_within_sequences(model.base_model)
    model.config._attn_implementation_internal = name
    assert packing._attends_within_sequences(model.base_model)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("one_row", [False, True])
def test_a_layout_loses_nothing_and_keeps_sequences_whole(seed: int, one_row: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, width = 1 + seed % 9, 1 + 3 * seed
    mask = torch.zeros(rows, width, dtype=torch.bool)
    for row in mask:
        ends = torch.randint(0, width + 1, (2,), generator=generator).sort().values
        row[ends[0] : ends[1]] = True
    layout = PackedLayout.of(mask, one_row=one_row)
    marks = torch.arange(1, rows * width + 1).view(rows, width)
    packed = layout.pack(marks)
    assert torch.equal(layout.unpack(packed), marks * mask)
    kept = packed[packed > 0]
    assert kept.sort().values.equal(marks[mask])
    # A token follows its neighbour, one position further, in the same packed row; a first token is at 0.
    follows = (packed[:, 1:] - packed[:, :-1] == 1) & (packed[:, 1:] % width != 1) & (packed[:, :-1] > 0)
    steps = layout.position_ids[:, 1:] - layout.position_ids[:, :-1]
    assert (steps[follows] == 1).all()
    lengths = mask.sum(1)
    assert int(follows.sum()) == int((lengths - 1).clamp(min=0).sum())
    assert int(((layout.position_ids == 0) & (packed > 0)).sum()) == int((lengths > 0).sum())
    if one_row:
        assert packed.shape[0] == 1
    else:
        assert packed.shape[0] <= rows
        assert max(int(lengths.max()), 1) <= packed.shape[1] <= width
        assert packed.numel() <= 2 * max(int(lengths.sum()), 1) + int(lengths.max())


def test_a_row_is_saved_where_a_little_more_room_does_it() -> None:
    """Five and four do not fit into five, but into the nine that padded rows have."""
    mask = torch.zeros(4, 9)
    for row, length in enumerate((5, 4, 4, 5)):
        mask[row, :length] = 1
    assert PackedLayout.of(mask).position_ids.shape == (2, 9)
    assert PackedLayout.of(mask[:, :5]).position_ids.shape == (4, 5)


def test_a_batch_without_any_token_still_hangs_on_the_graph() -> None:
    """DDP waits for the gradient of every parameter, also where all responses were cut off."""
    model = make("Qwen3")
    ids, _ = batch()
    output = model(**inputs(ids, torch.zeros_like(ids)), support_top_k=4, pack_sequences=True)
    output.log_probs.sum().backward()
    assert (output.log_probs == 0).all()
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


def test_experts_are_balanced_as_in_padded_rows() -> None:
    model = make("Qwen3 with experts")
    ids, mask = batch()
    losses = [
        model(**inputs(ids, mask), support_top_k=4, output_router_logits=True, pack_sequences=packed).aux_loss
        for packed in (False, True)
    ]
    assert losses[0] > 0.1
    torch.testing.assert_close(losses[1], losses[0], atol=1e-6, rtol=0)


def test_absolute_positions_begin_anew_with_each_sequence() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=16)
    ).double()
    model.eval()
    fuse_head(model)
    add_sparse_head(model, 1.0, maybe_gather_lm_head_ctx)
    add_packing(model)
    ids, mask = batch()
    found = model(**inputs(ids, mask), support_top_k=4, pack_sequences=True).log_probs
    torch.testing.assert_close(found, scored_alone(model, ids, mask), atol=1e-9, rtol=0)


def test_a_copy_runs_its_own_weights_and_adding_twice_is_adding_once() -> None:
    model = make("Llama-3")
    add_packing(model)
    ids, mask = batch()
    twin = copy.deepcopy(model.base_model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    state = twin(input_ids=ids, attention_mask=mask, pack_sequences=True).last_hidden_state
    assert (state == 0).all()
    own = model.base_model(input_ids=ids, attention_mask=mask, pack_sequences=True).last_hidden_state
    assert own.abs().max() > 0.1


def test_generation_is_as_before() -> None:
    plain, extended = FAMILIES["Qwen3"](), FAMILIES["Qwen3"]()
    extended.load_state_dict(plain.state_dict())
    add_packing(extended)
    ids = torch.arange(3, 9)[None]
    said = [m.generate(input_ids=ids, max_new_tokens=5, do_sample=False) for m in (plain, extended)]
    assert torch.equal(*said)
