"""How often an exact trust region goes over a row of the vocabulary on a CPU, each operation counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rounding import rounding_of
from tether.ops import dense_rows, linear_trust_region
from tether.projection import anchored, project_categorical
from tether.projection.anchored import AnchoredCurve, AnchoredStep

ROWS, D, V, BOUND = 6, 8, 4096, 0.05
PRODUCTS = {"aten::mm", "aten::addmm_", "aten::addmm"}


class _Passes(TorchDispatchMode):
    """Counts operations that read or write whole rows [.., V], in rows; views and allocations are none."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        tensors = [x for x in (*args, *(kwargs or {}).values(), out) if isinstance(x, Tensor)]
        largest = max((x.numel() for x in tensors if x.dim() and x.shape[-1] == V), default=0)
        free = (
            func.is_view
            or "empty" in name
            or name in {"aten::gather", "aten::scatter_add_", "aten::set_", "aten::slice"}
        )
        if largest and not free and name not in PRODUCTS:
            self.rows[name] = self.rows.get(name, 0) + largest / V
        return out

    @property
    def total(self) -> float:
        return sum(self.rows.values())


def _batch(moved: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(V, D, generator=generator)
    old = 1.5 * torch.randn(ROWS, D, generator=generator)
    hidden = old + moved * torch.randn(ROWS, D, generator=generator)
    ids = (old @ weight.T).softmax(-1).multinomial(1, generator=generator).squeeze(-1)
    return hidden.requires_grad_(), weight.requires_grad_(), ids, old


def _count(moved: float, expected: float) -> dict[str, float]:
    """Operations over a row, forward and backward, of a batch in which this share of rows is projected."""
    hidden, weight, ids, old = _batch(moved)
    with _Passes() as passes:
        found = linear_trust_region(hidden, weight, ids, old, kl_bound=BOUND, old_weight=weight.detach())
        (found.projected_log_probs.sum() + found.regression.sum()).backward()
    assert found.projected.float().mean().item() == expected
    assert not found.certified.any()
    assert found.converged is not None
    assert found.converged.all()
    return {name: count / ROWS for name, count in passes.rows.items()}


@pytest.fixture(autouse=True)
def _no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tether.ops.policy_pair.PolicyPair.log_ratio_range",
        lambda pair: torch.full((len(pair.hidden),), torch.inf, dtype=torch.float64),
    )


# A pass is one fused softmax; moments of what it gives meet it in the cache, at a tenth of its time each.
# A row whose first guess is bad is evaluated once more, 12 operations; of these six rows some are.
@pytest.mark.parametrize(
    ("moved", "projected", "passes", "operations"),
    [(0.02, 0.0, 4, 18), (0.5, 1.0, 9, 70)],
    ids=["uncertain", "projected"],
)
def test_passes_over_a_row_forward_and_backward(
    moved: float, projected: float, passes: int, operations: int
) -> None:
    counted = _count(moved, projected)
    names = ("aten::_softmax", "aten::softmax", "aten::exp", "aten::exp_", "aten::log", "aten::log_")
    assert 1 <= sum(counted.get(name, 0) for name in names) <= passes
    assert sum(counted.values()) <= operations


def test_the_reference_is_not_asked_for_ordinary_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_rows, "rows_kl", None)
    monkeypatch.setattr(dense_rows, "project_rows", None)
    _count(0.5, 1.0)


