# %% [markdown]
# # Reading a report
#
# `tether report RUN...` writes one HTML file about runs. The same numbers can be had in Python, here from the kept runs
# of `make train`: TROLL and the clip, one seed each.

# %%
from pathlib import Path

import matplotlib.pyplot as plt

from tether.experiments import load_runs
from tether.experiments.run_data import by_label
from tether.experiments.summary import format_interval, summarise
from tether.kinds import KINDS

here = Path.cwd()
results = next(folder for folder in (here, *here.parents) if (folder / "benchmarks" / "results").is_dir())
runs = load_runs([results / "benchmarks/results/quickstart/quickstart.csv"], KINDS)
for summary in summarise(runs):
    print(f"{summary.label:8} {summary.metric_text}: {format_interval(summary.start, True)} -> "
          f"{format_interval(summary.final, True)}, intervals over {summary.over}")  # fmt: skip

# %% [markdown]
# **One seed:** the interval is over problems. It says what other problems might have given and nothing about other
# seeds, so it cannot say which method is better; both learnt.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
for label, group in by_label(runs).items():
    success, kl = group[0].eval_curve("success"), group[0].curve("kl_max")
    left.plot(success.x, success.y, "o-", label=label)
    right.plot(kl.x, kl.y, linewidth=0.8, label=label)
left.set(title="success on held-out problems", xlabel="step")
right.set(title="largest KL before projection", xlabel="step", yscale="log")
left.legend()
plt.show()

# %% [markdown]
# **The KL saws:** it grows over the eight updates on a batch and starts again with the next. With TROLL the network may
# leave the bound (0.05), while what the loss sees does not.

# %% [markdown]
# A run's folder also has responses, so that its page shows every token: [such a page](../gallery/arithmetic.html).
# Next: [what every column means](../report.md).
