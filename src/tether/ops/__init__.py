"""Operations on a language model's head that never build the [tokens, vocabulary] logits."""

from tether.ops.found import LinearTrustRegion
from tether.ops.linear import LinearLogProbs, linear_log_probs
from tether.ops.trust_region import linear_trust_region

__all__ = ["LinearLogProbs", "LinearTrustRegion", "linear_log_probs", "linear_trust_region"]
