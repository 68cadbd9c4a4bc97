"""The policy that really sampled, from what its engine reports of each token.

An inference engine reports the log-probabilities of the few likeliest ids and of the one it drew. With the
exact mass of all others that is an old policy: no pass of the trainer's network is needed, and what differs
between the two (lag, kernels, precision) is inside the trust region instead of beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from tether.errors import InvalidInputError
from tether.projection.sparse import EMPTY, SparseLogProbs, append_kept_id
from tether.projection.support import rising, trim_to_mass
from tether.settings import check_support_size

#: Rounding of an engine's own arithmetic, float32: a log-softmax over 10^5 ids is off by up to 1e-4, the same
#: for all ids of a row, and that twice is allowed for.
_ARITHMETIC = 2048 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class SampledPolicy:
    """The behaviour policy of B sequences of T tokens, as its sampler reported it.

    Rows come in two kinds. Where the sampler could have drawn any id, the K reported ones keep their
    log-probabilities and all others are one outcome with the mass that is left; the divergence from such a
    row is a lower bound of the true one. Where sampling itself kept only a set (top-k, top-p, min-p) and the
    whole set is reported, the row is *truncated*: it is the behaviour policy exactly, the network is compared
    after renormalising it on the same set, and the divergence is exact.

    Example:
        >>> import torch
        >>> ids, log_probs = torch.tensor([[[4, 9]]]), torch.tensor([[[0.6, 0.3]]]).log()
        >>> sampled, mask = torch.tensor([[9]]), torch.ones(1, 1)
        >>> mu = SampledPolicy.from_report(sampled, ids, log_probs, mask)
        >>> round(mu.support.log_tail.exp().item(), 4), round(mu.log_probs.exp().item(), 4)
        (0.1, 0.3)
    """

    support: SparseLogProbs
    """The reported distributions, [B, T, K]; the tail is empty (-inf) in truncated rows."""
    sampled_ids: Tensor
    """What was drawn, [B, T]."""
    lag: Tensor | None = None
    """Versions (optimizer steps) between the sampler's weights and the trainer's, [B, T]; None if unknown."""

    @classmethod
    def from_report(
        cls,
        sampled_ids: Tensor,
        ids: Tensor,
        log_probs: Tensor,
        mask: Tensor,
        *,
        sampled_log_probs: Tensor | None = None,
        truncated: bool = False,
        lag: Tensor | int | None = None,
        vocabulary_size: int | None = None,
        log_tail_min: Tensor | None = None,
    ) -> Self:
        """Check an engine's report and complete it to distributions.

        Log-probabilities must be those that were sampled from, after temperature and truncation (vLLM's
        ``logprobs_mode="processed_logprobs"``). Their sum and the tail make 1 in the engine's rounding. What
        may be missing or too much is 2.4e-4 (a float32 log-softmax over 10^5 ids is off by up to half of
        that) and half a unit in the last place of every log-probability in the type it is given in, sum p
        |log p| eps / 2: about as much again for float16, some percent for bfloat16, which is too coarse for
        small tails.

        Args:
            sampled_ids: the drawn tokens, [B, T] integer.
            ids: reported ids, [B, T, K] integer, no id twice; `EMPTY` (-1) in unused slots.
            log_probs: theirs, [B, T, K]; an id whose probability is zero in float32 counts as not reported.
            mask: [B, T]; what is under a zero is not looked at.
            sampled_log_probs: of the drawn tokens, [B, T], if they need not be among `ids`.
            truncated: sampling kept only the reported ids: their probabilities must sum to 1.
            lag: versions between the sampler and the trainer: a number, [B] or [B, T].
            vocabulary_size: rows with so many ids are known to leave nothing out.
            log_tail_min: as in `SparseLogProbs`, if the sampler knows it, [B, T].

        Raises:
            InvalidInputError: shapes that do not fit, or a record that cannot be a distribution or not the
                sampler's, by sequence and position: NaN, an id twice or outside the vocabulary, more mass
                than 1, a sampled id that is missing or reported with two log-probabilities, a truncated set
                that does not hold it or not all of the mass.
        """
        _check_shapes(sampled_ids, ids, log_probs, mask, sampled_log_probs)
        # A narrow type cannot be compared with the ids of a vocabulary that it does not hold.
        sampled_ids, ids = sampled_ids.long(), ids.long()
        if not ids.shape[-1] and sampled_log_probs is not None:  # the drawn tokens are all that is known
            ids, log_probs = sampled_ids[..., None], sampled_log_probs[..., None]
        elif not ids.shape[-1]:  # nothing is, which is refused by sequence and position like all else
            ids, log_probs = pad(ids, (0, 1), value=EMPTY), pad(log_probs, (0, 1), value=-torch.inf)
        counted = mask > 0
        precision = torch.finfo(log_probs.dtype).eps
        dtype = torch.promote_types(log_probs.dtype, torch.float32)
        log_probs = log_probs.detach().to(dtype)
        _refuse_broken(ids, sampled_ids, log_probs, sampled_log_probs, counted, vocabulary_size)
        given = (ids != EMPTY) & counted[..., None]
        held = given & (log_probs.float().exp() > 0)
        log_tail_min = _least(log_tail_min, log_probs, given & ~held)
        ids = torch.where(held, ids, EMPTY)
        log_probs = torch.where(held, log_probs, -torch.inf)
        drawn = sampled_ids, sampled_log_probs
        ids, log_probs = _with_sampled(ids, log_probs, *drawn, counted, truncated, precision)
        _refuse_wrong_mass(log_probs, counted, truncated, precision)
        if truncated:
            log_probs = log_probs - torch.where(counted, log_probs.logsumexp(-1), 0.0)[..., None]
            nothing = torch.where(counted, -torch.inf, 0.0).to(dtype)
            support = SparseLogProbs(ids, log_probs, nothing)
        else:
            support = SparseLogProbs.from_log_probs(
                ids, log_probs, vocabulary_size=vocabulary_size, log_tail_min=log_tail_min
            )
        return cls(support, torch.where(counted, sampled_ids, 0), _spread_lag(lag, mask))

    def trimmed(self, mass: float) -> Self:
        """The same policy, of each token only the likeliest ids that hold `mass`, and the drawn one.

        What is left out joins the tail, exactly. Rows that hold every id that could have been drawn stay.

        Args:
            mass: in (0, 1].

        >>> ids, log_probs = torch.tensor([[[4, 7, 2]]]), torch.tensor([[[0.5, 0.3, 0.1]]]).log()
        >>> one = SampledPolicy.from_report(torch.tensor([[2]]), ids, log_probs, torch.ones(1, 1))
        >>> few = one.trimmed(0.4).support
        >>> few.ids.tolist(), [round(x, 3) for x in few.log_tail.exp().flatten().tolist()]
        ([[[4, 2]]], [0.4])
        """
        check_support_size(1, mass)
        ids, log_probs = _falling(self.support)
        used, drawn = ids != EMPTY, ids == self.sampled_ids[..., None]
        needed = (trim_to_mass(ids, log_probs, mass) != EMPTY) | self.truncated[..., None]
        held = (needed & used).sum(-1, keepdim=True)  # the first so many of each row
        slot = torch.arange(ids.shape[-1], device=ids.device)
        left_out = used & ~drawn & (slot >= held)
        least = _least(self.support.log_tail_min, log_probs, left_out)
        more = torch.where(left_out, log_probs, -torch.inf).logsumexp(-1)
        behind = drawn & (slot >= held)
        width = max(1, int((held + behind.any(-1, keepdim=True)).amax())) if ids.numel() else 1
        slot = slot[:width]
        own = behind.any(-1, keepdim=True) & (slot == held)
        few = torch.where(slot < held, ids[..., :width], EMPTY)
        values = torch.where(slot < held, log_probs[..., :width], -torch.inf)
        trimmed = SparseLogProbs(
            torch.where(own, self.sampled_ids[..., None].to(ids.dtype), few),
            torch.where(own, self.log_probs[..., None], values),
            torch.logaddexp(self.support.log_tail, more),
            least,
        )
        return replace(self, support=trimmed)

    @property
    def log_probs(self) -> Tensor:
        """Of the drawn tokens under the sampler, [B, T]: the denominator of the ratio."""
        return self.support.log_prob_of(self.sampled_ids)

    @property
    def truncated(self) -> Tensor:
        """Rows that hold every id that could have been drawn, [B, T] bool."""
        return torch.isneginf(self.support.log_tail)

    @property
    def rows(self) -> Tensor:
        """What has the leading dimensions of the tokens."""
        return self.support.log_probs

    def see(self, new: Tensor | SparseLogProbs) -> SparseLogProbs:
        """The network as this sampler's reports allow to see it: on the same outcomes, differentiable.

        Args:
            new: the network's logits or log-probabilities [B, T, V], or its `SparseLogProbs` on the ids of
                `support`.

        Raises:
            InvalidInputError: sparse log-probabilities on other ids.
        """
        if isinstance(new, Tensor):
            new = SparseLogProbs.at_ids(new, self.support.ids)
        elif new.ids.shape != self.support.ids.shape:
            raise InvalidInputError(
                f"The network was evaluated on ids {tuple(new.ids.shape)}, the sampler reported "
                f"{tuple(self.support.ids.shape)}. Evaluate it at support.ids."
            )
        return renormalise(new, self.truncated)

    def to(self, device: torch.device) -> SampledPolicy:
        """The same on another device."""
        of = self.support
        least, lag = (None if value is None else value.to(device) for value in (of.log_tail_min, self.lag))
        support = SparseLogProbs(of.ids.to(device), of.log_probs.to(device), of.log_tail.to(device), least)
        return SampledPolicy(support, self.sampled_ids.to(device), lag)

    def __getitem__(self, rows: Any) -> SampledPolicy:
        """Select rows: indexes the leading dimensions of all tensors."""
        return SampledPolicy(
            self.support[rows], self.sampled_ids[rows], None if self.lag is None else self.lag[rows]
        )


def _falling(support: SparseLogProbs) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities, the likeliest first; engines mostly report them so."""
    ids, log_probs = support.ids, support.log_probs
    if bool((log_probs[..., 1:] > log_probs[..., :-1]).any()):
        log_probs, order = log_probs.sort(-1, descending=True)
        ids = ids.gather(-1, order)
    return ids, log_probs


