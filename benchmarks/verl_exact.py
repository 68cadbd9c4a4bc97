"""Exact support on verl, measured on verl's own engine: gradients, sizes, precision, and verl's own tests.

    .venv-verl/bin/python -m benchmarks.verl_exact

- gradients of the third update of a batch against dense distributions in float64, as a share of the largest;
- processor time of an update with the loss in one pass over the LM head and after it, in turns, as a ratio;
- the largest tensor any operation of an update makes, as a share of [positions, vocabulary], at the size of
  Qwen3's vocabulary;
- in bfloat16, how far the first update's ratios are from 1, with the micro-batches of the old pass and with
  others; beside it how far verl's own log-probabilities are apart between two such passes;
- bytes that wait on a worker or travel, a response token;
- verl's own tests of losses and rollout correction, which its package holds, with the plug-in and without.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "verl_exact"
HELPERS = [str(ROOT / "tests"), str(ROOT / "tests" / "verl")]
LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}
BF16 = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}


def gradients(folder: Path) -> dict[str, float]:
    """One process, then two."""
    from actor import FLOAT64, VOCABULARY, Rollouts, acting, in_float64, make_actor, save_tiny_model
    from dense import KL_BOUND, worst_gradient
    from two_ranks_worker import DENSE

    from ranks import run_two_ranks
    from tether.ops import memory

    own, tied = save_tiny_model(folder / "own"), save_tiny_model(folder / "tied", tied=True)
    cases: dict[str, tuple[Path, bool, dict[str, Any], int]] = {
        "packed": (own, True, {}, 1000), "padded": (own, False, {}, 1000), "LoRA": (own, True, LORA, 1000),
        "tied embeddings": (tied, True, {}, 1000),
    }  # fmt: skip
    cases |= {f"{name}, in one pass": (*case[:-1], 3) for name, case in cases.items()}
    found = {}
    for name, (model, packed, lora, tokens) in cases.items():
        with in_float64(), patch.object(memory, "WORKSPACE_ELEMENTS", VOCABULARY * tokens):
            actor = make_actor(
                model, acting(troll_kl_bound=KL_BOUND, troll_top_k=6), packed=packed, model_settings=lora,
                engine_settings=FLOAT64, learning_rate=1e-2 if lora else 1e-3,
            )  # fmt: skip
            rollouts = Rollouts.scripted()
            found[name] = worst_gradient(model, actor, rollouts, rollouts, lora)[0]
    output = folder / "two"
    output.mkdir()
    worker = ROOT / "tests" / "verl" / "two_ranks_worker.py"
    run_two_ranks(worker, own, output, "gradients", output=output, timeout=900, cwd=worker.parent)
    numbers = [json.loads((output / f"numbers-{rank}.json").read_text()) for rank in range(2)]
    for name in DENSE:
        found[f"two processes, {name}"] = max(part[f"gradient {name}"] for part in numbers)
    return found


def passes(folder: Path, vocabulary: int = 49_152, width: int = 576, repeats: int = 3) -> dict[str, Any]:
    """Processor seconds of an update with SmolLM2-135M's head, the best of some, the ways taking turns."""
    from actor import Moved, Rollouts, acting, loss_afterwards, make_actor, save_tiny_model

    model = save_tiny_model(folder / "passes", vocabulary=vocabulary, width=width)
    rollouts, found = Rollouts.long(16, prompt=8, response=24), {}
    for trained, settings in (("all weights", {}), ("LoRA", LORA)):
        for name, bound in (("every token projected", 1e-12), ("none", 1e12)):
            actor = make_actor(
                model, acting(troll_kl_bound=bound), model_settings=settings, micro_batch=16,
                learning_rate=1e-3,
            )  # fmt: skip
            moved, seconds = Moved(actor, rollouts), {"in one pass": [], "afterwards": []}
            for _ in range(repeats):
                for way, asked in (("in one pass", nullcontext()), ("afterwards", loss_afterwards())):
                    with asked:
                        start = time.process_time()
                        moved.update()
                        seconds[way].append(time.process_time() - start)
            best = {way: min(values) for way, values in seconds.items()}
            found[f"{trained}, {name}"] = best | {"ratio": best["in one pass"] / best["afterwards"]}
    return found


