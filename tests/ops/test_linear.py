"""The LM-head operation against the naive line it equals, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from naive_head import SETTINGS, N, V, make_inputs, naive, use_everything
from torch import Tensor

from rounding import SUMMED_ANOTHER_WAY, error_of, rounding_of, unit_of
from tether.errors import InvalidInputError
from tether.ops import head, linear, linear_log_probs, memory
from tether.ops.logits import logits_log_probs

INF = math.inf


@pytest.fixture(params=[None, 1, 100], ids=["one block", "a block a token", "a few tokens a block"])
def _workspace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        monkeypatch.setattr(memory, "WORKSPACE_ELEMENTS", request.param)


@pytest.mark.usefixtures("_workspace")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_equal_the_naive_line(setting: str, with_bias: bool) -> None:
    options = SETTINGS[setting]
    hidden, weight, bias, ids = make_inputs(largest_id=options.get("vocabulary_size", V))
    outcomes = []
    for function in (naive, linear_log_probs):
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
    assert torch.equal(result.top_ids, expected.top_ids)  # type: ignore[arg-type]
    torch.testing.assert_close(result.top_log_probs, expected.top_log_probs, rtol=1e-10, atol=1e-10)
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("output", ["log_probs", "top_log_probs", "entropy", "log_sum_exp"])
def test_each_output_alone_has_the_gradient_of_finite_differences(output: str) -> None:
    hidden, weight, bias, ids = make_inputs()
    hidden, ids = hidden[:3], ids[:3].clamp_min(0)

    def function(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        result = linear_log_probs(h, w, ids, bias=b, top_k=3, temperature=0.8, softcap=4.0)
        return getattr(result, output)

    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    # The second backward pass forms the logits again, from the rows with gradient alone: other roundings.
    assert torch.autograd.gradcheck(function, leaves, atol=1e-7, nondet_tol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("setting", ["plain", "everything"])
def test_half_precision_is_within_twice_the_rounding_of_the_reference(
    dtype: torch.dtype, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64 on the same rounded inputs; the reference is the naive line in float32."""
    monkeypatch.setattr(head, "VOCABULARY_BLOCK", 16)  # the head is widened in several pieces
    options = SETTINGS[setting]
    hidden, weight, bias, ids = make_inputs(dtype, largest_id=options.get("vocabulary_size", V))
    results, gradients = [], []
    for function, precision in (
        (naive, torch.float64),
        (naive, torch.float32),
        (linear_log_probs, dtype),
    ):
        leaves = [x.to(precision, copy=True).requires_grad_() for x in (hidden, weight, bias)]
        result = function(leaves[0], leaves[1], ids, bias=leaves[2], top_k=5, **options)  # type: ignore[operator]
        results.append(torch.where(ids == -1, 0.0, result.log_probs).double())
        gradients.append([g.double() for g in torch.autograd.grad(use_everything(result, ids), leaves)])
        if function is linear_log_probs:
            assert result.log_probs.dtype == result.entropy.dtype == torch.float32
            assert all(leaf.grad is None for leaf in leaves)
    exact, reference, ours = results
    rounding = (reference - exact).abs().max()
    assert (ours - exact).abs().max() <= 2 * rounding + 2 * unit_of(exact)  # they are given in float32
    for exact_g, reference_g, our_g in zip(*gradients, strict=True):
        # Gradients come back in the parameters' own precision, so the reference's are rounded to it too.
        rounded = reference_g.to(dtype).double()
        assert (our_g - exact_g).norm() <= 2 * (rounded - exact_g).norm()


def test_float32_gradients_are_within_twice_the_rounding_of_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 48, generator=generator)
    weight = torch.randn(900, 48, generator=generator) * 0.3
    ids = torch.randint(900, (64, 8), generator=generator)
    gradients = []
    for function, precision in (
        (naive, torch.float64),
        (naive, torch.float32),
        (linear_log_probs, torch.float32),
    ):
        leaves = [x.to(precision).requires_grad_() for x in (hidden, weight)]
        result = function(*leaves, ids, top_k=16)  # type: ignore[operator]
        gradients.append([g.double() for g in torch.autograd.grad(use_everything(result, ids), leaves)])
    for exact, reference, ours in zip(*gradients, strict=True):
        assert (ours - exact).norm() <= 2 * (reference - exact).norm()