def renormalise(new: SparseLogProbs, truncated: Tensor) -> SparseLogProbs:
    """The network restricted to the ids of its support where `truncated` [...]; as it is elsewhere."""
    kept = torch.where(truncated[..., None], new.log_probs, 0.0).logsumexp(-1)
    return SparseLogProbs(
        new.ids,
        torch.where(truncated[..., None], new.log_probs - kept[..., None], new.log_probs),
        torch.where(truncated, -torch.inf, new.log_tail),
        new.log_tail_min,
    )


# ---------------------------------------------------------------------- what is refused


def _least(log_tail_min: Tensor | None, log_probs: Tensor, joins: Tensor) -> Tensor | None:
    """The smallest log-probability in the tail once some outcomes have joined it, [B, T]; None if unknown."""
    if log_tail_min is None or not log_probs.shape[-1]:
        return log_tail_min
    joined = torch.where(joins, log_probs, torch.inf).amin(-1)
    return torch.minimum(log_tail_min, joined.to(log_tail_min.dtype))


def _check_shapes(
    sampled_ids: Tensor, ids: Tensor, log_probs: Tensor, mask: Tensor, sampled_log_probs: Tensor | None
) -> None:
    tokens = tuple(sampled_ids.shape)
    own = None if sampled_log_probs is None else tuple(sampled_log_probs.shape)
    fitting = len(tokens) == 2 and tuple(mask.shape) == tokens and ids.shape == log_probs.shape
    if not (fitting and tuple(ids.shape[:-1]) == tokens and own in (None, tokens)):
        raise InvalidInputError(
            "A sampler's report needs sampled_ids and mask [B, T], ids and log_probs [B, T, K] and "
            f"sampled_log_probs [B, T] or none, got {tokens}, {tuple(mask.shape)}, {tuple(ids.shape)}, "
            f"{tuple(log_probs.shape)} and {own or 'none'}."
        )
    floating = [values.is_floating_point() for values in (sampled_ids, ids, log_probs)]
    if floating != [False, False, True]:
        raise InvalidInputError(
            "sampled_ids and ids must be integers and log_probs floating point, got "
            f"{sampled_ids.dtype}, {ids.dtype} and {log_probs.dtype}."
        )


