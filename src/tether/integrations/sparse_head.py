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
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from tether.integrations.exact_head import OldTokens, evaluate_exactly, whole
from tether.ops import LinearLogProbs, linear_log_probs
from tether.projection.sampled import renormalise
from tether.projection.sparse import EMPTY, SparseLogProbs

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
    certified: Tensor | None = None
    uncertain: Tensor | None = None
    tail_mass: Tensor | None = None
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


@dataclass(frozen=True)
class _Transform:
    """From the head's raw output to the logits the sampler saw."""

    temperature: float
    logit_scale: float
    softcap: float | None


def add_sparse_head(
    model: PreTrainedModel,
    temperature: float,
    weights_at_hand: Callable[..., AbstractContextManager[Any]],
) -> None:
    """Teach a model's forward the keywords `support_top_k`, `support_mass`, `support_ids` and `old_tokens`.

    - ``support_top_k=K``: the support is the model's own K most likely ids (cut at `support_mass`)
      and the label: how the old policy is recorded. With ``keep_hidden=True`` the last hidden states too.
    - ``support_ids=[B, T', K]`` for the last T' positions: the support is given: how the new policy
      is seen on the old one's ids. Where ``support_truncated=[B, T']`` is true, nothing else could be
      sampled: it is renormalised on them, and so is the label's log-probability.
    - ``old_tokens=OldTokens(...)`` for the last T' positions: the new policy is compared with the old one
      over the whole vocabulary, and projected.

    All need `labels` [B, T], unshifted, -100 where a position does not count. The result is a
    `SparseHeadOutput`. Call this before the model is wrapped (DDP, FSDP) and on the base model of a
    PEFT model.

    Args:
        model: a causal language model with `base_model` and output embeddings.
        temperature: the sampling temperature the logits are divided by.
        weights_at_hand: context manager factory around each use of the head's weight and bias, for
            heads sharded at rest.
    """
    transform = _head_transform(model.config.get_text_config(), temperature)
    previous = model.forward

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
        keep_hidden: bool = False,
        **kwargs: Any,
    ) -> Any:
        if support_top_k is None and support_ids is None and old_tokens is None:
            return previous(*args, **kwargs)
        labels = kwargs.pop("labels")
        kwargs.pop("fused_lm_head", None)
        backbone = _run_backbone(self, *args, **kwargs)
        head = self.get_output_embeddings()
        hidden = backbone.last_hidden_state[:, :-1].to(head.weight.device)
        labels = labels[:, 1:].to(head.weight.device)
        counted = labels != IGNORED_LABEL
        # Positions, found once: each use of the mask itself would make an accelerator's host wait for them.
        at = counted.nonzero(as_tuple=True)
        sampled, ids = labels[at], None
        weight, bias = whole(head.weight), None if head.bias is None else whole(head.bias)
        if old_tokens is not None:
            region = evaluate_exactly(
                hidden[at], weight, bias, sampled, old_tokens,
                _among_last(old_tokens.mask.shape[1], at, labels), weights_at_hand, **asdict(transform),
            )  # fmt: skip
            rows = region.known()
            rows["log_probs"] = rows.pop("new_log_probs")
            del rows["old_log_probs"]  # unknown here: they were recorded with the rollouts
            return SparseHeadOutput(
                **{name: _spread(values, counted, 0.0) for name, values in rows.items()},
                aux_loss=_load_balancing_loss(self, backbone, kwargs),
            )
        if support_ids is not None:
            ids = support_ids[_among_last(support_ids.shape[1], at, labels)].to(labels)
        vocabulary = self.config.get_text_config().vocab_size
        support, sampled_log_probs, entropy = _evaluate(
            hidden[at],
            weight,
            bias,
            sampled,
            ids,
            support_top_k,
            support_mass,
            vocabulary,
            transform,
            functools.partial(weights_at_hand, weight, bias),
        )
        if support_truncated is not None:
            truncated = support_truncated[counted[:, -support_truncated.shape[1] :]]
            support = renormalise(support, truncated)
            sampled_log_probs = torch.where(truncated, support.log_prob_of(sampled), sampled_log_probs)
        return SparseHeadOutput(
            log_probs=_spread(sampled_log_probs, counted, 0.0),
            entropy=_spread(entropy, counted, 0.0),
            support_ids=_spread(support.ids, counted, EMPTY),
            support_log_probs=_spread(support.log_probs, counted, -torch.inf),
            support_log_tail=_spread(support.log_tail, counted, 0.0),
            support_log_tail_min=None
            if support.log_tail_min is None
            else _spread(support.log_tail_min, counted, 0.0),
            hidden=hidden if keep_hidden else None,
            aux_loss=_load_balancing_loss(self, backbone, kwargs),
        )

    model.forward = types.MethodType(forward, model)


