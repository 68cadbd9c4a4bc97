"""verl's own loss in one pass over the LM head: its slopes a block of tokens at a time, itself at the end.

Of hidden states the engine's first call of the loss function only keeps them. In the second, which has the
advantages and all else the loss is made of, `linear_policy_loss` forms the logits of a block, asks for the
slopes of the loss there, and makes the gradient before the next block. verl's `ppo_loss` waits for a device
some times a sequence, too often to be asked for every block; so `TokenTerms` has the slopes, and `ppo_loss`
what is logged. That both are of one loss is checked with each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty

from tether.integrations.logits_hooks import TokenLayout
from tether.integrations.verl.carrier import flat
from tether.integrations.verl.layout import CountedTokens
from tether.integrations.verl.settings import TROLLPolicyLossConfig
from tether.integrations.verl.views import HiddenView
from tether.losses import PolicyLoss, linear_policy_loss, troll_objective
from tether.losses.linear import LinearPolicyLoss
from tether.projection.tokens import ProjectedTokens


def obstacle(settings: TROLLPolicyLossConfig, *, sequence_parallel: int, scales_loss: bool) -> str | None:
    """What needs the values of all tokens before the loss of any; None if nothing does.

    Args:
        sequence_parallel: over how many processes a sequence is cut.
        scales_loss: whether the engine multiplies the loss before its backward pass.
    """
    if settings.around_sampler:
        return "troll_anchor=sampler renormalises the network on what its sampler could sample"
    if settings.troll_support != "exact":
        return f"troll_support={settings.troll_support} reads logits that verl's engine keeps"
    if settings.troll_region == "sequence":
        return "troll_region=sequence projects the tokens of a sequence by one step"
    if sequence_parallel > 1:
        return (
            f"ulysses_sequence_parallel_size={sequence_parallel} cuts sequences that verl's loss needs whole"
        )
    if scales_loss:
        return "fp16 scales a loss up before its gradient is rounded"
    return None


class TokenTerms:
    """verl's `ppo_loss` as a sum of terms, each of which depends on its token alone (GSPO: on its sequence).

    Every `loss_agg_mode` weighs a token's loss by a number that follows from masks and counts alone: the
    derivative of verl's `agg_loss`, taken once.
    """

    def __init__(
        self, config: Any, data: Any, layout: TokenLayout, dtype: torch.dtype, *, with_entropy: bool
    ) -> None:
        self._policy_loss, self._mask = config.policy_loss, layout.mask
        mask = data["response_mask"].to_padded_tensor(0) > 0
        counted = flat(data["response_mask"]) > 0

        def of_tokens(name: str) -> Tensor:
            return layout.pad(flat(data[name])[counted])

        self._weights = layout.pad(_weights_of_tokens(config, data, mask, dtype)[mask])
        self._advantages = of_tokens("advantages")
        weighed = "rollout_is_weights" in data.keys()  # noqa: SIM118  (a TensorDict)
        self._policy_weights = of_tokens("rollout_is_weights") if weighed else None
        self._entropy_coeff = config.entropy_coeff if with_entropy else 0.0
        self._reference = of_tokens("ref_log_prob") if config.use_kl_loss else None
        self._penalty = (config.kl_loss_coef, config.kl_loss_type)

    def __call__(self, tokens: ProjectedTokens) -> PolicyLoss:
        """The sum, of tokens in the layout."""
        terms = troll_objective(
            tokens,
            self._advantages,
            self._mask,
            alpha=self._policy_loss.troll_alpha,
            ratio_level=self._policy_loss.troll_ratio,
            policy_weights=self._policy_weights,
        ).token_loss
        if self._entropy_coeff:
            assert tokens.entropy is not None
            terms = terms - self._entropy_coeff * tokens.entropy
        if self._reference is not None:
            coefficient, kind = self._penalty
            terms = terms + coefficient * kl_penalty(tokens.new_log_probs, self._reference, kind)
        return PolicyLoss((self._weights * terms).sum(), {})


def _weights_of_tokens(config: Any, data: Any, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The derivative of verl's average by the loss of each token, [B, T]."""
    counts = {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
    with torch.enable_grad():
        losses = torch.zeros(mask.shape, dtype=dtype, device=mask.device, requires_grad=True)
        mean = agg_loss(
            losses, mask, config.loss_agg_mode, **counts, loss_scale_factor=config.loss_scale_factor
        )
        return torch.autograd.grad(mean, losses)[0]


def loss_in_one_pass(
    view: HiddenView,
    rows: Tensor,
    tokens: CountedTokens,
    data: Any,
    fields: Mapping[str, Any],
    config: Any,
    verls: Callable[[ProjectedTokens], PolicyLoss],
) -> LinearPolicyLoss:
    """verl's loss of a micro-batch, with its gradient to hidden states and head.

    Args:
        rows: the hidden states in the logits' place, [1, positions, D].
        tokens: those that count.
        fields: the old policy's.
        config: verl's actor configuration.
        verls: verl's loss and metrics of the finished tokens, a value a token [N].
    """
    settings = config.policy_loss
    by_sequence = settings.troll_ratio == "sequence"
    with torch.autocast(rows.device.type, enabled=False):
        new, old, old_log_probs, layout = view.policies(
            rows, tokens, data, fields, tokens.per_sequence if by_sequence else None
        )
        dtype = torch.promote_types(new.hidden.dtype, torch.float32)
        return linear_policy_loss(
            lambda found: verls(found.each(layout.flatten)),
            new,
            layout.pad(tokens.sampled_ids),
            layout.mask,
            old=old,
            old_log_probs=old_log_probs,
            kl_bound=settings.troll_kl_bound,
            depends_on="sequence" if by_sequence else "token",
            in_blocks=TokenTerms(config, data, layout, dtype, with_entropy=view.with_entropy),
        )
