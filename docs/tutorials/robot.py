# %% [markdown]
# # A robot's jump
#
# The hopper has three joints and one aim: to get its body high. The policy looks once and chooses a **whole motion**,
# a few weights of a movement primitive; TCE credits its segments and keeps the update inside a KL ball about the last
# policy. This notebook trains for seconds, so it shows how things go together; 200 iterations, 69 seconds on two cores,
# learn the jump.

# %%
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt

from tether.episodic.evaluate import evaluation_seeds
from tether.episodic.figures import sample_motions
from tether.episodic.presets import preset
from tether.episodic.sampler import EpisodeSampler
from tether.episodic.train import load_learner, train

config = replace(preset("hopper-jump-quick"), iterations=4, episodes=8, num_workers=0, evaluate_every=2,
                 evaluation_episodes=4, checkpoint_every=4)  # fmt: skip
run = train(config, Path(tempfile.mkdtemp()) / "jump")

# %%
for row in run.evals():
    print(f"after {row['step']} iterations: {row['max_height_greedy']:.2f} m")
for row in run.metrics():
    print(f"iteration {row['step']}: KL of the mean {row['kl_mean_part']:.5f} (bound {config.trust_region.mean_bound}), "
          f"of the exploration {row['kl_cov_part']:.6f} (bound {config.trust_region.cov_bound})")  # fmt: skip

# %% [markdown]
# **What the policy tries:** each draw is a smooth, complete motion of all three joints.

# %%
with EpisodeSampler(config.env_id, 0, 0, config.env_options) as sampler:
    start = sampler.reset(seeds=evaluation_seeds(1))
    motions = sample_motions(load_learner(run.path, sampler.spec), start, 12)
figure, panels = plt.subplots(1, 3, figsize=(9, 2.8), sharex=True)
for joint, axes in enumerate(panels):
    axes.plot(motions.sampled[:, :, joint].T, color="#0072b2", alpha=0.4, linewidth=0.8)
    axes.plot(motions.mean[:, joint], color="black")
    axes.set_title(f"joint {joint + 1}")
plt.show()

# %% [markdown]
# The whole training, and a film of it:
#
#     tether episodic train --preset hopper-jump-quick
#     tether report runs/hopper-jump-quick-tce-seed0
#
# Next: [learning whole motions](../episodic.md), [what it came to](../episodic_results.md).
