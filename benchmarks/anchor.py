"""What a scoring pass costs: a step around the policy that sampled, against one around the trainer's own.

    python benchmarks/anchor.py                                            # the embedded model (3 minutes)
    python benchmarks/anchor.py --model models/smollm2-135m-instruct --prompts 4 --responses 4 --turns 2

A step is everything from prompts to new weights: generation, what it takes to have an old policy, updates.
With anchor "trainer" TRL scores the rollouts in a pass of its own; with "sampler" the records of generation
are the old policy. The trainer's anchor compares on the likeliest ids ("bucket", as the sampler's does, so
that nothing differs but that pass and the recording) or on the whole vocabulary ("exact", its default). Whole
batches of rollouts in turns (A B B A), processor time of this process, the median ratio of turns, beside the
ratio of the trainer's anchor to itself. "updates" is how many updates a batch is split into (with one, TRL
does not score, and the trainer's anchor is no region).

Writes benchmarks/results/anchor/<model>-<device>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from tether.llm.config import TrainConfig
from tether.llm.models import load_model_and_tokenizer
from tether.llm.tasks import make_task
from tether.llm.trainers import make_trainer

RESULTS = Path(__file__).parent / "results" / "anchor"


class Stopwatch(TrainerCallback):
    """Processor time of each optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._since = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._since = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.process_time() - self._since)


def batch_seconds(anchor: str, support: str, updates: int, arguments: argparse.Namespace) -> float:
    """Of one batch of rollouts with all its updates; the first of a run, which warms up, is left out."""
    config = TrainConfig(
        output=Path("unused"), model=arguments.model, task=arguments.task, steps=3 * updates,
        updates_per_rollout=updates, prompts_per_rollout=arguments.prompts,
        responses_per_prompt=arguments.responses, micro_batch_size=arguments.micro_batch,
        method={"name": "troll", "support": support}, anchor=anchor, threads=1, device=arguments.device,
        eval_every=0, save_every=0, learning_rate=1e-5,
    )  # fmt: skip
    model, tokenizer = load_model_and_tokenizer(config.model, dtype="float32", device=torch.device("cpu"))
    task = make_task(config.task)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(config, model, tokenizer, task, Path(folder))
        watch = Stopwatch()
        trainer.add_callback(watch)
        trainer.train()
    batches = [sum(watch.seconds[start : start + updates]) for start in range(0, len(watch.seconds), updates)]
    return statistics.mean(batches[1:])


def compare(support: str, updates: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Turns A B B A of both anchors."""
    ratios, itself, seconds = [], [], []
    for _ in range(arguments.turns):
        one, two, three, four = (
            batch_seconds(anchor, support, updates, arguments)
            for anchor in ("trainer", "sampler", "sampler", "trainer")
        )
        ratios.append(round((two + three) / (one + four), 3))
        itself.append(round(four / one, 3))
        seconds.append(round((one + four) / 2, 3))
    return {
        "trainer_support": support, "updates": updates, "ratio": statistics.median(ratios), "ratios": ratios,
        "trainer_to_itself": itself, "trainer_seconds": statistics.median(seconds),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--task", default="chained")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--updates", type=int, nargs="+", default=[8, 2])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "settings": vars(arguments),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, one thread",
        "steps": [
            compare(support, updates, arguments)
            for support in ("bucket", "exact")
            for updates in arguments.updates
        ],
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / f"{Path(arguments.model).name}-{arguments.device}.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
