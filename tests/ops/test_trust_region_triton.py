"""The exact trust region's kernels: interpreted on a CPU, compiled where there is a GPU.

Against the dense rows in float64 of `test_trust_region.py`, in chunks so small that a row takes several.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_trust_region import OPTIONS, STEP_ERROR, VOCABULARY, _Batch, _dense_outputs, _gradients, _outputs
from test_trust_region import _make as make_batch
from torch import Tensor

from rounding import SUMMED_ANOTHER_WAY, error_of, rounding_of
from tether.errors import InvalidInputError
from tether.ops import dense_rows, linear_trust_region
from tether.ops.token_state import ProjectedRows

pytest.importorskip("triton", reason="the kernels need the package", exc_type=ImportError)

from tether.ops import dense_rows_triton, dense_rows_triton_kernels, rows_triton, rows_triton_kernels

# The interpreter's numpy says aloud what a GPU computes silently.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("bfloat16_rounded_as_hardware_does"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUND, CHUNK = 0.05, 64


@pytest.fixture(autouse=True)
def _several_chunks_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_rows_triton, "COMPARED", dict.fromkeys(dense_rows_triton.COMPARED, (CHUNK, 1)))
    monkeypatch.setattr(dense_rows_triton, "TO_GRADIENT", (CHUNK, 1))
    assert VOCABULARY > 2 * CHUNK


def _make(name: str, dtype: torch.dtype = torch.float64) -> _Batch:
    batch = make_batch(name).to(dtype)
    tensors = {key: value.to(DEVICE) for key, value in vars(batch).items() if isinstance(value, Tensor)}
    return replace(batch, **tensors)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in OPTIONS]
    + [(name, torch.float32) for name in ("plain", "everything", "ids that cannot be sampled")],
)
def test_values_and_gradients_equal_dense_rows_in_float64(name: str, dtype: torch.dtype) -> None:
    """In float32 as precisely as the dense rows are in float32, and the step as it is solved."""
    batch = _make(name, dtype)
    exact, plain = make_batch(name).to(dtype).to(torch.float64), make_batch(name).to(torch.float32)
    leaves = [side.leaves() for side in (exact, plain, batch)]
    expected, rough = _dense_outputs(exact), _dense_outputs(plain)
    found = batch.ours(backend="triton")
    assert torch.equal(found.projected.cpu(), expected[5])
    assert bool(found.converged.all())  # type: ignore[union-attr]
    solved = STEP_ERROR if dtype == torch.float32 else 0.0
    for actual, other, wanted in zip(_outputs(found), rough, expected, strict=False):
        allowed = 2 * rounding_of(other, wanted) + solved if solved else 1e-9
        assert error_of(actual, wanted) <= allowed
    gradients = [
        _gradients([o.cpu() for o in outputs], side)
        for outputs, side in zip((expected[:4], rough[:4], _outputs(found)), leaves, strict=True)
    ]
    for wanted, other, actual in zip(*gradients, strict=True):
        rounding = float((other.double() - wanted).norm())
        allowed = 2 * rounding + solved * float(wanted.norm()) if solved else 1e-9 * float(wanted.norm())
        assert float((actual.double().cpu() - wanted).norm()) <= allowed


@pytest.mark.parametrize("name", ["plain", "everything", "ids that cannot be sampled"])
def test_in_half_precision_gradients_are_within_twice_the_rounding_of_their_result(name: str) -> None:
    """The logits' gradient is rounded for the products, and what they give once more."""
    batch = _make(name, torch.bfloat16)
    exact, plain = (make_batch(name).to(torch.bfloat16).to(dtype) for dtype in (torch.float64, torch.float32))
    leaves = [side.leaves() for side in (exact, plain, batch)]
    outputs = _dense_outputs(exact)[:4], _dense_outputs(plain)[:4], _outputs(batch.ours(backend="triton"))
    gradients = [
        _gradients([o.cpu() for o in some], side) for some, side in zip(outputs, leaves, strict=True)
    ]
    for wanted, other, actual in zip(*gradients, strict=True):
        rounding = float((other.to(torch.bfloat16).double() - wanted).norm())
        error = float((actual.double().cpu() - wanted).norm())
        assert rounding < error <= 2 * rounding + STEP_ERROR * float(wanted.norm())


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_the_ordinary_rows_are_never_left_to_the_plain_path(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_rows_triton, "by_reference", None)
    monkeypatch.setattr(dense_rows, "to_gradient", None)
    batch = _make(name)
    leaves = batch.leaves()
    outputs = _outputs(batch.ours(backend="triton"))
    _gradients([output.cpu() for output in outputs], leaves)


