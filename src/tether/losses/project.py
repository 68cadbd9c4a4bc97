"""The trust region on the sampled tokens of a batch, whatever is known of the two policies."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.losses.sampler import Bound, bound_of_tokens, project_each_bound, seen_by_sampler
from tether.ops import linear_trust_region
from tether.ops.hidden_states import HiddenStates
from tether.projection import (
    CategoricalProjection,
    SparseLogProbs,
    certify,
    kl_categorical,
    project_categorical,
)
from tether.projection.divergence import normalised
from tether.projection.sampled import SampledPolicy
from tether.projection.solve import may_ask
from tether.projection.sparse import EMPTY, on_one_support
from tether.projection.support import check_ids
from tether.projection.tokens import ProjectedTokens, put_back
from tether.settings import Region, SparseSupport, TROLLSettings, check_choice

Policy = Tensor | SparseLogProbs | HiddenStates
"""What is known of a policy at the tokens [B, T]: whole log-probabilities [B, T, V], those of a few ids with
the mass of all others, or the hidden states and the LM head that make them."""


def project_tokens(
    new: Policy,
    old: Policy | SampledPolicy,
    response_ids: Tensor,
    response_mask: Tensor,
    *,
    log_probs: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    kl_bound: Bound = TROLLSettings.kl_bound,
    support: SparseSupport = "bucket",
    region: Region = TROLLSettings.region,
) -> ProjectedTokens:
    """Project the distributions of a batch and read off the sampled tokens.

    Solves argmin_π KL(π ‖ new) subject to KL(π ‖ old) <= kl_bound for each token. Inside the bound, a token
    keeps the very `log_probs` given (but for hidden states on both sides, whose own are formed on the way and
    taken instead). For trainers that have an objective of their own; `troll` is the whole
    loss.

    Args:
        new, old: both policies in one form (see `Policy`). A sparse old policy's ids must hold every sampled
            token. Or `old` is the policy that sampled, from its engine's report (`SampledPolicy`), and `new`
            in any form; where sampling was truncated, the result is of `new` renormalised on the same set.
        response_ids: the sampled tokens, [B, T] integer.
        response_mask: [B, T]; distributions under a zero mask are ignored.
        log_probs, old_log_probs: exact, of the sampled tokens, [B, T]; by default those in `new` and `old`
            (of an old policy's hidden states they are not formed).
        kl_bound, region: as in `tether.project_categorical`. Bounds may differ by token, [B, T], or follow
            from the lag of a `SampledPolicy` (`LagBound`).
        support: of sparse policies, as in `tether.project_sparse`. With "paper" the sampled tokens'
            log-probabilities are those of the renormalised supports, as in the paper's code, and
            `log_probs` and `old_log_probs` are not looked at.

    Raises:
        InvalidInputError: shapes or forms that do not fit, a sampled token outside the old support, or what
            the projection refuses.

    Source: TROLL (arXiv 2510.03817, section 3 and 4).

    Example:
        >>> import torch
        >>> old = torch.tensor([[[0.7, 0.2, 0.1]]]).log()
        >>> new = torch.tensor([[[0.1, 0.2, 0.7]]]).log()
        >>> tokens = project_tokens(new, old, torch.tensor([[2]]), torch.ones(1, 1))
        >>> bool(tokens.projected), round(tokens.projected_log_probs.exp().item(), 3)
        (True, 0.188)
    """
    check_choice("region", region, get_args(Region))
    check_choice("support", support, get_args(SparseSupport))
    if support == "paper" and not (isinstance(new, SparseLogProbs) and isinstance(old, SparseLogProbs)):
        _refuse_papers_support(new, old)
    counted = response_mask > 0
    check_shapes(new, old, response_ids, response_mask, log_probs=log_probs, old_log_probs=old_log_probs)
    response_ids = torch.where(counted, response_ids, 0)  # padding may be anything, -100 for example
    kl_bound = bound_of_tokens(kl_bound, old, response_mask)
    if isinstance(old, SampledPolicy):
        _check_of_sampler(old, response_ids, counted)
        new, log_probs = seen_by_sampler(new, old, counted, log_probs)
        old_log_probs = old.log_probs if old_log_probs is None else old_log_probs
        old = old.support
    if isinstance(kl_bound, Tensor):
        project = functools.partial(project_tokens, support=support, region=region)
        return project_each_bound(
            project, kl_bound, (new, old), response_ids, response_mask, log_probs, old_log_probs, region
        )
    if isinstance(new, HiddenStates) and isinstance(old, HiddenStates):
        return _project_hidden_states(new, old, response_ids, counted, old_log_probs, kl_bound, region)
    outcomes = _outcomes(new, old, response_ids, counted, support)
    mask = counted if region == "sequence" else None
    result = project_categorical(outcomes.new, outcomes.old, kl_bound, region=region, mask=mask)
    if log_probs is None or support == "paper":  # whose code sees nothing but the renormalised supports
        log_probs = outcomes.sampled(outcomes.new)
    if old_log_probs is None or support == "paper":
        old_log_probs = outcomes.sampled(outcomes.old)
    kl, step, projected, converged = result.kl, result.step, result.projected, result.converged
    if region == "sequence":  # whose projection knows the divergence of its tokens in the mean alone
        kl = kl_categorical(outcomes.new.detach(), outcomes.old)
        step, projected, converged = (value[:, None].expand_as(kl) for value in (step, projected, converged))
    projected = projected & counted
    certified, uncertain = _prove(new, old, kl, kl_bound, support, region)
    # Whole distributions that were rounded to half precision have a mass that is off by a percent.
    pulled = normalised(outcomes.new) if isinstance(new, Tensor) else outcomes.new
    return ProjectedTokens(
        new_log_probs=log_probs,
        old_log_probs=old_log_probs,
        projected_log_probs=torch.where(projected, outcomes.sampled(result.log_probs), log_probs),
        regression=_regression(pulled, result.log_probs.detach(), projected),
        kl=kl,
        projected_kl=None if math.isinf(kl_bound) else _projected_kl(result, outcomes, projected, kl),
        step=step,
        projected=projected,
        tail_mass=new.log_tail.detach().exp() if isinstance(new, SparseLogProbs) else torch.zeros_like(kl),
        certified=certified,
        uncertain=uncertain,
        converged=converged,
    )


def _project_hidden_states(
    new: HiddenStates,
    old: HiddenStates,
    response_ids: Tensor,
    counted: Tensor,
    old_log_probs: Tensor | None,
    kl_bound: float,
    region: Region,
) -> ProjectedTokens:
    """`linear_trust_region` of the tokens that count, put back into their places [B, T].

    Raises:
        InvalidInputError: a new policy without its LM head, or what `linear_trust_region` refuses.
    """
    if new.weight is None:
        raise InvalidInputError("The new policy's HiddenStates need the weight of their LM head, [V, D].")
    # Positions, found once: each use of the mask itself would make an accelerator's host wait for them.
    at = counted.nonzero(as_tuple=True)
    rows = linear_trust_region(
        new.hidden[at],
        new.weight,
        response_ids[at],
        old.hidden[at],
        kl_bound=kl_bound,
        bias=new.bias,
        old_weight=old.weight,
        old_bias=old.bias,
        old_support=None if old.support is None else old.support[at],
        sequences=at[0] if region == "sequence" else None,
        temperature=new.head.temperature,
        logit_scale=new.head.logit_scale,
        softcap=new.head.softcap,
        vocabulary_size=new.head.vocabulary_size,
        weights_at_hand=new.head.weights_at_hand,
    )
    tokens = rows.each(lambda values: put_back(values, at, counted.shape))
    return tokens if old_log_probs is None else replace(tokens, old_log_probs=old_log_probs)


@dataclass(frozen=True)
class _Outcomes:
    """Both policies as log-probabilities of the same outcomes, [B, T, O]; the old one without gradient."""

    new: Tensor
    old: Tensor
    index: Tensor
    """Which outcome was sampled, [B, T]."""

    def sampled(self, log_probs: Tensor) -> Tensor:
        """Of the sampled outcomes."""
        return log_probs.gather(-1, self.index[..., None]).squeeze(-1)


def _outcomes(
    new: Policy, old: Policy, response_ids: Tensor, counted: Tensor, support: SparseSupport
) -> _Outcomes:
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        dtype = torch.promote_types(torch.promote_types(new.dtype, old.dtype), torch.float32)
        new, old = (torch.where(counted[..., None], side.to(dtype), 0.0) for side in (new, old.detach()))
        check_ids(response_ids, new.shape[-1], lowest=0)
        return _Outcomes(new, old, response_ids.long())
    if isinstance(new, SparseLogProbs) and isinstance(old, SparseLogProbs):
        _check_sampled_kept(old, response_ids, counted)
        new, old = on_one_support(
            _blank(new, counted, support), _blank(old.detach(), counted, support), support
        )
        index = (new.ids == response_ids[..., None]).int().argmax(-1)
        return _Outcomes(new.with_buckets(), old.with_buckets(), index)
    raise InvalidInputError(
        "new and old must come in one form, both as log-probabilities [B, T, V], SparseLogProbs or "
        f"HiddenStates, got {type(new).__name__} and {type(old).__name__}."
    )


def _projected_kl(
    result: CategoricalProjection, outcomes: _Outcomes, projected: Tensor, kl: Tensor
) -> Tensor:
    """The divergence of each token's projection; summed over its outcomes, not read from the bound."""
    return torch.where(projected, kl_categorical(result.log_probs.detach(), outcomes.old), kl)


def _prove(
    new: Policy, old: Policy, kl: Tensor, kl_bound: float, support: SparseSupport, region: Region
) -> tuple[Tensor | None, Tensor | None]:
    """What the support proves of each token; nothing if the old policy's tail is unknown."""
    if not isinstance(new, SparseLogProbs) or not isinstance(old, SparseLogProbs):
        return None, None
    if old.log_tail_min is None or support == "paper" or region == "sequence" or math.isinf(kl_bound):
        return None, None
    certificate = certify(new, old, kl_bound, kl=kl.detach())
    return certificate.inside, certificate.uncertain


def _regression(new: Tensor, projected: Tensor, where: Tensor) -> Tensor:
    """KL(new || projected) of the rows in `where`, zero elsewhere.

    Outcomes that the old policy, and so the projection, cannot produce are left out: their term is
    infinite, and no finite pull removes them.
    """
    counted = where[..., None] & ~torch.isneginf(new) & ~torch.isneginf(projected)
    log_new = torch.where(counted, new, 0.0)
    terms = log_new.exp() * (log_new - torch.where(counted, projected, 0.0))
    return torch.where(counted, terms, 0.0).sum(-1)


def _blank(distribution: SparseLogProbs, counted: Tensor, support: SparseSupport) -> SparseLogProbs:
    """The same in float32 at least, but certain of one outcome in rows that do not count.

    That is the tail, or id 0 where the tail is not looked at.
    """
    ids = distribution.ids
    dtype = torch.promote_types(distribution.log_probs.dtype, torch.float32)
    blank = torch.full((ids.shape[-1],), -torch.inf, dtype=dtype, device=ids.device)
    if support == "paper":
        blank[0] = 0.0
        only_first = torch.full_like(ids, EMPTY)
        only_first[..., 0] = 0
        ids = torch.where(counted[..., None], ids, only_first)
    return SparseLogProbs(
        ids,
        torch.where(counted[..., None], distribution.log_probs.to(dtype), blank),
        torch.where(counted, distribution.log_tail.to(dtype), -torch.inf if support == "paper" else 0.0),
    )


def _refuse_papers_support(new: Policy, old: Policy | SampledPolicy) -> None:
    if isinstance(old, SampledPolicy):
        known = "a sampler's report knows their exact mass"
    else:
        known = f"new and old are not both SparseLogProbs ({type(new).__name__} and {type(old).__name__})"
    raise InvalidInputError(
        f'support="paper" gives ids outside the support an invented probability, and {known}. Use '
        'support="bucket".'
    )


def _check_of_sampler(old: SampledPolicy, ids: Tensor, counted: Tensor) -> None:
    if bool((counted & (old.sampled_ids != ids)).any()):
        row, position = (int(i) for i in (counted & (old.sampled_ids != ids)).nonzero()[0])
        raise InvalidInputError(
            f"sequence {row}, position {position}: the sampler reported to have drawn id "
            f"{int(old.sampled_ids[row, position])}, the response has {int(ids[row, position])}. Align "
            "records and "
            "responses; never re-tokenise what was sampled."
        )


def check_shapes(
    new: Policy, old: Policy | SampledPolicy, ids: Tensor, mask: Tensor, **log_probs: Tensor | None
) -> None:
    """Refuse policies, ids, masks and log-probabilities that are not all of the tokens [B, T]."""
    if mask.shape != ids.shape or ids.dim() != 2:
        raise InvalidInputError(
            f"response_ids and response_mask must both be [B, T], got {tuple(ids.shape)} and "
            f"{tuple(mask.shape)}."
        )
    check_ids(ids, 0, name="response_ids")  # their type: which there may be, the policies know
    for name, policy in (("new", new), ("old", old)):
        rows = policy if isinstance(policy, Tensor) else policy.rows
        if rows.shape[:-1] != ids.shape:
            raise InvalidInputError(
                f"{name} must be [B, T, outcomes] with [B, T] = {tuple(ids.shape)}, got {tuple(rows.shape)}."
            )
    for name, values in log_probs.items():
        if values is not None and values.shape != ids.shape:
            raise InvalidInputError(
                f"{name} must be [B, T] = {tuple(ids.shape)}, of sampled tokens, got {tuple(values.shape)}."
            )


def _check_sampled_kept(old: SparseLogProbs, response_ids: Tensor, counted: Tensor) -> None:
    """Every sampled token must be in the old support, or its ratio would silently be zero."""
    missing = counted & ((response_ids < 0) | ~(old.ids == response_ids[..., None]).any(-1))
    if not may_ask(missing):
        torch._assert_async(~missing.any(), "troll: a sampled token is not among the old policy's ids")
    elif bool(missing.any()):
        raise InvalidInputError(
            f"{int(missing.sum())} sampled tokens are not among the old policy's ids. Build the support with "
            "SparseLogProbs.from_logits(..., keep_ids=response_ids)."
        )
