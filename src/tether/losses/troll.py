"""TROLL: the policy gradient of the projected policy, plus a pull of the network towards it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import (
    PolicyLoss,
    check_tokens,
    masked_max,
    masked_mean,
    sequence_log_ratio,
)
from tether.losses.tokens import LARGEST_LOG_RATIO, read_tokens
from tether.projection import SparseLogProbs, certify, kl_categorical, project_categorical, project_sparse
from tether.projection.categorical import Region
from tether.projection.solve import may_ask
from tether.projection.sparse import EMPTY, Tail

Distribution = Tensor | SparseLogProbs
RatioLevel = Literal["token", "sequence"]


@dataclass(frozen=True)
class ProjectedTokens:
    """The sampled tokens of a batch under the projected policy, all [B, T]."""

    log_probs: Tensor
    """Of the sampled tokens under the projected policy; differentiable."""
    old_log_probs: Tensor
    """Of the sampled tokens under the old policy, as the ratio needs them."""
    regression: Tensor
    """KL(new || stopgrad(projected)); zero, with zero gradient, where nothing was projected."""
    kl: Tensor
    """KL(new || old) of each token before the projection."""
    step: Tensor
    """Step s in [0, 1] along the geodesic."""
    projected: Tensor
    """Where the projection acted, bool."""
    tail_mass: Tensor
    """New mass outside the support; zero for dense distributions."""
    certified: Tensor | None = None
    """Tokens proven to be inside the bound by the support alone, bool; None where nothing was asked of it."""
    uncertain: Tensor | None = None
    """Tokens that the support can prove neither inside nor outside, bool."""
    projected_kl: Tensor | None = None
    """KL(projected || old) of each token: the solved one where the projection acted, `kl` elsewhere. None
    under an infinite bound, where nothing is ever projected."""

    def metrics(self, response_mask: Tensor) -> dict[str, Tensor]:
        """What to watch: see `troll`."""
        acted = self.projected & (response_mask > 0)
        proofs = {
            name: masked_mean(proof.to(self.kl.dtype), response_mask)
            for name, proof in (("certified", self.certified), ("uncertain", self.uncertain))
            if proof is not None
        }
        after = {}
        if self.projected_kl is not None:
            after["kl_projected_mean"] = masked_mean(self.projected_kl, response_mask)
            after["kl_projected_max"] = masked_max(self.projected_kl, response_mask)
        return proofs | {
            "kl_mean": masked_mean(self.kl, response_mask),
            "kl_max": masked_max(self.kl, response_mask),
            **after,
            "projected": masked_mean(acted.to(self.kl.dtype), response_mask),
            "mean_step": torch.where(acted.any(), masked_mean(self.step, acted), 1.0),
            "regression": masked_mean(self.regression.detach(), response_mask),
            "tail_mass": masked_mean(self.tail_mass, response_mask),
        }


def project_tokens(
    log_probs: Tensor,
    old_log_probs: Tensor,
    response_mask: Tensor,
    response_ids: Tensor,
    new: Distribution,
    old: Distribution,
    *,
    kl_bound: float = 0.05,
    tail: Tail = "bucket",
    region: Region = "token",
) -> ProjectedTokens:
    """Project the distributions of a batch and read off the sampled tokens.

    Inside the bound, a token keeps the very `log_probs` given, which come from the whole vocabulary.
    For trainers that have an objective of their own; `troll` is the whole loss.

    Args:
        log_probs, old_log_probs: exact, of the sampled tokens, [B, T].
        response_mask: [B, T]; distributions under a zero mask are ignored.
        response_ids: the sampled tokens, [B, T] integer.
        new, old: log-probabilities [B, T, V], or `SparseLogProbs` [B, T, K] whose old ids hold
            every sampled token.
        kl_bound, tail, region: as in `tether.project_sparse`.

    Raises:
        InvalidInputError: shapes that do not fit, a sampled token outside the old support, or what
            the projection refuses.
    """
    counted = response_mask > 0
    _check_distributions(log_probs, response_ids, new, old)
    response_ids = torch.where(counted, response_ids, 0)  # padding may be anything, -100 for example
    options = _Options(kl_bound, region, counted if region == "sequence" else None)
    if isinstance(new, SparseLogProbs) and isinstance(old, SparseLogProbs):
        _check_sampled_kept(old, response_ids, counted)
        rows = _project_sparse_rows(new, old, counted, response_ids, tail, options)
        tail_mass = new.log_tail.detach().exp()
        if tail == "paper":  # whose code sees nothing but the renormalised supports
            log_probs, old_log_probs = rows.new_sampled, rows.old_sampled
    else:
        assert isinstance(new, Tensor)
        assert isinstance(old, Tensor)
        rows = _project_dense_rows(new, old, counted, response_ids, options)
        tail_mass = torch.zeros_like(log_probs)
    certified, uncertain = _prove(new, old, rows.kl, kl_bound, tail, region)
    step, projected = rows.step, rows.acted
    if region == "sequence":
        step, projected = (value[:, None].expand_as(log_probs) for value in (step, projected))
    projected = projected & counted
    return ProjectedTokens(
        log_probs=torch.where(projected, rows.sampled, log_probs),
        old_log_probs=old_log_probs,
        regression=_regression(rows.new, rows.projected.detach(), projected),
        kl=rows.kl,
        projected_kl=None if math.isinf(kl_bound) else _projected_kl(rows, projected),
        step=step,
        projected=projected,
        tail_mass=tail_mass,
        certified=certified,
        uncertain=uncertain,
    )


def _projected_kl(rows: _Rows, projected: Tensor) -> Tensor:
    """The divergence of each token's projection; summed over its outcomes, not read from the bound."""
    solved = kl_categorical(rows.projected.detach(), rows.old)
    return torch.where(projected, solved, rows.kl)


