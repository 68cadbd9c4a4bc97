"""Your own training loop with a trust region: torch and tether's core, nothing else.

A small recurrent network learns to continue 1 3 with 0 2 4 1 (steps of two, modulo five) from rewards alone.
Each batch of responses serves sixteen updates; `troll` keeps what the loss sees within `kl_bound` of the
policy that wrote them, and `StepBack` the network itself within `budget` after them.
`python examples/own_loop.py` takes about half a minute.
"""

import torch
from torch import Tensor, nn

from tether import kl_categorical
from tether.losses import troll
from tether.step_back import StepBack

DIGITS, GIVEN, LENGTH = 5, 2, 4
PROMPTS, RESPONSES, UPDATES = 64, 8, 16


class Network(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(DIGITS, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, DIGITS)

    def forward(self, ids: Tensor) -> Tensor:  # [B, T] -> log-probabilities of what follows, [B, T, V]
        return self.head(self.recurrent(self.embed(ids))[0]).log_softmax(-1)

    @torch.no_grad()
    def respond(self, prompts: Tensor) -> Tensor:
        ids = prompts
        for _ in range(LENGTH):
            ids = torch.cat((ids, self(ids)[:, -1].exp().multinomial(1)), 1)
        return ids[:, GIVEN:]


def continuation(prompts: Tensor) -> Tensor:
    step = prompts[:, 1:] - prompts[:, :1]
    return (prompts[:, 1:] + step * torch.arange(1, LENGTH + 1)) % DIGITS


def train(rollouts: int, kl_bound: float = 0.05, budget: float = 0.05, seed: int = 0) -> list[float]:
    """Train from nothing and return the share of right digits in each batch of responses."""
    torch.manual_seed(seed)
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    step_back = StepBack(network, budget)
    accuracies = []
    for rollout in range(rollouts):
        prompts = torch.randint(DIGITS, (PROMPTS, GIVEN)).repeat_interleave(RESPONSES, 0)
        step_back.record()
        responses = network.respond(prompts)
        rewards = (responses == continuation(prompts)).float().mean(-1).view(PROMPTS, RESPONSES)
        spread = rewards.std(1, keepdim=True) + 1e-4
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten()
        ids = torch.cat((prompts, responses), 1)[:, :-1]
        with torch.no_grad():
            old = network(ids)[:, GIVEN - 1 :]
        for rows in torch.randperm(len(ids)).chunk(UPDATES):
            new, taken = network(ids[rows])[:, GIVEN - 1 :], responses[rows]
            result = troll(
                new.gather(-1, taken[..., None]).squeeze(-1),
                old[rows].gather(-1, taken[..., None]).squeeze(-1),
                advantages[rows],
                torch.ones_like(taken),
                response_ids=taken,
                new=new,
                old=old[rows],
                kl_bound=kl_bound,
            )
            optimizer.zero_grad()
            result.loss.backward()
            optimizer.step()
        kept = step_back.enforce(lambda ids=ids, old=old: kl_categorical(network(ids)[:, GIVEN - 1 :], old))
        accuracies.append(rewards.mean().item())
        if rollout % 25 == 0 or rollout == rollouts - 1:
            kl, projected = result.metrics["kl_max"].item(), result.metrics["projected"].item()
            print(
                f"{rollout:3d}  right {accuracies[-1]:.1%}  largest KL {kl:.3f}  projected {projected:.1%}  "
                f"network {kept.divergence_before:.3f} -> {kept.divergence:.3f}"
            )
    return accuracies


if __name__ == "__main__":
    train(rollouts=200)
