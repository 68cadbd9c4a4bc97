"""Token distributions on a few ids plus the mass of all others, and their projection.

A vocabulary has 50k to 260k entries, of which few matter. `SparseLogProbs` keeps those and, as one
more outcome, the exact mass of the rest. Projecting that coarser distribution is the dense problem
with K + 1 outcomes; its divergence never exceeds the true one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.projection.backend import Backend
from tether.projection.categorical import project_categorical
from tether.projection.divergence import log1mexp
from tether.projection.solve import may_ask
from tether.projection.support import (
    EMPTY,
    append_kept_id,
    check_ids,
    select_support,
    trim_to_mass,
    union_of_ids,
)
from tether.settings import Region, SparseSupport, TROLLSettings, check_choice

#: The probability the TROLL paper's code gives to every id it dropped.
PAPER_DEFAULT_PROBABILITY = 1e-12


@dataclass(frozen=True)
class SparseLogProbs:
    """A distribution over the vocabulary, known on K ids and in sum on the others.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
        >>> few = SparseLogProbs.from_logits(logits, top_k=2, keep_ids=torch.tensor([3]))
        >>> few.ids.tolist()
        [[0, 2, 3]]
        >>> round(few.log_tail.exp().item(), 4), round(logits.softmax(-1)[0, 1].item(), 4)
        (0.0871, 0.0871)
    """

    ids: Tensor
    """Vocabulary ids, [..., K] integer; `EMPTY` (-1) in slots that hold nothing. No id twice."""
    log_probs: Tensor
    """Log-probabilities of those ids, [..., K]; -inf in empty slots."""
    log_tail: Tensor
    """Log of the mass of all other ids, [...]; -inf if there are none."""
    log_tail_min: Tensor | None = None
    """A number, [...], that no log-probability of those other ids is below, if one is known: what
    `certify` needs to know about the old policy."""

    def __post_init__(self) -> None:
        if self.ids.shape != self.log_probs.shape or self.log_tail.shape != self.ids.shape[:-1]:
            raise InvalidInputError(
                "SparseLogProbs needs ids and log_probs [..., K] and log_tail [...], got "
                f"{tuple(self.ids.shape)}, {tuple(self.log_probs.shape)} and {tuple(self.log_tail.shape)}."
            )
        if self.log_tail_min is not None and self.log_tail_min.shape != self.log_tail.shape:
            raise InvalidInputError(
                f"log_tail_min must have the shape of log_tail, {tuple(self.log_tail.shape)}, got "
                f"{tuple(self.log_tail_min.shape)}."
            )

    @classmethod
    def from_logits(
        cls, logits: Tensor, top_k: int, *, mass: float = 1.0, keep_ids: Tensor | None = None
    ) -> SparseLogProbs:
        """Keep the most likely ids of dense logits, and the exact mass of the others.

        The ids are chosen without gradient; log-probabilities and tail mass are differentiable.

        Args:
            logits: [..., V], any floating dtype; computed in float32 at least.
            top_k: ids to keep, at most V are.
            mass: stop early once the kept ids hold this much probability (the paper: 1 - 1e-5).
            keep_ids: [...], one id a row that is kept whatever its rank: the sampled token.

        Returns:
            K = min(top_k, V) slots, and one more if `keep_ids` is given.

        Raises:
            InvalidInputError: top_k < 1, mass outside (0, 1], keep_ids of another shape or outside of the
                vocabulary, NaN or inf among the logits, or a row of -inf.
        """
        ids = select_support(logits.detach(), top_k, mass=mass, keep_ids=keep_ids)
        return cls.at_ids(logits, ids)

    @classmethod
    def at_ids(cls, logits: Tensor, ids: Tensor) -> SparseLogProbs:
        """The distribution of dense logits [..., V] seen from given ids [..., K], differentiable.

        Equals ``logits.log_softmax(-1).gather(-1, ids)`` and the log-sum of what was not gathered.

        Raises:
            InvalidInputError: ids that do not fit the logits, NaN or inf among these, or a row of -inf.
        """
        if ids.shape[:-1] != logits.shape[:-1]:
            raise InvalidInputError(
                f"ids must be [..., K] for logits {tuple(logits.shape)}, got {tuple(ids.shape)}."
            )
        check_ids(ids, logits.shape[-1])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = logits.detach().amax(-1, keepdim=True)
        _refuse_rows_of_no_distribution(largest)
        logits = logits - largest  # else huge ones swallow the log of the sum
        log_sum = logits.logsumexp(-1, keepdim=True)
        held = ids != EMPTY
        slots = torch.where(held, ids, 0).long()
        log_probs = torch.where(held, logits.gather(-1, slots) - log_sum, -torch.inf)
        if ids.shape[-1] >= logits.shape[-1] and bool((held.sum(-1) == logits.shape[-1]).all()):
            nothing = torch.full_like(log_sum.squeeze(-1), -torch.inf)
            return cls(ids, log_probs, nothing, torch.zeros_like(nothing))
        # One column more than there are ids, for the empty slots to mark.
        vocabulary = logits.shape[-1]
        taken = logits.new_zeros((*logits.shape[:-1], vocabulary + 1), dtype=torch.bool)
        taken.scatter_(-1, torch.where(held, slots, vocabulary), True)
        rest = logits.masked_fill(taken[..., :-1], -torch.inf)
        least = logits.detach().masked_fill(taken[..., :-1], torch.inf).amin(-1).clamp_max(0)
        log_sum = log_sum.squeeze(-1)
        return cls(ids, log_probs, _logsumexp(rest) - log_sum, least - log_sum.detach())

    @classmethod
    def from_log_probs(
        cls,
        ids: Tensor,
        log_probs: Tensor,
        *,
        vocabulary_size: int | None = None,
        log_tail_min: Tensor | None = None,
    ) -> SparseLogProbs:
        """Log-probabilities at some ids, [..., K], completed by the mass they leave to the others.

        For callers that never hold the whole vocabulary. The mass left is 1 minus the kept sum, which
        rounding limits to about 1e-7 in float32; anything smaller counts as that much, in the old
        and the new distribution alike, so that no rounding error looks like a violated bound. With
        `vocabulary_size`, rows that hold so many ids are known to leave nothing.
        """
        log_probs = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
        log_kept = _logsumexp(log_probs)
        epsilon = torch.finfo(log_probs.dtype).eps
        log_tail = log1mexp(log_kept.clamp_max(-epsilon)).clamp_min(math.log(epsilon))
        if vocabulary_size is not None and ids.shape[-1] >= vocabulary_size:
            whole = (ids != EMPTY).sum(-1) >= vocabulary_size
            log_tail = torch.where(whole, -torch.inf, log_tail)
        return cls(ids, log_probs, log_tail, log_tail_min)

    @classmethod
    def from_top_k(
        cls,
        top_ids: Tensor,
        top_log_probs: Tensor,
        kept_id: Tensor,
        kept_log_prob: Tensor,
        *,
        mass: float = 1.0,
        vocabulary_size: int | None = None,
        log_tail_min: Tensor | None = None,
    ) -> SparseLogProbs:
        """The most likely ids [..., K], most likely first, and one that is kept in any case [...].

        Args:
            top_ids, top_log_probs: sorted by falling log-probability.
            kept_id, kept_log_prob: the sampled token; it gets a slot of its own if it has none.
            mass: drop the least likely ids once the others hold this much probability.
            vocabulary_size: as in `from_log_probs`.
            log_tail_min: see the field.
        """
        ids = append_kept_id(trim_to_mass(top_ids, top_log_probs, mass), kept_id)
        log_probs = torch.cat((top_log_probs, kept_log_prob.unsqueeze(-1)), -1)
        log_probs = torch.where(ids == EMPTY, -torch.inf, log_probs)
        return cls.from_log_probs(ids, log_probs, vocabulary_size=vocabulary_size, log_tail_min=log_tail_min)

    @property
    def rows(self) -> Tensor:
        """The log-probabilities that are kept, whose leading dimensions are those of the tokens."""
        return self.log_probs

    def log_prob_of(self, ids: Tensor) -> Tensor:
        """Log-probability of one kept id a row, [...]; -inf for an id that was not kept."""
        match = self.ids == ids.unsqueeze(-1)
        return torch.where(match, self.log_probs, -torch.inf).amax(-1)

    def with_buckets(self) -> Tensor:
        """All K + 1 outcomes as one tensor of log-probabilities, the tail last, [..., K + 1]."""
        return torch.cat((self.log_probs, self.log_tail.unsqueeze(-1)), -1)

    def entropy(self) -> Tensor:
        """Entropy of the K + 1 outcomes in nats, [...]: a lower bound of the whole distribution's."""
        log_probs = self.with_buckets()
        # 0 log 0 = 0; replaced before the product, so that the gradient does not see -inf either.
        finite = torch.where(torch.isneginf(log_probs), 0.0, log_probs)
        return -(log_probs.exp() * finite).sum(-1)

    def detach(self) -> SparseLogProbs:
        """The same values, cut from the graph."""
        return SparseLogProbs(self.ids, self.log_probs.detach(), self.log_tail.detach(), self.log_tail_min)

    def __getitem__(self, rows: Any) -> SparseLogProbs:
        """Select rows: indexes the leading dimensions of all tensors."""
        least = None if self.log_tail_min is None else self.log_tail_min[rows]
        return SparseLogProbs(self.ids[rows], self.log_probs[rows], self.log_tail[rows], least)