def _logits(dtype: torch.dtype, moved: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, ids, old = _batch(moved)
    weight = weight.detach().double()
    return (hidden.detach().double() @ weight.T).to(dtype), (old.double() @ weight.T).to(dtype), ids


@pytest.mark.parametrize("moved", [0.15, 0.5, 1.0])
def test_steps_equal_the_references_in_float64(moved: float) -> None:
    new, old, ids = _logits(torch.float64, moved)
    curve = AnchoredCurve(new, old, ids, BOUND)
    expected = project_categorical(new, old, BOUND)
    torch.testing.assert_close(curve.kl[curve.reliable], expected.kl[curve.reliable], rtol=1e-10, atol=1e-13)
    rows = (curve.reliable & expected.projected).nonzero().squeeze(-1)
    assert rows.numel() >= 3
    found = curve.solve(rows)
    assert found.met.sum() >= 3
    wanted = expected.log_probs[rows].gather(-1, ids[rows, None]).squeeze(-1)
    torch.testing.assert_close(found.step[found.met], expected.step[rows][found.met], rtol=1e-9, atol=0)
    torch.testing.assert_close(found.log_prob[found.met], wanted[found.met], rtol=1e-9, atol=1e-11)
    assert float((found.kl[found.met] / BOUND - 1).abs().max()) <= 1e-12
    mean, variance = _moments(new[rows], old[rows], ids[rows], expected.log_probs[rows])
    torch.testing.assert_close(found.mean[found.met], mean[found.met], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found.variance[found.met], variance[found.met], rtol=1e-9, atol=0)


def _moments(new: Tensor, old: Tensor, ids: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the log-ratios less the sampled token's."""
    ratio = new - old
    ratio -= ratio.gather(-1, ids[:, None])
    mean = (log_probs.exp() * ratio).sum(-1)
    return mean, (log_probs.exp() * (ratio - mean[:, None]).square()).sum(-1)


@pytest.mark.parametrize("moved", [0.15, 0.5, 1.0])
def test_what_a_series_gives_is_as_good_as_an_evaluation(moved: float) -> None:
    new, old, ids = _logits(torch.float32, moved)
    curve = AnchoredCurve(new, old, ids, BOUND)
    expected = project_categorical(new.double(), old.double(), BOUND)
    rows = (curve.reliable & expected.projected).nonzero().squeeze(-1)
    found = curve.solve(rows)
    assert found.met.sum() >= 3
    rows, found = rows[found.met], AnchoredStep(*(value[found.met] for value in found))
    wanted = expected.log_probs[rows]
    mean, variance = _moments(new[rows].double(), old[rows].double(), ids[rows], wanted)
    # Sums over 4096 outcomes in float32.
    torch.testing.assert_close(found.step.double(), expected.step[rows], rtol=1e-5, atol=0)
    torch.testing.assert_close(found.mean.double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.variance.double(), variance, rtol=1e-5, atol=0)
    at_ids = wanted.gather(-1, ids[rows, None]).squeeze(-1)
    torch.testing.assert_close(found.log_prob.double(), at_ids, rtol=1e-6, atol=2e-6)


def test_in_float32_the_bound_is_met_as_closely_as_by_the_reference() -> None:
    new, old, ids = _logits(torch.float32)
    found = AnchoredCurve(new, old, ids, BOUND).solve(torch.arange(ROWS))
    exact_old = old.double().log_softmax(-1)

    def distance(log_probs: Tensor) -> float:
        exact = log_probs.double().log_softmax(-1)
        return float(((exact.exp() * (exact - exact_old)).sum(-1) / BOUND - 1).abs().max())

    reference = project_categorical(new, old, BOUND).log_probs
    assert distance(old + found.step[:, None] * (new - old)) <= 2 * max(distance(reference), 1e-5)


def test_rows_without_digits_are_left_to_the_reference() -> None:
    """A zero on either side, a sampled token that vanishes, a policy hundreds of nats away."""
    new, old, ids = _logits(torch.float32)
    ids = old.argmax(-1)
    new[0, 7] = -torch.inf
    old[1, 7] = -torch.inf
    old[2, ids[2]] = -200.0
    new[3] = new[3] * 60
    curve = AnchoredCurve(new, old, ids, BOUND)
    assert curve.reliable.tolist()[:4] == [False] * 4
    assert curve.reliable[4:].all()
    compared = dense_rows.compare_rows(new.clone(), old.clone(), ids, BOUND, project=True)
    expected = project_categorical(new.double(), old.double(), BOUND)
    rough = project_categorical(new, old, BOUND)
    assert not compared.kl.isnan().any()
    for rows, projection in compared.projections:
        wanted, near = (r.log_probs[rows].gather(-1, ids[rows, None]).squeeze(-1) for r in (expected, rough))
        error = (projection.projected_log_probs.double() - wanted).abs().max()
        assert float(error) <= 4 * rounding_of(near, wanted) + 1e-5
    assert sum(rows.numel() for rows, _ in compared.projections) == int(expected.projected.sum())


def test_a_search_that_runs_out_of_steps_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def project_rows(new: Tensor, *others: Any) -> Any:
        taken.append(len(new))
        return reference(new, *others)

    reference = dense_rows.project_rows
    monkeypatch.setattr(dense_rows, "project_rows", project_rows)
    monkeypatch.setattr(anchored, "LARGEST_CHANGE", dict.fromkeys(anchored.LARGEST_CHANGE, -1.0))
    _count(0.5, 1.0)
    assert taken == [1] * ROWS


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_row_that_counts_as_solved_is_on_the_bound(dtype: torch.dtype) -> None:
    """Old policies sure of an outcome that the new one gives up: there the first guess is a poor one."""
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)

        def uniform(most: float, generator: torch.Generator = generator) -> Tensor:
            return most * torch.rand(2000, generator=generator)

        size = (2000, (3, 5, 8, 20)[seed % 4])
        old = 2 * torch.randn(size, generator=generator)
        new = old + torch.randn(size, generator=generator)
        old[:, 0] += uniform(30)
        new[:, 0] -= uniform(10)
        ids = torch.randint(size[1], size[:1], generator=generator)
        new, old = new.to(dtype), old.to(dtype)
        curve = AnchoredCurve(new, old, ids, BOUND)
        rows = (curve.reliable & (curve.kl > BOUND)).nonzero().squeeze(-1)
        found = curve.solve(rows)
        assert found.met.any()
        at = rows[found.met]
        start, end = old[at].double(), new[at].double()
        exact = torch.lerp(start, end, found.step[found.met, None].double()).log_softmax(-1)
        before = start.log_softmax(-1)
        divergence = (exact.exp() * (exact - before)).sum(-1)
        assert divergence.sub(BOUND).abs().max() <= (1e-3 if dtype == torch.float32 else 1e-7) * BOUND


@pytest.mark.parametrize(
    ("new", "old", "sampled"),
    [
        # So near the old policy that the divergence of the guess is rounding alone.
        ([-0.6, -2.4, -1.3], [15.44, -2.5, -0.8], 0),
        ([-25.5, -2.5, 1.8, 2.0, -0.9], [7.23, -2.2, 0.8, 0.95, -1.0], 1),
    ],
)
def test_rows_whose_first_guess_leads_nowhere_equal_the_reference(
    new: list[float], old: list[float], sampled: int
) -> None:
    identity = torch.eye(len(new))
    rows = torch.tensor([new]), identity, torch.tensor([sampled]), torch.tensor([old])
    found = linear_trust_region(*rows, kl_bound=BOUND)
    expected = project_categorical(rows[0].double(), rows[3].double(), BOUND)
    assert float(found.step) == pytest.approx(float(expected.step), rel=1e-3)
    assert found.projected_kl is not None
    assert float(found.projected_kl) == pytest.approx(BOUND, rel=1e-3)
