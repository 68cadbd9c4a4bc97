"""The exact old policy as a model's forward takes it: hidden states, the head they met, and their support."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from tether.errors import ConfigError
from tether.ops import LinearLogProbs, linear_kl, linear_log_probs, linear_trust_region
from tether.ops.head import Head
from tether.projection import ProjectedTokens, SparseLogProbs
from tether.settings import Region


def as_multiplied(hidden: Tensor, weight: Tensor, *, in_float32: bool = False) -> tuple[Tensor, Tensor]:
    """Hidden states and head as the head's own forward would multiply them: in autocast's precision on a GPU.

    The logits are float32 all the same. In float32 the products would use none of a GPU's matrix units and
    take ten times as long. A processor multiplies what it is given, and so does a GPU where the head is
    sharded at rest and empty here (ZeRO-3), or was cast to float32 for its own sake (`in_float32`).
    """
    if in_float32:
        return hidden.float(), weight.float()
    if not (has_matrix_units(hidden) and torch.is_autocast_enabled(hidden.device.type) and weight.numel()):
        return hidden, weight
    dtype = torch.get_autocast_dtype(hidden.device.type)
    return hidden.to(dtype), weight.to(dtype)


def has_matrix_units(tensor: Tensor) -> bool:
    """Whether it lies where half precision is multiplied many times as fast as float32."""
    return tensor.is_cuda


def beside(new: Tensor, old: Tensor) -> Tensor:
    """Old hidden states where the new policy's are; in half precision if they are: that is what they had when
    they were recorded, and outputs of a model under autocast are widened."""
    return old.to(new.device, new.dtype if has_matrix_units(new) else None)


@dataclass(frozen=True)
class HeadSnapshot:
    """The LM head of the policy that gathered the data, where it has been trained since."""

    weight: Tensor
    """[V, D]; sharded (a DTensor) if the model's is."""
    bias: Tensor | None


