"""Gradients of whole losses, clip and TROLL, on the head: within twice the rounding of dense float32.

The exact gradient is dense float64 on the same rounded inputs, the reference the same dense lines in float32,
its gradients rounded to the parameters' own precision.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tether import SparseLogProbs, project_categorical
from tether.losses import ppo_clip, troll
from tether.ops import linear_log_probs, linear_trust_region

N, D, V, K = 48, 24, 3000, 16
BOUND = 0.05

Loss = Callable[[Tensor, Tensor, "Batch"], Tensor]


class Batch:
    """Tokens of an old policy, half of which the new one moves out of the trust region."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        self.weight = (0.7 * normal(V, D)).to(dtype)
        self.old_hidden = normal(N, D).to(dtype)
        moved = torch.where(torch.arange(N)[:, None] % 2 == 0, 0.4, 0.01) * normal(N, D)
        self.hidden = (self.old_hidden.float() + moved).to(dtype)
        old = self.old_hidden.double() @ self.weight.double().T
        self.sampled = old.softmax(-1).multinomial(1, generator=generator)
        self.old = SparseLogProbs.from_logits(old, K, keep_ids=self.sampled.squeeze(-1))
        self.advantages = normal(1, N)

    def old_of(self, dtype: torch.dtype) -> tuple[SparseLogProbs, Tensor, Tensor]:
        """The old policy, the sampled tokens' log-probabilities and advantages, [1, N]."""
        old = SparseLogProbs(self.old.ids[None], self.old.log_probs[None], self.old.log_tail[None])
        old = SparseLogProbs(old.ids, old.log_probs.to(dtype), old.log_tail.to(dtype))
        return old, old.log_prob_of(self.sampled.T), self.advantages.to(dtype)


def _clip(log_probs: Tensor, batch: Batch) -> Tensor:
    _, old_log_probs, advantages = batch.old_of(log_probs.dtype)
    return ppo_clip(log_probs.T, old_log_probs, advantages, torch.ones(1, N)).loss


def _bucket(log_probs: Tensor, at_support: SparseLogProbs, batch: Batch) -> Tensor:
    old, old_log_probs, advantages = batch.old_of(log_probs.dtype)
    new = SparseLogProbs(old.ids, at_support.log_probs[None], at_support.log_tail[None])
    return troll(
        log_probs.T, old_log_probs, advantages, torch.ones(1, N), response_ids=batch.sampled.T,
        new=new, old=old, kl_bound=BOUND,
    ).loss  # fmt: skip


def _exact(projected: Tensor, regression: Tensor, batch: Batch) -> Tensor:
    _, old_log_probs, advantages = batch.old_of(projected.dtype)
    return (regression - (projected - old_log_probs[0]).exp() * advantages[0]).mean()


def dense_clip(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
    return _clip((hidden @ weight.T).log_softmax(-1).gather(-1, batch.sampled), batch)


def our_clip(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
    return _clip(linear_log_probs(hidden, weight, batch.sampled).log_probs, batch)


def dense_bucket(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
    logits = hidden @ weight.T
    at_support = SparseLogProbs.at_ids(logits, batch.old.ids)
    return _bucket(logits.log_softmax(-1).gather(-1, batch.sampled), at_support, batch)


def our_bucket(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
    found = linear_log_probs(hidden, weight, torch.cat((batch.sampled, batch.old.ids), -1))
    at_support = SparseLogProbs.from_log_probs(batch.old.ids, found.log_probs[:, 1:], vocabulary_size=V)
    return _bucket(found.log_probs[:, :1], at_support, batch)


def dense_exact(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
    new = (hidden @ weight.T).log_softmax(-1)
    old = (batch.old_hidden.to(new.dtype) @ batch.weight.to(new.dtype).T).log_softmax(-1)
    result = project_categorical(new, old, BOUND)
    pull = (new.exp() * (new - result.log_probs.detach())).sum(-1)
    regression = torch.where(result.projected, pull, 0.0)
    return _exact(result.log_probs.gather(-1, batch.sampled).squeeze(-1), regression, batch)


def our_exact(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
    found = linear_trust_region(
        hidden, weight, batch.sampled.squeeze(-1), batch.old_hidden, kl_bound=BOUND, old_weight=batch.weight
    )
    assert 0 < int(found.projected.sum()) < N
    return _exact(found.projected_log_probs, found.regression, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("dense", "ours"),
    [(dense_clip, our_clip), (dense_bucket, our_bucket), (dense_exact, our_exact)],
    ids=["clip", "bucket", "exact"],
)
def test_gradients_are_within_twice_the_rounding_of_the_dense_reference(
    dense: Loss, ours: Loss, dtype: torch.dtype
) -> None:
    batch = Batch(dtype)
    gradients = []
    for loss, precision in ((dense, torch.float64), (dense, torch.float32), (ours, dtype)):
        leaves = [x.to(precision, copy=True).requires_grad_() for x in (batch.hidden, batch.weight)]
        gradients.append(torch.autograd.grad(loss(leaves[0], leaves[1], batch), leaves))
    for exact, reference, our in zip(*gradients, strict=True):
        assert our.dtype == dtype
        rounded = reference.to(dtype).double()
        assert (our.double() - exact).norm() <= 2 * (rounded - exact).norm()