def test_a_step_that_sequences_share_has_the_gradient_of_the_plain_path() -> None:
    batch = _make("soft cap")
    leaves, sequences = batch.leaves(), torch.arange(len(batch.ids), device=DEVICE) // 6
    results = []
    for backend in ("torch", "triton"):
        outputs = _outputs(batch.ours(backend=backend, sequences=sequences))
        results.append([*outputs, *_gradients([o.cpu() for o in outputs], leaves)])
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-8, atol=1e-10)


def _nasty() -> tuple[Tensor, Tensor, Tensor]:
    """Ties, a certain token, huge logits, a zero on either side or on both, a sampled token that vanishes."""
    generator = torch.Generator().manual_seed(3)
    old = torch.randn(12, VOCABULARY, generator=generator, dtype=torch.float64)
    new = old + torch.randn(12, VOCABULARY, generator=generator, dtype=torch.float64)
    ids = old.argmax(-1)
    old[0], new[0] = 0.0, torch.arange(VOCABULARY) % 2
    new[1, ids[1]] += 80.0
    old[2] += 1e4
    new[2] += 1e4
    new[3] *= 60
    new[4, 7] = old[5, 7] = -torch.inf
    new[6, 5:9] = old[6, 5:9] = -torch.inf
    old[7, ids[7]] = -200.0
    new[8, :CHUNK] = old[8, :CHUNK] = -torch.inf
    new[9] = old[9]
    ids[8] = CHUNK + 1
    # A first guess at which the divergence is rounding alone.
    new[10], old[10] = -60.0, -60.0
    new[10, :3] = torch.tensor([-0.6, -2.4, -1.3])
    old[10, :3] = torch.tensor([15.44, -2.5, -0.8])
    ids[10] = 0
    return new, old, ids


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nasty_rows_are_projected_or_left_but_never_wrong(dtype: torch.dtype) -> None:
    new, old, ids = (x.to(DEVICE) for x in _nasty())
    rough_new, rough_old = new.to(dtype), old.to(dtype)
    rows = torch.arange(12, device=DEVICE).flip(0)
    found = dense_rows_triton.compare_rows(
        rough_new, rough_old[rows], ids[rows], BOUND, project=True, rows=rows
    )
    kl = found.kl[rows]
    every = torch.arange(12, device=DEVICE)
    exact_kl = torch.empty_like(kl, dtype=torch.float64)
    inputs = rough_new.double(), rough_old.double(), ids
    exact = dense_rows.by_reference(*inputs, BOUND, exact_kl, every, project=True, rows=None)
    plain_kl = torch.empty_like(kl)
    dense_rows.by_reference(rough_new, rough_old, ids, BOUND, plain_kl, every, project=True, rows=None)
    assert torch.equal(kl.isinf(), exact_kl.isinf())
    anchored = (new - old).gather(-1, ids[:, None]).squeeze(-1).abs()
    for ours, plain, wanted, from_anchor in zip(kl, plain_kl, exact_kl, anchored, strict=True):
        # Of the sampled token's log-ratio, from which all others are measured.
        unit = torch.finfo(dtype).eps * max(1.0, float(from_anchor))
        if bool(wanted.isfinite()):
            allowed = SUMMED_ANOTHER_WAY * max(float((plain.double() - wanted).abs()), unit)
            assert float((ours.double() - wanted).abs()) <= allowed
    wanted_rows = torch.cat([at for at, _ in exact])
    ours_by_row = {int(rows[at]): part for at, part in _single(found.projections)}
    assert set(ours_by_row) == set(wanted_rows.tolist())
    tolerance = 2e-3 if dtype == torch.float32 else 1e-7
    for at, wanted_part in _single(exact):
        ours_part = ours_by_row[int(at)]
        assert float(ours_part.projected_kl) == pytest.approx(BOUND, rel=tolerance)
        assert float(ours_part.step) == pytest.approx(float(wanted_part.step), rel=tolerance)


