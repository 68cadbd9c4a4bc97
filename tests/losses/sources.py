"""What every method is checked against: run by test_sources.py, and listed in docs/methods.md.

    python tests/losses/sources.py     # writes docs/methods.md

A row cannot be in the table without its comparison being run, because the rows are these objects.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from references import (
    SEQUENCE_ADVANTAGES,
    Reference,
    cppo_equation,
    decoupled_clip_equation,
    dppo_equation,
    drpo_equation,
    ipo_equation,
    m2po_equation,
    mis_equation,
    pspo_equation,
    trl,
    trm_equation,
    verl,
    verl_penalty,
    verl_rejection,
)
from torch import Tensor

import tether.advantages
from tether.integrations.loss_options import GIVEN, looks_at_distributions, loss_options
from tether.llm.estimators import ESTIMATORS as RUN_ESTIMATORS
from tether.llm.estimators import find_estimator
from tether.losses import LOSSES
from tether.signatures import keywords_of, options_of, places_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "methods.md"


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    function: str
    """Name in LOSSES."""
    paper: str
    """Short title and arXiv number."""
    references: tuple[Reference, ...] = ()
    variant: str = ""
    """What this row sets differently, if it is not the function's defaults."""
    elsewhere: str = ""
    """What another test file checks it against."""


_COVARIANCE = {"clip_cov_ratio": 0.2, "clip_cov_low": 0.05, "clip_cov_high": 5.0}

