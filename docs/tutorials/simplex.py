# %% [markdown]
# # The projection, drawn on a simplex
#
# A policy over three tokens is a point in a triangle. The old policy is one point, what the optimiser made of it
# another, and the trust region is the set of points within a KL bound of the old one. Tether takes the new point to
# the nearest one inside, in the sense of KL, and this is all of TROLL's idea.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

from tether import kl_categorical, project_categorical

old = torch.tensor([0.6, 0.3, 0.1])
new = torch.tensor(
    [[0.05, 0.15, 0.80], [0.15, 0.8, 0.05], [0.5, 0.25, 0.25], [0.92, 0.05, 0.03], [0.63, 0.28, 0.09]]
)
bound = 0.05
result = project_categorical(new.log(), old.log().expand_as(new), kl_bound=bound)
projected = result.log_probs.exp()
for before, after, step in zip(new, projected, result.step, strict=True):
    kl = kl_categorical(before.log(), old.log()), kl_categorical(after.log(), old.log())
    print(f"KL {kl[0]:.3f} -> {kl[1]:.3f}, {step:.0%} of the way from old to new")

# %% [markdown]
# The last one was inside and stays where it was. All others end *on* the bound, not near it.

# %%
corners = np.array([[0, 0], [1, 0], [0.5, np.sqrt(3) / 2]])


def place(probabilities):
    return np.asarray(probabilities) @ corners


grid = np.stack(np.meshgrid(np.linspace(0.001, 0.998, 300), np.linspace(0.001, 0.998, 300)), -1).reshape(
    -1, 2
)
grid = grid[grid.sum(1) < 0.999]
grid = torch.tensor(np.column_stack([grid, 1 - grid.sum(1)]))
kl = kl_categorical(grid.log(), old.double().log().expand_as(grid))

figure, axes = plt.subplots(figsize=(6, 5.2))
axes.plot(*np.vstack([corners, corners[:1]]).T, color="black", linewidth=1)
axes.tricontourf(*place(grid).T, kl.numpy(), levels=[0, bound], colors=["#cfe5f3"])
axes.scatter(*place(old), color="black", zorder=3)
axes.annotate("old", place(old), (-8, -14), textcoords="offset points")
for before, after in zip(new, projected, strict=True):
    axes.annotate("", place(after), place(before), arrowprops={"arrowstyle": "->", "color": "#d55e00"})
axes.scatter(*place(new).T, color="#d55e00", label="new", zorder=3)
axes.scatter(*place(projected).T, color="#0072b2", label="projected", zorder=4)
for corner, name, away in zip(corners, "abc", [(-14, -4), (6, -4), (-3, 6)], strict=True):
    axes.annotate(f"token {name}", corner, away, textcoords="offset points")
axes.set_axis_off()
axes.legend(loc="upper left", frameon=False)
axes.set_title(f"All policies within KL {bound} of the old one, and the way to them")
plt.show()

# %% [markdown]
# **The gradient** is that of the projection, solved exactly: a step that would only push further out has none.
# Take the first new policy and ask for more of token c, of which it has too much already.

# %%
logits = new[0].log().requires_grad_()
target = project_categorical(logits.log_softmax(0), old.log(), kl_bound=bound)
target.log_probs[2].backward()
moved = project_categorical(
    (logits + 0.1 * logits.grad).log_softmax(0).detach(), old.log(), kl_bound=bound
).log_probs
print("gradient", [round(value, 3) for value in logits.grad.tolist()])
print(
    "the projected policy after a step is still on the bound:",
    round(kl_categorical(moved, old.log()).item(), 4),
)

# %% [markdown]
# Next: [your own loss](own_loss.py), [the derivation](../derivation.md).
