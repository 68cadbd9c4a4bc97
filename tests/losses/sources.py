"""What every method is checked against: run by test_sources.py, and listed in docs/methods.md.

    python tests/losses/sources.py     # writes docs/methods.md

A row cannot be in the table without its comparison being run, because the rows are these objects.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import equations
import numpy as np
import torch
from torch import Tensor
from trl_reference import trl_loss

import tether.advantages
from tether.losses import LOSSES
from tether.projection import SparseLogProbs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "methods.md"
FIXTURES = Path(__file__).with_name("verl_fixtures.json")

SEQUENCE_ADVANTAGES = ("fresh", "stale")
EVERY_BATCH = (*SEQUENCE_ADVANTAGES, "token-advantages")
#: Ids that the sparse distributions of `distributions` keep of a vocabulary of 7.
KEPT_IDS = [0, 2, 3, 6]


@dataclass(frozen=True)
class Batch:
    """Sampled tokens, [B, T] in float64, and where needed the whole distributions [B, T, V]."""

    name: str
    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    new: Tensor | None = None
    old: Tensor | None = None

    def sparse(self) -> dict[str, SparseLogProbs]:
        """Both distributions on `KEPT_IDS`."""
        assert self.new is not None
        assert self.old is not None
        ids = torch.tensor(KEPT_IDS).expand(*self.new.shape[:-1], -1)
        return {
            "new": SparseLogProbs.at_ids(self.new, ids),
            "old": SparseLogProbs.at_ids(self.old, ids),
        }

    def dense(self) -> dict[str, Tensor]:
        """Both distributions whole."""
        assert self.new is not None
        assert self.old is not None
        return {"new": self.new, "old": self.old}


@dataclass(frozen=True)
class Reference:
    """Somebody else's loss and gradient, and the settings with which ours must equal them."""

    source: str
    """As it reads in the table."""
    compute: Callable[[Batch], tuple[Any, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    batches: tuple[str, ...] = EVERY_BATCH
    distributions: str = ""
    """"sparse" or "dense" if the method is given those of the batch."""
    seed: int | None = None
    """Of the generator, for a method that draws."""

    def options(self, batch: Batch) -> dict[str, Any]:
        """The keywords for our function."""
        options = dict(self.settings)
        if self.distributions:
            options |= batch.sparse() if self.distributions == "sparse" else batch.dense()
        if self.seed is not None:
            options["generator"] = torch.Generator().manual_seed(self.seed)
        return options


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


@cache
def fixtures() -> dict[str, Any]:
    """The numbers of verl_fixtures.json."""
    loaded: dict[str, Any] = json.loads(FIXTURES.read_text())
    return loaded


@cache
def batch_of(name: str) -> Batch:
    """A batch by name: verl's three, or `distributions`."""
    if name == "distributions":
        return _distributions()
    tensors = {
        key: torch.tensor(value, dtype=torch.float64) for key, value in fixtures()["batches"][name].items()
    }
    return Batch(name, **tensors)


def _distributions() -> Batch:
    generator = torch.Generator().manual_seed(5)
    old = torch.randn(4, 5, 7, generator=generator, dtype=torch.float64).mul(1.5).log_softmax(-1)
    drift = torch.tensor([0.05, 0.3, 0.9, 0.2], dtype=torch.float64)[
        :, None, None
    ]  # the first sequence hardly moves
    new = (old + drift * torch.randn(old.shape, generator=generator, dtype=torch.float64)).log_softmax(-1)
    ids = torch.tensor(KEPT_IDS)[torch.randint(4, (4, 5), generator=generator)][..., None]
    mask = torch.ones(4, 5)
    mask[1, 3:], mask[3, 1] = 0, 0
    advantages = torch.tensor([1.0, -0.7, 0.5, 1.3], dtype=torch.float64)[:, None].expand(4, 5)
    return Batch(
        "distributions", new.gather(-1, ids)[..., 0], old.gather(-1, ids)[..., 0], advantages, mask, new, old
    )


def verl(name: str, **settings: Any) -> Reference:
    """A policy loss of verl, from the fixtures."""
    entries = {entry["batch"]: entry for entry in fixtures()["losses"] if entry["name"] == name}
    function = entries["fresh"]["function"].split("'")[1]
    return Reference(
        f"verl 0.9.1, policy loss `{function}`",
        lambda batch: (entries[batch.name]["loss"], entries[batch.name]["gradient"]),
        settings,
        seed=fixtures()["provenance"]["seed"] if function == "clip_cov" else None,
    )


def trl(
    ours: dict[str, Any],
    *,
    batches: tuple[str, ...] = EVERY_BATCH,
    one_a_sequence: bool = False,
    **theirs: Any,
) -> Reference:
    """A loss type of TRL, run."""

    def compute(batch: Batch) -> tuple[Tensor, Tensor]:
        advantages = batch.advantages[:, 0] if one_a_sequence else batch.advantages
        return trl_loss(batch.log_probs, batch.old_log_probs, advantages, batch.response_mask, **theirs)

    what = f"loss type `{theirs['loss_type']}`" if "loss_type" in theirs else "`GMPOTrainer`"
    return Reference(f"TRL 1.16, {what}", compute, ours, batches)


def _verl_entry(name: str, batch: Batch) -> tuple[float, np.ndarray]:
    (entry,) = (e for e in fixtures()["losses"] if (e["name"], e["batch"]) == (name, batch.name))
    return entry["loss"], np.array(entry["gradient"])


def _verl_penalty(estimate: str, coefficient: float) -> Reference:
    def compute(batch: Batch) -> tuple[float, np.ndarray]:
        loss, gradient = _verl_entry("unclipped", batch)
        kl, kl_gradient = _verl_entry(f"kl-{estimate}", batch)
        return loss + coefficient * kl, gradient + coefficient * kl_gradient

    return Reference(
        f"verl 0.9.1, `vanilla` without a clip plus {coefficient:g} `kl_penalty(old, new, {estimate})`",
        compute,
        {"kl_estimate": estimate, "kl_coef": coefficient},
    )


def _numpy(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return (
        batch.log_probs.numpy(),
        batch.old_log_probs.numpy(),
        batch.advantages.numpy(),
        batch.response_mask.numpy(),
    )


def _verl_rejection(estimate: str, bound: float) -> Reference:
    """-r A of the sequences that verl's rejection leaves, over all tokens."""

    def compute(batch: Batch) -> tuple[float, np.ndarray]:
        new, old, advantages, mask = _numpy(batch)
        (left,) = (
            np.array(entry["mask"])
            for entry in fixtures()["rejections"]
            if (entry["arguments"]["rollout_rs"], entry["batch"]) == (f"seq_max_{estimate}", batch.name)
        )

        def term(b: int, t: int) -> equations.Term:
            value = -math.exp(new[b, t] - old[b, t]) * advantages[b, t] * left[b, t]
            return value, value

        return equations.token_mean(mask, term)

    return Reference(
        f"verl 0.9.1, mask of `compute_rollout_rejection_mask(seq_max_{estimate})`",
        compute,
        {"kl_estimate": estimate, "kl_bound": bound},
    )


def _trm_equation(bound: float, form: str) -> Reference:
    def compute(batch: Batch) -> tuple[float, np.ndarray]:
        new, old, advantages, mask = _numpy(batch)
        p, q = batch.new.exp().tolist(), batch.old.exp().tolist()  # type: ignore[union-attr]
        see = (lambda x: equations.with_rest(x, KEPT_IDS)) if form == "sparse" else (lambda x: x)
        worst = [
            max(equations.kl(see(q[b][t]), see(p[b][t])) for t in range(mask.shape[1]) if mask[b, t])
            for b in range(mask.shape[0])
        ]

        def term(b: int, t: int) -> equations.Term:
            value = -math.exp(new[b, t] - old[b, t]) * advantages[b, t] if worst[b] <= bound else 0.0
            return value, value

        return equations.token_mean(mask, term)

    return Reference(
        f"its equation token by token, {form} distributions",
        compute,
        {"kl_bound": bound},
        ("distributions",),
        distributions=form,
    )


def _dppo_equation(divergence: str, low: float, high: float, form: str) -> Reference:
    measure = equations.total_variation if divergence == "top-k-tv" else equations.kl

    def compute(batch: Batch) -> tuple[float, np.ndarray]:
        new, old, advantages, mask = _numpy(batch)
        p, q = batch.new.exp().tolist(), batch.old.exp().tolist()  # type: ignore[union-attr]
        see = (lambda x: equations.with_rest(x, KEPT_IDS)) if form == "sparse" else (lambda x: x)

        def term(b: int, t: int) -> equations.Term:
            ratio, a = math.exp(new[b, t] - old[b, t]), advantages[b, t]
            distance = measure(see(q[b][t]), see(p[b][t]))
            if (a > 0 and ratio > 1 and distance > high) or (a < 0 and ratio < 1 and distance > low):
                return 0.0, 0.0
            weight = min(ratio, 20.0)
            return -weight * a * new[b, t], -weight * a

        return equations.token_mean(mask, term)

    return Reference(
        f"its equation token by token, `{divergence}`, {form} distributions",
        compute,
        {"divergence": divergence, "divergence_low": low, "divergence_high": high},
        ("distributions",),
        distributions=form,
    )


def _pspo_equation(smoothing: float) -> Reference:
    def compute(batch: Batch) -> tuple[float, np.ndarray]:
        new, old, advantages, mask = _numpy(batch)

        def term(b: int, t: int) -> equations.Term:
            p, q = math.exp(new[b, t]), math.exp(old[b, t])
            smoothed = (1 - smoothing) * p + smoothing * q
            return -smoothed / q * advantages[b, t], -(1 - smoothing) * p / q * advantages[b, t]

        return equations.token_mean(mask, term)

    return Reference("its equation token by token", compute, {"smoothing": smoothing})


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
            _dppo_equation("top-k-tv", 0.1, 0.15, "sparse"),
            _dppo_equation("top-k-kl", 0.02, 0.05, "sparse"),
            _dppo_equation("top-k-kl", 0.02, 0.05, "dense"),
        ),
    ),
    Method(
        "trm",
        "TRM, 2512.23075",
        (
            _trm_equation(0.05, "dense"),
            _trm_equation(0.05, "sparse"),
            _verl_rejection("k2", 0.3),
            _verl_rejection("k3", 0.3),
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
    Method("pspo", "PSPO, 2509.21282", (_pspo_equation(0.1), _pspo_equation(0.6))),
    Method(
        "kl_penalty",
        "PPO, 1707.06347",
        (_verl_penalty("k3", 1.0), _verl_penalty("k2", 0.5), _verl_penalty("k1", 2.0)),
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

# Not a choice of the method: shared by all, or data.
_NOT_LISTED = {"max_response_length", "new", "old", "response_ids", "generator"}


def _defaults(function: Callable[..., Any]) -> str:
    parameters = inspect.signature(function).parameters.values()
    listed = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in _NOT_LISTED]
    return "<br>".join(f"`{p.name}={p.default!r}`" for p in listed) or "none"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _arxiv(paper: str) -> str:
    title, _, number = paper.rpartition(", ")
    return f"{title}, [{number}](https://arxiv.org/abs/{number})" if title else paper


def table() -> str:
    """The page, from the objects that the tests run."""
    lines = [
        "# Methods and what they are checked against",
        "",
        "Written by `python tests/losses/sources.py`; edit that file. Every comparison listed runs in",
        "`tests/losses/test_sources.py`: loss and gradient agree to 1e-6 (in float64). Numbers of verl were",
        "made by `tests/losses/make_verl_fixtures.py`; TRL is run as installed.",
        "",
        "All losses take `(log_probs, old_log_probs, advantages, response_mask)` and keywords, and are in",
        "`tether.losses.LOSSES` by name.",
        "",
        "## Policy losses",
        "",
        _row("method", "paper", "file", "defaults", "checked against"),
        _row(*["---"] * 5),
    ]
    for method in METHODS:
        sources = [method.elsewhere, *(reference.source for reference in method.references)]
        lines.append(
            _row(
                f"`{method.function}`" + (f"<br>{method.variant}" if method.variant else ""),
                _arxiv(method.paper),
                f"`src/tether/losses/{method.function}.py`",
                "as above" if method.variant else _defaults(LOSSES[method.function]),
                "<br>".join(dict.fromkeys(source for source in sources if source)),
            )
        )
    lines += [
        "",
        "## Advantages",
        "",
        "In `src/tether/advantages.py`, by name in `tether.advantages.ADVANTAGES`.",
        "",
        _row("estimator", "paper", "defaults", "checked against"),
        _row(*["---"] * 4),
    ]
    for estimator in ESTIMATORS:
        function = getattr(tether.advantages, estimator.function)
        lines.append(
            _row(f"`{estimator.function}`", _arxiv(estimator.paper), _defaults(function), estimator.source)
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(table())


if __name__ == "__main__":
    main()
