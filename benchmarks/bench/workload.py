"""Batches to run on: hidden states, an LM head and an old policy, random but shaped like the real thing.

Nothing is zero and nothing is degenerate. In the peaked regime a row's entropy is about that of a language
model (1 to 3 nats); in the near-uniform one every id is about as likely as any other. The new policy's hidden
states are the old ones moved far enough, row by row, that a chosen share of rows leaves the trust region.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tether import SparseLogProbs
from tether.ops import linear_log_probs
from tether.projection import kl_categorical

KL_BOUND = 0.05
SEQUENCES = 4
Regime = Literal["peaked", "uniform"]

# Standard deviation of the logits over the vocabulary.
_SPREAD: dict[Regime, float] = {"peaked": 5.0, "uniform": 0.3}
# KL(new || old) aimed at, in units of the bound; what comes out is measured, not assumed.
_INSIDE, _OUTSIDE = 0.01, 8.0
_BISECTIONS = 9


@dataclass(frozen=True)
class Shape:
    """The size of an LM head and of a batch."""

    name: str
    tokens: int
    width: int
    vocabulary: int
    dtype: torch.dtype = torch.float32
    top_k: int = 64


@dataclass(frozen=True)
class Workload:
    """What one update of the policy is given, [N, ...] with N = SEQUENCES * T."""

    shape: Shape
    hidden: Tensor
    """New hidden states, a leaf that wants its gradient, [N, D]."""
    weight: Tensor
    """LM head, likewise, [V, D]."""
    old_hidden: Tensor
    old_weight: Tensor
    """The head that was kept of the old policy: a copy, as where the head is trained."""
    sampled: Tensor
    """Tokens the old policy sampled, [N]."""
    old_log_probs: Tensor
    """Of those, [N]."""
    old: SparseLogProbs
    """The old policy's most likely ids and the sampled one, [N, K + 1]."""
    advantages: Tensor
    """[SEQUENCES]"""
    violating: float
    """Share of rows whose divergence exceeds the bound, as measured on the support."""

    def batch(self, rows: Tensor) -> Tensor:
        """[N, ...] -> [SEQUENCES, T, ...]."""
        return rows.view(SEQUENCES, -1, *rows.shape[1:])

    @property
    def mask(self) -> Tensor:
        return torch.ones_like(self.batch(self.old_log_probs))

    def part(self, tokens: int, dtype: torch.dtype) -> Workload:
        """Every so manieth token of it, in another precision: to check results on.

        Its tensors are contiguous, as a batch's are: TRL's kernels take that for granted.
        """
        step = self.shape.tokens // tokens
        rows = torch.arange(0, self.shape.tokens, step, device=self.hidden.device)
        float_dtype = torch.promote_types(dtype, torch.float32)
        old = self.old[rows]
        return replace(
            self,
            shape=replace(self.shape, tokens=tokens, dtype=dtype),
            hidden=self.hidden.detach()[rows].to(dtype).requires_grad_(),
            weight=self.weight.detach().to(dtype).requires_grad_(),
            old_hidden=self.old_hidden[rows].to(dtype),
            old_weight=self.old_weight.to(dtype),
            sampled=self.sampled[rows],
            old_log_probs=self.old_log_probs[rows].to(float_dtype),
            old=SparseLogProbs(old.ids, old.log_probs.to(float_dtype), old.log_tail.to(float_dtype)),
            advantages=self.advantages.to(float_dtype),
        )


def make_workloads(
    shape: Shape, regime: Regime, rates: tuple[float, ...], device: torch.device
) -> dict[float, Workload]:
    """One batch, and for each rate the share of its rows (at least one, unless 0) that leaves the region.

    Raises:
        RuntimeError: the rows did not come out as wanted, so timing them would mean nothing.
    """
    start, noise = _old_policy(shape, regime, device)
    direction = _direction(noise, start.weight, start.old)
    inside = _moved(start, direction, _INSIDE * KL_BOUND)
    outside = _moved(start, direction, _OUTSIDE * KL_BOUND)
    workloads = {}
    for rate in rates:
        leaving = _evenly(rate, shape.tokens, device)
        hidden = torch.where(leaving[:, None], outside, inside)
        _check_leaving(_support_kl(start, hidden), leaving, f"{shape.name} ({regime})")
        violating = float(leaving.float().mean())
        workloads[rate] = replace(start, hidden=hidden.requires_grad_(), violating=violating)
    return workloads


