# %% [markdown]
# # TRL in ten minutes
#
# A GRPO script becomes a TROLL script by two names. Here it trains the model that ships with Tether, half a million
# parameters that add three-digit numbers and have picked up bad habits, for a few steps on a CPU.

# %%
import tempfile

import matplotlib.pyplot as plt
from datasets import Dataset
from transformers import AutoTokenizer

from tether import TROLLConfig, TROLLTrainer
from tether.llm.models import embedded_model_path

model = str(embedded_model_path())
sums = [(a, b) for a in range(121, 999, 67) for b in range(113, 999, 61)]
dataset = Dataset.from_list([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums])


def reward(completions, answer, **_):
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


# %% [markdown]
# All arguments of `GRPOConfig` are there. One default differs: a batch of rollouts serves eight updates.

# %%
args = TROLLConfig(
    output_dir=tempfile.mkdtemp(), troll_kl_bound=0.05, learning_rate=3e-4, max_steps=32, logging_steps=8,
    per_device_train_batch_size=32, num_generations=8, max_completion_length=8, use_cpu=True, bf16=False,
    report_to="none", save_strategy="no", disable_tqdm=True, seed=0, gradient_checkpointing=False,
)  # fmt: skip
trainer = TROLLTrainer(
    model=model, reward_funcs=reward, args=args, train_dataset=dataset,
    processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
)  # fmt: skip
_ = trainer.train()

# %% [markdown]
# **What to watch.** `trust_region/projected` takes the place of `clip_ratio/*`: the share of tokens on which the
# projection acted. `kl_mean` and `kl_max` are how far the network moved before it, `kl_projected_max` what the loss saw.

# %%
log = [row for row in trainer.state.log_history if "trust_region/kl_max" in row]
for row in log:
    print(
        f"step {row['step']:3}  reward {row['reward']:.2f}  projected {row['trust_region/projected']:.1%}  "
        f"largest KL {row['trust_region/kl_max']:.3f} -> {row['trust_region/kl_projected_max']:.3f}"
    )
figure, axes = plt.subplots(figsize=(6, 3))
steps = [row["step"] for row in log]
axes.plot(steps, [row["trust_region/kl_max"] for row in log], "o-", label="of the network")
axes.plot(steps, [row["trust_region/kl_projected_max"] for row in log], "o-", label="of what the loss sees")
axes.axhline(args.troll_kl_bound, color="black", linestyle="--", linewidth=1)
axes.set(xlabel="step", ylabel="largest KL of a token", yscale="log")
axes.legend()
plt.show()

# %% [markdown]
# Next: [what changes and what works](../trl.md), [asynchronous training](asynchronous.py).
