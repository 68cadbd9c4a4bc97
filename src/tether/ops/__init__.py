"""Operations on a language model's head that never build the [tokens, vocabulary] logits."""

from tether.ops.divergence import linear_kl
from tether.ops.hidden_states import HiddenStates
from tether.ops.linear import LinearLogProbs, linear_log_probs
from tether.ops.trust_region import linear_trust_region

__all__ = [
    "HiddenStates",
    "LinearLogProbs",
    "linear_kl",
    "linear_log_probs",
    "linear_trust_region",
]
