"""The names of trust regions and estimators, and what they are called in tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

#: TROLL, TRL's clip, nothing; and the losses of `tether.losses.LOSSES`. Your own: "package.module:function".
TRUST_REGIONS = (
    "troll", "clip", "none",
    "cispo", "clip_cov", "cppo", "decoupled_clip", "dppo", "drpo", "gmpo", "gspo", "icepop", "ipo", "kl_cov",
    "kl_penalty", "m2po", "mis", "ppo_clip", "pspo", "sapo", "tis", "trm", "unclipped", "vespo",
)  # fmt: skip

#: GRPO and its averages as TRL has them, GSPO's ratio, and estimators of `tether.advantages`.
Estimator = Literal[
    "grpo", "dr_grpo", "dapo", "bnpo", "gspo",
    "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo",
]  # fmt: skip

# Trust regions whose settings are fields of TrainConfig.
OWN_FIELDS = {
    "troll": "kl_bound, alpha, top_k, mass and region",
    "clip": "clip_low and clip_high",
    "none": "nothing to set",
}
_LABELS = {"troll": "TROLL", "clip": "clip", "none": "no trust region"}


def is_loss(trust_region: str) -> bool:
    """Whether a trust region is a loss, of `tether.losses` or your own, with options of its own.

    >>> is_loss("dppo"), is_loss("clip")
    (True, False)
    """
    return trust_region not in OWN_FIELDS


def method_label(trust_region: str, loss_options: Mapping[str, Any]) -> str:
    """The method's name in tables and legends, with what was chosen of a loss's options.

    >>> method_label("dppo", {"divergence": "top-k-kl"}), method_label("none", {})
    ('dppo divergence=top-k-kl', 'no trust region')
    """
    label = _LABELS.get(trust_region, trust_region)
    if not loss_options:
        return label
    return f"{label} {', '.join(f'{name}={value}' for name, value in loss_options.items())}"
