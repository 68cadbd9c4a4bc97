"""What a trust region says of the sampled tokens of a batch: the one result that every path returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

#: What `ProjectedTokens.metrics` returns, as far as it is known.
METRICS = (
    "certified", "uncertain", "kl_mean", "kl_max", "unconverged", "kl_projected_mean", "kl_projected_max",
    "projected", "mean_step", "regression", "tail_mass",
)  # fmt: skip


def put_back(rows: Tensor, at: tuple[Tensor, ...], shape: Sequence[int], fill: float = 0.0) -> Tensor:
    """Rows [N, ...] at their places `at` in [*shape, ...], `fill` elsewhere; of no row, the graph stays.

    `masked_scatter` would do, but its gradient makes an accelerator's host wait: the mask decides its size.
    """
    return rows.new_full((*shape, *rows.shape[1:]), fill).index_put(at, rows)


@dataclass(frozen=True, kw_only=True)
class ProjectedTokens:
    """Sampled tokens under the new, the old and the projected policy, a value a token, all of one shape.

    From whole distributions, supports, logits or hidden states, in one loss call or handed through a
    trainer: the same names mean the same everywhere. Nats, float32 at least.
    """

    new_log_probs: Tensor
    """Of the sampled tokens under the network being trained; differentiable."""
    old_log_probs: Tensor
    """Of the same tokens under the old policy, as the ratio needs them; NaN where the caller keeps them."""
    projected_log_probs: Tensor
    """Of the same tokens under the projected policy; inside the bound `new_log_probs`, gradient included."""
    regression: Tensor
    """KL(new || stopgrad(projected)); differentiable; zero, gradient included, where nothing is projected."""
    kl: Tensor
    """KL(new || old) before the projection; of certified tokens a lower bound."""
    projected_kl: Tensor | None = None
    """KL(projected || old): as solved for where the projection acted, `kl` elsewhere. None under an infinite
    bound, where nothing is ever projected."""
    step: Tensor
    """Step s in [0, 1] along the geodesic: 1 where nothing had to be done."""
    projected: Tensor
    """Where the bound was exceeded and the projection acted, bool."""
    tail_mass: Tensor
    """New mass outside the support: zero where there is none to be outside of, NaN where nobody gave one."""
    entropy: Tensor | None = None
    """Of the new policy; a lower bound where it is known on a support alone. None where nobody asked."""
    certified: Tensor | None = None
    """Proven to be inside the bound by the support alone, bool; None where nothing was asked of it."""
    uncertain: Tensor | None = None
    """The support can prove the token neither inside nor outside, bool."""
    converged: Tensor | None = None
    """Whether the token was inside the bound or the solver met it, bool (see `CategoricalProjection`): where
    not, the projection respects the bound but does not use all of it. None where nobody said."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with every tensor changed: padded, flattened, cut, moved."""
        return type(self)(**{name: change(value) for name, value in self.known().items()})

    def known(self) -> dict[str, Tensor]:
        """The tensors that there are, by name: how a result travels where objects cannot."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def metrics(self, response_mask: Tensor) -> dict[str, Tensor]:
        """What to watch, over the tokens that count; `tether.losses.troll` says what each is."""
        acted = self.projected & (response_mask > 0)
        means = {
            "certified": self.certified,
            "uncertain": self.uncertain,
            "kl_mean": self.kl,
            "unconverged": None if self.converged is None else self.converged == 0,
            "kl_projected_mean": self.projected_kl,
            "projected": acted,
            "mean_step": torch.where(acted, self.step, 0.0),
            "regression": self.regression,
            "tail_mass": self.tail_mass,
        }
        maxima = {"kl_max": self.kl, "kl_projected_max": self.projected_kl}
        found = measure_tokens(response_mask, _those_known(means), _those_known(maxima))
        step, share = found["mean_step"], found["projected"]
        found["mean_step"] = torch.where(share > 0, step / share, 1.0)
        return {name: found[name] for name in METRICS if name in found}


def _those_known(values: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if value is not None}


def measure_tokens(
    mask: Tensor, means: dict[str, Tensor], maxima: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Means and maxima over the tokens that count, by name, without gradient. Flags are counted; a sequence's
    value [B, 1] is that of its tokens.

    All at once: an accelerator's host takes longer to ask for each than the accelerator to find them.
    """
    found: dict[str, Tensor] = {}
    for reduce, values in ((masked_mean, means), (masked_max, maxima)):
        if values:
            stacked = torch.stack([value.detach().expand(mask.shape) for value in values.values()])
            found |= dict(zip(values, reduce(stacked, mask).unbind(), strict=True))
    return found


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens that count, 0 if none does; of values [..., *mask.shape], a mean each."""
    # In half precision, more than a few hundred tokens cannot be counted.
    mask = mask.to(torch.promote_types(values.dtype, torch.float32))
    # Not values * mask: what is masked may be infinite.
    return torch.where(mask > 0, values, 0.0).mul(mask).sum(_last(mask)) / mask.sum().clamp_min(1)


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Maximum over the tokens that count, 0 if none does; of values [..., *mask.shape], one each."""
    if mask.numel() == 0:
        return values.new_zeros(values.shape[: values.dim() - mask.dim()])
    counted = mask > 0
    return torch.where(counted.any(), torch.where(counted, values, -torch.inf).amax(_last(mask)), 0.0)


def _last(mask: Tensor) -> tuple[int, ...]:
    """The dimensions of the tokens."""
    return tuple(range(-mask.dim(), 0))
