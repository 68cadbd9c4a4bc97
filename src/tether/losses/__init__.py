"""Losses: one method a file, each a function of tensors and keywords. `value_clip` is the critic's."""

from collections.abc import Callable

from tether.losses.aggregate import LossAggMode, aggregate
from tether.losses.base import PolicyLoss
from tether.losses.cispo import cispo
from tether.losses.clip_cov import clip_cov
from tether.losses.cppo import cppo
from tether.losses.decoupled_clip import decoupled_clip
from tether.losses.dppo import dppo
from tether.losses.drpo import drpo
from tether.losses.gmpo import gmpo
from tether.losses.gspo import gspo
from tether.losses.icepop import icepop
from tether.losses.ipo import ipo
from tether.losses.kl_cov import kl_cov
from tether.losses.kl_penalty import kl_penalty
from tether.losses.linear import linear_policy_loss
from tether.losses.m2po import m2po
from tether.losses.mis import mis
from tether.losses.ppo_clip import ppo_clip
from tether.losses.project import project_tokens
from tether.losses.pspo import pspo
from tether.losses.sampler import truncated_weights
from tether.losses.sapo import sapo
from tether.losses.tis import tis
from tether.losses.trm import trm
from tether.losses.troll import TROLLObjective, troll, troll_objective
from tether.losses.unclipped import unclipped
from tether.losses.value_clip import value_clip
from tether.losses.vespo import vespo
from tether.names import look_up
from tether.projection.tokens import ProjectedTokens

#: Every method by its name in configs and reports.
LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "cispo": cispo,
    "clip_cov": clip_cov,
    "cppo": cppo,
    "decoupled_clip": decoupled_clip,
    "dppo": dppo,
    "drpo": drpo,
    "gmpo": gmpo,
    "gspo": gspo,
    "icepop": icepop,
    "ipo": ipo,
    "kl_cov": kl_cov,
    "kl_penalty": kl_penalty,
    "m2po": m2po,
    "mis": mis,
    "ppo_clip": ppo_clip,
    "pspo": pspo,
    "sapo": sapo,
    "tis": tis,
    "trm": trm,
    "troll": troll,
    "unclipped": unclipped,
    "vespo": vespo,
}


def find_loss(name: str) -> Callable[..., PolicyLoss]:
    """A loss by its name in `LOSSES`, or your own by where it is: ``"package.module:function"``.

    Raises:
        ConfigError: an unknown name, with the nearest; or nothing there to import.

    Example:
        >>> find_loss("gspo") is gspo, find_loss("tether.losses.gmpo:gmpo") is gmpo
        (True, True)
    """
    found: Callable[..., PolicyLoss] = look_up(name, LOSSES, "policy loss")
    return found


__all__ = [
    "LOSSES",
    "LossAggMode",
    "PolicyLoss",
    "ProjectedTokens",
    "TROLLObjective",
    "aggregate",
    "cispo",
    "clip_cov",
    "cppo",
    "decoupled_clip",
    "dppo",
    "drpo",
    "find_loss",
    "gmpo",
    "gspo",
    "icepop",
    "ipo",
    "kl_cov",
    "kl_penalty",
    "linear_policy_loss",
    "m2po",
    "mis",
    "ppo_clip",
    "project_tokens",
    "pspo",
    "sapo",
    "tis",
    "trm",
    "troll",
    "troll_objective",
    "truncated_weights",
    "unclipped",
    "value_clip",
    "vespo",
]
