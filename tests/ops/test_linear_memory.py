"""Peak memory of the LM-head operation, measured in processes of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tether.ops import head, memory

VOCABULARY, WIDTH = 65_536, 64
WEIGHT_BYTES = 4 * VOCABULARY * WIDTH

# Prints the growth of the peak resident set over what the inputs and a first small use already took.
MEASURE = """
import sys, torch
from tether import SparseLogProbs
from tether.losses import ppo_clip, troll
from tether.ops import linear_log_probs
tokens, dtype, loss = int(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)

def status(key):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(key))

def step(weight, tokens):
    hidden = torch.randn(tokens, weight.shape[1]).to(weight.dtype).requires_grad_()
    if loss == "every output":
        ids = torch.randint(weight.shape[0], (tokens, 4))
        result = linear_log_probs(hidden, weight, ids, top_k=16)
        (result.log_probs.sum() + result.entropy.sum()).backward()
        return
    mask, advantages = torch.ones(1, tokens), torch.ones(1)
    sampled = torch.randint(weight.shape[0], (tokens,))
    if loss == "clip":
        log_probs = linear_log_probs(hidden, weight, sampled[:, None]).log_probs.T
        ppo_clip(log_probs, log_probs.detach() - 0.1, advantages, mask).loss.backward()
        return
    with torch.no_grad():
        found = linear_log_probs(hidden + 0.1, weight, sampled[:, None], top_k=15)
        top, log_probs = (found.top_ids, found.top_log_probs), found.log_probs[:, 0]
        old = SparseLogProbs.from_top_k(*top, sampled, log_probs)[None]
    found = linear_log_probs(hidden, weight, torch.cat((sampled[:, None], old.ids[0]), -1)).log_probs
    new = SparseLogProbs.from_log_probs(old.ids, found[None, :, 1:])
    result = troll(
        found[:, :1].T, old.log_prob_of(sampled[None]), advantages, mask,
        response_ids=sampled[None], new=new, old=old,
    )
    assert tokens < 100 or result.metrics["projected"] > 0.1, result.metrics
    result.loss.backward()

step(torch.randn(512, 8, dtype=dtype, requires_grad=True), 4)
before = status("VmRSS")
step(torch.randn({vocabulary}, {width}, dtype=dtype, requires_grad=True), tokens)
print(status("VmHWM") - before)
"""


def _peak(tokens: int, dtype: str, loss: str) -> int:
    script = MEASURE.format(vocabulary=VOCABULARY, width=WIDTH)
    command = [sys.executable, "-c", script, str(tokens), dtype, loss]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize(
    ("tokens", "loss"), [(256, "every output"), (4096, "every output"), (4096, "clip"), (4096, "TROLL")]
)
def test_the_peak_is_weights_their_gradient_and_the_workspace_whatever_the_tokens(
    tokens: int, loss: str
) -> None:
    workspace = 4 * memory.WORKSPACE_ELEMENTS
    allowed = 1.15 * (2 * WEIGHT_BYTES + workspace)
    assert allowed < 0.12 * 4096 * VOCABULARY * 4  # what [tokens, vocabulary] would take is far beyond
    assert _peak(tokens, "float32", loss) <= allowed


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_a_half_precision_head_is_never_widened_whole() -> None:
    """The weight and its gradient in bfloat16, the float32 sum of the gradient, the workspace."""
    workspace = 4 * memory.WORKSPACE_ELEMENTS + 4 * head.VOCABULARY_BLOCK * WIDTH
    allowed = 1.15 * (2 * WEIGHT_BYTES // 2 + WEIGHT_BYTES + workspace)
    assert _peak(256, "bfloat16", "every output") <= allowed


@pytest.mark.parametrize(
    ("gigabytes", "rows"),
    [(12, 1024), (40, 1028), (60, 1542), (80, 2056), (141, 3625), (192, 4936), (400, 8192)],
)
def test_a_gpu_takes_as_many_tokens_at_a_time_as_its_memory_has_room_for(
    monkeypatch: pytest.MonkeyPatch, gigabytes: int, rows: int
) -> None:
    monkeypatch.setattr(memory, "_device_bytes", lambda _: gigabytes * 10**9)
    monkeypatch.setattr(memory.torch.cuda, "is_available", lambda: True)
    assert memory._accelerator_rows(torch.device("cuda", 0), 151_936) == rows


def test_other_accelerators_take_the_least() -> None:
    assert memory._accelerator_rows(torch.device("meta"), 151_936) == memory.ACCELERATOR_ROWS
