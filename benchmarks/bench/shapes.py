"""The sizes that are measured: a small model's and the embedded model's on a CPU, large ones on a GPU."""

from __future__ import annotations

import torch
from benchmarks.bench.workload import Shape

# SmolLM2-135M: D = 576, V = 49152. The logits of 256 tokens fit the declared workspace, those of 1024 do not.
SMALL = Shape("SmolLM2-135M", tokens=256, width=576, vocabulary=49_152)
SMALL_LONG = Shape("SmolLM2-135M", tokens=1024, width=576, vocabulary=49_152)
# The model that ships with Tether: an update of the quickstart holds about this many tokens.
EMBEDDED = Shape("embedded model", tokens=2048, width=128, vocabulary=128)
TINY = Shape("tiny", tokens=64, width=16, vocabulary=1024, top_k=16)

# The LM heads of Qwen3-4B, Qwen3-8B, Llama-3-8B and Gemma-3-270m.
_GPU_SIZES = {
    "Qwen3-4B": (2560, 151_936),
    "Qwen3-8B": (4096, 151_936),
    "Llama-3-8B": (4096, 128_256),
    "Gemma-3-270m": (640, 262_144),
}
GPU = tuple(
    Shape(name, tokens=32_768, width=width, vocabulary=vocabulary, dtype=torch.bfloat16)
    for name, (width, vocabulary) in _GPU_SIZES.items()
)

MEMORY_SHAPES = {"cpu": SMALL_LONG, "cpu tiny": TINY} | {f"gpu {shape.name}": shape for shape in GPU}
