"""A policy loss and its gradients from hidden states and LM head, in three products with the head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.losses.base import PolicyLoss
from tether.losses.course import Course, Objective
from tether.losses.project import Policy, check_shapes, project_tokens
from tether.ops import HiddenStates, linear_log_probs, linear_trust_region
from tether.ops.checks import check_vocabulary_size, signed
from tether.ops.one_pass import (
    WithGradients,
    blocks_of,
    keeps_all,
    log_probs_in_one_pass,
    trust_region_in_one_pass,
)
from tether.ops.policy_pair import check_heads
from tether.ops.token_state import DIFFERENTIABLE, TokenState
from tether.projection.backend import Backend
from tether.projection.sparse import SparseLogProbs
from tether.projection.support import check_ids
from tether.projection.tokens import ProjectedTokens, put_back
from tether.settings import TROLLSettings, check_choice, check_kl_bound

Reach = Literal["token", "sequence", "batch"]
"""What the slope of the loss at a token depends on, besides masks: the token, its sequence, or everything."""

_OF_TOKENS = (
    "cispo", "decoupled_clip", "dppo", "drpo", "icepop", "ipo", "kl_penalty", "ppo_clip", "pspo", "sapo",
    "unclipped",
)  # fmt: skip
_OF_SEQUENCES = ("cppo", "gmpo", "gspo", "tis", "vespo")  # tis by its option `level`
#: Of the losses that look at sampled tokens alone; what is not here may depend on everything.
REACH: dict[str, Reach] = {**dict.fromkeys(_OF_TOKENS, "token"), **dict.fromkeys(_OF_SEQUENCES, "sequence")}


@dataclass(frozen=True)
class LinearPolicyLoss(PolicyLoss):
    """A policy loss with the tokens it was computed from."""

    tokens: ProjectedTokens
    """What was found of them, [B, T], without gradient; zero where the mask is."""


def linear_policy_loss(
    objective: Objective,
    new: HiddenStates,
    response_ids: Tensor,
    response_mask: Tensor,
    *,
    old: HiddenStates | SparseLogProbs | None = None,
    old_log_probs: Tensor | None = None,
    kl_bound: float = TROLLSettings.kl_bound,
    depends_on: Reach = "token",
    in_blocks: Objective | None = None,
    backend: Backend = "auto",
) -> LinearPolicyLoss:
    """Evaluate any policy loss on a language model's head without forming its logits twice.

    Equals the objective of what `project_tokens` (without an old policy: `linear_log_probs`) finds, gradients
    included, which multiplies with the head four times where the logits of the batch are too many to be kept.
    Here the loss of a block of tokens is differentiated while their logits are at hand: three products.

    That takes a loss of which the slope at a token is known from the token alone, as it is for every ratio of
    tokens under each of `tether.losses.aggregate`'s averages. A ratio of sequences says
    ``depends_on="sequence"``: whole sequences then share a block (where the longest does not fit one, the
    logits are formed twice after all). ``depends_on="batch"`` never differentiates early. What was said is
    checked: the slopes that were used must be those of the finished batch.

    On a CPU, a batch of which all logits are kept anyway takes the ordinary path, which multiplies no more
    often then.

    Memory: as `linear_log_probs`, and nothing is kept for the backward pass but the gradients themselves.
    They are computed in the forward pass, so one backward pass can use them.

    Args:
        objective: from the tokens, [B, T], to a loss and metrics, such as
            ``lambda tokens: ppo_clip(tokens.new_log_probs, old_log_probs, advantages, mask)``. It is called
            for each block, with placeholders in place of tokens that are not evaluated yet.
        new: hidden states [B, T, D] with the weight of their LM head.
        response_ids: the sampled tokens, [B, T] integer.
        response_mask: [B, T].
        old: nothing for losses of sampled tokens alone; hidden states [B, T, D] for an exact trust region;
            `SparseLogProbs` [B, T, K] for one on a support, all other ids being one outcome.
        old_log_probs: of the sampled tokens, [B, T]; goes into the tokens.
        kl_bound: in nats, a token.
        depends_on: see above.
        in_blocks: called for the blocks in the objective's place, if that is slow: something with the same
            slopes at less cost. Its loss and metrics are not looked at, its slopes are checked at the end.
        backend: as in `tether.linear_log_probs`.

    Returns:
        What the objective returns of all tokens, and those tokens; the loss carries the gradient to hidden
        states, weight and bias.

    Raises:
        InvalidInputError: shapes that do not fit, a slope that depends on more than was said, a second
            backward pass, or what the projection refuses.

    Example:
        >>> import torch
        >>> from tether.losses import ppo_clip
        >>> _ = torch.manual_seed(0)
        >>> hidden, weight = torch.randn(1, 3, 8), torch.randn(50, 8, requires_grad=True)
        >>> ids, mask, old = torch.tensor([[1, 2, 3]]), torch.ones(1, 3), torch.full((1, 3), -4.0)
        >>> clip = lambda tokens: ppo_clip(tokens.new_log_probs, old, torch.ones(1), mask)
        >>> result = linear_policy_loss(clip, HiddenStates(hidden, weight), ids, mask)
        >>> result.loss.backward()
        >>> weight.grad.shape, sorted(result.metrics)
        (torch.Size([50, 8]), ['clipped', 'ratio_max', 'ratio_mean'])
    """
    check_choice("depends_on", depends_on, get_args(Reach))
    check_kl_bound(kl_bound)
    weight = new.weight
    if weight is None:
        raise InvalidInputError("The new policy's HiddenStates need the weight of their LM head, [V, D].")
    check_shapes(new, new if old is None else old, response_ids, response_mask, old_log_probs=old_log_probs)
    counted = response_mask > 0
    rows = _Rows(new, old, response_ids, counted, old_log_probs, kl_bound, backend)
    blocks = None
    # A sharded head is empty at rest.
    early = torch.is_grad_enabled() and depends_on != "batch" and len(weight) > 0
    if early and not keeps_all(rows.new.hidden, weight.shape[0]):
        lengths = counted.sum(-1).tolist() if depends_on == "sequence" else [1] * rows.count
        blocks = blocks_of(lengths, rows.new.hidden, weight.shape[0])
    if not blocks:
        return _ordinary(objective, rows)
    return _in_one_pass(rows.course(objective, objective if in_blocks is None else in_blocks), rows, blocks)


class _Rows:
    """The tokens that count, flattened, and how they become `ProjectedTokens`."""

    def __init__(
        self,
        new: HiddenStates,
        old: Policy | None,
        ids: Tensor,
        counted: Tensor,
        old_log_probs: Tensor | None,
        kl_bound: float,
        backend: Backend,
    ) -> None:
        self.counted, self.kl_bound, self.backend = counted, kl_bound, backend
        # Positions, found once: each use of the mask itself would make an accelerator's host wait for them.
        self._at = at = counted.nonzero(as_tuple=True)
        self.new = replace(new, hidden=new.hidden[at])
        self.ids = signed(ids)[at]
        self.count = self.ids.shape[0]
        assert new.weight is not None
        check_heads(self.new.hidden, new.weight, new.bias, old if isinstance(old, HiddenStates) else self.new)
        check_vocabulary_size(new.head.vocabulary_size, len(new.weight))
        check_ids(self.ids, new.head.vocabulary_size or len(new.weight), lowest=0)
        self.old_log_probs = None if old_log_probs is None else old_log_probs.detach()[at]
        self.old: HiddenStates | SparseLogProbs | None = None
        if isinstance(old, HiddenStates):
            support = None if old.support is None else old.support[at]
            self.old = replace(old, hidden=old.hidden.detach()[at], support=support)
        elif isinstance(old, SparseLogProbs):
            self.old = old.detach()[at]
        elif old is not None:
            raise InvalidInputError(
                f"old must be HiddenStates, SparseLogProbs or None, got {type(old).__name__}. Whole "
                "distributions go to project_tokens, with those of the new policy."
            )

    @property
    def wanted(self) -> Tensor:
        """Ids whose log-probabilities the tokens are made of, [N, 1 + K]: the sampled one and the support."""
        sampled = self.ids[:, None]
        if isinstance(self.old, SparseLogProbs):
            return torch.cat((sampled.to(self.old.ids.dtype), self.old.ids), -1)
        return sampled

    def evaluate(self) -> ProjectedTokens:
        """All of them, by the ordinary operations."""
        new = self.new
        assert new.weight is not None
        options = {name: value for name, value in vars(new.head).items()}
        if isinstance(self.old, HiddenStates):
            found = linear_trust_region(
                new.hidden, new.weight, self.ids, self.old.hidden, kl_bound=self.kl_bound, bias=new.bias,
                old_weight=self.old.weight, old_bias=self.old.bias, old_support=self.old.support,
                backend=self.backend, **options,
            )  # fmt: skip
            return self._with_old(found, slice(None))
        few = linear_log_probs(
            new.hidden, new.weight, self.wanted, bias=new.bias, backend=self.backend, **options
        )
        return self.tokens(slice(None), (few.log_probs, few.entropy))

    def tokens(self, rows: slice, values: Sequence[Tensor]) -> ProjectedTokens:
        """Of some rows, from log-probabilities at the wanted ids [n, 1 + K] and entropies [n]."""
        log_probs, entropy = values
        sampled = log_probs[:, 0]
        if isinstance(self.old, SparseLogProbs):
            old, head = self.old[rows], self.new
            assert head.weight is not None
            size = head.head.vocabulary_size or head.weight.shape[0]
            few = SparseLogProbs.from_log_probs(old.ids, log_probs[:, 1:], vocabulary_size=size)
            found = project_tokens(
                few[None], old[None], self.ids[None, rows], torch.ones_like(sampled)[None],
                log_probs=sampled[None], kl_bound=self.kl_bound,
            ).each(lambda value: value.squeeze(0))  # fmt: skip
        else:
            unknown = torch.full_like(sampled.detach(), torch.nan)
            found = ProjectedTokens(
                new_log_probs=sampled,
                old_log_probs=unknown,
                projected_log_probs=sampled,
                regression=torch.zeros_like(unknown),
                kl=unknown,
                step=torch.ones_like(unknown),
                projected=torch.zeros_like(unknown, dtype=torch.bool),
                tail_mass=unknown,
            )
        return self._with_old(replace(found, entropy=entropy), rows)

    def _with_old(self, tokens: ProjectedTokens, rows: slice) -> ProjectedTokens:
        if math.isinf(self.kl_bound):
            tokens = replace(tokens, projected_kl=None)
        if self.old_log_probs is None:
            return tokens
        return replace(tokens, old_log_probs=self.old_log_probs[rows].to(tokens.kl.dtype))

    def state(self, values: Sequence[Tensor], rows: slice) -> ProjectedTokens:
        """Of some rows, from the tensors of their `TokenState`."""
        return self._with_old(TokenState.read(values).result(), rows)

    def course(self, objective: Objective, in_blocks: Objective) -> Course:
        """Of a loss through them, a block at a time."""
        return Course(objective, in_blocks, self._at, self.counted.shape, self.old_log_probs)

    def batched(self, tokens: ProjectedTokens) -> ProjectedTokens:
        """[N] -> [B, T]; zero where nothing counts."""
        return tokens.each(lambda values: put_back(values, self._at, self.counted.shape))


def _ordinary(objective: Objective, rows: _Rows) -> LinearPolicyLoss:
    tokens = rows.batched(rows.evaluate())
    result = objective(tokens)
    return LinearPolicyLoss(result.loss, result.metrics, tokens.each(torch.detach))


def _in_one_pass(course: Course, rows: _Rows, blocks: list[slice]) -> LinearPolicyLoss:
    new = rows.new

    def of_log_probs(block: slice, values: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
        with torch.enable_grad():
            leaves = [value.detach().requires_grad_() for value in values]
            tokens = rows.tokens(block, leaves)
        slopes = course.differentiate(block, tokens)
        carriers = {name: getattr(tokens, name) for name in slopes}
        reached = [name for name, carrier in carriers.items() if carrier.requires_grad]
        return torch.autograd.grad(
            [carriers[name] for name in reached],
            leaves,
            [slopes[name] for name in reached],
            allow_unused=True,
        )

    def of_state(block: slice, values: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
        slopes = course.differentiate(block, rows.state(values, block))
        return [slopes[name] for name in DIFFERENTIABLE]

    with torch.no_grad():
        if isinstance(rows.old, HiddenStates):
            known = trust_region_in_one_pass(
                new, rows.old, rows.ids, rows.kl_bound, of_state, blocks, rows.backend
            )
        else:
            known = log_probs_in_one_pass(new, rows.wanted, of_log_probs, blocks, rows.backend)
        result = course.finish()
    with torch.enable_grad():
        loss = WithGradients.apply(result.loss, known, new.hidden, new.weight, new.bias)
    return LinearPolicyLoss(loss, result.metrics, course.tokens())
