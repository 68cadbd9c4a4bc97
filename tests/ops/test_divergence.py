"""`linear_kl` against dense float64 rows: every option of the head, every precision, blocks of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from naive_head import SETTINGS, D, N, V
from torch import Tensor

from rounding import SUMMED_ANOTHER_WAY, rounding_of
from tether.errors import InvalidInputError
from tether.ops import linear_kl, memory


def make_pair() -> dict[str, Tensor]:
    """Two policies some way apart; the first token is the same under both."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, bias = normal(N, D), normal(V, D), normal(V)
    return {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "old_hidden": hidden + 0.3 * normal(N, D),
        "old_weight": weight + 0.1 * normal(V, D),
        "old_bias": bias + 0.1 * normal(V),
    }


def dense(
    pair: dict[str, Tensor], temperature: float = 1.0, logit_scale: float = 1.0,
    softcap: float | None = None, vocabulary_size: int | None = None,
) -> Tensor:  # fmt: skip
    """The documented lines of torch, with the whole [N, V]."""

    def log_probs(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        logits = logit_scale * (hidden @ weight.T + bias)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return (logits / temperature)[:, :vocabulary_size].log_softmax(-1)

    new = log_probs(pair["hidden"], pair["weight"], pair["bias"])
    old = log_probs(pair["old_hidden"], pair["old_weight"], pair["old_bias"])
    return (new.exp() * (new - old)).sum(-1)


def cast(pair: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: value.to(dtype) for name, value in pair.items()}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("block", [1, 5 * V, 1 << 24])
def test_every_token_is_measured_exactly(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "WORKSPACE_ELEMENTS", block)
    pair, settings = make_pair(), SETTINGS[name]
    exact = dense(pair, **settings)
    torch.testing.assert_close(linear_kl(**pair, **settings), exact, rtol=1e-12, atol=1e-13)
    rough = cast(pair, torch.float32)
    within = SUMMED_ANOTHER_WAY * rounding_of(dense(rough, **settings), exact)
    torch.testing.assert_close(linear_kl(**rough, **settings).double(), exact, rtol=0, atol=within)


def test_half_precision_is_measured_in_float32() -> None:
    rough = cast(make_pair(), torch.bfloat16)
    exact = dense(cast(rough, torch.float64))
    found = linear_kl(**rough)
    assert found.dtype == torch.float32
    within = SUMMED_ANOTHER_WAY * rounding_of(dense(cast(rough, torch.float32)), exact)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=within)


def test_the_same_head_twice_is_a_frozen_one() -> None:
    pair = make_pair()
    pair |= {"old_weight": pair["weight"], "old_bias": pair["bias"]}
    frozen = {name: value for name, value in pair.items() if name not in ("old_weight", "old_bias")}
    torch.testing.assert_close(linear_kl(**frozen), dense(pair), rtol=1e-12, atol=1e-13)
    assert not linear_kl(**{**frozen, "old_hidden": pair["hidden"]}).any()


def test_there_is_no_gradient_and_no_token_need_be_there() -> None:
    pair = make_pair()
    pair["hidden"].requires_grad_()
    assert not linear_kl(**pair).requires_grad
    assert linear_kl(
        **{**pair, "hidden": pair["hidden"][:0], "old_hidden": pair["old_hidden"][:0]}
    ).shape == (0,)


@pytest.mark.parametrize("spoiled", ["hidden", "old_hidden"])
def test_a_token_that_overflowed_is_no_number_and_the_others_are(spoiled: str) -> None:
    pair = make_pair()
    expected = dense(pair)
    pair[spoiled][2] = torch.inf
    found = linear_kl(**pair)
    assert found.isnan().nonzero().flatten().tolist() == [2]
    others = torch.arange(N) != 2
    torch.testing.assert_close(found[others], expected[others], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"old_hidden": torch.zeros(N, D + 1)}, r"needs hidden and old_hidden \[N, D\]"),
        ({"old_weight": torch.zeros(V + 1, D)}, "old_weight must be"),
        ({"old_weight": None}, "one head"),
        ({"temperature": 0.0}, "temperature must be positive and finite, got 0.0"),
        ({"vocabulary_size": V + 1}, "vocabulary_size"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        linear_kl(**{**make_pair(), **changed})
