# %% [markdown]
# # Asynchronous training
#
# When other machines sample, their weights are some updates old by the time their responses arrive. A region around
# the trainer's *own* policy of a moment ago says nothing about that age. Put it around the policy that sampled: then
# lag, and what differs between two engines, is inside the bound.

# %%
from collections import deque

import matplotlib.pyplot as plt
import torch

from tether.losses import find_loss, troll
from tether.projection import SampledPolicy

TOKENS, PROMPTS, SAMPLES, UPDATES = 64, 16, 16, 100

# %% [markdown]
# **What a sampler reports** is what every inference engine can give: the drawn id, and the log-probabilities of its
# few likeliest ids. `SampledPolicy.from_report` makes an old policy of it; no pass of the trainer's network is needed.


# %%
def sample(weights):
    log_probs = weights.log_softmax(-1)[:, None].expand(-1, SAMPLES, -1)
    taken = log_probs.exp().flatten(0, 1).multinomial(1).view(PROMPTS, SAMPLES)
    reported, ids = log_probs.topk(16)
    drawn = log_probs.gather(-1, taken[..., None]).squeeze(-1)
    return taken, SampledPolicy.from_report(
        taken, ids, reported, torch.ones(taken.shape), sampled_log_probs=drawn
    )


def learn(method, lag, seed):
    torch.manual_seed(seed)
    logits = torch.randn(PROMPTS, TOKENS).requires_grad_()
    right = torch.randint(TOKENS, (PROMPTS, 1))
    optimizer, published, curve = torch.optim.Adam([logits], lr=0.1), deque(maxlen=lag + 1), []
    for _ in range(UPDATES):
        published.append(logits.detach().clone())
        taken, sampler = sample(published[0])  # as old as the queue is long
        rewards = (taken == right).float()
        advantages = rewards - rewards.mean(1, keepdim=True)
        new = logits.log_softmax(-1)
        curve.append(new.detach().exp().gather(1, right).mean().item())
        inputs = new.gather(1, taken), sampler.log_probs, advantages, torch.ones_like(advantages)
        if method == "TROLL":
            policies = {"new": new[:, None].expand(-1, SAMPLES, -1), "old": sampler}
            result = troll(*inputs, response_ids=taken, **policies)
        else:
            result = find_loss(method)(*inputs)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
    return curve


figure, axes = plt.subplots(figsize=(6, 3.5))
for name in ("TROLL", "ppo_clip", "unclipped"):
    curves = torch.tensor([learn(name, 16, seed) for seed in range(2)])
    axes.plot(curves.mean(0), label=name)
    print(f"{name:10} 16 updates old: ends at {curves[:, -1].mean():.0%} (two seeds)")
axes.set(xlabel="update", ylabel="probability of the right token")
axes.legend()
plt.show()

# %% [markdown]
# The drawing shows how it is wired, and a toy says no more. In TRL it is one setting, or another trainer:
#
#     TROLLConfig(troll_anchor="sampler")                     # vLLM samples, synchronously
#     AsyncTROLLConfig(max_staleness=8, troll_lag_growth="linear", troll_lag_rate=0.25)
#
# The second lets the bound grow with the age of the data. Next: [the region at the sampler](../async.md).
