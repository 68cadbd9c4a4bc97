"""How far two policies are apart, as hidden states and LM heads: every token's divergence, exactly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.ops.checks import check_vocabulary_size
from tether.ops.head import Head
from tether.ops.hidden_states import HiddenStates
from tether.ops.policy_pair import PolicyPair, check_heads, rows_at_a_time
from tether.projection.divergence import rows_kl


@torch.no_grad()
def linear_kl(
    hidden: Tensor,
    weight: Tensor,
    old_hidden: Tensor,
    *,
    bias: Tensor | None = None,
    old_weight: Tensor | None = None,
    old_bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocabulary_size: int | None = None,
    weights_at_hand: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """KL(new || old) of a language model's tokens over the whole vocabulary, without the logits in memory.

    Equals, in memory that `tether.ops.linear_trust_region` needs as well::

        new = linear_head(hidden, weight, bias).log_softmax(-1)            # [N, V]
        old = linear_head(old_hidden, old_weight, old_bias).log_softmax(-1)
        kl_categorical(new, old)

    with the head that `tether.linear_log_probs` describes. `linear_trust_region` says less of tokens that a
    certificate clears, for which it knows a lower bound alone; here every token is measured, at the cost of
    a product with each head. There is no gradient.

    Args:
        hidden, weight, bias: last hidden states of the new policy, [N, D], and its LM head, [V, D] and [V].
        old_hidden: last hidden states of the old policy, [N, D].
        old_weight, old_bias: the old LM head; by default the new one's, which is right for a frozen head.
        temperature, logit_scale, softcap, vocabulary_size, weights_at_hand: as in
            `tether.linear_log_probs`, for both policies (`weights_at_hand` for the new head alone).

    Returns:
        In nats, [N], float32 at least; NaN where logits hold NaN or infinity.

    Raises:
        InvalidInputError: shapes that do not fit, or a setting that is not positive.

    Example:
        >>> import torch
        >>> hidden, old_hidden = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0]])
        >>> weight = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
        >>> linear_kl(hidden, weight, old_hidden)   # .27 and .73 against a half each
        tensor([0.1109])
    """
    if hidden.dim() != 2 or old_hidden.shape != hidden.shape:
        raise InvalidInputError(
            f"linear_kl needs hidden and old_hidden [N, D], got {tuple(hidden.shape)} and "
            f"{tuple(old_hidden.shape)}. Flatten batch and time, and keep the tokens that count."
        )
    old = HiddenStates(old_hidden, old_weight, old_bias)
    check_heads(hidden, weight, bias, old)
    check_vocabulary_size(vocabulary_size, weight.shape[0])
    head = Head(temperature, logit_scale, softcap, vocabulary_size, weights_at_hand)
    kl = hidden.new_empty(hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32))
    with torch.autocast(hidden.device.type, enabled=False), head.weights_at_hand():
        pair = PolicyPair.of(head, hidden, weight, bias, old)
        for block in pair.every_block():
            new_logits, old_logits = pair.new_logits(block)[:, : pair.vocabulary], pair.old_logits(block)
            for part in rows_at_a_time(new_logits):
                kl[block][part] = rows_kl(new_logits[part], old_logits[part])
    return kl
