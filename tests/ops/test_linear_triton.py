"""The Triton path of the LM-head operation: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from naive_head import SETTINGS, N, V, make_inputs, naive, use_everything
from torch import Tensor

from rounding import SUMMED_ANOTHER_WAY, error_of, rounding_of, unit_of
from tether.errors import InvalidInputError, MissingDependencyError
from tether.ops import linear_log_probs, memory
from tether.projection import backend

pytest.importorskip("triton", reason="the Triton path needs the package", exc_type=ImportError)

from tether.ops import rows_triton

# The interpreter's numpy says aloud what a GPU computes silently.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("bfloat16_rounded_as_hardware_does"),
]

INF = math.inf
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _on_triton(hidden: Tensor, weight: Tensor, ids: Tensor, **options: Any) -> Any:
    return linear_log_probs(hidden, weight, ids, backend="triton", **options)


def _wide(
    tokens: int, vocabulary: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Enough ids for several groups and a block that is not whole."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 24, generator=generator)
    weight = torch.randn(vocabulary, 24, generator=generator) * 0.5
    bias = torch.randn(vocabulary, generator=generator)
    ids = torch.randint(vocabulary, (tokens, 6), generator=generator)
    ids[0, 2] = -1
    ids[1, 4] = ids[1, 1]
    hidden, weight, bias = (x.to(DEVICE, dtype) for x in (hidden, weight, bias))
    return hidden, weight, bias, ids.to(DEVICE)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_equal_the_naive_line(setting: str, with_bias: bool) -> None:
    options = SETTINGS[setting]
    hidden, weight, bias, ids = (
        x.to(DEVICE) for x in make_inputs(largest_id=options.get("vocabulary_size", V))
    )
    outcomes = []
    for function in (naive, _on_triton):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        result = function(
            leaves[0], leaves[1], ids, bias=leaves[2] if with_bias else None, top_k=5, **options
        )
        gradients = torch.autograd.grad(use_everything(result, ids), leaves[: 3 if with_bias else 2])
        outcomes.append((result, gradients))
    (expected, expected_gradients), (result, gradients) = outcomes
    held = ids != -1
    torch.testing.assert_close(result.log_probs[held], expected.log_probs[held], rtol=1e-10, atol=1e-10)
    assert bool(torch.isneginf(result.log_probs[~held]).all())
    torch.testing.assert_close(result.log_sum_exp, expected.log_sum_exp, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(result.entropy, expected.entropy, rtol=1e-10, atol=1e-10)
    assert torch.equal(result.top_ids, expected.top_ids)
    torch.testing.assert_close(result.top_log_probs, expected.top_log_probs, rtol=1e-10, atol=1e-10)
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("output", ["log_probs", "top_log_probs", "entropy", "log_sum_exp"])
def test_each_output_alone_has_the_gradient_of_the_plain_path(output: str) -> None:
    hidden, weight, bias, ids = (x.to(DEVICE) for x in make_inputs())
    ids[0, 0] = ids[0, 1]
    gradients = []
    for path in ("torch", "triton"):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        result = linear_log_probs(
            leaves[0], leaves[1], ids, bias=leaves[2], top_k=3, softcap=4.0, temperature=0.8, backend=path
        )
        chosen = getattr(result, output)
        gradients.append(torch.autograd.grad(torch.where(chosen.isneginf(), 0.0, chosen).sin().sum(), leaves))
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("setting", "dtype"),
    [(setting, dtype) for setting in SETTINGS for dtype in (torch.float32, torch.bfloat16)]
    + [("everything", torch.float16)],
)
def test_rounding_is_within_twice_that_of_the_reference(setting: str, dtype: torch.dtype) -> None:
    """Against float64 on the same rounded inputs; the reference is the naive line in float32."""
    options: dict[str, Any] = {**SETTINGS[setting], "top_k": 5}
    if "vocabulary_size" in options:
        options["vocabulary_size"] = 900
    hidden, weight, bias, ids = _wide(12, 1000, dtype)
    ids.clamp_(max=899)
    values, gradients = [], []
    for function, precision in ((naive, torch.float64), (naive, torch.float32), (_on_triton, dtype)):
        leaves = [x.to(precision, copy=True).requires_grad_() for x in (hidden, weight, bias)]
        result = function(leaves[0], leaves[1], ids, bias=leaves[2], **options)
        shown = (torch.where(ids == -1, 0.0, result.log_probs), result.entropy[:, None], result.top_log_probs)
        values.append(torch.cat(shown, -1).double())
        gradients.append([g.double() for g in torch.autograd.grad(_weighted(result, ids), leaves)])
    exact, reference, ours = values
    rounding = (reference - exact).abs().max()
    assert (ours - exact).abs().max() <= 2 * rounding + 2 * unit_of(exact)  # they are given in float32
    for exact_g, reference_g, our_g in zip(*gradients, strict=True):
        # Gradients come back in the parameters' own precision, so the reference's are rounded to it too.
        rounded = reference_g.to(dtype).double()
        assert (our_g - exact_g).norm() <= 2 * (rounded - exact_g).norm()


def _weighted(result: Any, ids: Tensor) -> Tensor:
    """All outputs at once, as a loss would weigh them."""
    weights = torch.linspace(-1, 1, ids.numel(), device=ids.device).view(ids.shape).to(result.log_probs.dtype)
    finite = torch.where(ids == -1, 0.0, result.log_probs)
    return (weights * finite).sum() + 0.1 * result.entropy.sum() + 0.1 * result.top_log_probs.sum()


@pytest.mark.parametrize(("vocabulary", "top_k"), [(1500, 1), (1500, 20), (300, 64), (100, 100), (1111, 333)])
def test_top_ids_are_those_of_a_stable_sort_whatever_ties(vocabulary: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    hidden = torch.randint(-2, 3, (6, 3), generator=generator).float().to(DEVICE)
    hidden[0] = 0  # one long tie, of zeros of both signs
    weight = torch.randint(-2, 3, (vocabulary, 3), generator=generator).float().to(DEVICE)
    logits = hidden @ weight.T
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    result = _on_triton(hidden, weight, expected[:, :1], top_k=top_k)
    assert torch.equal(result.top_ids, expected)
    dense = logits.double().log_softmax(-1)
    within = SUMMED_ANOTHER_WAY * rounding_of(logits.log_softmax(-1), dense)
    assert error_of(result.top_log_probs, dense.gather(-1, expected)) <= within


def test_more_candidates_than_registers_hold_are_searched_by_the_plain_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows_triton, "_MAX_CANDIDATES", 64)
    hidden, weight, bias, ids = _wide(5, 700)
    options: dict[str, Any] = {"bias": bias, "top_k": 9, "softcap": 3.0, "vocabulary_size": 650}
    options["with_min"] = True
    expected = linear_log_probs(hidden, weight, ids.clamp(max=649), backend="torch", **options)
    result = _on_triton(hidden, weight, ids.clamp(max=649), **options)
    assert torch.equal(result.top_ids, expected.top_ids)
    within = SUMMED_ANOTHER_WAY * unit_of(expected.log_prob_min, terms=hidden.shape[-1])
    torch.testing.assert_close(result.top_log_probs, expected.top_log_probs, rtol=0, atol=within)
    torch.testing.assert_close(result.log_prob_min, expected.log_prob_min, rtol=0, atol=within)


@pytest.mark.parametrize("options", [{}, {"vocabulary_size": 650, "softcap": 3.0, "temperature": 0.7}])
def test_the_smallest_log_probability_is_that_of_an_id_that_can_be_sampled(options: dict[str, Any]) -> None:
    hidden, weight, bias, ids = _wide(5, 700)
    result = _on_triton(hidden, weight, ids[:, :0], bias=bias, with_min=True, **options)
    leaves = (x.double() for x in (hidden, weight))
    dense = naive(*leaves, torch.arange(700, device=DEVICE).repeat(5, 1), bias=bias.double(), **options)
    expected = dense.log_probs[:, : options.get("vocabulary_size")].amin(-1)
    within = SUMMED_ANOTHER_WAY * unit_of(expected, terms=hidden.shape[-1])
    assert error_of(result.log_prob_min, expected) <= within


def test_a_tanh_as_near_to_its_reference_as_float32_is() -> None:
    """Across the point where a series takes over, and far into saturation."""
    raw = torch.cat((torch.linspace(-0.5, 0.5, 257), torch.linspace(-40, 40, 257)))
    hidden, weight = torch.ones(1, 1, device=DEVICE), raw[:, None].to(DEVICE)
    ids = torch.arange(len(raw), device=DEVICE)[None]
    result = _on_triton(hidden, weight, ids, softcap=1.0)
    expected = raw.double().tanh().log_softmax(-1)
    within = SUMMED_ANOTHER_WAY * rounding_of(raw.tanh().log_softmax(-1), expected)
    assert error_of(result.log_probs[0], expected) <= within


def test_what_arrives_at_empty_slots_and_padding_goes_nowhere() -> None:
    hidden, weight, bias, ids = _wide(4, 300)
    ids[2, 3] = 299  # padding
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    result = _on_triton(leaves[0], leaves[1], ids, bias=leaves[2], vocabulary_size=290)
    assert result.log_probs[2, 3].item() == result.log_probs[0, 2].item() == -INF
    upstream = torch.ones_like(result.log_probs)
    upstream[0, 2] = 1e6
    gradients = torch.autograd.grad(result.log_probs, leaves, upstream)
    naive_leaves = [x.detach().double().requires_grad_() for x in leaves]
    expected = naive(naive_leaves[0], naive_leaves[1], ids, bias=naive_leaves[2], vocabulary_size=290)
    upstream[0, 2] = 0
    wanted = torch.autograd.grad(
        torch.where(expected.log_probs.isneginf(), 0.0, expected.log_probs), naive_leaves, upstream.double()
    )
    assert bool((gradients[1][290:] == 0).all())
    assert bool((gradients[2][290:] == 0).all())
    # Padding that arrives takes its share from the row all the same, as in the plain path.
    plain = linear_log_probs(
        leaves[0], leaves[1], ids, bias=leaves[2], vocabulary_size=290, backend="torch"
    ).log_probs
    for got, same in zip(gradients, torch.autograd.grad(plain, leaves, upstream), strict=True):
        # Each is a sum over the rows and their ids of what the upstream gradients weigh.
        within = SUMMED_ANOTHER_WAY * unit_of(same, terms=ids.numel())
        torch.testing.assert_close(got, same, rtol=0, atol=within)
    assert wanted[0].isfinite().all()


def test_ids_masked_by_an_infinite_bias_stay_impossible_with_finite_gradients() -> None:
    hidden, weight, bias, ids = _wide(4, 300)
    bias[:200] = -INF
    leaf = hidden.requires_grad_()
    result = _on_triton(leaf, weight, ids.clamp(min=200), bias=bias, top_k=150)
    assert bool((result.top_ids[:, :100] >= 200).all())
    assert result.top_ids[:, 100:].tolist() == [list(range(50))] * 4  # ties of zero, by lowest id
    (gradient,) = torch.autograd.grad(result.entropy.sum() * 1e30, leaf)
    assert bool(gradient.isfinite().all())
    entropies = []
    for dtype in (torch.float32, torch.float64):
        dense = (hidden.to(dtype) @ weight.to(dtype).T + bias.to(dtype)).softmax(-1)
        entropies.append(-torch.special.xlogy(dense, dense).sum(-1).detach())
    within = SUMMED_ANOTHER_WAY * rounding_of(*entropies)
    assert error_of(result.entropy, entropies[1]) <= within


def test_the_entropy_of_a_certain_token_keeps_its_digits() -> None:
    hidden = torch.tensor([[1.0, 1.0]], device=DEVICE)
    weight = torch.tensor([[1000.0, 9.0], [1000.0, 0.0], [990.0, 3.0]], device=DEVICE)
    logits = (hidden.double() @ weight.double().T)[0]
    expected = -(logits.softmax(-1) * logits.log_softmax(-1)).sum().item()
    result = _on_triton(hidden, weight, torch.tensor([[0]], device=DEVICE))
    # One rounding of the probabilities' sum, twice; one of the logits is a thousand times as large.
    assert result.entropy.item() == pytest.approx(expected, abs=2 * unit_of(1.0))


def test_a_row_of_nan_harms_no_other_and_still_gives_ids() -> None:
    hidden, weight, _, ids = _wide(3, 700)
    clean = _on_triton(hidden, weight, ids, top_k=6)
    hidden[1] = -math.nan
    result = _on_triton(hidden, weight, ids, top_k=6)
    others = [0, 2]
    assert torch.equal(result.log_probs[others], clean.log_probs[others])
    assert torch.equal(result.top_ids[others], clean.top_ids[others])
    assert bool(result.entropy[1].isnan())
    assert bool(((result.top_ids >= 0) & (result.top_ids < 700)).all())


def test_blocks_of_tokens_and_strided_inputs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias, ids = _wide(11, 400)
    whole = _on_triton(hidden, weight, ids, bias=bias, top_k=4)
    monkeypatch.setattr(memory, "WORKSPACE_ELEMENTS", 4 * 400)
    monkeypatch.setattr(memory, "ACCELERATOR_ROWS", 4)
    monkeypatch.setattr(memory, "MOST_ACCELERATOR_ROWS", 4)  # on a GPU there is room for more
    parts = _on_triton(hidden.T.contiguous().T, weight, ids.T.contiguous().T.int(), bias=bias, top_k=4)
    within = SUMMED_ANOTHER_WAY * unit_of(whole.log_probs, terms=hidden.shape[-1])
    torch.testing.assert_close(parts.log_probs, whole.log_probs, rtol=0, atol=within)
    assert torch.equal(parts.top_ids.long(), whole.top_ids)
    assert parts.top_ids.dtype == torch.int32


def test_a_frozen_head_no_ids_and_no_tokens() -> None:
    hidden, weight, _, ids = _wide(3, 200)
    leaf = hidden.clone().requires_grad_()
    result = _on_triton(leaf, weight, ids[:, :0])
    assert result.log_probs.shape == (3, 0)
    assert result.top_ids is None
    (gradient,) = torch.autograd.grad(result.entropy.sum(), leaf)
    assert bool(gradient.isfinite().all())
    empty = _on_triton(leaf[:0], weight.requires_grad_(), ids[:0], top_k=3)
    (empty.log_probs.sum() + empty.entropy.sum()).backward()
    assert bool((weight.grad == 0).all())  # type: ignore[union-attr]


def test_rows_without_gradient_get_exactly_none() -> None:
    hidden, weight, _, ids = _wide(5, 300)
    leaf = hidden.requires_grad_()
    result = _on_triton(leaf, weight, ids.clamp_min(0), top_k=3)
    (gradient,) = torch.autograd.grad(result.log_probs[3].sum() + result.entropy[3], leaf)
    assert bool((gradient[3] != 0).any())
    assert bool((gradient[torch.arange(5) != 3] == 0).all())


def test_a_backend_that_cannot_run_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, ids = make_inputs()
    with pytest.raises(InvalidInputError, match='"auto", "torch" or "triton", got \'cuda\''):
        linear_log_probs(hidden, weight, ids, backend="cuda")  # type: ignore[arg-type]
    monkeypatch.setattr(backend, "_interpreted", lambda: False)
    with pytest.raises(InvalidInputError, match=r"CUDA device, got cpu\. Move them there"):
        linear_log_probs(hidden, weight, ids, backend="triton")
    monkeypatch.setattr(backend, "_installed", lambda: False)
    with pytest.raises(MissingDependencyError, match="pip install triton"):
        linear_log_probs(hidden, weight, ids, backend="triton")
    assert linear_log_probs(hidden, weight, ids).log_probs.shape == (N, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_norm_of_a_row_is_that_of_the_plain_path(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, minus = torch.randn(2, 74, 1500, generator=generator).to(DEVICE, dtype)[:, ::2]
    centre = weight.mean(0)
    options: list[dict[str, Tensor]] = [{}, {"minus": minus}, {"minus_row": centre}]
    for given in [*options, {"minus": minus, "minus_row": centre}]:
        found = rows_triton.largest_row(weight, **given)
        wanted = sum((-value.double() for value in given.values()), weight.double()).norm(dim=-1).amax()
        assert found.dtype == torch.float64
        unit = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        assert abs(float(found / wanted - 1)) <= SUMMED_ANOTHER_WAY * unit
