"""What bfloat16 leaves of a training step: how far a model moves, as it computes and as its weights say.

    python recipes/smollm2.py                                # once: gets the model
    python -m benchmarks.rounded_steps                       # ten minutes on one core with bfloat16

Under mixed precision the weights are float32, and are rounded to bfloat16 whenever the model computes.
Published weights mostly are bfloat16, so each begins in the middle of what rounds to it, and at a learning
rate of 1e-5 it takes Adam many steps to the next number. One batch of `make train-real` (128 responses, 8
updates) is trained in bfloat16 and in float32. Told are the share of the matrices' weights that round to
another number afterwards, and KL(trained || start) of sampled responses' tokens, in nats, both policies
computed in bfloat16 and in float32.

Writes benchmarks/results/rounded_steps/steps.csv.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path
from typing import Any

import torch

from tether import kl_categorical
from tether.llm.config import TrainConfig
from tether.llm.generate import answer, encode_prompt
from tether.llm.models import load_model_and_tokenizer
from tether.llm.precision import bfloat16_pays
from tether.llm.tasks import make_task
from tether.llm.train import train

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "rounded_steps" / "steps.csv"


def trained(start: str, in_bfloat16: bool, folder: str, seed: int) -> Any:
    """The model after one batch of the recipe."""
    run = train(
        TrainConfig(
            output=Path(folder) / "run", model=start, task="word_problems", seed=seed, steps=8,
            prompts_per_rollout=16, responses_per_prompt=8, learning_rate=1e-5, device="cpu",
            mixed_precision=in_bfloat16, rollouts="compact", share_prefixes=True, preflight="off",
            eval_every=8, eval_problems=1,
        )
    )  # fmt: skip
    return load_model_and_tokenizer(str(run.path / "model"), dtype="float32")[0]


def texts(model: Any, tokenizer: Any, count: int) -> list[tuple[list[int], int]]:
    """Prompts with a sampled response each, and where it begins."""
    task = make_task("word_problems")
    prompts = [problem.prompt for problem in task.problems("validation", count)]
    said = answer(
        model, tokenizer, prompts, max_response_tokens=40, temperature=1.0, batch_size=64, seed=0,
        compact=True,
    )  # fmt: skip
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    return [(ids + response.ids, len(ids)) for ids, response in zip(encoded, said, strict=True)]


@torch.no_grad()
def divergence(start: Any, new: Any, sequences: list[tuple[list[int], int]], in_bfloat16: bool) -> float:
    """Mean KL(new || start) of the responses' tokens."""
    found = []
    with torch.autocast("cpu", torch.bfloat16, enabled=in_bfloat16):
        for ids, begin in sequences:
            both = [model(torch.tensor([ids])).logits[0, begin - 1 : -1].float() for model in (new, start)]
            found.append(kl_categorical(*(logits.log_softmax(-1) for logits in both)))
    return torch.cat(found).mean().item()


def rounded_to_another(start: Any, new: Any) -> float:
    """The share of the matrices' weights whose bfloat16 number has changed."""
    changed = weights = 0
    for old, now in zip(start.parameters(), new.parameters(), strict=True):
        if old.dim() == 2:
            changed += int((old.bfloat16() != now.bfloat16()).sum())
            weights += old.numel()
    return changed / weights


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(ROOT / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--problems", type=int, default=64)
    given = parser.parse_args()
    if not bfloat16_pays():
        raise SystemExit("This processor is slow in bfloat16 and trains in float32: both rows would be one.")
    start, tokenizer = load_model_and_tokenizer(given.model, dtype="float32")
    sequences = texts(start, tokenizer, given.problems)
    rows = []
    for seed in given.seeds:
        for in_bfloat16 in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                new = trained(given.model, in_bfloat16, folder, seed)
            rows.append(
                {
                    "trained_in": "bfloat16" if in_bfloat16 else "float32", "seed": seed,
                    "rounds_to_another": round(rounded_to_another(start, new), 4),
                    "kl_in_bfloat16": divergence(start, new, sequences, True),
                    "kl_in_float32": divergence(start, new, sequences, False),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