def test_the_entropy_of_a_certain_token_keeps_its_digits() -> None:
    """Logits near 1000 whose entropy is about 1e-3: log-sum-exp minus mean logit would cancel."""
    hidden = torch.tensor([[1.0, 1.0]])
    weight = torch.tensor([[1000.0, 9.0], [1000.0, 0.0], [990.0, 3.0]])
    logits = (hidden.double() @ weight.double().T)[0]
    probs = logits.softmax(-1)
    expected = -(probs * logits.log_softmax(-1)).sum().item()
    result = linear_log_probs(hidden, weight, torch.tensor([[0]]))
    # One rounding of the probabilities' sum, twice; one of the logits is a thousand times as large.
    assert result.entropy.item() == pytest.approx(expected, abs=2 * unit_of(1.0))
    assert 1e-4 < expected < 2e-3


def test_tied_bfloat16_logits_are_ranked_by_lowest_id() -> None:
    hidden = torch.ones(2, 1)
    weight = torch.tensor([[1.0], [3.0], [3.0], [2.0], [3.0], [2.0]])
    result = linear_log_probs(hidden, weight, torch.zeros(2, 1).long(), top_k=5)
    assert result.top_ids is not None
    assert result.top_ids.tolist() == [[1, 2, 4, 3, 5]] * 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_narrow_ids_do_not_narrow_the_most_likely_ones(dtype: torch.dtype) -> None:
    vocabulary = torch.iinfo(dtype).max + 50
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 4, generator=generator) for n in (3, vocabulary))
    few = linear_log_probs(hidden, weight, torch.ones(3, 1, dtype=dtype), top_k=200)
    assert few.top_ids is not None
    assert torch.equal(few.top_ids.long(), (hidden @ weight.T).topk(200).indices)


def test_the_last_byte_is_an_id_and_no_empty_slot() -> None:
    """-1, which marks those, is 255 in a byte."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 4, generator=generator) for n in (2, 256))
    ids = torch.tensor([[255], [3]])
    wanted = linear_log_probs(hidden, weight, ids).log_probs
    assert wanted.isfinite().all()
    assert torch.equal(linear_log_probs(hidden, weight, ids.byte()).log_probs, wanted)
    logits = hidden @ weight.T
    assert torch.equal(logits_log_probs(logits, ids.byte()), logits_log_probs(logits, ids))


def test_top_k_never_exceeds_the_vocabulary_that_can_be_sampled() -> None:
    hidden, weight, _, ids = make_inputs(largest_id=5)
    result = linear_log_probs(hidden, weight, ids, top_k=50, vocabulary_size=5)
    assert result.top_ids is not None
    assert result.top_ids.shape == (N, 5)
    assert sorted(result.top_ids[0].tolist()) == [0, 1, 2, 3, 4]
    assert linear_log_probs(hidden, weight, ids).top_ids is None


def test_a_frozen_head_gets_no_gradient_and_changes_no_other() -> None:
    hidden, weight, bias, ids = make_inputs()
    gradients = []
    for frozen in (False, True):
        leaf = hidden.clone().requires_grad_()
        head = weight.clone().requires_grad_(not frozen)
        result = linear_log_probs(leaf, head, ids, bias=bias, top_k=4)
        use_everything(result, ids).backward()
        gradients.append(leaf.grad)
        assert (head.grad is None) == frozen
    assert torch.equal(gradients[0], gradients[1])


def test_frozen_hidden_states_let_the_head_learn_alone() -> None:
    hidden, weight, _, ids = make_inputs()
    head = weight.clone().requires_grad_()
    use_everything(linear_log_probs(hidden, head, ids, top_k=2), ids).backward()
    naive_head = weight.clone().requires_grad_()
    use_everything(naive(hidden, naive_head, ids, top_k=2), ids).backward()
    torch.testing.assert_close(head.grad, naive_head.grad, rtol=1e-9, atol=1e-11)


def test_padded_rows_of_the_head_never_receive_gradient() -> None:
    hidden, weight, bias, ids = make_inputs(largest_id=30)
    ids[0, 0] = 35  # padding: impossible, whatever the weights
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    result = linear_log_probs(leaves[0], leaves[1], ids, bias=leaves[2], vocabulary_size=30)
    assert result.log_probs[0, 0].item() == -INF
    result.log_probs.backward(torch.where(ids == -1, 0.0, torch.ones_like(result.log_probs)))
    assert bool((weight.grad[30:] == 0).all())  # type: ignore[index]
    assert bool((bias.grad[30:] == 0).all())  # type: ignore[index]


def test_autocast_does_not_lower_the_precision() -> None:
    hidden, weight, bias, ids = make_inputs(torch.float32)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]

    def run() -> tuple[Tensor, ...]:
        found = linear_log_probs(hidden, weight, ids, bias=bias)
        total = found.log_probs.sum() + found.entropy.sum()
        return found.log_probs, found.entropy, *torch.autograd.grad(total, leaves)

    plain = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the backward pass inside it, too
        under = run()
    assert all(torch.equal(one, other) for one, other in zip(plain, under, strict=True))


def test_nothing_of_the_size_of_the_logits_is_ever_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a workspace of 300 elements, no temporary of the operation exceeds it in rows."""
    monkeypatch.setattr(memory, "WORKSPACE_ELEMENTS", 300)
    seen: list[int] = []
    logits_of = head.Head.logits

    def spy(self: Any, *args: Any) -> Tensor:
        logits = logits_of(self, *args)
        seen.append(logits.numel())
        return logits

    monkeypatch.setattr(head.Head, "logits", spy)
    hidden, weight, _, ids = make_inputs()
    result = linear_log_probs(hidden.requires_grad_(), weight.requires_grad_(), ids, top_k=3)
    use_everything(result, ids).backward()
    assert max(seen) <= 300 < N * V
    # 13 tokens forward; backward leaves out the one row without gradient.
    assert sum(seen) == (N + N - 1) * V