METHODS: tuple[Method, ...] = (
    Method(
        "troll",
        "TROLL, 2510.03817",
        elsewhere="its formula in dense float64, finite differences, hand numbers "
        "(`tests/losses/test_troll.py`)",
    ),
    Method(
        "ppo_clip",
        "PPO, 1707.06347",
        (
            verl("clip"),
            trl({}, loss_type="dapo"),
            trl({"loss_agg_mode": "seq-mean-token-mean"}, loss_type="grpo"),
        ),
    ),
    Method(
        "ppo_clip",
        "DAPO, 2503.14476",
        (
            verl("clip-higher", clip_ratio_high=0.28),
            trl({"clip_ratio_high": 0.28}, loss_type="dapo", epsilon_high=0.28),
        ),
        variant="clip-higher: `clip_ratio_high=0.28`",
    ),
    Method(
        "ppo_clip",
        "Dual clip, 1912.09729",
        (verl("dual-clip", dual_clip=1.5),),
        variant="dual clip: `dual_clip=3`",
    ),
    Method(
        "gspo",
        "GSPO, 2507.18071",
        (
            verl("gspo"),
            verl("gspo-wide", clip_ratio_low=0.3, clip_ratio_high=0.4),
            trl(
                {"clip_ratio_low": 0.3, "clip_ratio_high": 0.4},
                batches=SEQUENCE_ADVANTAGES,
                loss_type="grpo",
                importance_sampling_level="sequence",
                epsilon_low=0.3,
                epsilon_high=0.4,
            ),
        ),
    ),
    Method(
        "cispo",
        "MiniMax-M1, 2506.13585",
        (
            verl("cispo", clip_ratio_high=0.5),
            verl("cispo-both", clip_ratio_low=0.3, clip_ratio_high=0.5),
            trl({"clip_ratio_high": 0.5}, loss_type="cispo", epsilon_high=1.5),
        ),
    ),
    Method(
        "sapo",
        "SAPO, 2511.20347",
        (
            verl("sapo"),
            verl("sapo-narrow", tau_pos=3.0, tau_neg=5.0),
            trl({}, loss_type="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05),
        ),
    ),
    Method(
        "gmpo",
        "GMPO, 2507.20673",
        (
            verl("gmpo"),
            trl(
                {"clip_ratio_low": 0.2, "clip_ratio_high": 0.4},
                batches=SEQUENCE_ADVANTAGES,
                one_a_sequence=True,
                trainer="GMPOTrainer",
                epsilon_low=0.2,
                epsilon_high=0.4,
            ),
        ),
    ),
    Method(
        "dppo",
        "DPPO, 2602.04879",
        (
            verl("dppo-tv"),
            verl("dppo-tv-capped", divergence_low=0.05, divergence_high=0.3, ratio_cap=1.2),
            verl("dppo-kl", divergence="binary-kl"),
            dppo_equation("top-k-tv", 0.1, 0.15, "sparse"),
            dppo_equation("top-k-kl", 0.02, 0.05, "sparse"),
            dppo_equation("top-k-kl", 0.02, 0.05, "dense"),
        ),
    ),
    Method(
        "trm",
        "TRM, 2512.23075",
        (
            trm_equation(0.05, "dense"),
            trm_equation(0.05, "sparse"),
            verl_rejection("k2", 0.3),
            verl_rejection("k3", 0.3),
        ),
    ),
    Method(
        "cppo",
        "CPPO, 2606.10968",
        (
            cppo_equation(probability_bound=0.15),
            cppo_equation(probability_bound=0.05, last_weight=0.5, prefix_budget=0.1, ratio_cap=1.5),
            cppo_equation(probability_bound=0.1, prefix_budget=0.0, budget_growth=1.0),
        ),
    ),
    Method("drpo", "DRPO, 2606.09821", (drpo_equation(12.5), drpo_equation(0.15))),
    Method(
        "ipo",
        "[prime-rl](https://docs.primeintellect.ai/prime-rl/ipo)",
        (ipo_equation(0.3, 0.0), ipo_equation(0.1, 1e-3)),
    ),
    Method("m2po", "M2PO, 2510.01161", (m2po_equation(0.04), m2po_equation(0.002), m2po_equation(0.0))),
    Method(
        "tis",
        "TIS, Yao et al. 2025",
        (verl("tis", ratio_cap=1.1), verl("tis-sequence", level="sequence", ratio_cap=2.0)),
    ),
    Method("icepop", "IcePop, 2510.18855", (verl("icepop", ratio_low=0.8, ratio_high=1.25),)),
    Method(
        "mis",
        "MIS, Liu et al. 2025",
        (
            mis_equation(level="sequence", ratio_low=0.5, ratio_high=2.0),
            mis_equation(level="geometric", ratio_low=0.9, ratio_high=1.1, ratio_cap=1.05),
        ),
    ),
    Method(
        "decoupled_clip",
        "A-3PO, 2512.06547",
        (
            decoupled_clip_equation(lag=1),
            decoupled_clip_equation(lag=8, clip_ratio_high=0.05, clip_ratio_low=0.02),
            decoupled_clip_equation(lag=64, weight_cap=1.2),
        ),
    ),
    Method(
        "clip_cov",
        "Entropy mechanism, 2505.22617",
        (
            verl("clip-cov-unclipped", **_COVARIANCE),
            verl("clip-cov", clip_ratio_low=0.2, clip_ratio_high=0.2, **_COVARIANCE),
        ),
    ),
    Method("kl_cov", "Entropy mechanism, 2505.22617", (verl("kl-cov", kl_cov_ratio=0.2),)),
    Method(
        "vespo",
        "VESPO, 2602.10693",
        (
            trl(
                {},
                loss_type="vespo",
                vespo_k_pos=2.0,
                vespo_lambda_pos=3.0,
                vespo_k_neg=3.0,
                vespo_lambda_neg=2.0,
            ),
        ),
    ),
    Method("pspo", "PSPO, 2509.21282", (pspo_equation(0.1), pspo_equation(0.6))),
    Method(
        "kl_penalty",
        "PPO, 1707.06347",
        (verl_penalty("k3", 1.0), verl_penalty("k2", 0.5), verl_penalty("k1", 2.0)),
    ),
    Method("unclipped", "policy gradient with importance weights", (verl("unclipped"),)),
)


@dataclass(frozen=True)
class Estimator:
    """A row of the table of advantages."""

    function: str
    paper: str
    source: str
    compute: Callable[[dict[str, Any]], Any]
    """Ours, on verl's inputs as tensors."""
    key: str
    """Of verl's outcome in the fixtures."""


def _by_group(name: str) -> Callable[[dict[str, Any]], Tensor]:
    function = getattr(tether.advantages, name)
    return lambda inputs: function(inputs["rewards"], inputs["groups"])


def _verl_estimator(
    function: str, paper: str, theirs: str, key: str, compute: Callable[..., Any]
) -> Estimator:
    return Estimator(function, paper, f"verl 0.9.1, {theirs}", compute, key)


ESTIMATORS: tuple[Estimator, ...] = (
    _verl_estimator(
        "grpo", "GRPO, 2402.03300", "`compute_grpo_outcome_advantage`", "grpo", _by_group("grpo")
    ),
    _verl_estimator(
        "dr_grpo",
        "Dr.GRPO, 2503.20783",
        "`compute_grpo_outcome_advantage`",
        "dr_grpo",
        _by_group("dr_grpo"),
    ),
    _verl_estimator(
        "rloo", "RLOO, 2402.14740", "`compute_rloo_outcome_advantage`", "rloo", _by_group("rloo")
    ),
    _verl_estimator(
        "reinforce_plus_plus",
        "REINFORCE++, 2501.03262",
        "`compute_reinforce_plus_plus_outcome_advantage`",
        "reinforce_plus_plus gamma=0.9",
        lambda x: tether.advantages.reinforce_plus_plus(x["token_rewards"], x["response_mask"], gamma=0.9),
    ),
    _verl_estimator(
        "reinforce_plus_plus_baseline",
        "REINFORCE++, 2501.03262",
        "`compute_reinforce_plus_plus_baseline_outcome_advantage`",
        "reinforce_plus_plus_baseline",
        lambda x: tether.advantages.reinforce_plus_plus_baseline(
            x["rewards"], x["groups"], x["response_mask"]
        ),
    ),
    _verl_estimator(
        "gae",
        "GAE, 1506.02438",
        "`compute_gae_advantage_return`: whitened advantages, returns",
        "gae gamma=0.95 lam=0.8",
        lambda x: tether.advantages.whiten(
            tether.advantages.gae(
                x["token_rewards"], x["values"], x["response_mask"], gamma=0.95, gae_lambda=0.8
            )[0],
            x["response_mask"],
        ),
    ),
)

_WORDS = {
    "generator": "random numbers", "lag": "updates since sampling", "new": "distributions",
    "proximal_log_probs": "a policy between the two",
}  # fmt: skip


def _options(function: Callable[..., Any], name: str) -> str:
    chosen = options_of(function, name, GIVEN | {"max_response_length", "policy_weights"}).values()
    return "<br>".join(f"`{option.name}={option.default!r}`" for option in chosen) or "none"


def _needs(name: str) -> str:
    """What a loss is given besides log-probabilities and advantages: always, or under which options."""
    given = keywords_of(LOSSES[name]) & _WORDS.keys()
    if not hasattr(LOSSES[name], "looks_at_distributions"):
        return "<br>".join(_WORDS[key] for key in sorted(given)) or "sampled tokens"
    words = [
        f"distributions with `{option.name}={value!r}`"
        for option in loss_options(name).values()
        for value in get_args(option.type)
        if isinstance(value, str) and looks_at_distributions(name, {option.name: value})
    ]
    return "<br>".join(words)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _arxiv(paper: str) -> str:
    title, _, number = paper.rpartition(", ")
    published = re.fullmatch(r"\d{4}\.\d{5}", number)
    return f"{title}, [{number}](https://arxiv.org/abs/{number})" if published else paper


def table() -> str:
    """The page, from the objects that the tests run."""
    lines = [
        "# Methods and what they are checked against",
        "",
        "Written by `python tests/losses/sources.py`; edit that file. Every comparison listed runs in",
        "`tests/losses/test_sources.py`: loss and gradient agree to 1e-6 (in float64). Numbers of verl were",
        "made by `tests/losses/make_verl_fixtures.py`; TRL is run as installed.",
        "",
        "Every response of these batches has a token that counts. One without any is a zero in a mean of",
        "sequences, as in TRL and in verl's trainers; verl's `agg_loss` on its own leaves it out",
        "(`tests/losses/test_aggregate.py`).",
        "",
        "All losses take `(log_probs, old_log_probs, advantages, response_mask)` and keywords, and are in",
        "`tether.losses.LOSSES` by name. Options and needs are read from the signatures: a loss is its file",
        "and its line in `LOSSES`, and a row here says what it is checked against.",
        "",
        "## Policy losses",
        "",
        _row("method", "paper", "file", "options", "needs", "checked against"),
        _row(*["---"] * 6),
    ]
    for method in METHODS:
        sources = [method.elsewhere, *(reference.source for reference in method.references)]
        lines.append(
            _row(
                f"`{method.function}`" + (f"<br>{method.variant}" if method.variant else ""),
                _arxiv(method.paper),
                f"`src/tether/losses/{method.function}.py`",
                "as above" if method.variant else _options(LOSSES[method.function], method.function),
                "as above" if method.variant else _needs(method.function),
                "<br>".join(dict.fromkeys(source for source in sources if source)),
            )
        )
    lines += [
        "",
        "## Advantages",
        "",
        "In `src/tether/advantages.py`, by name in `tether.advantages.ADVANTAGES`.",
        "",
        _row("estimator", "paper", "options", "needs", "checked against"),
        _row(*["---"] * 5),
    ]
    for estimator in ESTIMATORS:
        function = getattr(tether.advantages, estimator.function)
        given = ", ".join(f"`{place}`" for place in places_of(function))
        options = _options(function, estimator.function)
        lines.append(
            _row(f"`{estimator.function}`", _arxiv(estimator.paper), options, given, estimator.source)
        )
    lines += [
        "",
        "## Estimators of a training run",
        "",
        "`--estimator NAME`, or `package.module:function`, whose positional parameters are among `rewards`,",
        "`group_ids`, `response_mask` and `token_rewards`; the loss is then averaged over tokens.",
        "",
        _row("name", "in TRL's words", "advantages", "options"),
        _row(*["---"] * 4),
    ]
    for name, spec in RUN_ESTIMATORS.items():
        settings = "<br>".join(f"`{key}={value!r}`" for key, value in spec.trl.items())
        options = find_estimator(name)().options().items()
        chosen = "<br>".join(f"`{key}={value!r}`" for key, value in options)
        whose = f"`{spec.replaces.replace(':', '.')}`" if spec.replaces else "TRL's"
        lines.append(_row(f"`{name}`", settings, whose, chosen or "none"))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(table())


if __name__ == "__main__":
    main()
