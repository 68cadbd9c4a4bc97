"""What is done for the data of a sampler: the network on its outcomes, bounds by token, and weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.ops import linear_log_probs
from tether.ops.hidden_states import HiddenStates
from tether.projection.sampled import SampledPolicy
from tether.projection.sparse import SparseLogProbs
from tether.projection.support import check_ids
from tether.projection.tokens import ProjectedTokens, put_back
from tether.settings import LagBound, Region, is_number

Bound = float | Tensor | LagBound
"""One number, a number a token [B, T], or one that follows from the token's lag."""


def seen_by_sampler(
    new: Tensor | SparseLogProbs | HiddenStates,
    old: SampledPolicy,
    counted: Tensor,
    log_probs: Tensor | None,
) -> tuple[SparseLogProbs, Tensor | None]:
    """The network on the sampler's outcomes, and its log-probabilities of the drawn tokens there, if given.

    Where sampling was truncated, those are of the network renormalised on the same set.
    """
    if not isinstance(new, SparseLogProbs):
        new = _at_reported_ids(new, old.support.ids, counted)
    seen = old.see(new)
    if log_probs is not None:
        drawn = seen.log_prob_of(old.sampled_ids).to(log_probs.dtype)
        log_probs = torch.where(old.truncated & counted, drawn, log_probs)
    return seen, log_probs


def _at_reported_ids(new: Tensor | HiddenStates, ids: Tensor, counted: Tensor) -> SparseLogProbs:
    """Of the tokens that count alone: under a zero mask, a distribution may hold anything."""
    at = counted.nonzero(as_tuple=True)
    if isinstance(new, Tensor):
        check_ids(ids, new.shape[-1])
        few = SparseLogProbs.at_ids(new[at], ids[at])
    else:
        few = _of_hidden_states(new, new.hidden[at], ids[at])
    spread = functools.partial(put_back, at=at, shape=counted.shape)
    least = None if few.log_tail_min is None else spread(few.log_tail_min)
    return SparseLogProbs(ids, spread(few.log_probs, fill=-torch.inf), spread(few.log_tail), least)


def _of_hidden_states(new: HiddenStates, hidden: Tensor, ids: Tensor) -> SparseLogProbs:
    """Without ever forming the logits of a batch."""
    if new.weight is None:
        raise InvalidInputError("The new policy's HiddenStates need the weight of their LM head, [V, D].")
    vocabulary = new.head.vocabulary_size or new.weight.shape[0]
    rows = linear_log_probs(
        hidden,
        new.weight,
        ids,
        bias=new.bias,
        temperature=new.head.temperature,
        logit_scale=new.head.logit_scale,
        softcap=new.head.softcap,
        vocabulary_size=new.head.vocabulary_size,
        weights_at_hand=new.head.weights_at_hand,
    )
    return SparseLogProbs.from_log_probs(ids, rows.log_probs, vocabulary_size=vocabulary)


def truncated_weights(
    log_probs: Tensor, sampler_log_probs: Tensor, mask: Tensor, *, largest: float = 2.0
) -> Tensor:
    """min(pi_prox / mu, largest) of each token, [B, T]: what weighs the decoupled form's policy gradient.

    The decoupled form projects around a recent policy of the trainer's, pi_prox, and corrects for the sampler
    mu by this weight, a constant of the update: pass it as ``policy_weights``.

    Args:
        log_probs: of the drawn tokens under the proximal policy, [B, T].
        sampler_log_probs: of the same tokens under the sampler, [B, T].
        mask: [B, T]; 1 where it is zero.
        largest: truncation; 2 is the default of verl's ``rollout_is_threshold`` and of ms-swift's
            ``rollout_importance_sampling_threshold``; `math.inf` for none.

    Raises:
        InvalidInputError: shapes that differ, or a truncation that is not positive.

    Source: the decoupled objective, PPO-EWMA (arXiv 2110.00641) and AReaL (arXiv 2505.24298); truncated
    importance sampling, Ionides, "Truncated importance sampling" (2008).

    Example:
        >>> import torch
        >>> prox, mu = torch.tensor([[0.5, 0.1]]).log(), torch.tensor([[0.1, 0.2]]).log()
        >>> truncated_weights(prox, mu, torch.ones(1, 2)).tolist()
        [[2.0, 0.5]]
    """
    if not (is_number(largest) and largest > 0):
        raise InvalidInputError(f"largest must be positive, got {largest!r}; 2 is usual, math.inf for none.")
    if not log_probs.shape == sampler_log_probs.shape == mask.shape:
        raise InvalidInputError(
            "log_probs, sampler_log_probs and mask must have one shape, got "
            f"{tuple(log_probs.shape)}, {tuple(sampler_log_probs.shape)} and {tuple(mask.shape)}."
        )
    log_probs = log_probs.detach().to(torch.promote_types(log_probs.dtype, torch.float32))
    log_ratio = torch.where(mask > 0, log_probs - sampler_log_probs, 0.0)
    return torch.where(mask > 0, log_ratio.exp().clamp_max(largest), 1.0)


