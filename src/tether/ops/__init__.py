"""Operations on a language model's head that never build the [tokens, vocabulary] logits."""

from tether.ops.linear import LinearLogProbs, linear_log_probs

__all__ = ["LinearLogProbs", "linear_log_probs"]
