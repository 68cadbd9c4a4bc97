"""The exact trust region of a language model: no support, no tail, and no logits in memory.

The old policy is kept as what made it: its last hidden states and its LM head. Rows that no certificate
clears are compared over the whole vocabulary, a block at a time, and those outside the bound are projected
as dense rows. `dense_rows.py` holds the mathematics of a block; here is which blocks are formed, and again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.ops import dense_rows
from tether.ops.backlog import Backlog
from tether.ops.checks import signed
from tether.ops.dense_rows import ProjectedUpstream
from tether.ops.head import Head, HeadGradients, gradient_dtype
from tether.ops.hidden_states import HiddenStates
from tether.ops.memory import KEPT
from tether.ops.policy_pair import OldRows, PolicyPair, check_pair
from tether.ops.rows import Upstream, gather_upstream
from tether.ops.shared_steps import project_sequences
from tether.ops.token_state import TokenState
from tether.projection.backend import Backend, use_triton
from tether.projection.certificate import certify
from tether.projection.first_derivative import first_derivative
from tether.projection.solve import may_ask
from tether.projection.sparse import EMPTY, SparseLogProbs
from tether.projection.tokens import ProjectedTokens
from tether.settings import check_kl_bound


def linear_trust_region(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    old_hidden: Tensor,
    *,
    kl_bound: float,
    bias: Tensor | None = None,
    old_weight: Tensor | None = None,
    old_bias: Tensor | None = None,
    old_support: SparseLogProbs | None = None,
    sequences: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocabulary_size: int | None = None,
    weights_at_hand: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backend: Backend = "auto",
) -> ProjectedTokens:
    """Project a language model's token distributions exactly, from hidden states and LM heads alone.

    Equals, for rows outside the bound, but never holds [N, V]::

        new = linear_head(hidden, weight, bias).log_softmax(-1)            # [N, V]
        old = linear_head(old_hidden, old_weight, old_bias).log_softmax(-1)
        result = project_categorical(new, old, kl_bound)
        projected_log_probs = result.log_probs.gather(-1, ids[:, None])

    with the head that `tether.linear_log_probs` describes. A row is left alone without its old logits where
    a certificate (`tether.projection.certify`) says so: from the old support, if it is given, and from
    how far hidden states and weights have moved. The cost is one product with the head more than that
    of `linear_log_probs` for rows that are not certified, and another one for rows that are projected.

    Memory beyond inputs, outputs and gradients is that of `linear_log_probs` for each policy: 2^24 logits
    (which a CPU keeps for the backward pass if the batch has no more; an accelerator takes at least 1024
    rows, old logits for those alone that no certificate clears, and the gradient beside them where the
    products take it in half precision), and a few blocks that fit a CPU's cache (on an accelerator an eighth
    of the logits, about ten times). Gradients flow to `hidden`, `weight` and `bias`; nothing flows into the
    old policy. An accelerator is asked, a block at a time, which rows need work.

    Args:
        hidden: last hidden states of the new policy, [N, D].
        weight: its LM head, [V, D].
        ids: the sampled tokens, [N] integer.
        old_hidden: last hidden states of the old policy, [N, D].
        kl_bound: in nats, a token (or a sequence's mean token); `math.inf` for no trust region.
        bias: of the LM head, [V].
        old_weight, old_bias: the old LM head; by default the new one's, which is right for a frozen head.
        old_support: the old policy on a few ids, [N, K], for certificates.
        sequences: the sequence each row belongs to, [N] integer from 0 on: one step s a sequence, chosen
            so that its mean divergence meets the bound, as in ``project_categorical(region="sequence")``.
            Without it each row has its own.
        temperature, logit_scale, softcap, vocabulary_size, weights_at_hand: as in
            `tether.linear_log_probs`, for both policies (`weights_at_hand` for the new head alone).
        backend: as in `tether.linear_log_probs`; a step that `sequences` share is searched on the plain path.

    Returns:
        A value a token, [N]; `old_log_probs` is NaN, for whoever recorded the rollouts has them.

    Raises:
        InvalidInputError: shapes that do not fit, an id outside the vocabulary, NaN or infinity among
            the logits, a setting that is not positive, or a backend that cannot run here.
        MissingDependencyError: backend="triton" without the package.

    Source: TROLL (arXiv 2510.03817, section 3); that rows are dense one block at a time is ours.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> old_hidden, weight = torch.randn(3, 8), torch.randn(50, 8)
        >>> hidden = old_hidden + torch.tensor([[0.0], [0.01], [1.0]])
        >>> result = linear_trust_region(hidden, weight, torch.tensor([1, 2, 3]), old_hidden, kl_bound=0.05)
        >>> result.certified.tolist(), result.projected.tolist()
        ([True, True, False], [False, False, True])
    """
    old = HiddenStates(old_hidden.detach(), old_weight, old_bias, old_support)
    check_pair(hidden, weight, bias, ids, old, sequences, vocabulary_size)
    check_kl_bound(kl_bound)
    ids = signed(ids)
    head = Head(temperature, logit_scale, softcap, vocabulary_size, weights_at_hand)
    with torch.autocast(hidden.device.type, enabled=False):
        kernels = use_triton(backend, hidden)
        tensors = _LinearTrustRegion.apply(
            hidden, weight, bias, ids, old, sequences, head, float(kl_bound), kernels
        )
    result = TokenState.read(tensors).result()
    return replace(result, projected_kl=None) if math.isinf(kl_bound) else result


class _LinearTrustRegion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        old: HiddenStates,
        sequences: Tensor | None,
        head: Head,
        kl_bound: float,
        kernels: bool,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        state = TokenState.empty(hidden)
        with head.weights_at_hand():
            pair = PolicyPair.of(head, hidden, weight, bias, old, sequences, kernels=kernels)
            ratio_range = pair.log_ratio_range()
            held = None
            for block in pair.every_block():
                held = None  # given back before the next is formed
                held = evaluate_block(pair, block, ids, ratio_range, kl_bound, state)
            if sequences is not None:
                project_sequences(pair, ids, state, kl_bound)
        check_values(state)
        whole = 0 < hidden.shape[0] <= pair.buffers.shape[1] and sequences is None
        keep = whole and any(ctx.needs_input_grad[:3])
        kept = KEPT.offer(pair.buffers) if keep else None
        ctx.kept = None if kept is None else (kept, held)
        ctx.head, ctx.old, ctx.sequences, ctx.kl_bound = head, old, sequences, kl_bound
        ctx.kernels = kernels
        ctx.save_for_backward(hidden, weight, bias, ids, *state.tensors())
        ctx.mark_non_differentiable(*state.without_gradient())
        return state.tensors()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, *values = ctx.saved_tensors
        arrived = Arrived.of(TokenState.read(values), ids, grads, ctx.sequences)
        with ctx.head.weights_at_hand():
            pair = _pair_of(ctx, hidden, weight, bias)
            total = HeadGradients(ctx.needs_input_grad[:3], hidden, weight, bias, arrived.own.total.dtype)
            for block in pair.blocks(arrived.rows()):
                total.add(block, gradient_of_block(pair, block, ids, arrived, ctx.kl_bound))
        return (*total.rounded(), None, None, None, None, None, None)


def _pair_of(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> PolicyPair:
    """For a backward pass: with the logits of the forward pass, if they were kept and none came before it."""
    kept, ctx.kept = ctx.kept, None  # spoiled by whoever uses them
    if kept is None:
        return PolicyPair.of(ctx.head, hidden, weight, bias, ctx.old, ctx.sequences, kernels=ctx.kernels)
    buffers, held = kept
    return PolicyPair(ctx.head, hidden, weight, bias, ctx.old, ctx.sequences, buffers, held, ctx.kernels)


def evaluate_block(
    pair: PolicyPair,
    block: slice,
    ids: Tensor,
    ratio_range: Tensor,
    kl_bound: float,
    state: TokenState,
    meanwhile: Backlog | None = None,
) -> OldRows:
    """Everything the forward pass finds out about some rows, but for steps that sequences share.

    Args:
        meanwhile: what an accelerator can do while it is asked how many rows are outside the bound.

    Returns:
        Those of the block whose old logits had to be formed.
    """
    dense, logits = _dense_rows(pair), pair.new_logits(block)
    new, ids = logits[:, : pair.vocabulary], ids[block]
    found = dense.measure(logits, pair.vocabulary, ids)
    state.new_log_probs[block], state.entropy[block], state.log_sum[block] = found
    state.projected_log_probs[block] = state.new_log_probs[block]
    inside = _certify(pair, block, new, ratio_range[block], kl_bound, state)
    unknown = (~inside).nonzero().squeeze(-1)
    if not unknown.numel():
        return OldRows(unknown, None, plain=False)
    at = unknown + block.start
    old = pair.old_logits(at)
    # Without a certificate the rows are consecutive, and need no copy.
    rows = None if unknown.numel() == len(new) else unknown
    project = pair.sequences is None
    compared = dense.compare_rows(
        new, old, ids[unknown], kl_bound, project=project, rows=rows, meanwhile=meanwhile
    )
    state.kl[at] = compared.kl
    for outside, projection in compared.projections:
        state.put(at[outside], projection)
    return OldRows(unknown, old, compared.plain)


def _dense_rows(pair: PolicyPair) -> ModuleType:
    """What measures and projects rows of logits: two modules with the same three functions."""
    if not pair.kernels:
        return dense_rows
    from tether.ops import dense_rows_triton

    return dense_rows_triton


def _certify(
    pair: PolicyPair, block: slice, new: Tensor, ratio_range: Tensor, kl_bound: float, state: TokenState
) -> Tensor:
    """Rows that are inside whatever their old logits, bool; their divergence is noted as its lower bound."""
    some = state.part(block)
    if pair.old.support is None:
        torch.le(ratio_range.square() / 8, kl_bound, out=some.certified)
        torch.logical_not(some.certified, out=some.uncertain)
    elif pair.kernels:
        from tether.ops.certificate_triton import certify_rows

        certify_rows(new, pair.old.support[block], ratio_range, kl_bound, pair.vocabulary, some)
    else:
        old = pair.old.support[block]
        held = old.ids != EMPTY
        log_probs = new.gather(-1, torch.where(held, old.ids, 0).long()) - some.log_sum[:, None]
        log_probs = torch.where(held, log_probs, -torch.inf)
        few = SparseLogProbs.from_log_probs(old.ids, log_probs, vocabulary_size=pair.vocabulary)
        certificate = certify(few, old, kl_bound, log_ratio_range=ratio_range)
        some.certified.copy_(certificate.inside)
        some.uncertain.copy_(certificate.uncertain)
        some.kl.copy_(certificate.kl_lower)
        some.tail_mass.copy_(few.log_tail.exp())
    if pair.sequences is not None:  # whose mean needs the divergence of each token
        some.certified.zero_()
    return some.certified


class Arrived(NamedTuple):
    """The gradient that arrived, a value a token."""

    own: Upstream
    """For the network's own log-probability of the sampled token, and its entropy."""
    projected: ProjectedUpstream

    @classmethod
    def of(
        cls, state: TokenState, ids: Tensor, grads: tuple[Tensor | None, ...], sequences: Tensor | None
    ) -> Arrived:
        """Sorted by what it arrived for: the network itself, or its projection."""
        zero = torch.zeros_like(state.kl)
        log_prob, _, projected, regression = (zero if grad is None else grad for grad in grads[:4])
        sampled = torch.where(state.projected, projected, zero)
        regression = torch.where(state.projected, regression, zero)
        pull, variance = sampled * state.centred, state.variance
        if sequences is not None:
            pull, variance = (_sums(sequences, value)[sequences] for value in (pull, variance))
        # No variance: all mass on one outcome, and no direction that would change the divergence.
        held = state.constrained & (variance > torch.finfo(variance.dtype).tiny * 1e6)
        along = torch.where(held, pull / torch.where(held, variance, 1.0), 0.0) * state.step
        acts = state.projected & ((sampled != 0) | (regression != 0) | (along != 0))
        log_prob = log_prob + torch.where(state.projected, zero, projected)
        at_ids = ids[:, None], log_prob[:, None]
        own = gather_upstream(state.log_sum, state.entropy, None, grads[1], at_ids)
        return cls(own, ProjectedUpstream(sampled, regression, along, state.step, acts))

    def rows(self) -> Tensor:
        """Those that received any."""
        return (self.own.touched() | self.projected.acts).nonzero().squeeze(-1)


def gradient_of_block(
    pair: PolicyPair, block: Tensor | slice, ids: Tensor, arrived: Arrived, kl_bound: float
) -> Tensor:
    """Gradient that reaches the head's raw output, [n, V]; in place of the logits but for half precision."""
    logits = pair.new_logits(block)
    dtype = gradient_dtype(pair.hidden, pair.weight, logits.dtype) if pair.kernels else logits.dtype
    grad = logits if dtype == logits.dtype else logits.new_empty(logits.shape, dtype=dtype)
    own, upstream = arrived.own.at(block), arrived.projected.at(block)
    old, old_rows = pair.old_logits_of(block, upstream.acts)
    inside = logits[:, : pair.vocabulary]
    out = inside if grad is logits else grad[:, : pair.vocabulary]
    plain = pair.held is None or pair.held.plain
    _dense_rows(pair).to_gradient(
        pair.head, inside, out, own, old, old_rows, ids[block], upstream, kl_bound, plain=plain
    )
    if pair.vocabulary < grad.shape[1]:
        grad[:, pair.vocabulary :] = 0  # padding is -inf whatever the weights
    return grad


def _sums(sequences: Tensor, values: Tensor) -> Tensor:
    count = int(sequences.max()) + 1 if sequences.numel() else 0
    return values.new_zeros(count).index_add_(0, sequences, values)


def check_values(state: TokenState, first: int = 0) -> None:
    """Refuse logits that are no distribution, of rows from `first` on."""
    kl, invalid = state.kl, state.kl.isnan() | ~state.log_sum.isfinite()
    if not may_ask(kl):
        torch._assert_async(~invalid.any(), "linear_trust_region: the logits hold NaN or infinity")
    elif bool(invalid.any()):
        raise InvalidInputError(
            f"the logits of {int(invalid.sum())} of {kl.numel()} rows hold NaN or infinity, the first in row "
            f"{first + int(invalid.nonzero()[0, 0])}. Look for overflow in the model (float16?) or a "
            "learning rate that destroyed it."
        )
