"""What every test shares: one thread, fixed seeds, hypothesis without chance."""

from __future__ import annotations

import gc
import os
import random
import signal

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.internal.conjecture import providers

import machine

# Without shrinking a failing case: that can take minutes, and the raw case says enough.
settings.register_profile(
    "tether",
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile("tether")

# Hypothesis also draws the constants of whatever modules are imported by then: which, in a process that
# shares the tests with another, hangs on the other's speed, and a test that depends on it fails on some days.
_no_constants = providers._local_constants
providers._get_local_constants = lambda: _no_constants

# One thread, or as many as the environment asks for (`make test-portable` asks for one and for two).
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

# What a shell starts in the background ignores Ctrl-C, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Without a GPU, Triton's kernels are interpreted. Triton asks when a kernel is defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """Spare the collector what stays: every training ends with a full collection."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say all that the machine lacks before the first test runs."""
    if hasattr(session.config, "workerinput"):
        return  # the process that started this one has looked
    lacking = machine.missing(session.config.args)
    if lacking:
        raise pytest.UsageError(
            "\n".join(["These tests cannot run here:", *(f"- {line}" for line in lacking)])
        )
