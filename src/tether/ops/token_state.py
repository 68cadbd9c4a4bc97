"""What the exact trust region finds out about every token, and what of it the backward pass needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tether.projection.tokens import ProjectedTokens


@dataclass(frozen=True, kw_only=True)
class TokenState(ProjectedTokens):
    """The result with what the backward pass needs, [N] each; filled in a block of tokens at a time."""

    projected_kl: Tensor
    entropy: Tensor
    certified: Tensor
    uncertain: Tensor
    converged: Tensor
    log_sum: Tensor
    """Log of the sum of exponentials of the new logits."""
    constrained: Tensor
    """Whether the bound (and not the end of the curve) determines the step."""
    centred: Tensor
    """Step times the centred log-ratio of the sampled token, which is of moderate size whatever its range."""
    variance: Tensor
    """Of the step times the log-ratio under the projection."""

    @classmethod
    def empty(cls, hidden: Tensor) -> TokenState:
        """Of tokens for which nothing has to be done."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        flags = {"projected": False, "certified": False, "uncertain": False, "constrained": False}
        flags["converged"] = True
        values = {"step": 1.0, "tail_mass": torch.nan, "old_log_probs": torch.nan}

        def start(name: str) -> Tensor:
            if name in flags:
                return hidden.new_full(hidden.shape[:1], flags[name], dtype=torch.bool)
            return hidden.new_full(hidden.shape[:1], values.get(name, 0.0), dtype=dtype)

        return cls(**{name: start(name) for name in cls.names()})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The fields, those that carry a gradient first, as autograd hands them on."""
        others = (f.name for f in fields(cls) if f.name not in DIFFERENTIABLE)
        return (*DIFFERENTIABLE, *others)

    @classmethod
    def read(cls, tensors: Iterable[Tensor]) -> TokenState:
        """What `tensors` gave."""
        return cls(**dict(zip(cls.names(), tensors, strict=True)))

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in the order of the names."""
        return tuple(getattr(self, name) for name in self.names())

    def without_gradient(self) -> tuple[Tensor, ...]:
        """Those that are constants to whoever uses them."""
        return tuple(getattr(self, name) for name in self.names() if name not in DIFFERENTIABLE)

    def part(self, rows: slice) -> TokenState:
        """Of some of them: what is written there is written here."""
        return self.each(lambda values: values[rows])

    def result(self) -> ProjectedTokens:
        """What callers see."""
        seen = {f.name: getattr(self, f.name) for f in fields(ProjectedTokens)}
        return replace(
            ProjectedTokens(**seen), projected_kl=torch.where(self.projected, self.projected_kl, self.kl)
        )

    def put(self, rows: Tensor, projection: ProjectedRows) -> None:
        """Note what the projection of some rows found."""
        # A number that is assigned to positions is copied to the device, and the host waits for it.
        self.projected.index_fill_(0, rows, True)
        for name, value in projection._asdict().items():
            getattr(self, name)[rows] = value


#: The fields that carry a gradient.
DIFFERENTIABLE = ("new_log_probs", "entropy", "projected_log_probs", "regression")


class ProjectedRows(NamedTuple):
    """The part of `TokenState` that projected rows fill in."""

    projected_log_probs: Tensor
    projected_kl: Tensor
    regression: Tensor
    step: Tensor
    constrained: Tensor
    converged: Tensor
    centred: Tensor
    variance: Tensor
