"""Training from a config in one or two processes, on rollouts that do not depend on how many there are.

    torchrun --nproc_per_node 2 two_processes_train.py OUT

Sampling cannot be the same in two processes as in one (each has random numbers of its own), so completions
are scripted from the prompt, and one process takes its rows in the order in which two would. Everything else
is `tether.llm.train.train` as it is. Writes OUT/straight and OUT/resumed.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from short_run import config
from trl.trainer import grpo_trainer

from ranks import end_rank
from tether.llm.callbacks import CheckpointCallback
from tether.llm.process import is_main_process, process_count
from tether.llm.train import train

PROMPTS, RESPONSES, UPDATES = 4, 4, 4
LOOK = CheckpointCallback.on_step_end


def scripted(self: Any, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
    """Right and wrong sums, by the prompt and the how-manieth of its group alone."""
    tokenizer = self.processing_class
    seen: dict[str, int] = {}
    completions = []
    for ids in prompt_ids:
        prompt = tokenizer.decode(ids, skip_special_tokens=True)
        seen[prompt] = seen.get(prompt, 0) + 1
        draw = random.Random(f"{prompt}{seen[prompt]}")
        first, sign, second = re.fullmatch(r"(\d+)([+-])(\d+)=", prompt).groups()
        value = int(first) + int(f"{sign}{second}") + (draw.randint(1, 40) if seen[prompt] % 2 else 0)
        completions.append([*tokenizer(str(value))["input_ids"], tokenizer.eos_token_id])
    return completions, None


def as_two_would(batch: dict[str, Any]) -> dict[str, Any]:
    """Rows so that each update holds what two processes, each with half the rows, put into it."""
    if process_count() == 2:
        return batch
    rows = PROMPTS * RESPONSES
    share = rows // 2 // UPDATES
    order = [
        half * rows // 2 + update * share + place
        for update in range(UPDATES)
        for half in range(2)
        for place in range(share)
    ]
    return {
        name: value[order] if isinstance(value, torch.Tensor) and value.ndim > 0 else value
        for name, value in batch.items()
    }


def stopping_at_step_3(self: Any, args: Any, state: Any, control: Any, **more: Any) -> Any:
    """As if the first process alone had been asked to stop; all must, and at the same step."""
    if state.global_step == 3 and is_main_process():
        self.request_stop()
    return LOOK(self, args, state, control, **more)


def train_scripted(output: Path, replace: Callable[[Any, str, Any], None]) -> None:
    """Once straight through, once stopped and resumed. `replace(owner, name, value)` puts the script in."""
    replace(grpo_trainer.GRPOTrainer, "_generate_single_turn", scripted)
    replace(grpo_trainer, "shuffle_sequence_dict", as_two_would)
    short = {"steps": 8, "eval_every": 0, "eval_problems": 4, "save_every": 4, "preflight": "off"}
    train(config(output / "straight", **short))
    replace(CheckpointCallback, "on_step_end", stopping_at_step_3)
    train(config(output / "resumed", **{**short, "save_every": 8}))
    replace(CheckpointCallback, "on_step_end", LOOK)
    train(config(output / "resumed", **{**short, "save_every": 8}, resume=True))


if __name__ == "__main__":
    train_scripted(Path(sys.argv[1]), setattr)
    end_rank()
