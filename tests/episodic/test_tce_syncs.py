"""What the host waits for in the objective of TCE on a GPU, place by place."""

from __future__ import annotations

import torch
from torch import Tensor

from device_steps import Put, Waits, assert_step
from gaussians import random_factor, random_mean
from pretend_gpu import VALUE
from tether.episodic.segments import gae_returns, normalised, segment_advantages, segment_log_probs

EPISODES, DOF, BASIS, HORIZON, POINTS = 4, 2, 3, 10, 4

# A Cholesky factorisation says whether it succeeded, and points are checked.
WAITS: Waits = {
    ("episodic/segments.py:segment_log_probs", VALUE): 1,
    ("episodic/segments.py:segment_advantages", VALUE): 3,
}


def test_the_objective_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(EPISODES, HORIZON, generator=generator).double() for _ in range(2))
    basis = torch.rand(POINTS - 1, 2, BASIS, generator=generator).double()
    weights, mean = (random_mean(EPISODES, DOF * BASIS, seed=seed) for seed in (1, 2))
    factor, points = random_factor(EPISODES, DOF * BASIS, seed=3), torch.tensor([0, 3, 6, 9])

    def step(put: Put) -> list[Tensor]:
        leaves = [put(mean.requires_grad_()), put(factor.requires_grad_())]
        log_probs = segment_log_probs(put(weights), *leaves, put(basis), DOF)
        targets = gae_returns(put(rewards), put(values), gamma=0.99, gae_lambda=0.95)
        advantages = normalised(segment_advantages(put(rewards), put(values), put(points), gamma=0.99))
        loss = ((log_probs - log_probs.detach()).exp() * advantages).mean()
        return [log_probs, targets, advantages, loss, *torch.autograd.grad(loss, leaves)]

    assert_step(step, WAITS, terms=10_000)