@dataclass(frozen=True)
class OldTokens:
    """The old policy at the last T positions of B rows; goes through forward as one object.

    One object and not tensors, because FSDP's mixed precision would round tensors on their way.
    """

    hidden: Tensor
    """Last hidden states, [B, T, D]."""
    support: SparseLogProbs
    """[B, T, K], for certificates."""
    mask: Tensor
    """Tokens that count in a sequence's mean, [B, T]."""
    head: HeadSnapshot | None
    """None where the head is frozen."""
    kl_bound: float
    region: Region
    only_kl: bool = False
    """Measure each token's divergence, certified or not, and find out nothing else of it."""

    def __getitem__(self, rows: slice) -> OldTokens:
        """Some of the rows, for scoring loops that take a few at a time."""
        return OldTokens(
            self.hidden[rows], self.support[rows], self.mask[rows], self.head, self.kl_bound, self.region,
            self.only_kl,
        )  # fmt: skip

    def gathered_head(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias of the old head, gathered by every process, whether or not its rows need them."""
        if self.head is None:
            return None, None
        bias = None if self.head.bias is None else whole(self.head.bias).to(dtype)
        return whole(self.head.weight).to(dtype), bias

    def sequences(self, at: tuple[Tensor, Tensor]) -> Tensor | None:
        """The sequence of each token, by row and position; those outside the mask are one of their own."""
        if self.region == "token":
            return None
        rows = at[0]
        alone = rows.shape[0] + torch.arange(rows.shape[0], device=rows.device) + self.mask.shape[0]
        return torch.where(self.mask[at] > 0, rows, alone)


def take_snapshot(
    weight: Tensor, bias: Tensor | None, weights_at_hand: Callable[..., AbstractContextManager[Any]]
) -> HeadSnapshot | None:
    """The head as it is now; None if it is frozen, and so need not be kept.

    Raises:
        ConfigError: a head whose weights are not there as a matrix, such as FSDP1's flat shards.
    """
    if not (weight.requires_grad or (bias is not None and bias.requires_grad)):
        return None
    with weights_at_hand(weight, bias):
        if weight.dim() != 2 or not weight.numel():
            raise ConfigError(
                'troll_support="exact" keeps a copy of the LM head it trains, but this process holds a '
                f"shard of shape {tuple(weight.shape)} that cannot be gathered here. Use FSDP2 "
                '("fsdp_version": 2), DeepSpeed ZeRO, LoRA (whose head is frozen) or troll_support="bucket".'
            )
        return HeadSnapshot(weight.detach().clone(), None if bias is None else bias.detach().clone())


def evaluate_exactly(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sampled: Tensor,
    old: OldTokens,
    at: tuple[Tensor, Tensor],
    weights_at_hand: Callable[..., AbstractContextManager[Any]],
    **transform: Any,
) -> ProjectedTokens:
    """The trust region at the rows [N, D] of a batch's tokens `at` those rows and positions of `old`."""
    old_weight, old_bias = old.gathered_head(weight.dtype)
    old_hidden = beside(hidden, old.hidden[at])
    at_hand = functools.partial(weights_at_hand, weight, bias)
    if old.only_kl:
        kl = linear_kl(
            hidden, weight, old_hidden, bias=bias, old_weight=old_weight,
            old_bias=old_bias, weights_at_hand=at_hand, **transform,
        )  # fmt: skip
        return _measured(kl)
    return linear_trust_region(
        hidden,
        weight,
        sampled,
        old_hidden,
        kl_bound=old.kl_bound,
        bias=bias,
        old_weight=old_weight,
        old_bias=old_bias,
        old_support=old.support[at],
        sequences=old.sequences(at),
        weights_at_hand=at_hand,
        **transform,
    )


def _measured(kl: Tensor) -> ProjectedTokens:
    """Tokens of which the divergence alone was asked for."""
    unknown, nowhere = torch.full_like(kl, torch.nan), torch.zeros_like(kl, dtype=torch.bool)
    return ProjectedTokens(
        new_log_probs=unknown, old_log_probs=unknown, projected_log_probs=unknown, regression=unknown, kl=kl,
        step=unknown, projected=nowhere, tail_mass=unknown, entropy=unknown,
    )  # fmt: skip


def evaluate_on_support(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sampled: Tensor,
    ids: Tensor | None,
    head: Head,
    top_k: int | None = None,
    mass: float = 1.0,
) -> tuple[SparseLogProbs, Tensor, Tensor]:
    """Rows [N, D] on given ids [N, K], or on their own `top_k` most likely ones and the sampled ones [N].

    Returns:
        The distributions on their support, the sampled tokens' log-probabilities and the entropies, [N].
    """
    rows: LinearLogProbs = linear_log_probs(
        hidden, weight, sampled[:, None] if ids is None else torch.cat((sampled[:, None], ids), -1),
        bias=bias, top_k=top_k, with_min=top_k is not None, temperature=head.temperature,
        logit_scale=head.logit_scale, softcap=head.softcap, weights_at_hand=head.weights_at_hand,
    )  # fmt: skip
    sampled_log_probs, vocabulary = rows.log_probs[:, 0], head.vocabulary_size or weight.shape[0]
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


def head_transform(config: Any) -> tuple[float, float | None]:
    """Scale and soft cap of a model's logits, for which families have different names."""
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            scale = float(getattr(config, name))
            break
    else:
        scaling = getattr(config, "logits_scaling", None)
        if scaling is not None:
            scale = float(scaling) if config.model_type == "hyperclovax" else 1.0 / scaling
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        if getattr(config, name, None) is not None:
            return scale, float(getattr(config, name))
    return scale, None


def whole(parameter: Tensor) -> Tensor:
    """A head that FSDP2 shards as a unit of its own, gathered; nobody else does, as its forward never runs.

    Each process has tokens of its own, so the gradient is the mean over processes, as FSDP2's is.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.full_tensor(grad_placements=[Partial("avg")] * parameter.device_mesh.ndim)