def make_untuned_workload(shape: Shape, device: torch.device) -> Workload:
    """A batch of which some rows leave the region and nobody says how many: to measure memory on."""
    start, noise = _old_policy(shape, "peaked", device)
    hidden = start.old_hidden + 0.02 * noise.to(shape.dtype)
    return replace(start, hidden=hidden.requires_grad_(), violating=math.nan)


def _old_policy(shape: Shape, regime: Regime, device: torch.device) -> tuple[Workload, Tensor]:
    """A batch whose new policy is the old one, and noise to move it by, [N, D]."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    weight = normal(shape.vocabulary, shape.width).to(shape.dtype)
    hidden = (normal(shape.tokens, shape.width) * _SPREAD[regime] / math.sqrt(shape.width)).to(shape.dtype)
    sampled = _sample(hidden, weight, generator)
    old = old_support(hidden, weight, sampled, shape.top_k)
    old_weight = weight.clone()
    work = Workload(
        shape=shape,
        hidden=hidden,
        weight=weight.requires_grad_(),
        old_hidden=hidden,
        old_weight=old_weight,
        sampled=sampled,
        old_log_probs=old.log_prob_of(sampled),
        old=old,
        advantages=normal(SEQUENCES),
        violating=0.0,
    )
    return work, normal(shape.tokens, shape.width)


def _evenly(rate: float, tokens: int, device: torch.device) -> Tensor:
    """That share of the rows, spread over the batch so that a part of it has about the same share."""
    count = math.ceil(rate * tokens)
    chosen = torch.zeros(tokens, dtype=torch.bool, device=device)
    chosen[torch.arange(count, device=device) * tokens // max(1, count)] = True
    return chosen


def _check_leaving(kl: Tensor, wanted: Tensor, name: str) -> None:
    if not torch.equal(kl > KL_BOUND, wanted):
        raise RuntimeError(
            f"{int((kl > KL_BOUND).sum())} of {len(kl)} rows of {name} leave the trust region, "
            f"{int(wanted.sum())} were wanted."
        )


@torch.no_grad()
def old_support(hidden: Tensor, weight: Tensor, sampled: Tensor, top_k: int) -> SparseLogProbs:
    """What is kept of the old policy: its most likely ids and the sampled one."""
    found = linear_log_probs(hidden, weight, sampled[:, None], top_k=top_k)
    assert found.top_ids is not None
    assert found.top_log_probs is not None
    return SparseLogProbs.from_top_k(
        found.top_ids, found.top_log_probs, sampled, found.log_probs[:, 0],
        mass=1 - 1e-5, vocabulary_size=weight.shape[0],
    )  # fmt: skip


@torch.no_grad()
def _sample(hidden: Tensor, weight: Tensor, generator: torch.Generator) -> Tensor:
    blocks = [(block @ weight.t()).float().softmax(-1) for block in hidden.split(64)]
    return torch.cat([probs.multinomial(1, generator=generator).squeeze(-1) for probs in blocks])


def _direction(noise: Tensor, weight: Tensor, old: SparseLogProbs) -> Tensor:
    """Where hidden states move: towards their most likely id (away, if it has nearly all the mass), which
    changes a flat distribution too, and a little at random, as in updates."""
    likely = weight[old.ids[:, 0].long()].float()
    likely = torch.where(old.log_probs[:, :1] > math.log(0.5), -likely, likely)
    return likely / likely.norm(dim=-1, keepdim=True) + 0.3 * noise / noise.norm(dim=-1, keepdim=True)


@torch.no_grad()
def _moved(start: Workload, direction: Tensor, target: float) -> Tensor:
    """Hidden states whose divergence from the old policy is about `target`, by bisection row by row."""
    hidden = start.old_hidden
    low = torch.full(hidden.shape[:1], 1e-4, device=hidden.device)
    high = torch.full_like(low, 16.0)
    for _ in range(_BISECTIONS):
        middle = (low * high).sqrt()
        beyond = _support_kl(start, hidden + (middle[:, None] * direction).to(hidden.dtype)) > target
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    return hidden + ((low * high).sqrt()[:, None] * direction).to(hidden.dtype)


@torch.no_grad()
def _support_kl(start: Workload, hidden: Tensor) -> Tensor:
    """KL(new || old) of each row as its support shows it."""
    found = linear_log_probs(hidden, start.weight, start.old.ids)
    vocabulary = start.weight.shape[0]
    new = SparseLogProbs.from_log_probs(start.old.ids, found.log_probs, vocabulary_size=vocabulary)
    return kl_categorical(new.with_buckets(), start.old.with_buckets())
