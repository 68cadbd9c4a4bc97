"""Peak memory of the exact trust region, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tether.ops import memory

VOCABULARY, WIDTH, TOKENS = 65_536, 64, 1024
WEIGHT_BYTES = 4 * VOCABULARY * WIDTH

# Prints the growth of the peak resident set over what the inputs and a first small use already took. Every
# eighth row has moved beyond the bound.
MEASURE = f"""
import torch
from tether.ops import linear_trust_region
torch.set_num_threads(1)

def status(key):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(key))

def step(weight, tokens):
    old_weight = weight.detach().clone()
    old_hidden = 0.5 * torch.randn(tokens, weight.shape[1])
    moved = 0.1 * torch.randn(tokens, weight.shape[1]) * (torch.arange(tokens) % 8 == 0)[:, None]
    hidden = (old_hidden + moved).requires_grad_()
    ids = torch.randint(weight.shape[0], (tokens,))
    result = linear_trust_region(hidden, weight, ids, old_hidden, kl_bound=0.05, old_weight=old_weight)
    (result.projected_log_probs.sum() + result.regression.sum() + result.entropy.sum()).backward()
    return result.projected.float().mean().item()

step(torch.randn(512, 8, requires_grad=True), 4)
before = status("VmRSS")
projected = step(torch.randn({VOCABULARY}, {WIDTH}, requires_grad=True), {TOKENS})
print(status("VmHWM") - before, projected)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_the_peak_is_weights_their_gradient_and_the_workspace() -> None:
    """With rows that are projected; the old head is a weight too."""
    output = subprocess.run(
        [sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True
    ).stdout
    peak, projected = (float(number) for number in output.split())
    assert 0.05 < projected < 0.2
    allowed = 1.15 * (3 * WEIGHT_BYTES + 2 * 4 * memory.WORKSPACE_ELEMENTS)
    assert allowed < 0.8 * TOKENS * VOCABULARY * 4  # what one policy's [tokens, vocabulary] would take
    assert peak <= allowed