def test_rows_without_gradient_cost_nothing_and_change_nothing() -> None:
    hidden, weight, _, ids = make_inputs()
    leaf = hidden.clone().requires_grad_()
    linear_log_probs(leaf, weight, ids.clamp_min(0)).log_probs[4].sum().backward()
    assert leaf.grad is not None
    assert bool((leaf.grad[4] != 0).any())
    assert bool((leaf.grad[torch.arange(N) != 4] == 0).all())


def test_the_path_that_never_asks_which_rows_have_gradient_equals_the_one_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, weight, _, ids = make_inputs()
    gradients = []
    for ask in (True, False):
        monkeypatch.setattr(linear, "may_ask", lambda tensor, ask=ask: ask)
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        gradients.append(
            torch.autograd.grad(use_everything(linear_log_probs(*leaves, ids, top_k=3), ids), leaves)
        )
    for asked, unasked in zip(*gradients, strict=True):
        torch.testing.assert_close(unasked, asked, rtol=1e-12, atol=1e-13)


def test_sharded_weights_are_at_hand_in_forward_and_backward() -> None:
    """A head that is empty at rest, as under ZeRO-3, is used only inside its context."""
    hidden, whole, _, ids = make_inputs()
    entered: list[str] = []
    weight = whole.clone().requires_grad_(False)
    at_rest = weight.data.new_empty(0)
    stored, weight.data = weight.data, at_rest

    @contextmanager
    def gathered() -> Iterator[None]:
        entered.append("in")
        weight.data = stored
        try:
            yield
        finally:
            weight.data = at_rest

    leaf, plain = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    result = linear_log_probs(leaf, weight, ids.clamp_min(0), weights_at_hand=gathered)
    result.log_probs.sum().backward()
    linear_log_probs(plain, whole, ids.clamp_min(0)).log_probs.sum().backward()
    assert entered == ["in", "in"]
    assert weight.numel() == 0
    assert torch.equal(leaf.grad, plain.grad)  # type: ignore[arg-type]


def test_no_tokens_give_empty_results_with_a_gradient() -> None:
    hidden, weight, _, ids = make_inputs()
    weight.requires_grad_()
    result = linear_log_probs(hidden[:0].requires_grad_(), weight, ids[:0], top_k=3)
    assert result.log_probs.shape == (0, 4)
    assert result.entropy.shape == (0,)
    (result.log_probs.sum() + result.entropy.sum()).backward()
    assert weight.grad is not None
    assert bool((weight.grad == 0).all())


