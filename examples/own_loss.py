"""A policy loss of your own, trained by `tether llm train` without a change to Tether.

    PYTHONPATH=examples tether llm train --method own_loss:soft_wall --method.width 0.5

The loss is a function of tensors and keywords. Its keywords with defaults are its options on the command
line, in YAML and in Python; `new` and `old` in its signature would ask for whole token distributions,
`generator` for random numbers. Run as a script, this file trains with it for a few steps.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from torch import Tensor

from tether.losses import LossAggMode, PolicyLoss, aggregate
from tether.losses.tokens import check_at_least, read_tokens


def soft_wall(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    width: float = 0.5,
    loss_agg_mode: LossAggMode = "token-mean",
    max_response_length: int | None = None,
) -> PolicyLoss:
    """-r A + (log r)² / (2 width) a token: the further a token has moved, the harder it is pulled back.

    Args:
        log_probs, old_log_probs: of the sampled tokens, [B, T].
        advantages: [B] or [B, T].
        response_mask: [B, T].
        width: how far a token may go, in nats: where the pull is as strong as an advantage of 1.
        loss_agg_mode, max_response_length: see `tether.losses.aggregate`.
    """
    tokens = read_tokens(log_probs, old_log_probs, advantages, response_mask)
    check_at_least("width", width, 0.0, "0.5 is a start", above=True)
    token_loss = -tokens.ratio * tokens.advantages + tokens.log_ratio.square() / (2 * width)
    loss = aggregate(token_loss, response_mask, loss_agg_mode, max_response_length=max_response_length)
    return PolicyLoss(loss, tokens.metrics(tokens.ratio))


def main(output: Path) -> None:
    """Train the embedded model with it for two batches."""
    from tether.llm.config import TrainConfig
    from tether.llm.methods import find_method
    from tether.llm.train import train

    train(
        TrainConfig(
            output=output, task="arithmetic", method=find_method("own_loss:soft_wall")(width=0.5),
            steps=8, updates_per_rollout=4, prompts_per_rollout=8, eval_problems=20, eval_every=8,
            save_every=8,
        )
    )  # fmt: skip


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "run")
