"""What each method makes of one token, its gradient's weight against its ratio; and when to take the method.

Each curve is the loss itself, differentiated, at its defaults: a response of one token that the old policy
gave `OLD_PROBABILITY`, all other tokens together being the second outcome. The weight is the loss's slope in
the token's logit over that of -A log p: 1 is the plain policy gradient, 0 none, below 0 a pull back.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tether.integrations.loss_options import given_to
from tether.losses import LOSSES

if TYPE_CHECKING:
    from tether.experiments.plots import Theme

OLD_PROBABILITY = 0.2
RATIOS = np.unique(
    np.concatenate([np.geomspace(0.25, 4.0, 33), [0.9995, 0.9996, 0.9999, 1.0003, 1.0005, 1.001]])
)

#: When to take it; docs/how_to_choose.md and docs/studies.md have the measurements behind it.
WHEN: dict[str, str] = {
    "troll": (
        "Data is stale and an update holds a hundred tokens or more; or the bound has to hold "
        "exactly. With updates of a few short responses add `--kl-stop 0.1`."
    ),
    "ppo_clip": (
        "The baseline to compare with, and enough where a batch serves a few updates. Of its widths "
        "half the usual one (0.1) did best where stale updates hold few tokens."
    ),
    "gspo": (
        "Rewards are of whole sequences, or a mixture of experts makes token ratios noisy. Its "
        "published clip is narrow; 0.03 was better on very stale data."
    ),
    "cispo": "Rare tokens must keep a gradient and data is fresh. It holds nothing back on stale data.",
    "sapo": "A clip's sharp edge does harm and data is fresh. Not for dozens of updates a batch.",
    "gmpo": "Short answers and very stale data: the rival that TROLL has to beat there.",
    "dppo": (
        "A probability is to decide what has moved too far, not a ratio; with bounds of 0.05 on stale data."
    ),
    "trm": (
        "A single token that moved too far makes a response untrustworthy. Not for dozens of updates a batch."
    ),
    "cppo": (
        "Responses are long, and an early token's change should count more than a late one's. On data 64 "
        "updates old it ended 5 to 7 points below TROLL."
    ),
    "drpo": (
        "A mask is too abrupt and a pull back is wanted without whole distributions. On data 64 updates old "
        "it ended 5 to 9 points below TROLL."
    ),
    "ipo": (
        "Engines differ from the trainer and one threshold on probabilities is to sort out what is "
        "left. It does not hold on data 64 updates old."
    ),
    "m2po": (
        "Batches are very stale and the clip would drop most of what is surprising. On data 64 updates old "
        "it ended where the clip did."
    ),
    "tis": "Only the mismatch of sampler and trainer is to be corrected; it is no trust region.",
    "icepop": "The same, and tokens on which the two disagree are better left out than cut.",
    "mis": "The same, and responses on which the two disagree are better left out whole.",
    "decoupled_clip": (
        "Asynchronous training a few updates behind; the region should be around a recent policy, not the "
        "sampler. It does not hold on data 64 updates old."
    ),
    "clip_cov": "Entropy collapses early. It keeps no policy near another.",
    "kl_cov": "The same, by a price instead of dropped tokens.",
    "vespo": (
        "A sequence's ratio is to weigh it; set for it (`lambda_pos=6,lambda_neg=4`) it held on stale data."
    ),
    "pspo": "A ratio with less variance is wanted, and data is fresh.",
    "kl_penalty": "Moving should cost something everywhere instead of being forbidden somewhere.",
    "unclipped": (
        "A batch serves one update, or the learning rate is small enough: then nothing beats it. Else "
        "it is what a trust region has to improve on."
    ),
}

#: What one token cannot show.
BESIDE: dict[str, str] = {
    "clip_cov": "Its rule picks tokens of a batch by their covariance; this curve: a token it leaves alone.",
    "kl_cov": "Its rule picks tokens of a batch by their covariance; this curve: a token it picked.",
    "m2po": "Its mask looks at a whole batch; here the batch is this one token.",
    "cppo": "Its bound tightens along a response; the curve is that of a first token.",
    "gspo": "The ratio is that of the whole sequence.",
    "gmpo": "The clip acts on each token, the weight is the geometric mean over the sequence.",
    "vespo": "The weight is that of the whole sequence's ratio.",
    "trm": "One token outside the bound drops its whole sequence.",
    "mis": "The ratio is that of the whole sequence.",
    "decoupled_clip": "With data one update old, where it is PPO's clip.",
}


@functools.cache
def curve(name: str, advantage: float) -> np.ndarray:
    """`weights` at `RATIOS`."""
    return weights(name, advantage, RATIOS)


def weights(name: str, advantage: float, ratios: Iterable[float]) -> np.ndarray:
    """The gradient's weight at each ratio, at the method's defaults."""
    found = []
    for ratio in ratios:
        probability = OLD_PROBABILITY * float(ratio)
        logit = torch.tensor(probability, dtype=torch.float64).logit().requires_grad_()
        new = torch.stack([logit, torch.zeros_like(logit)]).log_softmax(0)[None, None]
        old = torch.tensor([OLD_PROBABILITY, 1 - OLD_PROBABILITY], dtype=torch.float64).log()[None, None]
        mask = torch.ones(1, 1, dtype=torch.float64)
        loss = LOSSES[name](
            new[..., 0],
            old[..., 0],
            torch.tensor([advantage], dtype=torch.float64),
            mask,
            **_given(name, new, old),
        ).loss
        (slope,) = torch.autograd.grad(loss, logit)
        found.append(-slope.item() / (1 - probability) / advantage)
    return np.array(found)


def figure_svg(name: str, theme: Theme = "light") -> str:
    """The two curves, for an advantage of 1 and of -1."""
    from matplotlib.figure import Figure

    from tether.experiments.plots import COLOURS, house_style, svg_text

    with house_style(theme):
        figure = Figure(figsize=(6.4, 3.0), layout="constrained")
        for place, advantage in enumerate((1.0, -1.0), 1):
            axes = figure.add_subplot(1, 2, place)
            axes.plot(RATIOS, curve(name, advantage), color=COLOURS[theme].cycle[place - 1])
            axes.axvline(1.0, color=COLOURS[theme].muted, linewidth=0.8)
            axes.axhline(0.0, color=COLOURS[theme].muted, linewidth=0.8)
            axes.set_title("rewarded" if advantage > 0 else "punished", loc="left")
            axes.set_xlabel("ratio new / old")
            axes.set_xscale("log", base=2)
            axes.set_xticks([0.25, 0.5, 1, 2, 4], ["¼", "½", "1", "2", "4"])
            axes.set_ylim(-1.5, 4.2)
            if place == 1:
                axes.set_ylabel("weight of the gradient")
        return svg_text(figure, theme)


def section(name: str) -> str:
    """A method's rule, curve and use, for its page."""
    doc = (LOSSES[name].__doc__ or "").strip()
    rule = re.split(r"\n\s*\n", doc)[0]
    equation = " ".join(rule.split())
    picture = f"![{name}: weight of the gradient against the ratio]({name}"
    caption = (
        "How strongly a token's gradient is weighted, by how much likelier (right) or less likely (left) it "
        f"has become since it was sampled with probability {OLD_PROBABILITY:g}: 1 is the plain policy "
        f"gradient, 0 none, below 0 a pull back. {BESIDE.get(name, '')}"
    )
    return "\n\n".join([
        f"> {equation}",
        f"**When to take it.** {WHEN[name]}",
        f"{picture}.svg#only-light)\n{picture}-dark.svg#only-dark)",
        caption.rstrip(),
    ])  # fmt: skip


def _given(name: str, new: torch.Tensor, old: torch.Tensor) -> dict[str, Any]:
    given: dict[str, Any] = {
        "response_ids": torch.zeros(1, 1, dtype=torch.long), "new": new, "old": old, "lag": 1,
        "generator": torch.Generator().manual_seed(0),
    }  # fmt: skip
    return {key: value for key, value in given.items() if key in given_to(name, {})}