def _refuse(bad: Tensor, what: str, remedy: str, **values: Tensor) -> None:
    """Name the first bad token [B, T] and its values, if there is one."""
    if not bool(bad.any()):
        return
    row, position = (int(index) for index in bad.nonzero()[0])
    count = int(bad.sum())
    shown = {name: value[row, position].item() for name, value in values.items()}
    raise InvalidInputError(
        f"sequence {row}, position {position}: {what.format(**shown)} ({count} token{'s' * (count > 1)} in "
        f"all). {remedy}"
    )


def _refuse_broken(
    ids: Tensor, sampled: Tensor, log_probs: Tensor, own: Tensor | None, counted: Tensor,
    vocabulary_size: int | None,
) -> None:  # fmt: skip
    """Numbers that are none, and ids that are none or twice."""
    used = ids != EMPTY
    nan = (used & log_probs.isnan()).any(-1)
    if own is not None:
        nan = nan | own.isnan()
    _refuse(
        counted & nan,
        "a reported log-probability is NaN",
        "The engine's logits overflowed or were all masked; look there, or leave the sequence out.",
    )
    largest = torch.iinfo(ids.dtype).max if vocabulary_size is None else vocabulary_size - 1
    wrong = used & ((ids < 0) | (ids > largest))
    _refuse(
        counted & wrong.any(-1),
        "the reported id {id} is not in the vocabulary",
        f"Ids lie in [0, {largest}], {EMPTY} marks an unused slot. Are engine and trainer on the same "
        "tokenizer?",
        id=ids.gather(-1, wrong.int().argmax(-1, keepdim=True)).squeeze(-1),
    )
    _refuse(
        counted & ((sampled < 0) | (sampled > largest)), "the sampled id {id} is not in the vocabulary",
        f"Ids lie in [0, {largest}]. Leave padding out of the mask.", id=sampled,
    )  # fmt: skip
    ordered = rising(torch.where(used, ids, EMPTY))
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != EMPTY)
    _refuse(
        counted & twice.any(-1),
        "an id is reported twice",
        "Merge the sampled token into the top K by its id instead of appending it.",
    )


