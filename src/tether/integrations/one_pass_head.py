"""A policy loss evaluated inside a model's forward, where the logits of a block of tokens are at hand."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tether.errors import TetherError
from tether.integrations.exact_head import OldTokens, as_multiplied, beside, whole
from tether.losses import linear_policy_loss
from tether.losses.linear import LinearPolicyLoss, Objective, Reach
from tether.ops import HiddenStates
from tether.ops.head import Head
from tether.projection import SparseLogProbs


@dataclass(frozen=True)
class LossOfTokens:
    """What `linear_policy_loss` is told besides the network; goes through forward as one object."""

    objective: Objective
    """Of the last T positions of all B rows."""
    depends_on: Reach
    old: OldTokens | SparseLogProbs
    """The old policy there: its hidden states, or its distributions on a few ids [B, T, K]."""
    old_log_probs: Tensor
    """Of the labels, [B, T]."""
    kl_bound: float


def say_once(whose: Any, log: logging.Logger, obstacle: str | None) -> None:
    """Log whether a trainer's or engine's loss is computed in one pass, and if not, why: the first time."""
    if getattr(whose, "_told_of_passes", False):
        return
    whose._told_of_passes = True
    told = "in one pass over the LM head"
    log.info(
        "The policy loss is computed %s.",
        told if obstacle is None else f"after the LM head, not with it: {obstacle}",
    )


def evaluate_loss(
    wanted: LossOfTokens,
    hidden: Tensor,
    labels: Tensor,
    counted: Tensor,
    lm_head: Any,
    head: Head,
    weights_at_hand: Callable[..., AbstractContextManager[Any]],
    *,
    in_float32: bool = False,
) -> LinearPolicyLoss:
    """The loss of a micro-batch.

    Args:
        hidden: what the labels are predicted from, [B, T', D] with T' at least T.
        labels: [B, T'].
        counted: which positions have a label, [B, T'].
        lm_head: the module.
        head: what becomes of its output.
        weights_at_hand, in_float32: as in `tether.integrations.sparse_head.add_sparse_head`.

    Raises:
        TetherError: the rows are not all of those the objective is of.
    """
    rows, tokens = wanted.old_log_probs.shape
    if hidden.shape[0] != rows:
        raise TetherError(
            f"A policy loss of {rows} sequences was to be computed in a forward pass of {hidden.shape[0]}. "
            "An override of _get_per_token_logps_and_entropies must not split the batch of an update."
        )
    hidden, weight = as_multiplied(hidden, whole(lm_head.weight), in_float32=in_float32)
    bias = None if lm_head.bias is None else whole(lm_head.bias)
    head = replace(head, weights_at_hand=functools.partial(weights_at_hand, weight, bias))
    # The objective is no part of the model: what a trainer computes outside of it is not autocast either.
    with torch.autocast(hidden.device.type, enabled=False):
        return linear_policy_loss(
            wanted.objective,
            HiddenStates(hidden[:, -tokens:], weight, bias, head=head),
            labels[:, -tokens:],
            counted[:, -tokens:],
            old=_old_policy(wanted.old, weight, hidden),
            old_log_probs=wanted.old_log_probs,
            kl_bound=wanted.kl_bound,
            depends_on=wanted.depends_on,
        )


def _old_policy(
    old: OldTokens | SparseLogProbs, weight: Tensor, hidden: Tensor
) -> HiddenStates | SparseLogProbs:
    if isinstance(old, SparseLogProbs):
        return old
    old_weight, old_bias = old.gathered_head(weight.dtype)
    return HiddenStates(beside(hidden, old.hidden), old_weight, old_bias, old.support)
