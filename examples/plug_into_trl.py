"""TRL's GRPO with TROLL's trust region instead of the clip. The lines that change are marked.

    python examples/plug_into_trl.py                    # the embedded model: a minute without a GPU
    python examples/plug_into_trl.py Qwen/Qwen3-0.6B    # any model folder or name on the hub

The model learns additions; the reward is the share of digits that are right.
"""

from __future__ import annotations

import argparse
import random
import tempfile

import torch
from datasets import Dataset

from tether import TROLLConfig, TROLLTrainer  # was: from trl import GRPOConfig, GRPOTrainer
from tether.llm.models import embedded_model_path


def make_problems(count: int, seed: int = 0) -> Dataset:
    """Additions of two numbers below a thousand, with their answers."""
    draw = random.Random(seed)
    pairs = [(draw.randrange(1000), draw.randrange(1000)) for _ in range(count)]
    return Dataset.from_list([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs])


def share_of_right_digits(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 for the answer itself; less for each digit that is wrong, missing or too many."""
    return [
        sum(x == y for x, y in zip(given.strip(), wanted, strict=False))
        / max(len(given.strip()), len(wanted))
        for given, wanted in zip(completions, answer, strict=True)
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train with TROLL through TRL.")
    parser.add_argument("model", nargs="?", default=str(embedded_model_path()), help="folder or hub name")
    parser.add_argument("--steps", type=int, default=20, help="optimiser steps (default: 20)")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="1e-6 suits large models")
    options = parser.parse_args(arguments)

    with tempfile.TemporaryDirectory() as folder:
        trainer = TROLLTrainer(  # was: GRPOTrainer(
            model=options.model,
            reward_funcs=share_of_right_digits,
            args=TROLLConfig(  # was: GRPOConfig(
                troll_kl_bound=0.05,  # was: epsilon=0.2
                output_dir=folder,
                max_steps=options.steps,
                learning_rate=options.learning_rate,
                per_device_train_batch_size=64,
                num_generations=8,
                steps_per_generation=4,  # updates on each batch of rollouts: what a trust region is for
                max_completion_length=8,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
                bf16=torch.cuda.is_available(),
                model_init_kwargs={"dtype": "float32"},
            ),
            train_dataset=make_problems(500),
        )
        trainer.train()

    print(f"\n{'step':>4}  {'reward':>6}  {'mean KL':>8}  {'projected':>9}")
    for row in trainer.state.log_history:
        if "trust_region/kl_mean" in row:
            reward = f"{row['reward']:6.3f}" if "reward" in row else " " * 6  # once a batch of rollouts
            kl, projected = row["trust_region/kl_mean"], row["trust_region/projected"]
            print(f"{row['step']:>4}  {reward}  {kl:8.5f}  {projected:9.2%}")


if __name__ == "__main__":
    main()