@dataclass(frozen=True)
class SparseProjection:
    """What `project_sparse` returns."""

    log_probs: SparseLogProbs
    """The projected distribution."""
    new: SparseLogProbs
    """The new distribution as it was projected: on the same ids, renormalised with ``support="paper"``."""
    old: SparseLogProbs
    """The old distribution as it was compared with, likewise."""
    step: Tensor
    """Step s in [0, 1], a value a region: 1 where nothing had to be done."""
    kl: Tensor
    """KL(new || old) of the K + 1 outcomes in nats, before the projection, a value a region."""
    projected: Tensor
    """Where the bound was exceeded and the projection acted, bool, a value a region."""
    converged: Tensor
    """Whether the solver met the bound where it had to, bool, a value a region: see
    `CategoricalProjection`."""


def project_sparse(
    new: SparseLogProbs,
    old: SparseLogProbs,
    kl_bound: float,
    *,
    support: SparseSupport = "bucket",
    region: Region = TROLLSettings.region,
    mask: Tensor | None = None,
    backend: Backend = "auto",
) -> SparseProjection:
    """Solve argmin_π KL(π ‖ new) subject to KL(π ‖ old) <= kl_bound on a sparse support.

    With ``support="bucket"`` (default) everything outside the support is one outcome with its exact
    mass, and inside the tail π keeps the new policy's proportions. The divergence that is bounded is
    a lower bound of the true one (data processing), and approaches it as K grows.

    With ``support="paper"`` the TROLL paper's code is reproduced: the supports' union is formed, every
    id missing on one side gets probability 1e-12, both are renormalised and the tail is ignored. It
    exists for comparison; the projected distribution can leave the ball many times over.

    Args:
        new, old: distributions [..., K]. With ``support="bucket"`` both on the same ids in the same order;
            with ``support="paper"`` each on its own.
        kl_bound, region, mask, backend: as in `project_categorical`.

    Returns:
        Projected log-probabilities, on the ids of `new` (bucket) or on the union (paper).

    Raises:
        InvalidInputError: as in `project_categorical`, or different ids with ``support="bucket"``.

    Source: TROLL (arXiv 2510.03817, section 4 and appendix); the bucket is ours.

    Example:
        >>> import torch
        >>> old_logits, new_logits = torch.tensor([2.0, 1.0, 0.0, -1.0]), torch.tensor([0.0, 1.0, 2.0, 3.0])
        >>> old = SparseLogProbs.from_logits(old_logits, top_k=2)
        >>> result = project_sparse(SparseLogProbs.at_ids(new_logits, old.ids), old, kl_bound=0.05)
        >>> p, q = result.log_probs.with_buckets(), old.with_buckets()
        >>> round((p.exp() * (p - q)).sum().item(), 4)
        0.05
    """
    new, old = on_one_support(new, old, support)
    sides = new.with_buckets(), old.with_buckets()
    result = project_categorical(*sides, kl_bound, region=region, mask=mask, backend=backend)
    projected = SparseLogProbs(new.ids, result.log_probs[..., :-1], result.log_probs[..., -1])
    found = result.step, result.kl, result.projected, result.converged
    return SparseProjection(projected, new, old, *found)


