"""What a trainer of TRL does to a model's head before ours extends it."""

from __future__ import annotations

from typing import Any

import pytest
from trl.trainer import utils

#: TRL's forward that answers with log-probabilities, since 1.15; before, it asks for logits.
FUSED = hasattr(utils, "add_fused_lm_head")
needs_fused_head = pytest.mark.skipif(not FUSED, reason="compares with TRL's fused head, which 1.15 brought")


def fuse_head(model: Any, temperature: float = 1.0) -> None:
    """As the installed TRL does."""
    if FUSED:
        utils.add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
