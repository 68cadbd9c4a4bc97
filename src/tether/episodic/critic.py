"""The critic: how much reward is still to come."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tether.episodic.networks import Activation, build_mlp
from tether.episodic.statistics import RunningStatistics
from tether.errors import ConfigError, InvalidInputError


@dataclass(frozen=True)
class CriticConfig:
    """Network and optimisation of the critic."""

    hidden_sizes: tuple[int, ...] = (128, 128)
    """Units of the hidden layers."""

    activation: Activation = "leaky_relu"
    """Activation between the layers."""

    learning_rate: float = 3e-4
    """Adam's learning rate; follows the policy's schedule."""

    epochs: int = 50
    """Gradient steps in an iteration, each on the whole batch."""

    weight_decay: float = 0.0
    """Adam's weight decay."""

    normalise_inputs: bool = True
    """Normalise inputs by their running mean and standard deviation."""

    normalise_targets: bool = False
    """Predict values in running standard deviations from their running mean."""

    time_input: bool = True
    """Show the critic of states how many seconds of the episode are over (TCE)."""

    state_stride: int = 1
    """Fit on every n-th state of an episode, from a random first one on; published is every one (TCE)."""

    def __post_init__(self) -> None:
        rates = 0 < self.learning_rate < math.inf and 0 <= self.weight_decay < math.inf
        if self.epochs < 1 or not rates:
            raise ConfigError(
                "The critic needs epochs >= 1, learning_rate > 0 and weight_decay >= 0, got "
                f"{self.epochs}, {self.learning_rate} and {self.weight_decay}."
            )
        if self.state_stride < 1:
            raise ConfigError(f"state_stride is 1 (every state) or more, got {self.state_stride}.")


class Critic(nn.Module):
    """Estimate a value from an observation.

    Args:
        config: the network.
        input_size: number of features.
        generator: draws the initial weights.
        dtype: of all parameters.

    Example:
        >>> critic = Critic(CriticConfig(), 3, generator=torch.Generator().manual_seed(0))
        >>> critic(torch.zeros(4, 5, 3)).shape
        torch.Size([4, 5])
    """

    def __init__(
        self,
        config: CriticConfig,
        input_size: int,
        *,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config = config
        self.network = build_mlp(
            input_size,
            config.hidden_sizes,
            1,
            activation=config.activation,
            output_gain=1.0,
            generator=generator,
        ).to(dtype)
        self.statistics = RunningStatistics(input_size)
        self.target_statistics = RunningStatistics(1, clip=math.inf)

    def normalised(self, inputs: Tensor) -> Tensor:
        """What the network sees of inputs [..., size]; the inputs themselves before the first `observe`."""
        return self.statistics(inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Values of inputs [..., size] -> [...]."""
        values = self.network(self.normalised(inputs))
        return self.target_statistics.invert(values).squeeze(-1)

    def observe(self, inputs: Tensor) -> None:
        """Take inputs [..., size] into the running statistics."""
        if self.config.normalise_inputs:
            self.statistics.update(inputs)

    def prepared(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Take targets [N] of inputs [N, size] into the statistics; what `fit` needs of both.

        Returns:
            Inputs and targets [N, 1] as the network sees and predicts them: normalised if so configured.

        Raises:
            InvalidInputError: targets that are not finite.
        """
        if not bool(torch.isfinite(targets).all()):
            raise InvalidInputError("The critic's targets hold NaN or infinity. Look at the rewards.")
        with torch.no_grad():
            if self.config.normalise_targets:
                self.target_statistics.update(targets[:, None])
            return self.normalised(inputs), self.target_statistics(targets[:, None])

    def loss(self, features: Tensor, wanted: Tensor) -> Tensor:
        """Mean squared error on what `prepared` returned."""
        return nn.functional.mse_loss(self.network(features), wanted)

    def fit(self, optimizer: torch.optim.Optimizer, features: Tensor, wanted: Tensor) -> None:
        """Regress on what `prepared` returned, in as many steps as configured, each on the whole batch."""
        for _ in range(self.config.epochs):
            optimizer.zero_grad(set_to_none=True)
            self.loss(features, wanted).backward()
            optimizer.step()
