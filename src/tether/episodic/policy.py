"""The policy of an episode: a Gaussian over movement-primitive weights, given what the episode is about."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from tether.episodic.networks import Activation, build_mlp
from tether.errors import ConfigError, InvalidInputError, check_option
from tether.projection import (
    GaussianProjection,
    diagonal_gaussian_entropy,
    gaussian_entropy,
    kl_diagonal_gaussian,
    kl_gaussian,
    project_diagonal_gaussian,
    project_gaussian,
)
from tether.projection.gaussian import GaussianMethod

Covariance = Literal["full", "diagonal"]

# Standard deviations are softplus of a parameter, whose inverse overflows soon after.
_LARGEST_STD = 500.0


@dataclass(frozen=True)
class PolicyConfig:
    """Network and exploration of the policy."""

    hidden_sizes: tuple[int, ...] = (128, 128)
    """Units of the hidden layers."""

    activation: Activation = "leaky_relu"
    """Activation between the layers."""

    covariance: Covariance = "full"
    """Explore with correlated weights, and so times and joints ("full"), or with each by itself."""

    contextual_covariance: bool = False
    """Let the covariance depend on the context; otherwise it is one set of parameters."""

    init_std: float = 1.0
    """Standard deviation of every weight before training."""

    min_std: float = 1e-4
    """Added to the Cholesky factor's diagonal, so that exploration cannot vanish."""

    mean_gain: float = 0.01
    """Gain of the last layer: how much the first means differ between contexts."""

    def __post_init__(self) -> None:
        check_option("covariance", self.covariance, get_args(Covariance))
        if not 0 < self.min_std < self.init_std:
            raise ConfigError(
                f"Needed: 0 < min_std < init_std, got min_std={self.min_std} and init_std={self.init_std}."
            )
        if not math.isfinite(self.mean_gain):
            raise ConfigError(f"mean_gain must be a finite number, got {self.mean_gain}.")
        if self.init_std > _LARGEST_STD:
            raise ConfigError(
                f"init_std is at most {_LARGEST_STD:g}, got {self.init_std}. Raise the motion's "
                "weights_scale and goal_scale instead."
            )


@dataclass(frozen=True)
class WeightDistribution:
    """Gaussians over the W weights of E episodes, with a full or a diagonal covariance."""

    mean: Tensor
    """[E, W]"""

    scale: Tensor
    """Full: Cholesky factor [W, W] or [E, W, W]. Diagonal: standard deviations [W] or [E, W]."""

    covariance: Covariance
    """How to read `scale`."""

    @property
    def scale_tril(self) -> Tensor:
        """The Cholesky factor, whatever the covariance, [W, W] or [E, W, W]."""
        return self.scale if self.covariance == "full" else self.scale.diag_embed()

    def weights(self, noise: Tensor) -> Tensor:
        """Weights [E, W] of standard normal noise [E, W]; zeros give the means."""
        if self.covariance == "full":
            return self.mean + (self.scale @ noise[..., None]).squeeze(-1)
        return self.mean + self.scale * noise

    def log_prob(self, weights: Tensor) -> Tensor:
        """Log-density of weights [E, W] -> [E]."""
        gap = weights - self.mean
        if self.covariance == "full":
            shared = self.scale.dim() == 2  # one solve with the episodes as columns
            columns = gap.mT if shared else gap[..., None]
            whitened = torch.linalg.solve_triangular(self.scale, columns, upper=False)
            whitened = whitened.mT if shared else whitened.squeeze(-1)
            log_det = self.scale.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        else:
            whitened, log_det = gap / self.scale, self.scale.log().sum(-1)
        size = gap.shape[-1]
        return -0.5 * whitened.square().sum(-1) - log_det - 0.5 * size * math.log(2 * math.pi)

    def entropy(self) -> Tensor:
        """Entropy in nats: a value, or [E] with contextual covariances."""
        entropy = gaussian_entropy if self.covariance == "full" else diagonal_gaussian_entropy
        return entropy(self.scale)

    def kl(self, other: WeightDistribution) -> tuple[Tensor, Tensor]:
        """KL(self || other) in nats: the mean's part [E] and the covariance's (a value or [E])."""
        divergence = kl_gaussian if self.covariance == "full" else kl_diagonal_gaussian
        return divergence(self.mean, self.scale, other.mean, other.scale)

    def project(
        self,
        old: WeightDistribution,
        mean_bound: float,
        cov_bound: float,
        *,
        method: GaussianMethod = "kl",
        entropy_bound: float | None = None,
    ) -> tuple[WeightDistribution, GaussianProjection]:
        """This distribution projected onto the trust region around `old`, and the projection's report."""
        project = project_gaussian if self.covariance == "full" else project_diagonal_gaussian
        result = project(
            self.mean, self.scale, old.mean, old.scale, mean_bound, cov_bound,
            method=method, entropy_bound=entropy_bound,
        )  # fmt: skip
        return WeightDistribution(result.mean, result.scale_tril, self.covariance), result

    def detach(self) -> WeightDistribution:
        """The same values, cut from the graph and from the parameters they may share memory with."""
        return WeightDistribution(self.mean.detach().clone(), self.scale.detach().clone(), self.covariance)


