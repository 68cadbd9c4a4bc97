"""Advantage estimators: from rewards to how much better than expected each response, or token, was.

Each is a function of tensors. `grpo`, `dr_grpo` and `rloo` return one value a response, [B];
`reinforce_plus_plus`, its baseline variant and `gae` one a token, [B, T]. The losses take both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.projection.solve import may_ask


def grpo(rewards: Tensor, group_ids: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """(r - mean) / (std + epsilon) within a prompt's responses: no critic, and scaled to the prompt.

    The standard deviation is the unbiased one. A group whose rewards are all equal gets exact zeros.

    Args:
        rewards: one a response, [B].
        group_ids: which prompt each response answers, [B] integer, in any order.
        epsilon: keeps the division finite; TRL has 1e-4, verl 1e-6.

    Returns:
        [B], float32 at least.

    Raises:
        InvalidInputError: shapes that do not fit, a group of a single response, a reward that is not finite,
            a negative epsilon.

    Source: GRPO (arXiv 2402.03300, section 4.1.2).

    Example:
        >>> import torch
        >>> grpo(torch.tensor([1.0, 0.0, 3.0, 3.0]), torch.tensor([7, 7, 8, 8]))
        tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    if not epsilon >= 0:
        raise InvalidInputError(f"epsilon must not be negative, got {epsilon!r} (1e-6 is usual).")
    groups = _Groups(rewards, group_ids)
    variance = groups.mean(groups.centred.square()) * (groups.size / (groups.size - 1))
    scaled = groups.centred / (variance.sqrt() + epsilon)
    return torch.where(variance > 0, scaled, 0.0)  # 0/0 for epsilon = 0


def dr_grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """r - mean within a prompt's responses: without the division that favours easy and hard prompts.

    Goes with ``loss_agg_mode="seq-mean-token-sum-norm"``, the other half of Dr.GRPO.

    Args, Raises: as in `grpo`.

    Source: Dr.GRPO (arXiv 2503.20783, section 3).

    Example:
        >>> import torch
        >>> dr_grpo(torch.tensor([1.0, 0.0, 3.0, 3.0]), torch.tensor([0, 0, 1, 1])).tolist()
        [0.5, -0.5, 0.0, 0.0]
    """
    return _Groups(rewards, group_ids).centred


def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """r - mean of the prompt's other responses: an unbiased baseline, as it does not know r.

    Equals n / (n - 1) times `dr_grpo` for n responses a prompt.

    Args, Raises: as in `grpo`.

    Source: RLOO (arXiv 2402.14740, the leave-one-out baseline).

    Example:
        >>> import torch
        >>> rloo(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0, 0, 0])).tolist()
        [0.0, -1.5, 1.5]
    """
    groups = _Groups(rewards, group_ids)
    return groups.centred * (groups.size / (groups.size - 1))


