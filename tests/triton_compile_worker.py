"""Compile every kernel for a Hopper GPU, which needs none; started by test_triton_compiles.py.

Prints a line of JSON a kernel: its name, bytes of machine code, bytes spilled from registers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tether.ops import certificate_triton_kernels as certificate
from tether.ops import dense_rows_triton as dense
from tether.ops import rows_triton_kernels as rows
from tether.ops.rows_triton import _warps
from tether.projection import categorical_triton_chunks as chunks
from tether.projection import categorical_triton_kernels as categorical
from tether.projection.anchored import LARGEST_CHANGE

F32, F64, BF16, I32, I64 = "*fp32", "*fp64", "*bf16", "*i32", "*i64"
HEAD: dict[str, Any] = {"SCALE": 0.7, "CAP": 30.0, "HAS_BIAS": True}
NUMBERS = torch.finfo(torch.float32)
TINY = {"TINY": NUMBERS.tiny, "WIDTH": 512}
WIDE = {"TINY": NUMBERS.tiny, "BLOCK": 4096}

#: kernel, warps, types of its pointers, compiled-in values; whole numbers are 32 bits wide.
CASES: list[tuple[Any, int, dict[str, str], dict[str, Any]]] = [
    (
        rows.reduce_kernel,
        4,
        {"raw": F32, "bias": BF16, "ids": I64, **dict.fromkeys(("log_probs", "maxima", "largest"), F32)}
        | {"log_total": F32, "entropy": F32, "smallest": F32},
        {**HEAD, "GROUP": 64, "BLOCK": 4096, "BLOCK_IDS": 64, "slots": 1},
    ),
    (
        rows.select_kernel,
        _warps(8192),
        {"values": F32, "bias": BF16, "groups": I32, "picked": I32, "picked_values": F32},
        {**HEAD, "GROUP": 32, "WIDTH": 8192, "PARTS": 64},
    ),
    (
        rows.select_kernel,
        _warps(4096),
        {"values": F32, "picked": I32},
        {"bias": None, "groups": None, "picked_values": None, "SCALE": 1.0, "CAP": 0.0, "HAS_BIAS": False}
        | {"GROUP": 0, "WIDTH": 4096, "PARTS": 64},
    ),
    (
        rows.gradient_kernel,
        8,
        {"raw": F32, "bias": BF16, "grad": BF16}
        | dict.fromkeys(("log_sum", "entropy", "total", "grad_entropy"), F32),
        {**HEAD, "BLOCK": 4096},
    ),
    (
        rows.gradient_at_ids_kernel,
        4,
        {"raw": F32, "bias": BF16, "ids": I64, "arrived": F32, "at_ids": F32}
        | dict.fromkeys(("log_sum", "entropy", "total"), F32),
        # A lone id a row, which Triton compiles in: what a loss without a support asks for.
        {**HEAD, "BLOCK": 64, "grad_entropy": None, "slots": 1},
    ),
    (rows.scatter_kernel, 1, {"grad": BF16, "ids": I64, "at_ids": F32}, {"BLOCK": 64}),
    (
        categorical.project_kernel,
        2,
        dict.fromkeys(("new", "old", "bound", "log_probs", "step", "kl"), F32)
        | dict.fromkeys(("constrained", "converged"), "*i8"),
        {**TINY, "TOLERANCE": 1e-5, "EPSILON": NUMBERS.eps},
    ),
    (
        categorical.project_backward_kernel,
        2,
        dict.fromkeys(("new", "old", "bound", "step", "kl", "upstream", "grad"), F32)
        | {"constrained": "*i8"},
        {**TINY, "EPSILON": NUMBERS.eps},
    ),
    (
        chunks.project_wide_kernel,
        16,
        dict.fromkeys(("new", "old", "bound", "log_probs", "step", "kl", "known"), F32)
        | dict.fromkeys(("constrained", "converged"), "*i8"),
        {**WIDE, "TOLERANCE": 1e-5, "EPSILON": NUMBERS.eps},
    ),
    (
        chunks.project_wide_backward_kernel,
        16,
        dict.fromkeys(("new", "old", "bound", "step", "kl", "known", "upstream", "grad"), F32)
        | {"constrained": "*i8"},
        {**WIDE, "EPSILON": NUMBERS.eps},
    ),
    *(
        (
            dense.compare_kernel,
            dense.COMPARED[dtype][1],
            {**dict.fromkeys(("new", "old", "found"), real), "ids": I64, "rows": I64}
            | {"bound": F64, "outcome": "*i8"},
            {"CHANGE": LARGEST_CHANGE[dtype], "FOUND": dense._FOUND, "BLOCK": dense.COMPARED[dtype][0]}
            | given,
        )
        for dtype, real, given in ((torch.float32, F32, {"rows": None}), (torch.float64, F64, {}))
    ),
    *(
        (
            dense.projected_gradient_kernel,
            dense.TO_GRADIENT[1],
            dict.fromkeys(("logits", "old", "log_sum", "entropy", "total", "grad_entropy", "arrived"), real)
            | dict.fromkeys(("sampled", "regression", "along", "step"), real)
            | {"grad": grad, "old_rows": I64, "ids": I64, "left": "*i8"},
            {"SLOPE": 0.7, "BLOCK": dense.TO_GRADIENT[0]} | given,
        )
        for real, grad, given in ((F32, BF16, {"CAP": 0.0, "grad_entropy": None}), (F64, F64, {"CAP": 30.0}))
    ),
    *(
        (
            certificate.certify_kernel,
            1,
            dict.fromkeys(("logits", "log_sum", "lower_out", "tail_mass_out"), real)
            | dict.fromkeys(("old_log_probs", "old_tails", "least"), F32)
            | {"ids": ids, "ratio_range": F64, "bound": F64, "inside_out": "*i8", "uncertain_out": "*i8"},
            {"EPSILON": NUMBERS.eps, "COARSER": NUMBERS.eps, "SMALLEST": -15.9, "TERMS": 12.4, "BLOCK": 128}
            | given,
        )
        for real, ids, given in ((F32, I32, {}), (F64, I64, {"least": None}))
    ),
    (
        rows.square_norm_kernel,
        4,
        {"weight": BF16, "minus": BF16, "minus_row": BF16, "squares": F32},
        {"BLOCK": 1024},
    ),
]


def compile_for_hopper(kernel: Any, warps: int, pointers: dict[str, str], settings: dict[str, Any]) -> bytes:
    """Machine code of a kernel."""
    signature = {
        name: "constexpr" if name in settings else pointers.get(name, "i32") for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=settings)
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": warps}).asm["cubin"]  # type: ignore[no-any-return]


def spilled_bytes(code: bytes) -> int:
    """What a thread keeps in memory because it has no register for it."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True)
    return int(re.search(r"STACK:(\d+)", report.stdout).group(1))  # type: ignore[union-attr]


if __name__ == "__main__":
    for case in CASES:
        machine_code = compile_for_hopper(*case)
        size, spilled = len(machine_code), spilled_bytes(machine_code)
        sys.stdout.write(json.dumps({"name": case[0].__name__, "bytes": size, "spilled": spilled}) + "\n")