class GaussianPolicy(nn.Module):
    """Choose the weights of a whole motion from one look at the task.

    A network gives the mean. The covariance is one set of parameters for all contexts (default), or a
    second head of the network. It starts at init_std² times the identity.

    Args:
        config: network and exploration.
        context_size: C.
        num_weights: W.
        generator: draws the initial weights.
        dtype: of all parameters.

    Raises:
        ConfigError: sizes below 1, or an unknown activation.

    Source: deep black-box RL (arXiv 2210.09622) and TCE (arXiv 2401.11437, appendix).

    Example:
        >>> policy = GaussianPolicy(PolicyConfig(), 2, 6, generator=torch.Generator().manual_seed(0))
        >>> distribution = policy(torch.zeros(3, 2))
        >>> distribution.mean.shape, distribution.scale_tril.shape
        (torch.Size([3, 6]), torch.Size([6, 6]))
    """

    def __init__(
        self,
        config: PolicyConfig,
        context_size: int,
        num_weights: int,
        *,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config = config
        self.context_size = context_size
        self.num_weights = num_weights
        full = config.covariance == "full"
        self._num_scales = num_weights * (num_weights + 1) // 2 if full else num_weights
        heads = num_weights + (self._num_scales if config.contextual_covariance else 0)
        self.network = build_mlp(
            context_size,
            config.hidden_sizes,
            heads,
            activation=config.activation,
            output_gain=config.mean_gain,
            generator=generator,
        )
        if not config.contextual_covariance:
            self.scale_parameters = nn.Parameter(torch.zeros(self._num_scales))
        self._below = tuple(torch.tril_indices(num_weights, num_weights, offset=-1))
        # softplus(shift) + min_std = init_std
        self._shift = math.log(math.expm1(config.init_std - config.min_std))
        self.to(dtype)

    def forward(self, contexts: Tensor) -> WeightDistribution:
        """The distribution of the weights given contexts [E, C].

        Raises:
            InvalidInputError: another shape than [E, C].
        """
        if contexts.dim() != 2 or contexts.shape[1] != self.context_size:
            raise InvalidInputError(
                f"contexts must be [episodes, {self.context_size}], got {tuple(contexts.shape)}."
            )
        output = self.network(contexts)
        if self.config.contextual_covariance:
            mean, raw = output.split((self.num_weights, self._num_scales), dim=-1)
        else:
            mean, raw = output, self.scale_parameters
        return WeightDistribution(mean, self._scale(raw), self.config.covariance)

    @torch.no_grad()
    def set_scale(self, scale: Tensor) -> None:
        """Make `scale` (as in `WeightDistribution`) the policy's covariance.

        Raises:
            ConfigError: the covariance depends on the context, so there is no single one to set.
            InvalidInputError: another shape.
        """
        if self.config.contextual_covariance:
            raise ConfigError("A contextual covariance is a network's output and cannot be set.")
        full = self.config.covariance == "full"
        if scale.shape != (self.num_weights,) * (2 if full else 1):
            raise InvalidInputError(f"scale has shape {tuple(scale.shape)}, which is not this policy's.")
        diagonal = (scale.diagonal() if full else scale).double() - self.config.min_std
        # The inverse of softplus; a standard deviation at its minimum stays just above it.
        raw = diagonal.clamp_min(1e-12).expm1().log() - self._shift
        if full:
            raw = torch.cat((raw, scale[self._below].double()))
        self.scale_parameters.copy_(raw)

    def _scale(self, raw: Tensor) -> Tensor:
        diagonal = nn.functional.softplus(raw[..., : self.num_weights] + self._shift) + self.config.min_std
        if self.config.covariance == "diagonal":
            return diagonal
        lower = raw.new_zeros((*raw.shape[:-1], self.num_weights, self.num_weights))
        lower[(..., *self._below)] = raw[..., self.num_weights :]
        return lower + diagonal.diag_embed()
