"""A small policy and a step of it, for the tests of the step back on one process and on two."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tether import kl_categorical
from tether.step_back import Statistic, StepBack, StepBackResult

BUDGET = 0.05


class Policy:
    """A two-layer policy over 24 outcomes at 200 tokens, and a step of it, all in float64."""

    def __init__(self, seed: int, size: float) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.inputs = normal(200, 8)
        self.start = [normal(8, 16) / 3, 1.5 * normal(16, 24)]
        self.step = [size * normal(8, 16), size * normal(16, 24)]
        self.parameters = [nn.Parameter(tensor.clone()) for tensor in self.start]
        self.old = self.log_probs(self.start)

    def log_probs(self, weights: list[Tensor] | list[nn.Parameter]) -> Tensor:
        first, second = weights
        return (torch.tanh(self.inputs @ first) @ second).detach().log_softmax(-1)

    def kl(self) -> Tensor:
        return kl_categorical(self.log_probs(self.parameters), self.old)

    def kl_at(self, t: float) -> Tensor:
        """From the definition of the line, without anything of the module's."""
        new = self.log_probs([a + t * b for a, b in zip(self.start, self.step, strict=True)])
        return (new.exp() * (new - self.old)).sum(-1)

    def enforce(self, statistic: Statistic = "mean", passes: int = 4) -> StepBackResult:
        bound = StepBack(self.parameters, BUDGET, statistic=statistic, passes=passes)
        bound.record()
        with torch.no_grad():
            for parameter, step in zip(self.parameters, self.step, strict=True):
                parameter += step
        return bound.enforce(self.kl)
