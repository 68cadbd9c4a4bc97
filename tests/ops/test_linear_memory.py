"""Peak memory of the LM-head operation, measured in processes of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tether.ops import head, linear

VOCABULARY, WIDTH = 65_536, 64
WEIGHT_BYTES = 4 * VOCABULARY * WIDTH

# Prints the growth of the peak resident set over what the inputs and a first small use already took.
MEASURE = """
import sys, torch
from tether.ops import linear_log_probs
tokens, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
torch.set_num_threads(1)

def status(key):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(key))

def step(weight, tokens):
    hidden = torch.randn(tokens, weight.shape[1]).to(weight.dtype).requires_grad_()
    ids = torch.randint(weight.shape[0], (tokens, 4))
    result = linear_log_probs(hidden, weight, ids, top_k=16)
    (result.log_probs.sum() + result.entropy.sum()).backward()

step(torch.randn(512, 8, dtype=dtype, requires_grad=True), 4)
before = status("VmRSS")
step(torch.randn({vocabulary}, {width}, dtype=dtype, requires_grad=True), tokens)
print(status("VmHWM") - before)
"""


def _peak(tokens: int, dtype: str) -> int:
    script = MEASURE.format(vocabulary=VOCABULARY, width=WIDTH)
    command = [sys.executable, "-c", script, str(tokens), dtype]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("tokens", [256, 4096])
def test_the_peak_is_weights_their_gradient_and_the_workspace_whatever_the_tokens(tokens: int) -> None:
    workspace = 4 * linear._WORKSPACE_ELEMENTS
    allowed = 1.15 * (2 * WEIGHT_BYTES + workspace)
    assert allowed < 0.12 * 4096 * VOCABULARY * 4  # what [tokens, vocabulary] would take is far beyond
    assert _peak(tokens, "float32") <= allowed


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_a_half_precision_head_is_never_widened_whole() -> None:
    """The weight and its gradient in bfloat16, the float32 sum of the gradient, the workspace."""
    workspace = 4 * linear._WORKSPACE_ELEMENTS + 4 * head.VOCABULARY_BLOCK * WIDTH
    allowed = 1.15 * (2 * WEIGHT_BYTES // 2 + WEIGHT_BYTES + workspace)
    assert _peak(256, "bfloat16") <= allowed
