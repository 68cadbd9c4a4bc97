"""TRM: whole sequences are left out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tether.losses import trm

# Two sequences of three tokens over two outcomes; the second token of the first moved far.
OLD = torch.tensor([[[0.5, 0.5]] * 3, [[0.25, 0.75]] * 3], dtype=torch.float64).log()
NEW = torch.tensor([[[0.5, 0.5], [0.9, 0.1], [0.6, 0.4]], [[0.3, 0.7]] * 3], dtype=torch.float64).log()
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def _run(mask: torch.Tensor = MASK, **options: object) -> tuple[object, np.ndarray]:
    leaf = NEW[..., 0].clone().requires_grad_()
    result = trm(
        leaf, OLD[..., 0], torch.tensor([1.0, -2.0], dtype=torch.float64), mask,
        **({"new": NEW, "old": OLD} | options),  # type: ignore[arg-type]
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    return result, gradient.numpy()


def test_one_token_too_far_leaves_out_its_sequence_and_the_average_still_counts_it() -> None:
    result, gradient = _run()
    # The second sequence alone: ratio 1.2, A = -2, two of five tokens.
    assert result.loss.item() == pytest.approx(2 * 1.2 * 2 / 5)  # type: ignore[attr-defined]
    np.testing.assert_allclose(gradient, [[0, 0, 0], [2.4 / 5, 2.4 / 5, 0]], atol=1e-15)
    assert result.metrics["clipped"].item() == pytest.approx(3 / 5)  # type: ignore[attr-defined]


def test_a_token_under_the_mask_does_not_count_against_its_sequence() -> None:
    _, gradient = _run(torch.tensor([[1, 0, 1], [1, 1, 0]]))
    np.testing.assert_allclose(gradient, [[-0.25, 0, -0.3], [0.6, 0.6, 0]], atol=1e-12)


def test_the_divergence_is_from_old_to_new() -> None:
    forward = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)  # .511; the other way round .368
    result, _ = _run(kl_bound=0.4)
    assert result.metrics["kl_max"].item() == pytest.approx(forward)  # type: ignore[attr-defined]
    assert result.metrics["clipped"].item() > 0  # type: ignore[attr-defined]
    assert _run(kl_bound=0.52)[0].metrics["clipped"].item() == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("estimate", "of_ratio"),
    [("k2", lambda r: math.log(r) ** 2 / 2), ("k3", lambda r: r - 1 - math.log(r))],
)
def test_without_distributions_the_sampled_token_stands_in(estimate: str, of_ratio: object) -> None:
    worst = of_ratio(0.9 / 0.5)  # type: ignore[operator]
    for bound, left_out in ((worst * 0.99, 3 / 5), (worst * 1.01, 0.0)):
        result, _ = _run(new=None, old=None, kl_estimate=estimate, kl_bound=bound)
        assert result.metrics["clipped"].item() == pytest.approx(left_out)  # type: ignore[attr-defined]
        assert result.metrics["kl_max"].item() == pytest.approx(worst)  # type: ignore[attr-defined]