def test_no_ids_still_give_entropy_and_top_k() -> None:
    hidden, weight, _, _ = make_inputs()
    ids = torch.empty(N, 0, dtype=torch.long)
    result = linear_log_probs(hidden, weight, ids, top_k=2)
    expected = naive(hidden, weight, ids, top_k=2)
    assert result.log_probs.shape == (N, 0)
    torch.testing.assert_close(result.top_log_probs, expected.top_log_probs)
    torch.testing.assert_close(result.entropy, expected.entropy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 3, 6)}, r"hidden \[N, D\].*\(2, 3, 6\).*Flatten"),
        ({"hidden": torch.zeros(5, 6)}, r"\(5, 6\) and \(13, 4\)"),
        ({"weight": torch.zeros(37, 7)}, r"weight must be \[V, 6\].*\(37, 7\)"),
        ({"bias": torch.zeros(36)}, r"bias must be \[37\], got \(36,\)"),
        ({"ids": torch.full((13, 4), 37)}, r"\[0, 37\).*found 37"),
        ({"ids": torch.full((13, 4), -2)}, r"found -2"),
        ({"ids": torch.full((13, 4), 1.5)}, r"ids must be integers, got torch\.float32"),
        ({"top_k": 0}, r"top_k must be an integer of at least 1, got 0"),
        ({"temperature": 0.0}, r"temperature must be positive and finite, got 0\.0"),
        ({"temperature": math.nan}, r"temperature must be positive and finite, got nan"),
        ({"logit_scale": -1.0}, r"logit_scale must be positive"),
        ({"softcap": 0.0}, r"softcap must be positive"),
        ({"softcap": math.inf}, r"softcap must be positive and finite, got inf"),
        ({"vocabulary_size": 38}, r"vocabulary_size must lie in \[1, 37\].*got 38"),
        ({"vocabulary_size": 0}, r"vocabulary_size must lie in \[1, 37\].*got 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_value(change: dict[str, Any], message: str) -> None:
    hidden, weight, _, ids = make_inputs(torch.float32)
    arguments: dict[str, Any] = {"hidden": hidden, "weight": weight, "ids": ids} | change
    with pytest.raises(InvalidInputError, match=message):
        linear_log_probs(**arguments)


def test_a_token_of_no_probability_keeps_gradients_finite_whatever_arrives() -> None:
    """Padding is -inf and some logits underflow; the entropy's gradient, times 1e38, must not meet 0 inf."""
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [1.0], [-2e4], [5.0]])
    result = linear_log_probs(hidden, weight, torch.tensor([[0]]), vocabulary_size=3)
    (1e30 * result.entropy).sum().backward()
    p = torch.tensor([0.0, 1.0], dtype=torch.float64).softmax(0)
    # d H / d h = -Cov(log p, w) for logits w h with w = 0, 1: -p0 p1 (log p1 - log p0) (1 - 0) = -p0 p1.
    assert hidden.grad is not None
    expected = -1e30 * (p[0] * p[1]).item()
    assert hidden.grad.item() == pytest.approx(expected, abs=SUMMED_ANOTHER_WAY * unit_of(expected))


def test_top_k_of_a_wide_head_is_that_of_a_stable_sort_and_so_are_its_log_probs() -> None:
    """Wide enough for groups, with ids beyond the last whole one, in cache-sized pieces and in one."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randint(-2, 3, (70, 3), generator=generator).float()
    weight = torch.randint(-2, 3, (5003, 3), generator=generator).float()  # small integers: exact ties
    logits = (hidden @ weight.T).double()
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[:, :12]
    result = linear_log_probs(hidden, weight, expected, top_k=12)
    assert result.top_ids is not None
    assert result.top_log_probs is not None
    assert result.top_ids.tolist() == expected.tolist()
    dense = logits.log_softmax(-1)
    within = SUMMED_ANOTHER_WAY * rounding_of(logits.float().log_softmax(-1), dense)
    assert error_of(result.top_log_probs, dense.gather(-1, expected)) <= within
    assert error_of(result.log_probs, dense.gather(-1, expected)) <= within
    assert error_of(result.log_sum_exp, logits.logsumexp(-1)) <= within


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_smallest_log_probability_leaves_padding_out(softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(7, 5, generator=generator), torch.randn(300, 5, generator=generator)
    found = linear_log_probs(
        hidden, weight, torch.zeros(7, 1).long(), with_min=True, vocabulary_size=290, softcap=softcap
    )
    raw = (hidden.double() @ weight.double().T)[:, :290]
    logits = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    assert found.log_prob_min is not None
    # Of the logits and of the sum of their exponentials, a sum of D products each.
    within = SUMMED_ANOTHER_WAY * unit_of(logits.log_softmax(-1), terms=hidden.shape[-1])
    assert error_of(found.log_prob_min, logits.log_softmax(-1).amin(-1)) <= within
    assert linear_log_probs(hidden, weight, torch.zeros(7, 1).long()).log_prob_min is None