def largest(folder: Path, vocabulary: int = 151_936, sequences: int = 64, length: int = 32) -> dict[str, Any]:
    """Of an update in which tokens are projected."""
    from actor import Rollouts, acting, make_actor, save_tiny_model
    from largest_tensor import largest_tensor

    model = save_tiny_model(folder / "wide", vocabulary=vocabulary)
    rollouts = Rollouts.long(sequences, prompt=length // 4, response=length - length // 4)
    actor = make_actor(model, acting(), packed=False, micro_batch=sequences, learning_rate=0.03)
    old = rollouts.score(actor)
    rollouts.update(actor, old)
    with largest_tensor() as found:
        metrics = rollouts.update(actor, old)
    positions = sequences * length
    return {
        "positions": positions,
        "vocabulary": vocabulary,
        "projected": metrics["actor/troll/projected"],
        "share": found.elements / (positions * vocabulary),
    }


def half_precision(folder: Path) -> dict[str, float]:
    """Largest |log ratio| of a first update, and of verl's own second pass."""
    from actor import Rollouts, acting, make_actor, save_tiny_model, unclipped

    model, rollouts = save_tiny_model(folder / "half"), Rollouts.scripted()
    found = {}
    for name, micro_batch in (("same micro-batches", 4), ("other micro-batches", 1)):
        engine = {**BF16, "infer_micro_batch_size_per_gpu": 4}
        ours = make_actor(model, acting(), engine_settings=engine, micro_batch=micro_batch, packed=False)
        metrics = rollouts.update(ours, rollouts.score(ours))
        found[f"{name}: ratio - 1"] = abs(metrics["actor/troll/ratio_max"] - 1)
        found[f"{name}: KL"] = metrics["actor/troll/kl_max"]
        passes = []
        for size in (4, micro_batch):
            theirs = make_actor(
                model,
                unclipped(),
                engine_settings={**BF16, "infer_micro_batch_size_per_gpu": size},
                packed=False,
            )
            passes.append(rollouts.score(theirs)["old_log_probs"].values().float())
        found[f"{name}: verl's log-probabilities"] = float((passes[0] - passes[1]).abs().max())
    return found


def sizes(folder: Path) -> dict[str, float]:
    """Bytes a response token of a model of width 32 in bfloat16, K = 64."""
    from actor import Rollouts, acting, make_actor, save_tiny_model

    model, rollouts = save_tiny_model(folder / "sizes"), Rollouts.long(16, 8, 24)
    tokens, found = 16 * 24, {}
    for store in ("local", "queue"):
        actor = make_actor(model, acting(troll_old_store=store), engine_settings=BF16, model_settings=LORA)
        old = rollouts.score(actor)
        fields = [value.values() for name, value in old.items() if name.startswith("troll_old_")]
        waits = rollouts.update(actor, old)["actor/troll/store_bytes"]
        found[f"{store}: wait on the worker"] = waits / tokens
        found[f"{store}: travel"] = sum(values.nbytes for values in fields) / tokens
    return found


def own_tests(_: Path) -> dict[str, dict[str, int]]:
    """How verl's tests of losses and rollout correction end without the plug-in and with it."""
    import verl

    tests = Path(verl.__file__).parent.parent / "tests" / "trainer"
    if not tests.is_dir():
        return {}
    outcomes = {}
    for name, policy in (("without", "none"), ("with", "tether")):
        plain = {key: value for key, value in os.environ.items() if not key.startswith("VERL_")}
        environment = {**plain, "VERL_USE_EXTERNAL_PLUGINS": policy}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            "addopts=",
            str(tests),
        ]
        if policy != "none":  # loaded, and not only looked for: its errors would be swallowed there
            command += ["-p", "tether.integrations.verl"]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tests)
        words = re.findall(r"(\d+) (passed|failed|skipped|errors?)", ran.stdout.strip().splitlines()[-1])
        outcomes[name] = {word: int(count) for count, word in words}
    return outcomes


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "gradients": gradients,
    "passes": passes,
    "largest": largest,
    "half_precision": half_precision,
    "sizes": sizes,
    "own_tests": own_tests,
}


def table(record: dict[str, Any]) -> str:
    """The measurements as Markdown."""
    rows = []
    for name, value in record.get("gradients", {}).items():
        rows.append(f"| gradient against dense float64, {name} | {value:.1e} |")
    for name, value in record.get("passes", {}).items():
        rows.append(
            f"| processor time of an update, loss in one pass / afterwards, {name} | {value['ratio']:.2f} |"
        )
    if "largest" in record:
        wide = record["largest"]
        shape = f"[{wide['positions']:,}, {wide['vocabulary']:,}]"
        rows.append(f"| largest tensor of an update, share of {shape} | {wide['share']:.3f} |")
    for name, value in record.get("half_precision", {}).items():
        rows.append(f"| bfloat16, {name}, largest | {value:.1e} |")
    for name, value in record.get("sizes", {}).items():
        rows.append(f"| bytes a response token, D = 32, {name} | {value:.0f} |")
    for name, outcome in record.get("own_tests", {}).items():
        counts = ", ".join(f"{count} {word}" for word, count in outcome.items())
        rows.append(f"| verl's own tests of losses and rollout correction, {name} the plug-in | {counts} |")
    return "\n".join(["| measured | |", "|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure again"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    sys.path[:0] = HELPERS
    import cpu_verl  # noqa: F401
    import torch

    import verl

    torch.set_num_threads(1)
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.output / "exact.json"
    record = json.loads(file.read_text()) if file.exists() else {}
    record |= {
        "command": "python -m benchmarks.verl_exact",
        "verl": verl.__version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.distributed.init_process_group(
            "gloo", rank=0, world_size=1, init_method=f"file://{folder}/meeting"
        )
        for part in arguments.parts:
            record[part] = PARTS[part](folder)
            file.write_text(json.dumps(record, indent=1) + "\n")
        torch.distributed.destroy_process_group()
    (arguments.output / "exact.md").write_text(table(record) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
