"""How advantages are estimated in the trainers here, where not by TRL.

TRL subtracts the mean of a prompt's rewards and may divide by their deviation. A function of
`tether.advantages` or of your own replaces that, under any trust region; `trl_critic` is the one that learns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether.advantages import ADVANTAGES
from tether.errors import ConfigError, TetherError, replaced
from tether.integrations.loss_options import check_estimator_options
from tether.integrations.trl_old_policy import loss_mask
from tether.integrations.trl_resume import ResumableTrainer
from tether.names import look_up
from tether.signatures import check_known, options_of, places_of

# What a function from rewards to advantages may ask for, by the names of its parameters.
_AVAILABLE = ("rewards", "group_ids", "response_mask", "token_rewards")

__getattr__ = replaced(
    __name__, AdvantageTrainer='the keyword estimator of every trainer, as in estimator="rloo"'
)


class Estimator:
    """What a trainer asks of an estimator while it trains; by default it neither learns nor remembers."""

    name: str

    def start(self, trainer: Any) -> Estimator:
        """The estimator of a trainer whose model is ready: itself, if it has nothing to learn."""
        return self

    def advantages(self, trainer: Any, rewards: Tensor, output: dict[str, Any]) -> Tensor:
        """Of this process's rows, [b] or [b, T], from the rewards [B] of all; may add columns to `output`."""
        raise NotImplementedError

    def learn(self, trainer: Any, inputs: dict[str, Any]) -> None:
        """Called with each micro-batch before the policy learns from it."""

    def save(self, folder: Path) -> None:
        """Add to a checkpoint what it has learned."""

    def load(self, folder: Path) -> None:
        """Go on from there."""


@dataclass(frozen=True)
class FromRewards(Estimator):
    """Advantages by a function of the rewards.

    Raises:
        ConfigError: an unknown function or option, a value out of range, or one that needs more than rewards.

    Example:
        >>> FromRewards("reinforce_plus_plus", {"gamma": 0.9}).name
        'reinforce_plus_plus'
        >>> FromRewards("rloo", {"gamma": 0.9})
        Traceback (most recent call last):
        ...
        tether.errors.ConfigError: rloo has no option 'gamma'. It has none.
    """

    name: str
    """Of `tether.advantages.ADVANTAGES` but "gae", or "package.module:function". The function is given, by
    the names of its positional parameters: rewards [B], group_ids [B] (which prompt each answers),
    response_mask [B, T], token_rewards [B, T] (rewards on each response's last token); it returns [B] or
    [B, T]."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its keywords, such as {"gamma": 0.99}."""

    def __post_init__(self) -> None:
        """Refuse what cannot be computed."""
        function: Any = look_up(self.name, ADVANTAGES, "estimator")
        more = set(places_of(function)) - set(_AVAILABLE)
        if more:
            raise ConfigError(
                f"estimator={self.name!r} asks for {', '.join(sorted(more))}, and from rewards there are "
                f"{', '.join(_AVAILABLE)}. A critic is estimator=CriticOptions() of "
                "tether.integrations.trl_critic."
            )
        check_known(self.name, self.options, options_of(function, self.name))
        check_estimator_options(self.name, self.options)

    def compute(self, rewards: Tensor, response_mask: Tensor, responses_per_prompt: int) -> Tensor:
        """Advantages [B] or [B, T] of responses that stand prompt by prompt.

        Args:
            rewards: [B].
            response_mask: [B, T].
            responses_per_prompt: successive rows that answer one prompt.

        Example:
            >>> FromRewards("rloo").compute(torch.tensor([1.0, 0.0]), torch.ones(2, 3), 2).tolist()
            [1.0, -1.0]
        """
        function: Any = look_up(self.name, ADVANTAGES, "estimator")
        available = {
            "rewards": rewards,
            "group_ids": torch.arange(len(rewards), device=rewards.device) // responses_per_prompt,
            "response_mask": response_mask,
            "token_rewards": rewards_at_the_end(rewards, response_mask),
        }
        return torch.as_tensor(function(*(available[name] for name in places_of(function)), **self.options))

    def advantages(self, trainer: Any, rewards: Tensor, output: dict[str, Any]) -> Tensor:
        """Of this process's rows, by the rewards and masks of all."""
        mask = loss_mask(output)
        everyone = trainer.accelerator.gather(trainer.accelerator.pad_across_processes(mask, dim=1))
        advantages = self.compute(rewards, everyone, trainer.num_generations)
        first = trainer.accelerator.process_index * len(mask)
        mine = advantages[first : first + len(mask)]
        return mine if mine.dim() == 1 else mine[:, : mask.shape[1]]