def _with_sampled(
    ids: Tensor, log_probs: Tensor, sampled: Tensor, own: Tensor | None, counted: Tensor, truncated: bool,
    precision: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The drawn id has a slot in every counted row, with the log-probability it was drawn with."""
    there = ids == sampled[..., None]
    missing = counted & ~there.any(-1)
    reported = (ids != EMPTY).sum(-1)
    if truncated:
        _refuse(
            missing,
            "the set of {k} ids that sampling was restricted to does not hold the sampled id {id}",
            "Such a set cannot have been sampled from: pass the log-probabilities after truncation (vLLM: "
            'logprobs_mode="processed_logprobs") and ask for at least as many ids as sampling keeps.',
            id=sampled, k=reported,
        )  # fmt: skip
    if own is None:
        _refuse(
            missing,
            "the sampled id {id} is not among the {k} reported ids and its own log-probability is missing",
            "Ask the engine for the sampled token's log-probability besides the top K and pass it as "
            "sampled_log_probs.",
            id=sampled, k=reported,
        )  # fmt: skip
        return ids, log_probs
    own = own.detach().to(log_probs.dtype)
    _refuse(
        missing & ~(own.float().exp() > 0),
        "the sampled id {id} has log-probability {log_prob:.4g}, so it cannot have been sampled",
        "Pass the log-probabilities that were sampled from, after temperature and truncation.",
        id=sampled, log_prob=own,
    )  # fmt: skip
    listed = torch.where(there, log_probs, -torch.inf).amax(-1)
    apart = _ARITHMETIC + precision * listed.abs()
    _refuse(
        counted & there.any(-1) & ((own - listed).abs() > apart),
        "the sampled id {id} has log-probability {own:.6g} by itself and {listed:.6g} among the top K",
        "Both must be those that were sampled from: the same temperature, both after processing.",
        id=sampled, own=own, listed=listed,
    )  # fmt: skip
    if not bool(missing.any()):
        return ids, log_probs
    ids = torch.where(counted[..., None], append_kept_id(ids, sampled), EMPTY)
    log_probs = torch.cat((log_probs, own[..., None]), -1)
    return ids, torch.where(ids == EMPTY, -torch.inf, log_probs)


def _refuse_wrong_mass(log_probs: Tensor, counted: Tensor, truncated: bool, precision: float) -> None:
    probs = log_probs.double().exp()
    mass = probs.sum(-1)
    off = (mass - 1).abs() if truncated else mass - 1
    if not bool((counted & (off > _ARITHMETIC)).any()):
        return  # the rounding of each log-probability, which only allows more, need not be known
    # Of probabilities: what is far above 1 may not allow itself.
    surprise = (
        (probs.clamp_max(1) * torch.where(probs > 0, log_probs.double(), 0.0).clamp_max(0)).sum(-1).abs()
    )
    allowed = _ARITHMETIC + precision / 2 * surprise
    _refuse(
        counted & (mass > 1 + allowed),
        "the reported probabilities sum to {mass:.6f}, more than 1 by more than rounding ({allowed:.1e})",
        "Pass natural log-probabilities after temperature, as sampled from (vLLM: "
        'logprobs_mode="processed_logprobs"), not logits or scores.',
        mass=mass, allowed=allowed,
    )  # fmt: skip
    if truncated:
        _refuse(
            counted & (mass < 1 - allowed),
            "the reported probabilities sum to {mass:.6f}, but truncated=True says that nothing else could "
            "be sampled (rounding: {allowed:.1e})",
            "Ask for at least as many ids as sampling keeps (set top_k to at most that number), after "
            "truncation; or sample without truncation.",
            mass=mass, allowed=allowed,
        )  # fmt: skip


def _spread_lag(lag: Tensor | int | None, mask: Tensor) -> Tensor | None:
    if lag is None:
        return None
    given = torch.as_tensor(lag, device=mask.device)
    wrong = given.is_floating_point() or (given.dim() and given.shape not in (mask.shape[:1], mask.shape))
    if wrong or bool((given < 0).any()):
        raise InvalidInputError(
            "lag counts versions between the sampler and the trainer: an integer from 0, [B] or [B, T] of "
            f"them with [B, T] = {tuple(mask.shape)}; got {given.dtype} {tuple(given.shape)}"
            + (f" with {given.min().item()}." if given.numel() else ".")
        )
    return (given[:, None] if given.dim() == 1 else given).expand(mask.shape).long()
