"""The numeric tests under every arithmetic this processor can do: `make test-portable`.

Numbers come out of three libraries that each choose code by the processor: ATen's vector loops, MKL's matrix
products in float32 and float64, oneDNN's in half precision. Two threads add in another order than one. Each
setting here makes them choose otherwise, which is all that other machines do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

#: What compares numbers: neither trainings that only have to succeed, nor measurements of memory.
TESTS = (
    "tests/projection", "src/tether/projection",
    "tests/ops", "src/tether/ops", "--ignore-glob=tests/ops/*_memory.py",
    "tests/losses", "src/tether/losses",
    "tests/test_advantages.py", "src/tether/advantages.py", "tests/test_step_back.py",
    "tests/integrations/test_logits_hooks.py", "tests/integrations/test_sparse_head.py",
    "tests/integrations/test_packing.py", "tests/integrations/test_trl_loss.py",
    "tests/integrations/test_trl_exact.py", "tests/integrations/test_trl_identity.py",
    "tests/integrations/test_trl_losses.py", "tests/integrations/test_trl_two_processes.py",
    "tests/integrations/test_trl_sampler.py", "tests/integrations/test_trl_async.py",
    "tests/episodic/test_policy.py", "tests/episodic/test_prodmp.py", "tests/episodic/test_segments.py",
    "tests/episodic/test_running_statistics.py", "tests/episodic/test_envs_original.py",
    "src/tether/episodic/prodmp.py",
    "src/tether/episodic/segments.py", "src/tether/episodic/statistics.py",
)  # fmt: skip

#: By name, from the least to the most capable processor.
CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")

#: Sines and exponentials as on processors without fused multiply-add; contacts magnify the difference.
PLAIN_LIBM = {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX2_Usable,-FMA_Usable"}

#: Matrix products as on processors without AVX-512, in Intel's code for any of them.
PLAIN_PRODUCTS = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2"}

_PROBE = """
import hashlib, torch
torch.manual_seed(0)
left, right = torch.randn(200, 300), torch.randn(300, 500)
products = left @ right, left.bfloat16() @ right.bfloat16()
bits = b"".join(x.float().numpy().tobytes() for x in (*products, left.softmax(-1)))
print(torch.backends.cpu.get_cpu_capability(), hashlib.sha256(bits).hexdigest()[:8])
"""


def only(environment: dict[str, str]) -> dict[str, str]:
    """The caller's environment with these settings and no others of their kind."""
    ours = ("ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS", *PLAIN_PRODUCTS, *PLAIN_LIBM)
    return {name: value for name, value in os.environ.items() if name not in ours} | environment


def probe(environment: dict[str, str]) -> tuple[str, str]:
    """The vector code that torch chooses, and a name for what it makes of some products and a softmax."""
    answer = subprocess.run(
        [sys.executable, "-c", _PROBE], env=only(environment), capture_output=True, text=True, check=True
    )
    capability, bits = answer.stdout.split()
    return capability, bits


def settings(most: str) -> tuple[dict[str, dict[str, str]], list[str]]:
    """What to run by name, and the capabilities that a processor with `most` lacks.

    >>> settings("AVX2")[1]
    ['AVX512']
    """
    # torch believes what it is told, and dies of an instruction that does not exist.
    known = CAPABILITIES.index(most) if most in CAPABILITIES else 0
    found = {name: {"ATEN_CPU_CAPABILITY": name.lower()} for name in CAPABILITIES[: known + 1]}
    if most not in CAPABILITIES:
        found[most] = {}
    found["plain matrix products and C library"] = PLAIN_PRODUCTS | PLAIN_LIBM
    return found, list(CAPABILITIES[known + 1 :])


def run(name: str, environment: dict[str, str], threads: int, arguments: list[str]) -> bool:
    """Run the tests, as many at a time as the threads leave cores for; say what came of them."""
    at_once = max(1, (os.cpu_count() or 1) // threads)
    environment = {**environment, "OMP_NUM_THREADS": str(threads)}
    _, bits = probe(environment)
    print(f"== {name}, {threads} thread{'s' * (threads > 1)} (results {bits}): {environment}", flush=True)
    began = time.monotonic()
    code = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-m", "not slow"),
            *("-n", str(at_once if at_once > 1 else 0), "--dist", "loadfile"),
            *(arguments or TESTS),
        ],
        cwd=REPOSITORY,
        env=only(environment),
        check=False,
    ).returncode
    print(f"== {name}, {threads}: {'passed' if code == 0 else f'FAILED ({code})'}, ", end="")
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    return code == 0


def main(arguments: list[str]) -> int:
    """Run every setting, the failed ones too; arguments replace the tests."""
    most, _ = probe({})
    wanted, lacking = settings(most)
    for name in lacking:
        print(f"== {name}: SKIPPED, this processor lacks it (torch finds {most}).", flush=True)
    failed = [
        f"{name} with {threads} threads"
        for name, environment in wanted.items()
        for threads in (1, 2)
        if not run(name, environment, threads, arguments)
    ]
    print(f"== failed: {', '.join(failed)}" if failed else "== All passed.", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
