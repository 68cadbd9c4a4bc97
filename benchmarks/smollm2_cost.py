"""What SmolLM2-135M-Instruct costs on a CPU: time to the first step and a step, peak memory, weights.

    python recipes/smollm2.py                 # once: gets the model
    python benchmarks/smollm2_cost.py         # all weights, all with gradient checkpointing, adapters

Each variant is `tether llm train` on problems of GSM8K's form in a process of its own: float32, 2 updates on
8 responses each of at most 64 tokens, without evaluation to speak of. Memory is the largest resident set the
kernel saw, less that of a process that has imported the same libraries and loaded nothing. (A run resets the
kernel's mark before each step to measure that step alone, so the mark is read every 50 ms.) Writes
benchmarks/results/smollm2_cost/cost.json.
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
from pathlib import Path
from typing import Any

from tether.llm.config import TrainConfig
from tether.llm.models import read_config_and_tokenizer
from tether.llm.preflight import estimate_memory

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "smollm2-135m-instruct"
RESULTS = Path(__file__).parent / "results" / "smollm2_cost"

VARIANTS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "all weights, gradient checkpointing": {"gradient_checkpointing": True},
    "adapters of rank 16": {"lora_rank": 16},
}


def word_problems() -> list[dict[str, str]]:
    """Two hundred in GSM8K's form and of its length, so that nothing has to be downloaded."""
    text = (
        "A shop sells apples by the box and by the piece. Maria carries {n} boxes of {m} apples each to the "
        "shop, and on the way she eats {k} of the apples. The shop's owner pays her for every apple that is "
        "left, and gives her {k} dollars besides. How many apples has she left to sell?"
    )
    return [
        {
            "question": text.format(n=n, m=n % 7 + 2, k=n % 3 + 1),
            "answer": f"{n} * {n % 7 + 2} - {n % 3 + 1} #### {n * (n % 7 + 2) - n % 3 - 1}",
        }
        for n in range(2, 202)
    ]


def config(model: Path, output: Path, **changes: Any) -> TrainConfig:
    data = output.with_name("rows.jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in word_problems()))
    return TrainConfig(
        **{
            "output": output, "model": str(model), "task": "gsm8k", "task_options": {"path": str(data)},
            "steps": 2, "updates_per_rollout": 2, "prompts_per_rollout": 4, "responses_per_prompt": 4,
            "max_response_tokens": 64, "eval_every": 0, "eval_problems": 1, "save_every": 0, "threads": 1,
            "device": "cpu", "preflight": "off", **changes,
        }
    )  # fmt: skip


def options(settings: TrainConfig) -> list[str]:
    chosen = [
        "--output", str(settings.output), "--model", settings.model, "--task", "gsm8k",
        "--task-options", "path", str(settings.task_options["path"]),
        "--steps", "2", "--updates-per-rollout", "2",
        "--prompts-per-rollout", "4", "--responses-per-prompt", "4", "--max-response-tokens", "64",
        "--eval-every", "0", "--eval-problems", "1", "--save-every", "0", "--threads", "1", "--device", "cpu",
        "--preflight", "off",
    ]  # fmt: skip
    if settings.gradient_checkpointing:
        chosen.append("--gradient-checkpointing")
    if settings.lora_rank is not None:
        chosen += ["--lora-rank", str(settings.lora_rank)]
    return chosen


def run_and_watch(command: list[str], metrics: Path | None) -> tuple[float, float | None, int]:
    """Seconds in all, seconds until the first line of metrics, and the largest resident set in bytes."""
    started, first, peak = time.perf_counter(), None, 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if first is None and metrics is not None and metrics.exists() and metrics.stat().st_size:
            first = time.perf_counter() - started
        if pid:
            break
        peak = max(peak, largest_resident_set(process.pid))
        time.sleep(0.05)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with code {process.returncode}.")
    return time.perf_counter() - started, first, max(peak, usage.ru_maxrss * 1024)


def largest_resident_set(pid: int) -> int:
    """Bytes the kernel has marked for a process since the mark was reset; 0 for one that has just ended."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return 0 if found is None else int(found[1]) * 1024


def measure(name: str, model: Path, changes: dict[str, Any], imports: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        settings = config(model, Path(folder) / "run", **changes)
        command = [sys.executable, "-m", "tether", "llm", "train", *options(settings)]
        seconds, first, peak = run_and_watch(command, settings.output / "metrics.jsonl")
        model_config, _ = read_config_and_tokenizer(settings.model)
        lines = [json.loads(line) for line in (settings.output / "metrics.jsonl").read_text().splitlines()]
    assert first is not None
    found = {
        "variant": name,
        "seconds_to_first_step": round(first, 1),
        "seconds_of_second_step": round(lines[1]["step_seconds"], 1),
        "seconds_in_all": round(seconds, 1),
        "peak_bytes": peak,
        "peak_bytes_beyond_imports": peak - imports,
        "counted_bytes": estimate_memory(settings, model_config).fixed,
    }
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="model folder (default: %(default)s)")
    model: Path = parser.parse_args().model
    if not model.is_dir():
        raise SystemExit(f"There is no model in {model}. Get it with: python recipes/smollm2.py")
    imported = "import tether.llm.train, tether.llm.callbacks, tether.integrations.trl, peft"
    _, _, imports = run_and_watch([sys.executable, "-c", imported], None)
    results = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, one thread",
        "imports_bytes": imports,
        "runs": [measure(name, model, changes, imports) for name, changes in VARIANTS.items()],
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "cost.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
