"""Where the time of a step goes with SmolLM2-135M-Instruct on a CPU: TROLL beside TRL's own GRPOTrainer.

    python recipes/smollm2.py                   # once: gets the model
    python -m benchmarks.smollm2_speed          # 16 prompts x 8 responses, 8 updates, each trainer once
    python -m benchmarks.smollm2_speed --prompts 4 --updates 4 --repeats 3

The trainers get the same problems and settings (bfloat16 arithmetic, at most 40 tokens) and take turns in
one process, one batch of rollouts and its updates each. TRL's clip is run as it is; TROLL once as TRL's
trainer runs (`transformers`), and once as recipes/train_real.yaml has it: each prompt read once for its group
and rows left out once they ended (`rollouts: compact`), common beginnings computed once (`share_prefixes`).
Seconds are of the processor and so hardly depend on who else uses the machine, which those of the clock do.
Writes a row a measurement to benchmarks/results/smollm2_speed/speed.csv.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gc
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tether.llm.config import TrainConfig
from tether.llm.models import load_model_and_tokenizer
from tether.llm.tasks import make_task, reward_function, to_dataset
from tether.llm.trainers import _trl_settings, make_trainer

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "smollm2-135m-instruct"
RESULTS = Path(__file__).parent / "results" / "smollm2_speed" / "speed.csv"

FAST: dict[str, Any] = {"rollouts": "compact", "share_prefixes": True}
VARIANTS: dict[str, dict[str, Any] | None] = {"TRL": None, "TROLL": {}, "TROLL, shared": FAST}
"""What changes of the settings; None for TRL's own trainer."""

PHASES = {"rollouts": "_generate_single_turn", "scoring and rollouts": "_generate_and_score_completions"}
FIELDS = (
    "variant", "repeat", "responses", "updates", "response_tokens", "phase", "processor_seconds", "seconds",
)  # fmt: skip


class Clock:
    """Seconds of the processor and of the clock, by phase."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}
        self.tokens = 0

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, with its time on the account of a phase."""

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = time.process_time(), time.perf_counter()
            result = call(*args, **kwargs)
            spent = self.spent.setdefault(phase, [0.0, 0.0])
            spent[0] += time.process_time() - before[0]
            spent[1] += time.perf_counter() - before[1]
            if phase == "rollouts":
                self.tokens += sum(map(len, result[0]))
            return result

        return run


def build(config: TrainConfig, folder: Path, *, of_trl: bool) -> Any:
    """Tether's trainer of a config, or TRL's own with the same settings and problems."""
    task = make_task(config.task)
    model, tokenizer = load_model_and_tokenizer(config.model)
    if not of_trl:
        return make_trainer(config, model, tokenizer, task, folder)
    from trl import GRPOConfig, GRPOTrainer

    return GRPOTrainer(
        model=model,
        reward_funcs=reward_function(task),
        args=GRPOConfig(**_trl_settings(config, task, folder)),
        train_dataset=to_dataset(task, "train", config.prompts_per_rollout),
        processing_class=tokenizer,
    )


def measure(variant: str, repeat: int, prompts: int, updates: int) -> list[dict[str, Any]]:
    """One batch of rollouts and its updates, from a fresh model."""
    changes = VARIANTS[variant]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        config = TrainConfig(
            output=Path(folder), model=str(MODEL), task="word_problems", steps=updates, device="cpu",
            prompts_per_rollout=prompts, updates_per_rollout=updates, learning_rate=1e-5,
            mixed_precision=True, seed=repeat, **(changes or {}),
        )  # fmt: skip
        trainer, clock = build(config, Path(folder), of_trl=changes is None), Clock()
        for phase, name in PHASES.items():
            stack.enter_context(mock.patch.object(trainer, name, clock.timed(phase, getattr(trainer, name))))
        clock.timed("all", trainer.train)()
    del trainer
    gc.collect()
    rollouts, both, everything = (clock.spent[name] for name in ("rollouts", "scoring and rollouts", "all"))
    phases = {
        "rollouts": rollouts,
        "scoring": [a - b for a, b in zip(both, rollouts, strict=True)],
        "updates": [a - b for a, b in zip(everything, both, strict=True)],
        "all": everything,
    }
    return [
        dict(
            zip(
                FIELDS,
                (variant, repeat, prompts * 8, updates, clock.tokens, phase, *(round(s, 2) for s in seconds)),
                strict=True,
            )
        )
        for phase, seconds in phases.items()
    ]


def summary(rows: list[dict[str, Any]]) -> str:
    """Response tokens a processor second, and each phase's cost a response token over TRL's."""
    cost: dict[tuple[str, str], float] = {}
    for variant in VARIANTS:
        for phase in ("rollouts", "scoring", "updates", "all"):
            chosen = [row for row in rows if (row["variant"], row["phase"]) == (variant, phase)]
            seconds = sum(row["processor_seconds"] for row in chosen)
            cost[variant, phase] = seconds / max(1, sum(row["response_tokens"] for row in chosen))
    lines = [f"{'tokens a processor second':26}" + "".join(f"{name:>22}" for name in VARIANTS)]
    for phase in ("rollouts", "scoring", "updates", "all"):
        shown = [
            f"{1 / cost[name, phase]:8.0f} (x{cost[name, phase] / cost['TRL', phase]:.2f})"
            for name in VARIANTS
        ]
        lines.append(f"{phase:26}" + "".join(f"{text:>22}" for text in shown))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=16, help="in a batch, 8 responses each")
    parser.add_argument("--updates", type=int, default=8, help="on a batch")
    parser.add_argument("--repeats", type=int, default=1)
    given = parser.parse_args()
    if not MODEL.is_dir():
        raise SystemExit(f"There is no model in {MODEL}. Get it with: python recipes/smollm2.py")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    print(f"{torch.get_num_threads()} threads")
    for repeat in range(given.repeats):
        for variant in VARIANTS:
            found = measure(variant, repeat, given.prompts, given.updates)
            rows += found
            print(*(f"{row['phase']} {row['processor_seconds']} s" for row in found), variant, flush=True)
            with RESULTS.open("w", newline="") as file:
                writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
    print(summary(rows))


if __name__ == "__main__":
    main()
