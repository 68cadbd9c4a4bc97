"""Multilayer perceptrons with the initialisation that policy search wants, and their optimiser."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from tether.errors import ConfigError, check_option

Activation = Literal["relu", "leaky_relu", "tanh"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "tanh": nn.Tanh}


def build_mlp(
    input_size: int,
    hidden_sizes: tuple[int, ...],
    output_size: int,
    *,
    activation: Activation,
    output_gain: float,
    generator: torch.Generator,
) -> nn.Sequential:
    """A perceptron with orthogonal weights (gain sqrt 2, `output_gain` in the last layer) and zero biases.

    Raises:
        ConfigError: an unknown activation, or a size below 1.

    Example:
        >>> net = build_mlp(3, (8,), 2, activation="tanh", output_gain=0.01, generator=torch.Generator())
        >>> net(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """
    check_option("activation", activation, _ACTIVATIONS)
    sizes = (input_size, *hidden_sizes, output_size)
    if min(sizes) < 1:
        raise ConfigError(f"A network needs sizes of at least 1; got {sizes} (input, hidden, output).")
    layers: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(pairwise(sizes)):
        last = index == len(sizes) - 2
        linear = nn.Linear(inputs, outputs)
        gain = output_gain if last else math.sqrt(2)
        nn.init.orthogonal_(linear.weight, gain, generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear] if last else [linear, _ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)


def adam(
    parameters: Iterable[nn.Parameter], learning_rate: float, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """Adam, fused: on a CPU in a quarter of the time of one operation after the other."""
    return torch.optim.Adam(parameters, learning_rate, weight_decay=weight_decay, fused=True)


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, share: float) -> None:
    """Move a network's parameters by a share of the way to another's."""
    for behind, ahead in zip(slow.parameters(), fast.parameters(), strict=True):
        behind.lerp_(ahead, share)
