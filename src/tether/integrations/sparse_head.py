"""A Transformers causal language model whose forward can return sparse log-probabilities.

`add_sparse_head` extends a model's forward by a mode that ends in `tether.ops.linear_log_probs`
instead of logits. Without that mode the forward is what it was before, so generation and every other
use of the model are untouched.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from tether.integrations.exact_head import (
    OldTokens,
    as_multiplied,
    evaluate_exactly,
    evaluate_on_support,
    head_transform,
    whole,
)
from tether.integrations.head_check import check_head, run_backbone
from tether.integrations.one_pass_head import LossOfTokens, evaluate_loss
from tether.losses.linear import LinearPolicyLoss
from tether.ops.head import Head
from tether.projection.sampled import renormalise
from tether.projection.sparse import EMPTY, SparseLogProbs
from tether.projection.tokens import ProjectedTokens, put_back

IGNORED_LABEL = -100


@dataclass
class SparseHeadOutput(ModelOutput):
    """Per-token results for next-token labels, [B, T - 1]; zero where the label is ignored."""

    log_probs: Tensor | None = None
    """Of the labels."""
    entropy: Tensor | None = None
    """Over the whole vocabulary, in nats."""
    support_ids: Tensor | None = None
    """[B, T - 1, K]; see `SparseLogProbs`."""
    support_log_probs: Tensor | None = None
    support_log_tail: Tensor | None = None
    support_log_tail_min: Tensor | None = None
    hidden: Tensor | None = None
    """Last hidden states, [B, T - 1, D], if they were asked for."""
    projected_log_probs: Tensor | None = None
    """Of the labels, and so on: see `ProjectedTokens`."""
    regression: Tensor | None = None
    kl: Tensor | None = None
    projected_kl: Tensor | None = None
    step: Tensor | None = None
    projected: Tensor | None = None
    converged: Tensor | None = None
    certified: Tensor | None = None
    uncertain: Tensor | None = None
    tail_mass: Tensor | None = None
    loss: Tensor | None = None
    """Of the whole batch, if one was given; differentiable, as nothing else is then."""
    loss_metrics: dict[str, Tensor] | None = None
    aux_loss: Tensor | None = None
    """Load-balancing loss of a mixture of experts, if its router logits were asked for."""

    def support(self, tokens: int) -> SparseLogProbs:
        """The distributions of the last `tokens` positions."""
        ids, log_probs, log_tail = self.support_ids, self.support_log_probs, self.support_log_tail
        assert ids is not None
        assert log_probs is not None
        assert log_tail is not None
        support = SparseLogProbs(ids, log_probs, log_tail, self.support_log_tail_min)
        return support[:, -tokens:]


def add_sparse_head(
    model: PreTrainedModel,
    temperature: float,
    weights_at_hand: Callable[..., AbstractContextManager[Any]],
    *,
    in_float32: bool = False,
) -> None:
    """Teach a model's forward the keywords `support_top_k`, `support_mass`, `support_ids`, `old_tokens` and
    `policy_loss`.

    - ``support_top_k=K``: the support is the model's own K most likely ids (cut at `support_mass`)
      and the label: how the old policy is recorded. With ``keep_hidden=True`` the last hidden states too.
    - ``support_ids=[B, T', K]`` for the last T' positions: the support is given: how the new policy
      is seen on the old one's ids. Where ``support_truncated=[B, T']`` is true, nothing else could be
      sampled: it is renormalised on them, and so is the label's log-probability.
    - ``old_tokens=OldTokens(...)`` for the last T' positions: the new policy is compared with the old one
      over the whole vocabulary, and projected.
    - ``policy_loss=LossOfTokens(...)`` for the last T' positions: the loss itself is evaluated, in one pass
      over the head; what else is returned of the tokens carries no gradient.

    All need `labels` [B, T], unshifted, -100 where a position does not count. Or, with
    ``label_positions=[M]`` and one row of input, `labels` [1, M] are what follows each of those positions; a
    position may serve several labels and supports [1, M, K]. The result is a `SparseHeadOutput`. Call this
    before the model is wrapped (DDP, FSDP) and on the base model of a PEFT model. The first such pass is
    preceded by a check on a few tokens that the head alone makes the model's logits of its hidden states.

    Args:
        model: a causal language model with `base_model` and output embeddings.
        temperature: the sampling temperature the logits are divided by.
        weights_at_hand: context manager factory around each use of the head's weight and bias, for
            heads sharded at rest.
        in_float32: the head was cast to float32 and is to be multiplied so, also under autocast.

    Raises:
        ConfigError: in that first pass, a model with more between its hidden states and its logits.
    """
    scale, softcap = head_transform(model.config.get_text_config())
    head = Head(temperature, scale, softcap, model.config.get_text_config().vocab_size)
    previous = model.forward
    checked = False

    # Keep the original signature: `generate` validates its model kwargs against it.
    @functools.wraps(type(model).forward)
    def forward(
        self: Any,
        *args: Any,
        support_top_k: int | None = None,
        support_mass: float = 1.0,
        support_ids: Tensor | None = None,
        support_truncated: Tensor | None = None,
        old_tokens: OldTokens | None = None,
        policy_loss: LossOfTokens | None = None,
        keep_hidden: bool = False,
        label_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        asked = (support_top_k, support_ids, old_tokens, policy_loss)
        if all(question is None for question in asked):
            return previous(*args, **kwargs)
        nonlocal checked
        if not checked:  # here and not when the model is built: only in a forward are sharded weights at hand
            check_head(self, previous, head, weights_at_hand)
            checked = True
        labels = kwargs.pop("labels")
        kwargs.pop("fused_lm_head", None)
        backbone = run_backbone(self, *args, **kwargs)
        states, lm_head = backbone.last_hidden_state, self.get_output_embeddings()
        aux_loss = _load_balancing_loss(self, backbone, kwargs)
        if policy_loss is not None:
            states, labels, counted = _before_labels(states, labels, lm_head)
            loss = evaluate_loss(
                policy_loss, states, labels, counted, lm_head, head, weights_at_hand, in_float32=in_float32
            )
            return SparseHeadOutput(**_of_loss(loss), aux_loss=aux_loss)
        if label_positions is not None:  # as a row of its own, each state before its label
            states = torch.nn.functional.pad(states[:, label_positions], (0, 0, 0, 1))
            labels = torch.nn.functional.pad(labels, (1, 0), value=IGNORED_LABEL)
        rows = _Rows.of(lm_head, states, labels, weights_at_hand, in_float32=in_float32)
        if old_tokens is not None:
            found: dict[str, Any] = dict(rows.projected(old_tokens, head))
        else:
            found = rows.on_support(support_ids, support_truncated, support_top_k, support_mass, head)
            found["hidden"] = rows.hidden if keep_hidden else None
        return SparseHeadOutput(**found, aux_loss=aux_loss)

    model.forward = types.MethodType(forward, model)


@dataclass(frozen=True)
class _Rows:
    """The positions of a batch that count, and the head their hidden states meet."""

    hidden: Tensor
    """Last hidden states but the last position's, [B, T - 1, D]."""
    counted: Tensor
    """Which positions have a label, [B, T - 1]."""
    at: tuple[Tensor, Tensor]
    """Their rows and positions, found once: each use of the mask would make an accelerator's host wait."""
    sampled: Tensor
    """Their labels, [N]."""
    weight: Tensor
    bias: Tensor | None
    weights_at_hand: Callable[..., AbstractContextManager[Any]]

    @classmethod
    def of(
        cls,
        head: Any,
        hidden: Tensor,
        labels: Tensor,
        weights_at_hand: Callable[..., AbstractContextManager[Any]],
        *,
        in_float32: bool,
    ) -> _Rows:
        hidden, labels, counted = _before_labels(hidden, labels, head)
        rows, positions = counted.nonzero(as_tuple=True)
        bias = None if head.bias is None else whole(head.bias)
        sampled = labels[rows, positions]
        hidden, weight = as_multiplied(hidden, whole(head.weight), in_float32=in_float32)
        return cls(hidden, counted, (rows, positions), sampled, weight, bias, weights_at_hand)

    def projected(self, old: OldTokens, head: Head) -> dict[str, Tensor | None]:
        """Compared with the old policy over the whole vocabulary, and projected."""
        region = evaluate_exactly(
            self.hidden[self.at], self.weight, self.bias, self.sampled, old,
            self._among_last(old.mask.shape[1]), self.weights_at_hand,
            temperature=head.temperature, logit_scale=head.logit_scale, softcap=head.softcap,
        )  # fmt: skip
        return {name: self._spread(values, 0.0) for name, values in _outputs(region).items()}

    def on_support(
        self, ids: Tensor | None, truncated: Tensor | None, top_k: int | None, mass: float, head: Head
    ) -> dict[str, Tensor | None]:
        """On the support given, or the model's own."""
        if ids is not None:
            ids = ids[self._among_last(ids.shape[1])].to(self.sampled)
        at_hand = functools.partial(self.weights_at_hand, self.weight, self.bias)
        support, log_probs, entropy = evaluate_on_support(
            self.hidden[self.at], self.weight, self.bias, self.sampled, ids,
            replace(head, weights_at_hand=at_hand), top_k, mass,
        )  # fmt: skip
        if truncated is not None:
            alone = truncated[self._among_last(truncated.shape[1])]
            support = renormalise(support, alone)
            log_probs = torch.where(alone, support.log_prob_of(self.sampled), log_probs)
        least = support.log_tail_min
        return {
            "log_probs": self._spread(log_probs, 0.0),
            "entropy": self._spread(entropy, 0.0),
            "support_ids": self._spread(support.ids, EMPTY),
            "support_log_probs": self._spread(support.log_probs, -torch.inf),
            "support_log_tail": self._spread(support.log_tail, 0.0),
            "support_log_tail_min": None if least is None else self._spread(least, 0.0),
        }

    def _among_last(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The same rows and positions, counted among the last `tokens` of each row."""
        rows, positions = self.at
        return rows, positions - (self.counted.shape[1] - tokens)

    def _spread(self, rows: Tensor, fill: float) -> Tensor:
        return put_back(rows, self.at, self.counted.shape, fill)


def _before_labels(hidden: Tensor, labels: Tensor, lm_head: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [B, T - 1, D] with the labels that follow them, where the head is, and which count."""
    device = lm_head.weight.device
    hidden, labels = hidden[:, :-1].to(device), labels[:, 1:].to(device)
    return hidden, labels, labels != IGNORED_LABEL


def _outputs(tokens: ProjectedTokens) -> dict[str, Tensor]:
    """By the names of `SparseHeadOutput`."""
    values = tokens.known()
    values["log_probs"] = values.pop("new_log_probs")
    del values["old_log_probs"]  # they were recorded with the rollouts
    return values


def _of_loss(found: LinearPolicyLoss) -> dict[str, Any]:
    return {**_outputs(found.tokens), "loss": found.loss, "loss_metrics": found.metrics}


def _load_balancing_loss(model: Any, backbone: Any, kwargs: dict[str, Any]) -> Tensor | None:
    if not kwargs.get("output_router_logits"):
        return None
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = model.config.get_text_config()
    return load_balancing_loss_func(
        backbone.router_logits, config.num_experts, config.num_experts_per_tok, kwargs.get("attention_mask")
    )
