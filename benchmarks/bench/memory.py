"""Peak memory of one loss and its gradients, each in a process of its own.

    python -m benchmarks.bench.memory CONTESTANT SHAPE

Prints the growth of the peak over what the inputs take, in bytes. On a CPU that is the resident set (Linux),
on an accelerator what its allocator handed out. It is the second step's: what libraries set aside at the
first, for products of these sizes, stays and is not the loss's. Tether's own workspace stays too, but counts:
it is given back in between.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from pathlib import Path

import torch
from benchmarks.bench import contestants
from benchmarks.bench.shapes import MEMORY_SHAPES
from benchmarks.bench.workload import make_untuned_workload

from tether.ops.memory import WORKSPACE

CONTESTANTS = {
    "clip": contestants.tether_clip,
    "TROLL": contestants.tether_troll,
    "TROLL in one pass": contestants.fused_troll,
    "exact in one pass": contestants.fused_exact,
    "paper-style": contestants.paper_style_troll,
    "TRL clip": contestants.trl_clip,
    "Liger clip": contestants.liger_clip,
}


_OUT_OF_MEMORY = "out of memory"


def peak_bytes(name: str, shape: str) -> int | None:
    """Run a contestant in a new process and read what it printed; None if it did not fit, which is said.

    Raises:
        RuntimeError: with what the process said, if it failed.
    """
    command = [sys.executable, "-m", "benchmarks.bench.memory", name, shape]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    if done.stdout.strip() == _OUT_OF_MEMORY:
        print(f"left out: {name} does not fit on the device ({shape})", flush=True)
        return None
    return int(done.stdout.split()[-1])


def _measure(name: str, shape_name: str) -> int:
    torch.set_num_threads(1)
    shape = MEMORY_SHAPES[shape_name]
    device = torch.device("cpu") if shape_name.startswith("cpu") else torch.device("cuda")
    work = make_untuned_workload(shape, device)
    step = contestants.step(CONTESTANTS[name], work)
    step()
    gc.collect()
    WORKSPACE.release()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts again from here
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


if __name__ == "__main__":
    try:
        print(_measure(sys.argv[1], sys.argv[2]))
    except torch.OutOfMemoryError:
        print(_OUT_OF_MEMORY)
