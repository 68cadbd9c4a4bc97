"""Attention by products of matrices gives what PyTorch's attention gives."""

from __future__ import annotations

import pytest
import torch
from packed_models import make
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tether.integrations import grouped_attention as grouped
from tether.integrations.grouped_attention import grouped_attention


def inputs(length: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Query, key and value of 6 heads in 2 groups against 40 keys; in the mask a row that sees one key."""
    torch.manual_seed(0)
    made = [
        torch.randn(3, heads, tokens, 16, dtype=dtype) * 2
        for heads, tokens in ((6, length), (2, 40), (2, 40))
    ]
    mask = torch.rand(3, 1, length, 40) < 0.5
    mask[:, :, 0] = False
    mask[..., 7] = True
    return [one.requires_grad_() for one in made], mask


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """In float64, by PyTorch."""
    wide = [one.detach().double().requires_grad_() for one in (query, key, value)]
    keys, values = (one.repeat_interleave(3, 1) for one in wide[1:])
    attended = scaled_dot_product_attention(wide[0], keys, values, attn_mask=mask, scale=0.2).transpose(1, 2)
    attended.square().sum().backward()
    return torch.cat([attended.detach().flatten(), *(one.grad.flatten() for one in wide)])  # type: ignore[union-attr]


def by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    attended, _ = grouped._attend(torch.nn.Module(), query, key, value, mask, scaling=0.2)
    attended.double().square().sum().backward()
    return torch.cat(
        [attended.detach().double().flatten(), *(one.grad.double().flatten() for one in (query, key, value))]
    )


@pytest.mark.parametrize(
    ("length", "dtype", "kind"),
    [
        *(
            (1, dtype, kind)
            for dtype in (torch.float32, torch.bfloat16)
            for kind in ("bool", "added", "none")
        ),
        *((23, torch.bfloat16, kind) for kind in ("bool", "added")),
    ],
)
def test_values_and_gradients_are_those_of_float64(length: int, dtype: torch.dtype, kind: str) -> None:
    tensors, mask = inputs(length, dtype)
    given: Tensor | None = {"bool": mask, "none": None}.get(
        kind, torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -1e4)
    )
    wanted = dense(*tensors, None if kind == "none" else mask)
    found = by_products(*tensors, given)
    # Scores, probabilities and what comes out are each rounded once.
    assert (found - wanted).abs().max() <= 8 * torch.finfo(dtype).eps * wanted.abs().max()


def test_a_model_attends_this_way_inside_and_as_before_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("Llama-3", attn_implementation="sdpa").eval()
    seen: list[int] = []
    real = grouped._attend
    monkeypatch.setattr(grouped, "_attend", lambda *args, **kw: seen.append(1) or real(*args, **kw))
    ids = torch.tensor([[5, 6, 7]])
    before = model(input_ids=ids).logits
    assert not seen
    with grouped_attention(model):
        inside = model(input_ids=ids).logits
    assert len(seen) == model.config.num_hidden_layers
    torch.testing.assert_close(inside, before)
    with pytest.raises(ZeroDivisionError), grouped_attention(model):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"


def test_a_model_with_another_attention_is_left_as_it_is() -> None:
    model = make("Llama-3", attn_implementation="eager")
    with grouped_attention(model):
        assert model.config._attn_implementation == "eager"


def test_rotated_queries_under_autocast_are_rounded_and_take_the_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (query, key, value), mask = inputs(23, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        monkeypatch.setattr("transformers.integrations.sdpa_attention.sdpa_attention_forward", None)
        found, _ = grouped._attend(torch.nn.Module(), query, key, value.bfloat16(), mask, scaling=0.2)
    rounded = [part.bfloat16() for part in (query, key, value)]
    wanted, _ = grouped._attend(torch.nn.Module(), *rounded, mask, scaling=0.2)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wanted)