def _evaluate(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sampled: Tensor,
    ids: Tensor | None,
    top_k: int | None,
    mass: float,
    vocabulary: int,
    transform: _Transform,
    weights_at_hand: Callable[[], AbstractContextManager[Any]],
) -> tuple[SparseLogProbs, Tensor, Tensor]:
    """The support, the sampled tokens' log-probabilities and the entropies of counted rows."""
    wanted = sampled[:, None] if ids is None else torch.cat((sampled[:, None], ids), -1)
    rows: LinearLogProbs = linear_log_probs(
        hidden,
        weight,
        wanted,
        bias=bias,
        top_k=top_k,
        with_min=top_k is not None,
        temperature=transform.temperature,
        logit_scale=transform.logit_scale,
        softcap=transform.softcap,
        weights_at_hand=weights_at_hand,
    )
    sampled_log_probs = rows.log_probs[:, 0]
    if ids is not None:
        support = SparseLogProbs.from_log_probs(ids, rows.log_probs[:, 1:], vocabulary_size=vocabulary)
    else:
        assert rows.top_ids is not None
        assert rows.top_log_probs is not None
        support = SparseLogProbs.from_top_k(
            rows.top_ids,
            rows.top_log_probs,
            sampled,
            sampled_log_probs,
            mass=mass,
            vocabulary_size=vocabulary,
            log_tail_min=rows.log_prob_min,
        )
    return support, sampled_log_probs, rows.entropy


def _run_backbone(model: Any, *args: Any, **kwargs: Any) -> Any:
    # Looked up on each call: FSDP and PEFT replace modules after the forward was extended.
    kwargs["use_cache"] = False
    return model.base_model(*args, **kwargs)


def _among_last(tokens: int, at: tuple[Tensor, ...], labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and positions `at` of `labels` [B, T], counted among the last `tokens` of each row."""
    rows, positions = at
    return rows, positions - (labels.shape[1] - tokens)


def _spread(rows: Tensor, counted: Tensor, fill: float) -> Tensor:
    """Put rows [N, ...] where `counted` [B, T] is true; keeps the graph even without any row."""
    mask = counted.view(*counted.shape, *[1] * (rows.dim() - 1))
    return rows.new_full((*counted.shape, *rows.shape[1:]), fill).masked_scatter(mask, rows)


def _head_transform(config: PretrainedConfig, temperature: float) -> _Transform:
    """Model families that scale or soft-cap their logits say so under different names."""
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            scale = float(getattr(config, name))
            break
    else:
        scaling = getattr(config, "logits_scaling", None)
        if scaling is not None:
            scale = float(scaling) if config.model_type == "hyperclovax" else 1.0 / scaling
    return _Transform(temperature, scale, getattr(config, "final_logit_softcapping", None))


def _load_balancing_loss(model: Any, backbone: Any, kwargs: dict[str, Any]) -> Tensor | None:
    if not kwargs.get("output_router_logits"):
        return None
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = model.config.get_text_config()
    return load_balancing_loss_func(
        backbone.router_logits, config.num_experts, config.num_experts_per_tok, kwargs.get("attention_mask")
    )