def bound_of_tokens(kl_bound: Bound, old: Any, mask: Tensor) -> float | Tensor:
    """A number, or one for each token, [B, T].

    Raises:
        InvalidInputError: a growing `LagBound` for data whose lag nobody knows, or bounds of another shape.
    """
    if isinstance(kl_bound, LagBound) and kl_bound.growth == "constant":
        return kl_bound.kl_bound
    if isinstance(kl_bound, LagBound):
        lag = old.lag if isinstance(old, SampledPolicy) else None
        if lag is None:
            raise InvalidInputError(
                "kl_bound is a LagBound, but nothing says how old the data are. Pass "
                "old=SampledPolicy.from_report("
                "..., lag=...), or a tensor of bounds [B, T]."
            )
        return kl_bound.at(lag)
    if not isinstance(kl_bound, Tensor):
        return kl_bound
    if kl_bound.dim() != 1:  # of sequences or of positions? Where B is T, nothing tells them apart.
        with suppress(RuntimeError):
            return kl_bound.expand(mask.shape)
    raise InvalidInputError(
        f"kl_bound must be a number or expand to [B, T] = {tuple(mask.shape)} from [B, 1] or [1, T], got "
        f"{tuple(kl_bound.shape)}."
    )


def project_each_bound(
    project: Callable[..., ProjectedTokens],
    bounds: Tensor,
    policies: tuple[Any, Any],
    response_ids: Tensor,
    mask: Tensor,
    log_probs: Tensor | None,
    old_log_probs: Tensor | None,
    region: Region,
) -> ProjectedTokens:
    """`project` of the tokens under each bound in turn, [B, T] put together again.

    Lags are whole numbers and few differ in a batch, so that there are few groups.

    Raises:
        InvalidInputError: ``region="sequence"`` with two bounds in one sequence.
    """
    counted = mask > 0
    values = bounds[counted].unique().tolist()
    if len(values) <= 1:
        bound = values[0] if values else 1.0  # without a token, any
        return project(
            *policies, response_ids, mask, log_probs=log_probs, old_log_probs=old_log_probs, kl_bound=bound
        )
    parts = []
    for value in values:
        chosen = counted & (bounds == value)
        if region == "sequence":
            chosen = _whole_sequences(chosen, counted)
        parts.append((chosen, _project_some(project, chosen, policies, response_ids, log_probs, old_log_probs,
                                            region, kl_bound=value)))  # fmt: skip
    if any(part.projected_kl is not None for _, part in parts):
        # Under an infinite bound it is not formed: nothing was projected there.
        parts = [
            (chosen, part if part.projected_kl is not None else replace(part, projected_kl=part.kl))
            for chosen, part in parts
        ]
    names = set.intersection(*(set(part.known()) for _, part in parts))
    return ProjectedTokens(
        **{name: _together([(c, part.known()[name]) for c, part in parts]) for name in names}
    )


def _whole_sequences(chosen: Tensor, counted: Tensor) -> Tensor:
    rows = chosen.any(-1, keepdim=True)
    if bool((rows & counted & ~chosen).any()):
        raise InvalidInputError(
            'region="sequence" bounds the mean over a sequence, so its tokens must share one bound. Give '
            "each "
            'sequence one lag, or use region="token".'
        )
    return counted & rows


def _project_some(
    project: Callable[..., ProjectedTokens],
    chosen: Tensor,
    policies: tuple[Any, Any],
    response_ids: Tensor,
    log_probs: Tensor | None,
    old_log_probs: Tensor | None,
    region: Region,
    *,
    kl_bound: float,
) -> ProjectedTokens:
    """Of the chosen tokens alone, [B, T] with anything elsewhere."""
    if region == "sequence" or isinstance(policies[0], HiddenStates):  # which evaluate counted tokens alone
        return project(*policies, response_ids, chosen, log_probs=log_probs, old_log_probs=old_log_probs,
                       kl_bound=kl_bound)  # fmt: skip

    at = chosen.nonzero(as_tuple=True)

    def pick(values: Any) -> Any:
        return None if values is None else values[at][None]

    few = project(
        *(pick(policy) for policy in policies), pick(response_ids), torch.ones_like(pick(response_ids)),
        log_probs=pick(log_probs), old_log_probs=pick(old_log_probs), kl_bound=kl_bound,
    )  # fmt: skip
    return few.each(lambda values: put_back(values[0], at, chosen.shape))


def _together(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    whole = torch.zeros_like(parts[0][1])
    for chosen, values in parts:
        whole = torch.where(chosen, values, whole)
    return whole
