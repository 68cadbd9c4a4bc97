"""What packing a micro-batch saves: time and peak memory of a training pass, packed against padded.

    python benchmarks/packing.py       # a random Llama of 9 million weights on a CPU (2 minutes)
    python benchmarks/packing.py --model models/smollm2-135m-instruct --longest 64 --turns 1
    python benchmarks/packing.py --model Qwen/Qwen3-0.6B --dtype bfloat16 --rows 64 --longest 1024  # a GPU

A pass is what an update does with a micro-batch: forward to the sampled tokens' log-probabilities and the 64
most likely ids, and backward to all weights. Lengths are drawn as rollouts have them: prompts between a sixth
of the longest response and half of it, responses geometric and cut at the longest. "Even" rows, all of the
same length, show what packing costs where there is nothing to save. Results are compared before anything is
timed. Time: padded and packed in turns (A B B A), the median ratio of turns, beside the ratio of padded to
itself. Memory: a process for each, the largest resident set of the pass less that before it (on a GPU the
allocator's).

Writes benchmarks/results/packing/<model>-<device>.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import maybe_gather_lm_head_ctx

from tether.experiments.peak_memory import peak_memory
from tether.integrations.packing import PackedLayout, add_packing
from tether.integrations.sparse_head import add_sparse_head

RANDOM = "random-llama"
RESULTS = Path(__file__).parent / "results" / "packing"
KINDS = ("mixed", "even")


def load(arguments: argparse.Namespace) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {"dtype": getattr(torch, arguments.dtype), "attn_implementation": arguments.attention}
    if arguments.model == RANDOM:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=8192, hidden_size=256, intermediate_size=768, num_hidden_layers=8,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
            attn_implementation=arguments.attention,
        )  # fmt: skip
        model: Any = LlamaForCausalLM(config).to(device, settings["dtype"])
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, **settings).to(device)
    model.train()
    add_sparse_head(model, 1.0, maybe_gather_lm_head_ctx)
    add_packing(model)
    return model


def rows(
    kind: str, arguments: argparse.Namespace, vocabulary: int, device: torch.device
) -> dict[str, Tensor]:
    """Prompts padded on the left and responses on the right, as TRL pads them."""
    generator = torch.Generator().manual_seed(arguments.seed)
    longest_prompt, longest = arguments.longest // 2, arguments.longest
    prompts = torch.randint(longest_prompt // 3, longest_prompt + 1, (arguments.rows,), generator=generator)
    draws = torch.rand(arguments.rows, generator=generator, dtype=torch.float64)
    responses = (draws.log() / torch.log1p(torch.tensor(-2 / longest))).ceil().long().clamp(1, longest)
    if kind == "even":
        prompts[:], responses[:] = longest_prompt, longest
    width, length = int(prompts.max()), int(responses.max())
    places = torch.arange(width + length)
    mask = (places >= width - prompts[:, None]) & (places < width + responses[:, None])
    ids = torch.randint(10, vocabulary, mask.shape, generator=generator)
    labels = torch.where(mask & (places >= width), ids, -100)
    return {
        name: value.to(device)
        for name, value in {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}.items()
    }


def run_pass(model: Any, batch: dict[str, Tensor], packed: bool) -> Tensor:
    output = model(**batch, support_top_k=64, pack_sequences=packed)
    (output.log_probs.sum() / (batch["labels"] != -100).sum()).backward()
    return output.log_probs.detach()


def seconds(model: Any, batch: dict[str, Tensor], packed: bool) -> float:
    """Processor time of the one thread on a CPU; wall time with the queue emptied on a GPU."""
    model.zero_grad(set_to_none=True)
    clock = time.perf_counter if batch["input_ids"].is_cuda else time.process_time
    synchronize(batch)
    started = clock()
    run_pass(model, batch, packed)
    synchronize(batch)
    return clock() - started


def synchronize(batch: dict[str, Tensor]) -> None:
    if batch["input_ids"].is_cuda:
        torch.cuda.synchronize()


def compare(model: Any, batch: dict[str, Tensor]) -> dict[str, float]:
    """Log-probabilities and the gradient of all weights, packed against padded; the largest difference."""
    found = []
    for packed in (False, True):
        model.zero_grad(set_to_none=True)
        log_probs = run_pass(model, batch, packed)
        gradient = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
        found.append((log_probs, gradient))
    (padded, wanted), (packed_, gradient) = found
    off = sum(float((gradient[name] - g).square().sum()) for name, g in wanted.items()) ** 0.5
    size = sum(float(g.square().sum()) for g in wanted.values()) ** 0.5
    differences = {
        "log_probs": float((packed_ - padded).abs().max()),
        "gradient_relative": off / size,
    }
    limit = {torch.float32: 1e-3, torch.bfloat16: 0.2}[model.dtype]
    if max(differences.values()) > limit:
        raise SystemExit(f"Packed and padded differ by {differences}: nothing is timed.")
    return differences


def measure_time(model: Any, batch: dict[str, Tensor], turns: int) -> dict[str, Any]:
    ratios, noise, padded_seconds = [], [], []
    for _ in range(turns):
        first, second, third, fourth = (
            seconds(model, batch, packed) for packed in (False, True, True, False)
        )
        ratios.append((second + third) / (first + fourth))
        noise.append(first / fourth)
        padded_seconds += [first, fourth]
    return {
        "time_ratio": round(statistics.median(ratios), 3),
        "time_ratios": [round(ratio, 3) for ratio in ratios],
        "padded_to_itself": [round(ratio, 3) for ratio in noise],
        "padded_seconds": round(statistics.median(padded_seconds), 2),
    }


def peak_of_one_pass(arguments: argparse.Namespace) -> None:
    """In a process of its own: print the memory that a pass takes beyond the model and its gradients."""
    model = load(arguments)
    kind, way = arguments.peak
    few = argparse.Namespace(**{**vars(arguments), "longest": 8})
    run_pass(
        model, rows(kind, few, model.config.vocab_size, model.device), way == "packed"
    )  # gradients exist
    batch = rows(kind, arguments, model.config.vocab_size, model.device)
    gc.collect()
    memory = peak_memory(model.device)
    if memory is None:
        raise SystemExit("Memory is measured on a GPU or under Linux.")
    memory.restart()
    run_pass(model, batch, way == "packed")
    print(memory.peak())


def measure_memory(kind: str) -> dict[str, Any]:
    peaks = {}
    for way in ("padded", "packed"):
        command = [sys.executable, __file__, *sys.argv[1:], "--peak", kind, way]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        peaks[way] = int(result.stdout.split()[-1])
    return {
        "padded_bytes": peaks["padded"],
        "packed_bytes": peaks["packed"],
        "memory_ratio": round(peaks["packed"] / peaks["padded"], 3),
    }


def describe(batch: dict[str, Tensor]) -> dict[str, Any]:
    mask = batch["attention_mask"]
    computed = PackedLayout.of(mask).position_ids.numel()
    return {
        "rows": mask.shape[0],
        "width": mask.shape[1],
        "tokens": int(mask.sum()),
        "padded_places": mask.numel(),
        "packed_places": computed,
        "places_ratio": round(computed / mask.numel(), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=RANDOM, help="folder or name (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="rows of the micro-batch (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=128, help="longest response (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="turns of four passes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (default: %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights")
    parser.add_argument("--attention", default="sdpa", help="implementation (default: %(default)s)")
    parser.add_argument("--peak", nargs=2, metavar=("KIND", "WAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        peak_of_one_pass(arguments)
        return
    model = load(arguments)
    where = "cuda" if model.device.type == "cuda" else platform.machine()
    settings = {name: getattr(arguments, name) for name in ("rows", "longest", "turns", "seed", "dtype")}
    results: dict[str, Any] = {
        "model": Path(arguments.model).name,
        "machine": f"{where}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, one thread",
        "settings": {**settings, "attention": arguments.attention},
    }
    for kind in KINDS:
        batch = rows(kind, arguments, model.config.vocab_size, model.device)
        results[kind] = {
            **describe(batch),
            **compare(model, batch),
            **measure_time(model, batch, arguments.turns),
            **measure_memory(kind),
        }
        print(json.dumps({kind: results[kind]}, indent=2), flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    target = RESULTS / f"{results['model']}-{model.device.type}.json"
    target.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
