"""Your own training loop with a trust region: torch and tether's core, nothing else.

A small recurrent network learns to continue 1 3 with 0 2 4 1 (steps of two, modulo five), from rewards
alone. Each batch of responses is used for sixteen updates, so the network moves away from the policy that
wrote them, and `troll` keeps what the loss sees within `kl_bound` of it.

    python examples/own_loop.py            # about half a minute
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from tether.losses import troll

DIGITS, GIVEN, LENGTH = 5, 2, 4
PROMPTS, RESPONSES, UPDATES = 64, 8, 16


class Network(nn.Module):
    """Reads a prompt and the response so far, predicts the next digit."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(DIGITS, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, DIGITS)

    def forward(self, ids: Tensor) -> Tensor:
        """Log-probabilities of what follows each id, [B, T, V]."""
        return self.head(self.recurrent(self.embed(ids))[0]).log_softmax(-1)

    @torch.no_grad()
    def respond(self, prompts: Tensor) -> Tensor:
        """Sample a response to each prompt, [B, LENGTH]."""
        ids = prompts
        for _ in range(LENGTH):
            ids = torch.cat((ids, self(ids)[:, -1].exp().multinomial(1)), 1)
        return ids[:, GIVEN:]


def continuation(prompts: Tensor) -> Tensor:
    """What should follow two digits: the same step again and again."""
    step = prompts[:, 1:] - prompts[:, :1]
    return (prompts[:, 1:] + step * torch.arange(1, LENGTH + 1)) % DIGITS


def train(rollouts: int, kl_bound: float = 0.05, seed: int = 0) -> list[float]:
    """Train from nothing and return the share of right digits in each batch of responses."""
    torch.manual_seed(seed)
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    accuracies = []
    for rollout in range(rollouts):
        prompts = torch.randint(DIGITS, (PROMPTS, GIVEN)).repeat_interleave(RESPONSES, 0)
        responses = network.respond(prompts)
        rewards = (responses == continuation(prompts)).float().mean(-1)
        groups = rewards.view(PROMPTS, RESPONSES)
        advantages = (
            (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        ).flatten()
        ids = torch.cat((prompts, responses), 1)[:, :-1]
        with torch.no_grad():
            old = network(ids)[:, GIVEN - 1 :]
        for rows in torch.randperm(len(ids)).chunk(UPDATES):
            new, taken = network(ids[rows])[:, GIVEN - 1 :], responses[rows][..., None]
            result = troll(
                new.gather(-1, taken).squeeze(-1),
                old[rows].gather(-1, taken).squeeze(-1),
                advantages[rows],
                torch.ones(len(rows), LENGTH),
                response_ids=responses[rows],
                new=new,
                old=old[rows],
                kl_bound=kl_bound,
            )
            optimizer.zero_grad()
            result.loss.backward()
            optimizer.step()
        accuracies.append(rewards.mean().item())
        if rollout % 25 == 0 or rollout == rollouts - 1:
            shown = {
                name: round(result.metrics[name].item(), 4) for name in ("kl_mean", "kl_max", "projected")
            }
            print(f"rollout {rollout:3d}  right digits {accuracies[-1]:.1%}  {shown}")
    return accuracies


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--kl-bound", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train(options.rollouts, options.kl_bound, options.seed)
