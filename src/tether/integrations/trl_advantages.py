"""Advantage estimators of `tether.advantages` in TRL's GRPO trainer, in place of TRL's own.

TRL subtracts the mean of a prompt's rewards and may divide by their deviation. RLOO, REINFORCE++ and
its variant with a baseline replace that here, under any trust region; `trl_critic` adds a critic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tether.advantages import ADVANTAGES
from tether.errors import ConfigError, TetherError
from tether.integrations.trl_trainer import OldPolicyTrainer, loss_mask

#: What `AdvantageTrainer` can compute from rewards alone, and the settings each takes.
ESTIMATORS: dict[str, tuple[str, ...]] = {
    "dr_grpo": (),
    "grpo": ("epsilon",),
    "reinforce_plus_plus": ("gamma",),
    "reinforce_plus_plus_baseline": (),
    "rloo": (),
}


class AdvantageTrainer(OldPolicyTrainer):
    """A trainer whose advantages come from `tether.advantages`; put it before another trainer's class.

    Args besides those of `GRPOTrainer`:

        advantage: a name of `ESTIMATORS`.
        advantage_options: its settings, such as {"gamma": 0.99}.

    The estimators see the rewards of all processes, weighted by `reward_weights` and added up; TRL's
    `scale_rewards` and `multi_objective_aggregation` would have no effect and are refused.

    Raises:
        ConfigError: an unknown estimator or setting.
        TetherError: a response without a reward while training.

    Source: see each estimator in `tether.advantages`.

    Example:
        ```python
        class RLOOWithTROLL(AdvantageTrainer, TROLLTrainer):
            pass

        trainer = RLOOWithTROLL(model, reward, args, train_dataset=dataset, advantage="rloo")
        ```
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *rest: Any,
        advantage: str,
        advantage_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.advantage = advantage
        self.advantage_options = dict(advantage_options or {})
        self._check_advantage()
        if args is not None and args.scale_rewards not in ("group", True):
            raise ConfigError(
                f"scale_rewards={args.scale_rewards!r} is a setting of TRL's advantages, which "
                f"advantage={advantage!r} replaces. Leave it at its default."
            )
        if args is not None and args.multi_objective_aggregation != "sum_then_normalize":
            raise ConfigError(
                f"multi_objective_aggregation={args.multi_objective_aggregation!r} is a setting of TRL's "
                f"advantages; advantage={advantage!r} adds up the weighted rewards first. Leave it at its "
                "default."
            )
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
        self._rewards: Tensor | None = None

    def _check_advantage(self) -> None:
        if self.advantage not in ESTIMATORS:
            raise ConfigError(
                f"advantage={self.advantage!r} is not an estimator from rewards. Choose one of "
                f"{', '.join(ESTIMATORS)}."
            )
        known = ESTIMATORS[self.advantage]
        for name in self.advantage_options:
            if name not in known:
                raise ConfigError(
                    f"{self.advantage} has no option {name!r}. It has {', '.join(known) or 'none'}."
                )

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        by_function: Tensor = super()._calculate_rewards(*args, **kwargs)
        weights = self.reward_weights.to(by_function.device)
        self._rewards = (by_function * weights).nansum(1)
        unscored = int(by_function.isnan().all(1).sum())
        if unscored and self.model.training:
            raise TetherError(
                f"{unscored} of {len(by_function)} responses have no reward: every reward function returned "
                f"None. {self.advantage} compares all responses, so give each a number, such as 0."
            )
        return by_function

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        rewards, self._rewards = self._rewards, None
        if self.model.training:  # TRL's own loss of an evaluation is not looked at
            assert rewards is not None
            output["advantages"] = self._estimate(rewards, output)
        return output

    def _estimate(self, rewards: Tensor, output: dict[str, Any]) -> Tensor:
        """Advantages [b] or [b, T] of this process's rows, from the rewards [B] of all."""
        mask = loss_mask(output)
        everyone = self.accelerator.gather(self.accelerator.pad_across_processes(mask, dim=1))
        advantages = estimate(self.advantage, rewards, everyone, self.num_generations, self.advantage_options)
        first = self.accelerator.process_index * len(mask)
        mine = advantages[first : first + len(mask)]
        return mine if mine.dim() == 1 else mine[:, : mask.shape[1]]


def estimate(
    name: str,
    rewards: Tensor,
    response_mask: Tensor,
    responses_per_prompt: int,
    options: Mapping[str, Any] | None = None,
) -> Tensor:
    """Advantages of responses that stand prompt by prompt, by the name of the estimator.

    Args:
        name: of `ESTIMATORS`.
        rewards: [B].
        response_mask: [B, T].
        responses_per_prompt: successive rows that answer one prompt.
        options: of the estimator.

    Returns:
        [B] or [B, T].

    Example:
        >>> estimate("rloo", torch.tensor([1.0, 0.0]), torch.ones(2, 3), 2).tolist()
        [1.0, -1.0]
    """
    options = dict(options or {})
    function: Any = ADVANTAGES[name]
    if name == "reinforce_plus_plus":
        return torch.as_tensor(function(rewards_at_the_end(rewards, response_mask), response_mask, **options))
    groups = torch.arange(len(rewards), device=rewards.device) // responses_per_prompt
    if name == "reinforce_plus_plus_baseline":
        return torch.as_tensor(function(rewards, groups, response_mask, **options))
    return torch.as_tensor(function(rewards, groups, **options))


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
