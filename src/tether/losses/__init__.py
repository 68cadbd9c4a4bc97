"""Policy losses: one method a file, each a function of tensors and keywords."""

from collections.abc import Callable

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.ppo_clip import ppo_clip
from tether.losses.troll import ProjectedTokens, project_tokens, troll
from tether.losses.unclipped import unclipped

#: Every method by its name in configs and reports.
LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "ppo_clip": ppo_clip,
    "troll": troll,
    "unclipped": unclipped,
}

__all__ = [
    "LOSSES",
    "LossAggMode",
    "PolicyLoss",
    "ProjectedTokens",
    "aggregate",
    "ppo_clip",
    "project_tokens",
    "troll",
    "unclipped",
]