class EstimatorTrainer(ResumableTrainer):
    """`GRPOTrainer` whose advantages come from an estimator, if it is given one: a name, or what starts one.

    The estimator sees the rewards of all processes, weighted by `reward_weights` and added up; TRL's
    `scale_rewards` and `multi_objective_aggregation` would have no effect and are refused.

    Raises:
        ConfigError: an unknown estimator, or a setting without effect.
        TetherError: a response without a reward while training.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *rest: Any,
        estimator: Any = None,
        **kwargs: Any,
    ) -> None:
        self._estimator_settings = FromRewards(estimator) if isinstance(estimator, str) else estimator
        if self._estimator_settings is not None and args is not None:
            _check_settings(self._estimator_settings.name, args)
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
        self.estimator: Estimator | None = None  # until the model is ready
        self._rewards: Tensor | None = None

    def _start_estimator(self) -> None:
        if self._estimator_settings is not None:
            self.estimator = self._estimator_settings.start(self)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        by_function: Tensor = super()._calculate_rewards(*args, **kwargs)
        if self.estimator is None:
            return by_function
        weights = self.reward_weights.to(by_function.device)
        self._rewards = (by_function * weights).nansum(1)
        unscored = int(by_function.isnan().all(1).sum())
        if unscored and self.model.training:
            raise TetherError(
                f"{unscored} of {len(by_function)} responses have no reward: every reward function returned "
                f"None. {self.estimator.name} compares all responses, so give each a number, such as 0."
            )
        return by_function

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        rewards, self._rewards = self._rewards, None
        if self.estimator is not None and self.model.training:  # TRL's loss of an evaluation is not looked at
            assert rewards is not None
            output["advantages"] = self.estimator.advantages(self, rewards, output)
            if self.log_completions:
                self._log_advantages(output)
        return output

    def _log_advantages(self, output: dict[str, Any]) -> None:
        """In TRL's table of completions, where its own stand: means over a response where tokens differ."""
        advantages = output["advantages"]
        if advantages.dim() == 2:
            mask = loss_mask(output)
            advantages = (advantages * mask).sum(1) / mask.sum(1).clamp_min(1)
        everyone = self.accelerator.gather(advantages).tolist()
        logged = self._logs["advantages"]
        for _ in everyone:
            logged.pop()
        logged.extend(everyone)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self.estimator is not None and self.model.training:
            self.estimator.learn(self, inputs)
        loss: Tensor = super()._compute_loss(model, inputs)
        return loss

    def _save_beside(self, folder: Path) -> None:
        super()._save_beside(folder)
        if self.estimator is not None:
            self.estimator.save(folder)

    def _load_beside(self, folder: Path) -> None:
        super()._load_beside(folder)
        if self.estimator is not None:
            self.estimator.load(folder)


def rewards_at_the_end(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Each response's reward [B] on its last token that counts, [B, T].

    A response without such a token (masked because it was cut off) gets no reward anywhere.

    Example:
        >>> rewards_at_the_end(torch.tensor([2.0]), torch.tensor([[1, 1, 0]])).tolist()
        [[0.0, 2.0, 0.0]]
    """
    counted = response_mask > 0
    places = torch.arange(counted.shape[1], device=counted.device)
    last = torch.where(counted, places, -1).amax(-1, keepdim=True)
    return torch.where(places == last, rewards[:, None], 0.0)


def _check_settings(estimator: str, args: Any) -> None:
    """Refuse what acts on TRL's advantages."""
    if args.scale_rewards not in ("group", True):
        raise ConfigError(
            f"scale_rewards={args.scale_rewards!r} is a setting of TRL's advantages, which "
            f"estimator={estimator!r} replaces. Leave it at its default."
        )
    if args.multi_objective_aggregation != "sum_then_normalize":
        raise ConfigError(
            f"multi_objective_aggregation={args.multi_objective_aggregation!r} is a setting of TRL's "
            f"advantages; estimator={estimator!r} adds up the weighted rewards first. Leave it at its "
            "default."
        )