def _single(projections: list[tuple[Tensor, ProjectedRows]]) -> list[tuple[Tensor, ProjectedRows]]:
    return [
        (row, ProjectedRows(*(value[k] for value in part)))
        for rows, part in projections
        for k, row in enumerate(rows)
    ]


def test_a_row_that_the_reference_must_take_gets_its_gradient() -> None:
    """Ids that one policy alone cannot produce."""
    batches = []
    for backend in ("torch", "triton"):
        batch = _make("bias")
        assert batch.bias is not None
        batch.bias[3] = -torch.inf
        leaves = batch.leaves()
        outputs = _outputs(batch.ours(backend=backend))
        batches.append([*outputs, *_gradients([o.cpu() for o in outputs], leaves)])
    for plain, ours in zip(*batches, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-8, atol=1e-10, equal_nan=True)


class _Reads:
    """Counts reads of a chunk, in passes over a row of the vocabulary."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chunks = 0
        for module, name in ((dense_rows_triton_kernels, "_chunk"), (rows_triton_kernels, "_load_logits")):
            monkeypatch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, read: Any) -> Any:
        def count(*arguments: Any) -> Any:
            self.chunks += 1
            return read(*arguments)

        return count


@pytest.mark.skipif(DEVICE == "cuda", reason="there the kernels are compiled and nobody can count")
@pytest.mark.parametrize(
    ("moved", "passes"), [(0.002, (3, 4)), (0.5, (5, 8))], ids=["uncertain", "projected"]
)
def test_passes_over_a_row_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch, moved: float, passes: tuple[int, int]
) -> None:
    """The kernels', and operations of PyTorch on rows of logits: there are none."""
    from test_passes import PRODUCTS, _Passes
    from test_passes import V as wide

    chunks, tokens = 4, 4
    size = wide // chunks, 1
    monkeypatch.setattr(dense_rows_triton, "COMPARED", dict.fromkeys(dense_rows_triton.COMPARED, size))
    monkeypatch.setattr(dense_rows_triton, "TO_GRADIENT", size)
    monkeypatch.setattr(rows_triton, "_BLOCK", wide // chunks)
    monkeypatch.setattr(
        "tether.ops.policy_pair.PolicyPair.log_ratio_range",
        lambda pair: torch.full((len(pair.hidden),), torch.inf, dtype=torch.float64),
    )
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(wide, 8, generator=generator)
    old = 1.5 * torch.randn(tokens, 8, generator=generator)
    hidden = (old + moved * torch.randn(tokens, 8, generator=generator)).requires_grad_()
    ids = (old @ weight.T).argmax(-1)
    reads = _Reads(monkeypatch)
    with _Passes() as plain:
        found = linear_trust_region(hidden, weight, ids, old, kl_bound=BOUND, backend="triton")
        (found.projected_log_probs.sum() + found.regression.sum()).backward()
    assert found.projected.all() if moved > 0.1 else not found.projected.any()
    # The sampled token of each row is read by itself besides.
    counted = (reads.chunks - tokens) / (chunks * tokens)
    assert passes[0] <= counted <= passes[1]
    assert not set(plain.rows) - PRODUCTS, plain.rows


def test_kernels_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tether.projection import backend

    batch = make_batch()
    monkeypatch.setattr(backend, "_interpreted", lambda: False)
    with pytest.raises(InvalidInputError, match=r"CUDA device, got cpu\. Move them there"):
        batch.ours(backend="triton")