def _prove(
    new: Distribution, old: Distribution, kl: Tensor, kl_bound: float, tail: Tail, region: Region
) -> tuple[Tensor | None, Tensor | None]:
    """What the support proves of each token; nothing if the old policy's tail is unknown."""
    if not isinstance(new, SparseLogProbs) or not isinstance(old, SparseLogProbs):
        return None, None
    if old.log_tail_min is None or tail == "paper" or region == "sequence" or math.isinf(kl_bound):
        return None, None
    certificate = certify(new, old, kl_bound, kl=kl.detach())
    return certificate.inside, certificate.uncertain


@dataclass(frozen=True)
class _Options:
    kl_bound: float
    region: Region
    mask: Tensor | None


@dataclass(frozen=True)
class _Rows:
    """One projection, dense or sparse, as rows of outcomes [B, T, ...] and the sampled tokens' entries."""

    new: Tensor
    old: Tensor
    projected: Tensor
    new_sampled: Tensor
    old_sampled: Tensor
    sampled: Tensor
    step: Tensor
    acted: Tensor
    kl: Tensor


def _project_sparse_rows(
    new: SparseLogProbs,
    old: SparseLogProbs,
    counted: Tensor,
    response_ids: Tensor,
    tail: Tail,
    options: _Options,
) -> _Rows:
    new, old = _blank(new, counted, tail), _blank(old.detach(), counted, tail)
    result = project_sparse(new, old, options.kl_bound, tail=tail, region=options.region, mask=options.mask)
    return _Rows(
        new=result.new.with_buckets(),
        old=result.old.with_buckets(),
        projected=result.log_probs.with_buckets(),
        new_sampled=result.new.log_prob_of(response_ids),
        old_sampled=result.old.log_prob_of(response_ids),
        sampled=result.log_probs.log_prob_of(response_ids),
        step=result.step,
        acted=result.projected,
        kl=_token_kl(result.kl, result.new.with_buckets(), result.old.with_buckets(), options.region),
    )