def on_one_support(
    new: SparseLogProbs, old: SparseLogProbs, support: SparseSupport
) -> tuple[SparseLogProbs, SparseLogProbs]:
    """Both distributions on the same ids, as `project_sparse` compares them.

    Raises:
        InvalidInputError: an unknown support, or different ids with ``support="bucket"``.
    """
    check_choice("support", support, get_args(SparseSupport))
    if support == "paper":
        new, old = _on_union_with_default(new, old)
    elif not _same_ids(new.ids, old.ids):
        raise InvalidInputError(
            'support="bucket" compares both distributions on the same ids, but those of new '
            f"{tuple(new.ids.shape)} and old {tuple(old.ids.shape)} differ. Evaluate the new policy at "
            "the old one's ids: SparseLogProbs.at_ids(new_logits, old.ids)."
        )
    return new, old


def _same_ids(new: Tensor, old: Tensor) -> bool:
    """Whether both sides name the same ids; an accelerator asserts it without stopping for the answer."""
    if new is old or new.shape != old.shape:
        return new is old
    if may_ask(new):
        return torch.equal(new, old)
    torch._assert_async(
        (new == old).all(), 'project_sparse: support="bucket" needs the same ids in new and old'
    )
    return True


def _on_union_with_default(new: SparseLogProbs, old: SparseLogProbs) -> tuple[SparseLogProbs, SparseLogProbs]:
    ids = union_of_ids(new.ids, old.ids)
    return _with_default(new, ids), _with_default(old, ids)


