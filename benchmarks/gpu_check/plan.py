"""How large each piece is: what a GPU can do in half an hour, and next to nothing for the dry run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

_KERNEL_TESTS = (
    "tests/ops/test_certificate_triton.py",
    "tests/ops/test_linear_triton.py",
    "tests/ops/test_trust_region_triton.py",
    "tests/projection/test_categorical_triton.py",
)


@dataclass(frozen=True)
class Plan:
    """Sizes of every piece."""

    dry: bool
    device: torch.device
    model: str | None
    """To train; None for SmolLM2 from the package registry, or the embedded model in the dry run."""
    head: tuple[int, int, int, int]
    """Tokens, width, vocabulary and top-K of the LM head."""
    rows: tuple[int, int]
    """Rows and outcomes of the projection."""
    kernel_tests: tuple[str, ...]
    bench: tuple[str, ...]
    """Sections of `python -m benchmarks.bench`."""
    bench_seconds: float
    training: dict[str, Any] = field(default_factory=dict)
    """Settings of the trainings, besides their trust region."""
    vllm_steps: int = 4
    sharded: dict[str, int] = field(default_factory=dict)
    """Sizes of the model that is sharded over two devices."""


def make_plan(*, dry: bool, model: str | None) -> Plan:
    """For the GPU that is there, or for a CPU."""
    if dry:
        return Plan(
            dry=True, device=torch.device("cpu"), model=model,
            head=(4, 16, 300, 4), rows=(8, 17),
            kernel_tests=("--collect-only", *_KERNEL_TESTS),
            bench=("root_search",), bench_seconds=300,
            training={
                "task": "arithmetic", "steps": 4, "updates_per_rollout": 2, "prompts_per_rollout": 2,
                "responses_per_prompt": 4, "learning_rate": 1e-3, "device": "cpu", "threads": 1,
            },
            vllm_steps=2,
            sharded={"width": 32, "vocabulary": 128, "layers": 1, "rows": 2, "length": 12},
        )  # fmt: skip
    return Plan(
        dry=False, device=torch.device("cuda"), model=model,
        head=(512, 1024, 151_936, 64), rows=(4096, 65),
        kernel_tests=_KERNEL_TESTS,
        bench=("main_shapes", "old_policy", "root_search", "near_uniform", "memory"), bench_seconds=690,
        training={
            # SmolLM2 starts with 10 % of these right, and learns them in some hundred steps.
            "task": "word_problems", "task_options": {"largest": 10}, "steps": 20, "updates_per_rollout": 4,
            "prompts_per_rollout": 64, "responses_per_prompt": 8, "max_response_tokens": 64,
            "learning_rate": 1e-5, "mixed_precision": True,
        },
        sharded={"width": 1024, "vocabulary": 32_768, "layers": 4, "rows": 8, "length": 256},
    )  # fmt: skip
