"""TROLL for engines whose custom loss is handed the logits of a batch.

Two functions that take the response tokens as one flat list of rows, which is what such engines have
(packed sequences, sequence-parallel slices, tensor-parallel columns):

- `record_old_policy` in the pass that scores the rollouts, before the first update;
- `project_on_old_policy` in every update.

`tether.integrations.verl` is built on them; `docs/other_engines.md` shows them in other engines' hooks.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.losses import ProjectedTokens, project_tokens, troll_objective
from tether.ops.logits import VocabularyShard, logits_least_id, logits_log_probs, logits_top_ids
from tether.projection import SparseLogProbs
from tether.projection.support import check_ids
from tether.projection.tokens import put_back
from tether.settings import SparseSupport, TROLLSettings, check_choice


def record_old_policy(
    logits: Tensor,
    sampled_ids: Tensor,
    *,
    top_k: int = TROLLSettings.top_k,
    mass: float = TROLLSettings.mass,
    rows: Tensor | None = None,
    shard: VocabularyShard | None = None,
) -> SparseLogProbs:
    """Keep what the trust region needs of the policy that gathered the data.

    Args:
        logits: [M, V], divided by the sampling temperature; with `shard` this process's columns.
        sampled_ids: the token that was sampled from each row, [N] integer.
        top_k, mass: keep this many of the most likely ids, or fewer once they hold so much probability.
            The sampled token is always kept.
        rows: which rows of the logits predict the N tokens, [N]; all of them if not given.
        shard: for a vocabulary that is split over processes.

    Returns:
        A distribution a token, [N, K + 1] float32, without gradient, with what certificates need.

    Raises:
        InvalidInputError: shapes that do not fit, an impossible `top_k` or `mass`, or NaN among the logits.

    Source: TROLL (arXiv 2510.03817, section 4); the exact tail mass is ours.

    Example:
        >>> import torch
        >>> old = record_old_policy(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([3]), top_k=2)
        >>> old.ids.tolist(), round(old.log_tail.exp().item(), 3)
        ([[0, 1, 3]], 0.087)
    """
    _check_rows(logits, sampled_ids, rows, shard)
    with torch.no_grad():
        top = logits_top_ids(logits, top_k, rows=rows, shard=shard)
        least = logits_least_id(logits, rows=rows, shard=shard)
        return _sparse(logits, sampled_ids, top, mass, rows, shard, least)[1]


def project_on_old_policy(
    logits: Tensor,
    sampled_ids: Tensor,
    old: SparseLogProbs,
    *,
    kl_bound: float = TROLLSettings.kl_bound,
    support: SparseSupport = "bucket",
    top_k: int | None = None,
    mass: float = TROLLSettings.mass,
    rows: Tensor | None = None,
    shard: VocabularyShard | None = None,
    sequence_lengths: Tensor | None = None,
) -> ProjectedTokens:
    """Project each token's new distribution onto the KL ball around the old one.

    The gradient flows into `logits`, which are neither copied nor widened to float32 as a whole.

    Args:
        logits, sampled_ids, rows, shard: as in `record_old_policy`, of the network being trained.
        old: what `record_old_policy` returned for the same N tokens.
        kl_bound: in nats a token; `math.inf` switches the trust region off.
        support: what stands for ids outside the old support: "bucket", one outcome with their exact
            mass; or "paper", the TROLL paper's fixed probability on the union of both policies' ids.
        top_k, mass: with "paper" only, the ids kept of the new policy, as `record_old_policy` keeps the old
            one's. Give its `top_k` where `old` was packed in between, which drops the columns that these
            tokens leave empty; by default there are as many as `old` has, but for the sampled one.
        sequence_lengths: bound the mean divergence over each sequence instead of each token's: how many of
            the N tokens, which lie one after the other, belong to each sequence, [B] integer.

    Returns:
        A value for each of the N tokens, [N].

    Raises:
        InvalidInputError: shapes that do not fit, lengths that do not add up to N, or what the
            projection refuses.

    Source: TROLL (arXiv 2510.03817, eq. 5-7).

    Example:
        >>> import torch
        >>> old = record_old_policy(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0]), top_k=2)
        >>> logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]], requires_grad=True)
        >>> result = project_on_old_policy(logits, torch.tensor([0]), old, kl_bound=0.05)
        >>> bool(result.projected), round(result.kl.item(), 2)
        (True, 1.58)
    """
    check_choice("support", support, get_args(SparseSupport))
    if old.ids.shape[0] != sampled_ids.shape[0]:
        raise InvalidInputError(
            f"old holds {old.ids.shape[0]} tokens and sampled_ids {sampled_ids.shape[0]}. Both must be those "
            "of the same batch, in the same order."
        )
    _check_rows(logits, sampled_ids, rows, shard)
    if support == "paper":
        kept = max(1, old.ids.shape[-1] - 1) if top_k is None else top_k
        top = logits_top_ids(logits, kept, rows=rows, shard=shard)
        log_probs, new = _sparse(logits, sampled_ids, top, mass, rows, shard)
    else:
        wanted = torch.cat((sampled_ids[:, None], old.ids.to(sampled_ids.dtype)), -1)
        found = logits_log_probs(logits, wanted, rows=rows, shard=shard)
        log_probs = found[:, 0]
        new = SparseLogProbs.from_log_probs(
            wanted[:, 1:], found[:, 1:], vocabulary_size=_vocabulary(logits, shard)
        )
        old = SparseLogProbs(wanted[:, 1:], old.log_probs, old.log_tail, old.log_tail_min)
    layout = TokenLayout(sampled_ids.shape[0], sequence_lengths, sampled_ids.device)
    tokens = project_tokens(
        layout.pad_distribution(new),
        layout.pad_distribution(old),
        layout.pad(sampled_ids),
        layout.mask,
        log_probs=layout.pad(log_probs),
        old_log_probs=layout.pad(old.log_prob_of(sampled_ids)),
        kl_bound=kl_bound,
        support=support,
        region="token" if sequence_lengths is None else "sequence",
    )
    return tokens.each(layout.flatten)


def troll_token_losses(
    tokens: ProjectedTokens, advantages: Tensor, *, alpha: float = TROLLSettings.alpha
) -> tuple[Tensor, dict[str, Tensor]]:
    """TROLL's loss of each token, for engines that aggregate themselves, and what to watch.

    Equals the summands of ``tether.losses.troll``: -π(o)/q(o) A + alpha KL(p ‖ sg[π]).

    Args:
        tokens: from `project_on_old_policy`, [N].
        advantages: of the same N tokens, [N].
        alpha: weight of the regression, not negative.

    Returns:
        Losses [N], differentiable, and the metrics of `tether.losses.troll` except `entropy`.

    Raises:
        InvalidInputError: advantages of another shape, or a negative alpha.

    Example:
        >>> import torch
        >>> logits, ids = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True), torch.tensor([0])
        >>> tokens = project_on_old_policy(logits, ids, record_old_policy(logits, ids))
        >>> losses, metrics = troll_token_losses(tokens, torch.tensor([2.0]))
        >>> losses.tolist(), metrics["kl_max"].item()
        ([-2.0], 0.0)
    """
    if advantages.shape != tokens.kl.shape:
        raise InvalidInputError(
            f"advantages must be {tuple(tokens.kl.shape)}, one a token, got {tuple(advantages.shape)}."
        )
    batch = tokens.each(lambda values: values[None])
    objective = troll_objective(batch, advantages[None], torch.ones_like(batch.kl), alpha=alpha)
    return objective.token_loss[0], objective.metrics


def _sparse(
    logits: Tensor,
    sampled_ids: Tensor,
    top: Tensor,
    mass: float,
    rows: Tensor | None,
    shard: VocabularyShard | None,
    least: Tensor | None = None,
) -> tuple[Tensor, SparseLogProbs]:
    """Log-probabilities of the sampled tokens, and the distributions on the most likely ids and those."""
    parts = [sampled_ids[:, None].long(), top]
    found = logits_log_probs(
        logits, torch.cat(parts if least is None else [*parts, least], -1), rows=rows, shard=shard
    )
    support = SparseLogProbs.from_top_k(
        top, found[:, 1 : 1 + top.shape[-1]], sampled_ids.long(), found[:, 0], mass=mass,
        vocabulary_size=_vocabulary(logits, shard), log_tail_min=None if least is None else found[:, -1],
    )  # fmt: skip
    return found[:, 0], support


def _check_rows(
    logits: Tensor, sampled_ids: Tensor, rows: Tensor | None, shard: VocabularyShard | None
) -> None:
    """A row of -1 would be the last one, of another sequence."""
    check_ids(sampled_ids, _vocabulary(logits, shard), lowest=0)
    if rows is not None:
        check_ids(rows, logits.shape[0], lowest=0, name="rows")


def _vocabulary(logits: Tensor, shard: VocabularyShard | None) -> int:
    return logits.shape[-1] if shard is None else shard.vocabulary_size


class TokenLayout:
    """Between the flat list of tokens and the [B, T] of the projection: one long row, or a row a sequence."""

    def __init__(self, count: int, lengths: Tensor | None, device: torch.device) -> None:
        if lengths is None:
            self.mask = torch.ones((1, count), dtype=torch.bool, device=device)
            places = torch.arange(count, device=device)
            self.at: tuple[Tensor, ...] = (torch.zeros_like(places), places)
            return
        if lengths.dim() != 1 or int(lengths.sum()) != count or bool((lengths < 0).any()):
            raise InvalidInputError(
                f"sequence_lengths must be [B], not negative, and add up to the {count} tokens, got "
                f"{lengths.tolist()!r:.200}."
            )
        longest = int(lengths.max()) if lengths.numel() else 0
        self.mask = torch.arange(longest, device=device) < lengths.to(device)[:, None]
        self.at = self.mask.nonzero(as_tuple=True)

    def pad(self, rows: Tensor) -> Tensor:
        """[N, ...] to [B, T, ...], zeros where there is no token."""
        return rows[None] if self._one_row() else put_back(rows, self.at, self.mask.shape)

    def flatten(self, values: Tensor) -> Tensor:
        """[B, T, ...] back to [N, ...]."""
        return values[0] if self._one_row() else values[self.at]

    def _one_row(self) -> bool:
        return self.mask.shape[0] == 1 and self.mask.shape[1] == len(self.at[0])

    def pad_distribution(self, distribution: SparseLogProbs) -> SparseLogProbs:
        least = distribution.log_tail_min
        return SparseLogProbs(
            self.pad(distribution.ids),
            self.pad(distribution.log_probs),
            self.pad(distribution.log_tail),
            None if least is None else self.pad(least),
        )