def reinforce_plus_plus(token_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Discounted rewards to go of each token, whitened over the batch: one response a prompt suffices.

    The baseline is the whole batch's mean, not a prompt's.

    Args:
        token_rewards: [B, T]: the response's reward on its last token, and less any penalty a token.
        response_mask: [B, T]; what is masked inside a response is skipped, not discounted.
        gamma: discount a token, in [0, 1].

    Returns:
        [B, T], zero where the mask is; zero mean and unit variance over the tokens that count.

    Raises:
        InvalidInputError: shapes that do not fit, or gamma outside [0, 1].

    Source: REINFORCE++ (arXiv 2501.03262, the global advantage normalisation).

    Example:
        >>> import torch
        >>> rewards = torch.tensor([[0.0, 1.0], [0.0, -1.0]])
        >>> reinforce_plus_plus(rewards, torch.ones(2, 2))
        tensor([[ 0.8660,  0.8660],
                [-0.8660, -0.8660]])
    """
    rewards, counted = _token_values("token_rewards", token_rewards, response_mask)
    _check_fraction("gamma", gamma)
    return whiten(_discounted_sum(rewards, counted, gamma), counted)


def reinforce_plus_plus_baseline(rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
    """r - mean within a prompt's responses, then whitened over the batch's tokens.

    The prompt's mean is the baseline; the scale, unlike in `grpo`, is shared by all prompts, so a
    prompt whose responses hardly differ does not get a huge one.

    Args:
        rewards, group_ids: as in `grpo`.
        response_mask: [B, T].

    Returns:
        [B, T], zero where the mask is.

    Raises:
        InvalidInputError: as in `grpo`, or a mask that does not fit.

    Source: REINFORCE++ (arXiv 2501.03262, REINFORCE++-baseline).

    Example:
        >>> import torch
        >>> rewards, groups = torch.tensor([3.0, 1.0]), torch.tensor([0, 0])
        >>> reinforce_plus_plus_baseline(rewards, groups, torch.ones(2, 2))
        tensor([[ 0.8660,  0.8660],
                [-0.8660, -0.8660]])
    """
    centred = _Groups(rewards, group_ids).centred
    if response_mask.dim() != 2 or response_mask.shape[0] != len(rewards):
        raise InvalidInputError(
            f"response_mask must be [B, T] with B = {len(rewards)}, got {tuple(response_mask.shape)}."
        )
    return whiten(centred.unsqueeze(-1).expand(response_mask.shape), response_mask)


def gae(
    token_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and the critic's targets: PPO's trade of bias against variance.

    A_t = sum_k (gamma gae_lambda)^k delta_{t+k} with delta_t = r_t + gamma V_{t+1} - V_t. Tokens under
    the mask (padding, a tool's output) are as if they were not there: sums and values pass over them.

    Args:
        token_rewards: [B, T].
        values: the critic's, before each token, [B, T].
        response_mask: [B, T].
        gamma: discount, in [0, 1].
        gae_lambda: 1 for Monte Carlo returns, 0 for one-step errors.
        last_values: of the state after the last token, [B], where a response was cut off and not
            finished; zeros if None.

    Returns:
        Advantages and returns (advantages + values, what the critic should learn), [B, T], zero where
        the mask is. Not whitened: see `whiten`.

    Raises:
        InvalidInputError: shapes that do not fit, gamma or gae_lambda outside [0, 1].

    Source: GAE (arXiv 1506.02438, eq. 16).

    Example:
        >>> import torch
        >>> rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.75]])
        >>> advantages, returns = gae(rewards, values, torch.ones(1, 2), gae_lambda=0.5)
        >>> advantages.tolist(), returns.tolist()
        ([[0.375, 0.25]], [[0.875, 1.0]])
    """
    rewards, counted = _token_values("token_rewards", token_rewards, response_mask)
    before, _ = _token_values("values", values, response_mask)
    _check_fraction("gamma", gamma)
    _check_fraction("gae_lambda", gae_lambda)
    after = before.new_zeros(len(before)) if last_values is None else last_values.detach().to(before.dtype)
    if after.shape != before.shape[:1]:
        raise InvalidInputError(f"last_values must be [B] = ({len(before)},), got {tuple(after.shape)}.")
    errors = torch.zeros_like(before)
    for t in reversed(range(before.shape[1])):
        errors[:, t] = rewards[:, t] + gamma * after - before[:, t]
        after = torch.where(counted[:, t], before[:, t], after)
    advantages = _discounted_sum(errors, counted, gamma * gae_lambda)
    return advantages, torch.where(counted, advantages + before, 0.0)


def whiten(values: Tensor, response_mask: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """Zero mean and unit (unbiased) variance over the tokens that count, [B, T]; zero elsewhere.

    Example:
        >>> import torch
        >>> whiten(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[1, 1, 0]]))
        tensor([[-0.7071,  0.7071,  0.0000]])
    """
    values, counted = _token_values("values", values, response_mask)
    count = counted.sum()
    # Relative to the least one, so that equal values differ from their mean by exactly nothing.
    least = torch.where(counted, values, torch.inf).amin() if values.numel() else 0.0
    above_least = torch.where(counted, values - least, 0.0)
    centred = torch.where(counted, above_least - above_least.sum() / count.clamp_min(1), 0.0)
    variance = centred.square().sum() / (count - 1).clamp_min(1)
    return centred * (variance + epsilon).rsqrt()


#: Every estimator by its name in configs and reports; they differ in what they take.
ADVANTAGES: dict[str, Callable[..., Tensor | tuple[Tensor, Tensor]]] = {
    "dr_grpo": dr_grpo,
    "gae": gae,
    "grpo": grpo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "rloo": rloo,
}


class _Groups:
    """Rewards by prompt: what is above the prompt's mean, and how many responses it has, both [B]."""

    def __init__(self, rewards: Tensor, group_ids: Tensor) -> None:
        if rewards.dim() != 1 or rewards.shape != group_ids.shape:
            raise InvalidInputError(
                "rewards and group_ids must both be [B], got "
                f"{tuple(rewards.shape)} and {tuple(group_ids.shape)}. Sum token rewards first."
            )
        if group_ids.is_floating_point():
            raise InvalidInputError(f"group_ids must be integers, got {group_ids.dtype}.")
        ids, self._index, sizes = group_ids.unique(return_inverse=True, return_counts=True)
        self._count = len(ids)
        lonely, broken = sizes < 2, ~rewards.isfinite()
        if bool(lonely.any() | broken.any()):  # asked together: an accelerator's host waits for the answer
            raise _refusal(rewards, ids, lonely, broken)
        rewards = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
        self.size = sizes.to(rewards.dtype)[self._index]
        # Relative to the least one, so that equal rewards differ from their mean by exactly nothing.
        least = rewards.new_zeros(len(ids)).scatter_reduce(
            0, self._index, rewards, "amin", include_self=False
        )
        above_least = rewards - least[self._index]
        self.centred = above_least - self.mean(above_least)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of each response's group, [B]."""
        totals = values.new_zeros(self._count)
        return totals.index_add(0, self._index, values)[self._index] / self.size


def _refusal(rewards: Tensor, ids: Tensor, lonely: Tensor, broken: Tensor) -> InvalidInputError:
    """What says which prompts [G] are `lonely`, or which rewards [B] `broken`."""
    if bool(lonely.any()):
        return InvalidInputError(
            f"every prompt needs at least 2 responses to be compared, but group {ids[lonely][0].item()} has "
            "1. Sample more a prompt, or use reinforce_plus_plus or gae."
        )
    first = int(broken.nonzero()[0, 0])
    return InvalidInputError(
        f"rewards must be finite, got {rewards[first].item()} for response {first}. One such reward spoils "
        "its whole prompt: give the response a number, such as 0, or leave the prompt out."
    )


def _discounted_sum(values: Tensor, counted: Tensor, discount: float) -> Tensor:
    """sum_k discount^k of the k-th counted value from each on, [B, T]; zero where the mask is."""
    sums = torch.zeros_like(values)
    running = torch.zeros_like(values[:, 0]) if values.shape[1] else values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        running = torch.where(counted[:, t], values[:, t] + discount * running, running)
        sums[:, t] = torch.where(counted[:, t], running, 0.0)
    return sums


def _token_values(name: str, values: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Values in float32 at least, zero under the mask, and the mask as bool.

    Raises:
        InvalidInputError: shapes that do not fit; NaN or infinity, which would spoil the whole batch.
    """
    if values.dim() != 2 or values.shape != response_mask.shape:
        raise InvalidInputError(
            f"{name} and response_mask must both be [B, T], got {tuple(values.shape)} and "
            f"{tuple(response_mask.shape)}."
        )
    counted = response_mask > 0
    dtype = torch.promote_types(values.dtype, torch.float32)
    values = torch.where(counted, values.detach().to(dtype), 0.0)
    if may_ask(values) and not bool(values.isfinite().all()):
        row, position = (int(i) for i in (~values.isfinite()).nonzero()[0])
        raise InvalidInputError(
            f"{name} at [{row}, {position}] is {values[row, position].item()}, which would spoil every token "
            "of the batch. Mend the reward function, or mask the response."
        )
    return values, counted


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InvalidInputError(f"{name} must lie in [0, 1], got {value!r} (1 is usual for responses).")
