"""What the exact trust region finds out about every token, and what of it the backward pass needs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearTrustRegion:
    """What `linear_trust_region` returns, a value a token, [N]; nats, float32 at least."""

    log_probs: Tensor
    """Log-probabilities of the given ids under the new policy. Differentiable."""
    entropy: Tensor
    """Of the new policy over the whole vocabulary. Differentiable."""
    projected_log_probs: Tensor
    """Of the given ids under the projected policy; `log_probs`, gradient included, inside the bound."""
    regression: Tensor
    """KL(new || stopgrad(projected)). Differentiable; zero, with zero gradient, inside the bound."""
    kl: Tensor
    """KL(new || old) before the projection; where certified, the certificate's lower bound."""
    projected_kl: Tensor
    """KL(projected || old): as solved for where the projection acted, `kl` elsewhere."""
    step: Tensor
    """Step s in [0, 1] along the geodesic: 1 where nothing had to be done."""
    projected: Tensor
    """Where the bound was exceeded and the projection acted, bool."""
    certified: Tensor
    """Where a certificate spared the old policy's logits, bool."""
    uncertain: Tensor
    """Where the support could not decide and the whole vocabulary had to, bool."""
    tail_mass: Tensor
    """New mass outside `old_support`; NaN without one."""


@dataclass(frozen=True)
class Found(LinearTrustRegion):
    """The same with what the backward pass needs, [N] each; filled in a block of tokens at a time."""

    log_sum: Tensor
    """Log of the sum of exponentials of the new logits."""
    constrained: Tensor
    """Whether the bound (and not the end of the curve) determines the step."""
    centred: Tensor
    """Centred log-ratio of the sampled token, in units of `unit`."""
    variance: Tensor
    """Variance of the log-ratio under the projection, in squared `unit`s."""
    unit: Tensor
    """Range of the log-ratio (of a sequence: the largest of its tokens); keeps variances finite."""

    @classmethod
    def empty(cls, hidden: Tensor) -> Found:
        """Of tokens for which nothing has to be done."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        flags = {"projected", "certified", "uncertain", "constrained"}
        values = {"step": 1.0, "unit": 1.0, "tail_mass": torch.nan}

        def start(name: str) -> Tensor:
            if name in flags:
                return hidden.new_zeros(hidden.shape[0], dtype=torch.bool)
            return hidden.new_full(hidden.shape[:1], values.get(name, 0.0), dtype=dtype)

        return cls(**{field.name: start(field.name) for field in fields(cls)})

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in the order of the fields, as autograd wants them."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def without_gradient(self) -> tuple[Tensor, ...]:
        """Those that are constants to whoever uses them."""
        return tuple(getattr(self, field.name) for field in fields(self) if field.name not in DIFFERENTIABLE)

    def public(self) -> LinearTrustRegion:
        """What callers see."""
        seen = {field.name: getattr(self, field.name) for field in fields(LinearTrustRegion)}
        return LinearTrustRegion(
            **{**seen, "projected_kl": torch.where(self.projected, self.projected_kl, self.kl)}
        )

    def put(self, rows: Tensor, projection: Projection) -> None:
        """Note what the projection of some rows found."""
        self.projected[rows] = True
        for name, value in projection._asdict().items():
            getattr(self, name)[rows] = value


#: The fields that carry a gradient: the first ones.
DIFFERENTIABLE = ("log_probs", "entropy", "projected_log_probs", "regression")


class Projection(NamedTuple):
    """The part of `Found` that projected rows fill in."""

    projected_log_probs: Tensor
    projected_kl: Tensor
    regression: Tensor
    step: Tensor
    constrained: Tensor
    centred: Tensor
    variance: Tensor
    unit: Tensor
