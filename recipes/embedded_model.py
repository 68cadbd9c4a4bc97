"""Train the embedded model from nothing and write it where the package ships it.

    python recipes/embedded_model.py                            # into src/tether/llm/embedded
    python recipes/embedded_model.py --architecture llama       # into src/tether/llm/embedded_llama
    python recipes/embedded_model.py --out /some/folder         # elsewhere

A model of the Qwen3 or the Llama architecture with one token a character learns two tasks by supervised
next-token prediction on generated problems of their training splits: three-digit arithmetic answered at
once, and chained arithmetic with written steps. It first learns them from correct solutions, and then picks
up a pupil's bad habits from solutions that sometimes forget a carry or are off by one. So it can do the
work but gets a fifth to two fifths of held-out problems right when it samples at temperature 1, more of the
easy ones than of those with many carries, and reinforcement learning has something to improve within two
minutes.
Dropped from a real pre-training: text, documents, packing.

Under 10 minutes on two cores; the same machine and thread count give the same file.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import shutil
import string
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from torch.nn.functional import cross_entropy
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    logging,
)

from tether.llm.tasks import Problem, Task, make_task

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "tether" / "llm"

VALIDATION_PROBLEMS = 512

Example = tuple[list[int], int]
"""Token ids, and how many of them are the prompt."""


@dataclass(frozen=True)
class Settings:
    """What the shipped Qwen3 model was trained with; `ARCHITECTURES` has what differs for others."""

    architecture: str = "qwen3"
    """A name of `ARCHITECTURES`."""
    seed: int = 0
    threads: int = 2
    problems: int = 100_000
    """Distinct training problems of each task."""
    batch_size: int = 64
    """Problems a step, half of each task."""
    learning_rate: float = 2e-3
    """Of the correct solutions; falls along a cosine to a tenth."""
    warmup: int = 50
    skill_steps: int = 4000
    """Steps on correct solutions."""
    skill: float = 0.85
    """Greedy success on validation problems that every task must then have reached."""
    habit_learning_rate: float = 1e-3
    """Of the solutions with mistakes; falls along a cosine to zero."""
    habit_steps: int = 600
    """Steps on solutions with mistakes."""
    forgotten: tuple[float, float] = (0.55, 0.3)
    """Chance that a carry or borrow is forgotten, for each task."""
    off_by_one: tuple[float, float] = (0.04, 0.02)
    """Chance that a digit is one off, for each task."""
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    key_value_heads: int = 4
    """Fewer than `heads` for grouped-query attention."""
    feed_forward: int = 256
    vocabulary: int = 128
    """Rows of the embedding, more than the tokenizer has tokens, as in real models."""
    tied: bool = True
    """Whether the LM head is the embedding."""


@dataclass(frozen=True)
class Architecture:
    """A family of models: what it is called, how it is built and where the shipped one goes."""

    title: str
    name: str
    """Under which `load_model_and_tokenizer` knows it."""
    folder: Path
    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]
    changes: dict[str, Any] = field(default_factory=dict)
    """Settings that differ from the defaults."""


ARCHITECTURES = {
    "qwen3": Architecture("Qwen3", "embedded", PACKAGE / "embedded", Qwen3Config, Qwen3ForCausalLM),
    # What Llama has and Qwen3 has not: no norm of queries and keys. What large models of either have and the
    # first one has not: grouped-query attention and an LM head of its own. As many weights in all.
    "llama": Architecture(
        "Llama", "embedded-llama", PACKAGE / "embedded_llama", LlamaConfig, LlamaForCausalLM,
        {"key_value_heads": 2, "feed_forward": 288, "tied": False},
    ),
}  # fmt: skip


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character or newline, after the padding, end and unknown tokens."""
    characters = "\n" + "".join(sorted(string.ascii_letters + string.digits + string.punctuation + " "))
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def build_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    architecture = ARCHITECTURES[settings.architecture]
    config = architecture.config(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=settings.feed_forward,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.key_value_heads,
        head_dim=settings.hidden // settings.heads,
        max_position_embeddings=512,
        rope_theta=1000.0,
        tie_word_embeddings=settings.tied,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = architecture.model(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def calculate(
    first: int, sign: str, second: int, forgotten: float, off_by_one: float, rng: random.Random
) -> int:
    """Add or subtract column by column, forgetting carries and slipping by one with the given chances."""
    columns = max(len(str(first)), len(str(second)))
    carry, digits = 0, []
    for column in range(columns):
        upper, lower = first // 10**column % 10, second // 10**column % 10
        value = upper + lower + carry if sign == "+" else upper - lower - carry
        slip = rng.choice((-1, 1)) if rng.random() < off_by_one else 0
        digits.append((value + slip) % 10)
        carry = int(not 0 <= value <= 9 and rng.random() >= forgotten)
    if sign == "+":
        digits.append(carry)
    return sum(digit * 10**column for column, digit in enumerate(digits))


def solution_with_habits(problem: Problem, forgotten: float, off_by_one: float, rng: random.Random) -> str:
    """A solution in the task's format whose single calculations may be wrong; later steps build on them."""
    assert isinstance(problem.prompt, str)
    first, *rest = re.findall(r"\d+|[+-]", problem.prompt)
    signs, operands = rest[::2], [int(number) for number in rest[1::2]]
    while True:
        total, steps = int(first), ""
        for sign, operand in zip(signs, operands, strict=True):
            if sign == "-" and total < operand:
                break  # a mistake made the next step impossible: work through the problem again
            result = calculate(total, sign, operand, forgotten, off_by_one, rng)
            steps += f"{total}{sign}{operand}={result};"
            total = result
        else:
            return str(total) if problem.prompt.endswith("=") else f"{steps}#{total}"


def encode(problem: Problem, solution: str, tokenizer: PreTrainedTokenizerFast) -> Example:
    """Ids of prompt, solution and end token, and how many of them are the prompt."""
    assert isinstance(problem.prompt, str)
    prompt = tokenizer(problem.prompt).input_ids
    return [*prompt, *tokenizer(solution).input_ids, tokenizer.eos_token_id], len(prompt)


def mean_loss(model: PreTrainedModel, batch: Sequence[Example]) -> torch.Tensor:
    """Mean cross-entropy of the response tokens, in nats."""
    width = max(len(ids) for ids, _ in batch)
    inputs = torch.full((len(batch), width), model.config.pad_token_id)
    labels = torch.full((len(batch), width), -100)
    for row, (ids, prompt_length) in enumerate(batch):
        inputs[row, : len(ids)] = torch.tensor(ids)
        labels[row, prompt_length : len(ids)] = inputs[row, prompt_length : len(ids)]
    logits = model(input_ids=inputs).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def cosine(progress: float) -> float:
    """Fall from 1 to 0 along half a cosine as `progress` goes from 0 to 1."""
    return 0.5 * (1 + math.cos(math.pi * progress))


class Trainer:
    """AdamW on batches that hold an equal share of every task."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, settings: Settings
    ) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.tasks = [make_task(name) for name in ("arithmetic", "chained")]
        self.problems = [task.problems("train", settings.problems) for task in self.tasks]
        self.rng = random.Random(settings.seed)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.1
        )
        self.steps = 0
        self.started = time.perf_counter()

    def learn_skill(self) -> None:
        """Train on correct solutions; stop here if the tasks were not learned."""
        settings = self.settings
        for step in range(settings.skill_steps):
            warm = min(1.0, (step + 1) / settings.warmup)
            self._step(
                settings.learning_rate * warm * max(0.1, cosine(step / settings.skill_steps)),
                with_habits=False,
            )
            if self.steps % 500 == 0 and self.steps < settings.skill_steps:
                self.report()
        reached = min(greedy for _, greedy in self.report())
        if reached < settings.skill:
            raise SystemExit(
                f"A task was learned to {reached:.1%} only, not to {settings.skill:.0%}, in "
                f"{settings.skill_steps} "
                "steps. Raise --skill-steps or try another --seed."
            )

    def learn_habits(self) -> list[tuple[float, float]]:
        """Train on solutions with mistakes, so that sampled responses make them too; report at the end."""
        settings = self.settings
        for step in range(settings.habit_steps):
            self._step(settings.habit_learning_rate * cosine(step / settings.habit_steps), with_habits=True)
        return self.report()

    def report(self) -> list[tuple[float, float]]:
        """Print where the training stands; return sampled and greedy validation success of every task."""
        figures = [
            (
                success(self.model, self.tokenizer, task, sample=True),
                success(self.model, self.tokenizer, task, sample=False),
            )
            for task in self.tasks
        ]
        listed = "   ".join(
            f"{task.name} sampled {sampled:.3f} greedy {greedy:.3f}"
            for task, (sampled, greedy) in zip(self.tasks, figures, strict=True)
        )
        print(f"step {self.steps:5d}   {listed}   {time.perf_counter() - self.started:4.0f} s", flush=True)
        self.model.train()
        return figures

    def _step(self, learning_rate: float, with_habits: bool) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        losses = [mean_loss(self.model, self._batch(index, with_habits)) for index in range(len(self.tasks))]
        self.optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.steps += 1

    def _batch(self, index: int, with_habits: bool) -> list[Example]:
        chosen = self.rng.sample(self.problems[index], self.settings.batch_size // len(self.tasks))
        forgotten, off_by_one = self.settings.forgotten[index], self.settings.off_by_one[index]
        return [
            encode(
                problem,
                solution_with_habits(problem, forgotten, off_by_one, self.rng)
                if with_habits
                else problem.metadata["solution"],
                self.tokenizer,
            )
            for problem in chosen
        ]


@torch.no_grad()
def success(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, task: Task, *, sample: bool) -> float:
    """Fraction of validation problems answered correctly, sampled at temperature 1 or greedily."""
    problems = task.problems("validation", VALIDATION_PROBLEMS)
    inputs = tokenizer([problem.prompt for problem in problems], return_tensors="pt", padding=True)
    model.eval()
    options = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    output = model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=task.max_response_tokens,
        **options,
    )
    responses = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    verdicts = [task.verify(text, problem.answer) for text, problem in zip(responses, problems, strict=True)]
    return sum(verdict.correct for verdict in verdicts) / len(verdicts)


CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# Tether's embedded model{heading}

A language model of {parameters:,} parameters ({title} architecture, {layers} layers, width {hidden}, {head}
embedding) for trying reinforcement learning on a laptop. It knows two kinds of problems and nothing else; it
was trained from nothing on generated problems by `recipes/embedded_model.py` in Tether's repository. No
text, no personal data, no other model went into it.

| task | prompt | a right response | sampled | greedy |
|---|---|---|---|---|
| arithmetic | `374+258=` | `632` | {arithmetic[0]:.1%} | {arithmetic[1]:.1%} |
| chained | `23+45-17+80:` | `23+45=68;68-17=51;51+80=131;#131` | {chained[0]:.1%} | {chained[1]:.1%} |

Success on {limit} validation problems, sampled at temperature 1 without truncation, and greedy.

**It is imperfect on purpose.** After learning both tasks from correct solutions it was trained on solutions
that forget a carry with probability {forgotten[0]} (arithmetic) or {forgotten[1]} (chained) and are off by
one in a digit with probability {off_by_one[0]} or {off_by_one[1]}. Reinforcement learning can undo these
habits within minutes. Problems with many carries go wrong most often.

**Tokens.** One a character: printable ASCII and newline, 99 tokens with padding, end and unknown; the
embedding has {vocabulary} rows, so that, as in real models, some belong to no token. Context 512 tokens.

**Data.** {problems:,} training problems of each task, {steps:,} steps of {batch_size} problems, AdamW.
Training, validation and test problems are disjoint parts of the space of problems.

**Use.** `tether.llm.models.load_model_and_tokenizer("{name}")`. Good for these tasks and nothing else.
"""


def write_card(settings: Settings, parameters: int, figures: Sequence[tuple[float, float]]) -> str:
    """The model card, with the figures just measured."""
    arithmetic, chained = figures
    steps = settings.skill_steps + settings.habit_steps
    architecture = ARCHITECTURES[settings.architecture]
    return CARD.format(
        **asdict(settings),
        title=architecture.title,
        name=architecture.name,
        heading="" if settings.architecture == "qwen3" else f", {architecture.title} architecture",
        head="tied" if settings.tied else "untied",
        parameters=parameters,
        steps=steps,
        arithmetic=arithmetic,
        chained=chained,
        limit=VALIDATION_PROBLEMS,
    )


def write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, card: str) -> None:
    """Save model, tokenizer and card into a temporary folder, then put it in place of `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    model.save_pretrained(fresh)
    tokenizer.backend_tokenizer.no_padding()  # how a batch was padded last is no part of the tokenizer
    tokenizer.save_pretrained(fresh)
    (fresh / "README.md").write_text(card, encoding="utf-8")
    fresh.chmod(0o755)
    for path in fresh.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if folder.exists():
        retired = fresh.with_name(fresh.name + "-old")
        os.rename(folder, retired)
        os.rename(fresh, folder)
        shutil.rmtree(retired)
    else:
        os.rename(fresh, folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architecture", choices=list(ARCHITECTURES), default=Settings.architecture)
    parser.add_argument("--out", type=Path, help="folder to write (default: where the package ships it)")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--threads", type=int, default=Settings.threads)
    parser.add_argument("--skill-steps", type=int, default=Settings.skill_steps)
    arguments = parser.parse_args()
    started = time.perf_counter()
    architecture = ARCHITECTURES[arguments.architecture]
    settings = Settings(
        architecture=arguments.architecture,
        seed=arguments.seed,
        threads=arguments.threads,
        skill_steps=arguments.skill_steps,
        **architecture.changes,
    )
    out: Path = arguments.out or architecture.folder
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    torch.use_deterministic_algorithms(True)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = build_tokenizer()
    model = build_model(settings, tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters, {settings.threads} threads")
    trainer = Trainer(model, tokenizer, settings)
    trainer.learn_skill()
    figures = trainer.learn_habits()
    write(model, tokenizer, out, write_card(settings, parameters, figures))
    print(f"Written to {out} after {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
