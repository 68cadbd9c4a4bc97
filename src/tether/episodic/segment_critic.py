"""A critic that reads a state and the motion from there on, and says what each beginning of it earns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tether.errors import ConfigError, check_at_least_one


@dataclass(frozen=True)
class SegmentCriticConfig:
    """A causal transformer over segments."""

    width: int = 32
    """Features of a token."""

    layers: int = 2
    """Transformer layers."""

    heads: int = 4
    """Attention heads, which share the features."""

    learning_rate: float = 1e-3
    """Adam's learning rate."""

    epochs: int = 40
    """Gradient steps in an iteration, each on its own batch."""

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "epochs"):
            check_at_least_one(name, getattr(self, name))
        if self.width % self.heads:
            raise ConfigError(f"width={self.width} must be a multiple of heads={self.heads}.")
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate must be positive and finite, got {self.learning_rate}.")


class SegmentCritic(nn.Module):
    """Q(s, a_1 .. a_i) for every i, from one reading of [s, a_1, ..., a_L].

    A token sees what came before it alone, so that Q of the first i actions does not depend on those that
    follow.

    Args:
        config: the network.
        state_size, action_size: features of a state and of an action.
        longest: most actions that are read at once.
        generator: draws the initial weights.
        dtype: of all parameters.

    Source: TOP-ERL (arXiv 2410.09536, section 4.2), whose critic also says what s alone is worth.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> critic = SegmentCritic(SegmentCriticConfig(), 3, 2, 10, generator=generator)
        >>> critic(torch.zeros(5, 3), torch.zeros(5, 4, 2)).shape
        torch.Size([5, 4])
    """

    def __init__(
        self,
        config: SegmentCriticConfig,
        state_size: int,
        action_size: int,
        longest: int,
        *,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.state, self.action = nn.Linear(state_size, config.width), nn.Linear(action_size, config.width)
        self.places = nn.Parameter(torch.zeros(longest, config.width))
        layer = nn.TransformerEncoderLayer(
            config.width, config.heads, 4 * config.width, dropout=0.0, activation="gelu", batch_first=True,
            norm_first=True,
        )  # fmt: skip
        self.layers = nn.TransformerEncoder(
            layer, config.layers, nn.LayerNorm(config.width), enable_nested_tensor=False
        )
        self.returned = nn.Linear(config.width, 1)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        nn.init.xavier_uniform_(self.returned.weight, 0.01, generator=generator)  # nothing is known at first
        self.to(dtype)

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:
        """What is expected, [N, L], of states [N, O] with actions [N, L, A]."""
        later = self.action(actions) + self.places[: actions.shape[1]]
        tokens = torch.cat((self.state(states)[:, None], later), dim=1)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=tokens.dtype)
        returns: Tensor = self.returned(self.layers(tokens, mask, is_causal=True)[:, 1:])
        return returns.squeeze(-1)
