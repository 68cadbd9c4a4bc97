"""Other people's losses on the shared batches: verl's numbers, TRL run, equations written out."""

from __future__ import annotations

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

from tether.projection import SparseLogProbs

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


def verl_penalty(estimate: str, coefficient: float) -> Reference:
    """verl's plain loss plus its own estimate of the divergence."""

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


def verl_rejection(estimate: str, bound: float) -> Reference:
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


def trm_equation(bound: float, form: str) -> Reference:
    """-r A of the sequences without a divergence above the bound."""

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


def dppo_equation(divergence: str, low: float, high: float, form: str) -> Reference:
    """The gradient of sg(min(r, 20)) A log p where the token is not dropped."""
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


def pspo_equation(smoothing: float) -> Reference:
    """The smoothed ratio, from probabilities."""

    def compute(batch: Batch) -> tuple[float, np.ndarray]:
        new, old, advantages, mask = _numpy(batch)

        def term(b: int, t: int) -> equations.Term:
            p, q = math.exp(new[b, t]), math.exp(old[b, t])
            smoothed = (1 - smoothing) * p + smoothing * q
            return -smoothed / q * advantages[b, t], -(1 - smoothing) * p / q * advantages[b, t]

        return equations.token_mean(mask, term)

    return Reference("its equation token by token", compute, {"smoothing": smoothing})


def _equation(term_of: Callable[..., Callable[[int, int], equations.Term]], **settings: Any) -> Reference:
    """A method's terms, written out from (new, old, advantages, mask) and its settings."""

    def compute(batch: Batch) -> tuple[float, np.ndarray]:
        arrays = _numpy(batch)
        return equations.token_mean(arrays[-1], term_of(*arrays, **settings))

    named = ", ".join(f"`{name}={value!r}`" for name, value in settings.items())
    return Reference(f"its equation token by token ({named})", compute, settings)


def m2po_equation(second_moment: float) -> Reference:
    """-r A, without the fewest of the tokens pushed away that bring the mean square within the bound."""
    return _equation(equations.m2po_term, second_moment=second_moment)


def cppo_equation(**settings: float) -> Reference:
    """DPPO's term where the weighted change fits in what the prefix has left."""
    return _equation(equations.cppo_term, **settings)


def ipo_equation(probability_bound: float, kl_coef: float) -> Reference:
    """The policy gradient where the probability moved little, and the squared log-ratio everywhere."""
    return _equation(equations.ipo_term, probability_bound=probability_bound, kl_coef=kl_coef)


def drpo_equation(probability_bound: float) -> Reference:
    """r A less the quadratic in the probability's change."""
    return _equation(equations.drpo_term, probability_bound=probability_bound)


def mis_equation(**settings: Any) -> Reference:
    """The weighted policy gradient of the responses inside the band."""
    return _equation(equations.mis_term, **settings)


def decoupled_clip_equation(**settings: float) -> Reference:
    """PPO's clip around the interpolated policy, weighted by how far that is from the sampler's."""
    return _equation(equations.decoupled_clip_term, **settings)