def _project_dense_rows(
    new: Tensor, old: Tensor, counted: Tensor, response_ids: Tensor, options: _Options
) -> _Rows:
    dtype = torch.promote_types(torch.promote_types(new.dtype, old.dtype), torch.float32)
    new = torch.where(counted[..., None], new.to(dtype), 0.0)
    old = torch.where(counted[..., None], old.detach().to(dtype), 0.0)
    result = project_categorical(new, old, options.kl_bound, region=options.region, mask=options.mask)
    index = response_ids[..., None].long()
    return _Rows(
        new=new,
        old=old,
        projected=result.log_probs,
        new_sampled=new.gather(-1, index).squeeze(-1),
        old_sampled=old.gather(-1, index).squeeze(-1),
        sampled=result.log_probs.gather(-1, index).squeeze(-1),
        step=result.step,
        acted=result.projected,
        kl=_token_kl(result.kl, new, old, options.region),
    )


def troll(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    response_ids: Tensor,
    new: Distribution,
    old: Distribution,
    kl_bound: float = 0.05,
    alpha: float = 1.0,
    tail: Tail = "bucket",
    region: Region = "token",
    ratio_level: RatioLevel = "token",
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """Minimise -π(o)/q(o) A + alpha KL(p ‖ sg[π]), with π the projection of p on KL(π ‖ q) <= bound.

    p is the network's distribution of a token, q the old policy's, o the sampled token. Where p is
    inside the bound, π = p and the loss is the plain policy gradient. Where it is outside, the ratio
    is that of the projection, whose gradient has no component that would leave the region further,
    and the regression pulls the network back to the projection.

    With ``ratio_level="sequence"`` the ratio is GSPO's, the geometric mean over the sequence's
    projected token ratios; use ``loss_agg_mode="seq-mean-token-mean"`` with it, as GSPO does.

    Args:
        log_probs, old_log_probs: exact log-probabilities of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        response_ids: the sampled tokens, [B, T] integer.
        new, old: the distributions: log-probabilities [B, T, V], or `SparseLogProbs` [B, T, K].
        kl_bound: in nats, a token (or a sequence's mean token); `math.inf` for no trust region.
        alpha: weight of the regression, not negative.
        tail, region: as in `tether.project_sparse`.
        ratio_level: "token" or "sequence".
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.

    Returns:
        The loss, and metrics `kl_mean`, `kl_max` (before the projection), `kl_projected_mean`,
        `kl_projected_max` (after it; not under an infinite bound), `projected` (fraction), and, if `old` has
        a `log_tail_min`, `certified` and `uncertain` (fractions; see `ProjectedTokens`),
        `mean_step` (over projected tokens, 1 if there are none), `regression`, `entropy` (of the given
        distribution: a sparse one's is a lower bound), `tail_mass`, `ratio_mean`, `ratio_max`.

    Raises:
        InvalidInputError: shapes that do not fit, negative alpha, or what the projection refuses.

    Source: TROLL (arXiv 2510.03817, eq. 5-7).

    Example:
        >>> import torch
        >>> old = torch.tensor([[[0.7, 0.2, 0.1]]]).log()
        >>> new = torch.tensor([[[0.1, 0.2, 0.7]]]).log().requires_grad_()
        >>> ids, mask = torch.tensor([[2]]), torch.ones(1, 1)
        >>> result = troll(new[..., 2], old[..., 2], torch.ones(1), mask, response_ids=ids, new=new, old=old)
        >>> round(result.metrics["ratio_max"].item(), 2), result.metrics["projected"].item()
        (1.88, 1.0)
    """
    check_tokens(log_probs, old_log_probs, advantages, response_mask)
    if not alpha >= 0:
        raise InvalidInputError(f"alpha must not be negative, got {alpha!r}.")
    if ratio_level not in ("token", "sequence"):
        raise InvalidInputError(f'ratio_level must be "token" or "sequence", got {ratio_level!r}.')
    projected = project_tokens(
        log_probs, old_log_probs, response_mask, response_ids, new, old,
        kl_bound=kl_bound, tail=tail, region=region,
    )  # fmt: skip
    tokens = read_tokens(projected.log_probs, projected.old_log_probs, advantages, response_mask)
    ratio = tokens.ratio
    if ratio_level == "sequence":
        ratio = sequence_log_ratio(tokens.log_ratio, response_mask).clamp_max(LARGEST_LOG_RATIO).exp()
    token_loss = -ratio * tokens.advantages
    if alpha > 0:
        token_loss = token_loss + alpha * projected.regression
    loss = aggregate(token_loss, response_mask, loss_agg_mode, max_response_length=max_response_length)
    metrics = projected.metrics(response_mask) | tokens.metrics(ratio)
    metrics["entropy"] = masked_mean(_entropy(new), response_mask)
    return PolicyLoss(loss, metrics)


def _regression(new: Tensor, projected: Tensor, where: Tensor) -> Tensor:
    """KL(new || projected) of the rows in `where`, zero elsewhere.

    Outcomes that the old policy, and so the projection, cannot produce are left out: their term is
    infinite, and no finite pull removes them.
    """
    counted = where[..., None] & ~torch.isneginf(new) & ~torch.isneginf(projected)
    log_new = torch.where(counted, new, 0.0)
    terms = log_new.exp() * (log_new - torch.where(counted, projected, 0.0))
    return torch.where(counted, terms, 0.0).sum(-1)


def _entropy(distribution: Distribution) -> Tensor:
    if isinstance(distribution, SparseLogProbs):
        return distribution.detach().entropy()
    log_probs = distribution.detach()
    log_probs = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    return -torch.where(torch.isneginf(log_probs), 0.0, log_probs.exp() * log_probs).sum(-1)


def _token_kl(region_kl: Tensor, new: Tensor, old: Tensor, region: Region) -> Tensor:
    """The divergence of each token, which a sequence's projection only knows in the mean."""
    return region_kl if region == "token" else kl_categorical(new.detach(), old)


def _blank(distribution: SparseLogProbs, counted: Tensor, tail: Tail) -> SparseLogProbs:
    """The same in float32 at least, but certain of one outcome in rows that do not count.

    That is the tail, or id 0 where the tail is not looked at.
    """
    ids = distribution.ids
    dtype = torch.promote_types(distribution.log_probs.dtype, torch.float32)
    blank = torch.full((ids.shape[-1],), -torch.inf, dtype=dtype, device=ids.device)
    if tail == "paper":
        blank[0] = 0.0
        only_first = torch.full_like(ids, EMPTY)
        only_first[..., 0] = 0
        ids = torch.where(counted[..., None], ids, only_first)
    return SparseLogProbs(
        ids,
        torch.where(counted[..., None], distribution.log_probs.to(dtype), blank),
        torch.where(counted, distribution.log_tail.to(dtype), -torch.inf if tail == "paper" else 0.0),
    )


def _check_distributions(log_probs: Tensor, ids: Tensor, new: Distribution, old: Distribution) -> None:
    if isinstance(new, SparseLogProbs) != isinstance(old, SparseLogProbs):
        raise InvalidInputError(
            "new and old must both be log-probabilities [B, T, V] or both SparseLogProbs, got "
            f"{type(new).__name__} and {type(old).__name__}."
        )
    for name, value in (("new", new), ("old", old)):
        rows = value.log_probs if isinstance(value, SparseLogProbs) else value
        if rows.shape[:-1] != log_probs.shape:
            raise InvalidInputError(
                f"{name} must be [B, T, outcomes] with [B, T] = {tuple(log_probs.shape)}, "
                f"got {tuple(rows.shape)}."
            )
    if ids.shape != log_probs.shape:
        raise InvalidInputError(f"response_ids must be {tuple(log_probs.shape)}, got {tuple(ids.shape)}.")


def _check_sampled_kept(old: SparseLogProbs, response_ids: Tensor, counted: Tensor) -> None:
    """Every sampled token must be in the old support, or its ratio would silently be zero."""
    missing = counted & ~(old.ids == response_ids[..., None]).any(-1)
    if not may_ask(missing):
        torch._assert_async(~missing.any(), "troll: a sampled token is not among the old policy's ids")
    elif bool(missing.any()):
        raise InvalidInputError(
            f"{int(missing.sum())} sampled tokens are not among the old policy's ids. Build the support with "
            "SparseLogProbs.from_logits(..., keep_ids=response_ids)."
        )