def _with_default(side: SparseLogProbs, ids: Tensor) -> SparseLogProbs:
    """`side` on other ids: the default probability where it has none, renormalised, no tail."""
    # Slots of one side found in the sorted union; empty slots sort beyond every id.
    last = torch.iinfo(ids.dtype).max
    sorted_ids = torch.where(ids == EMPTY, last, ids)
    own = torch.where(side.ids == EMPTY, last, side.ids.to(ids.dtype))
    slots = torch.searchsorted(sorted_ids, own).clamp_max(ids.shape[-1] - 1)
    own_log_probs = side.log_probs.to(torch.promote_types(side.log_probs.dtype, torch.float32))
    log_probs = own_log_probs.new_full(
        (*ids.shape[:-1], ids.shape[-1] + 1), math.log(PAPER_DEFAULT_PROBABILITY)
    )
    slots = torch.where(own == last, ids.shape[-1], slots)  # what is empty goes into a spare slot
    log_probs = log_probs.scatter(-1, slots, own_log_probs)[..., :-1]
    log_probs = log_probs.masked_fill(ids == EMPTY, -torch.inf).log_softmax(-1)
    return SparseLogProbs(ids, log_probs, torch.full_like(log_probs[..., 0], -torch.inf))


def _logsumexp(values: Tensor) -> Tensor:
    """logsumexp over the last dimension whose gradient is zero, not NaN, for a row of nothing."""
    empty = torch.isneginf(values).all(-1, keepdim=True)
    total = torch.where(empty, 0.0, values).logsumexp(-1)
    return torch.where(empty.squeeze(-1), -torch.inf, total)


def _refuse_rows_of_no_distribution(largest: Tensor) -> None:
    """By each row's largest logit, [..., 1], which is NaN where one is."""
    invalid = ~largest.isfinite()
    if not may_ask(largest):
        torch._assert_async(~invalid.any(), "SparseLogProbs: logits hold NaN or inf, or a row of -inf")
    elif bool(invalid.any()):
        raise InvalidInputError(
            f"the logits of {int(invalid.sum())} of {largest.numel()} rows hold NaN or inf, or are all -inf. "
            "Look for overflow in the model (float16?) or a learning rate that destroyed it."
        )
