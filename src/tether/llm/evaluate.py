"""How often a model solves held-out problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tether.experiments.files import atomic_write_text, dump_json_lines
from tether.experiments.statistics import bootstrap_interval, proportion_interval
from tether.llm.config import EvalConfig
from tether.llm.generate import Response, answer
from tether.llm.process import prepare_process
from tether.llm.tasks import Problem, Task, make_task
from tether.llm.tasks.training import closing, verify_all

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate_model` measured."""

    success: float
    """Share of sampled responses that are right."""
    success_greedy: float
    """Share of problems whose most likely response is right."""
    reward: float
    """Mean reward of the sampled responses."""
    rows: list[dict[str, Any]]
    """One entry a response: problem, prompt, reference, response, correct, reward, greedy."""

    def problem_success(self) -> list[float]:
        """Sampled success of each problem: what an interval over problems is made from."""
        by_problem: dict[int, list[float]] = {}
        for row in self.rows:
            if not row["greedy"]:
                by_problem.setdefault(row["problem"], []).append(float(row["correct"]))
        return [sum(values) / len(values) for values in by_problem.values()]


def evaluate_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    problems: Sequence[Problem],
    *,
    samples: int = 1,
    temperature: float = 1.0,
    max_response_tokens: int | None = None,
    batch_size: int = 256,
    seed: int = 0,
    chat_template_options: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Answer each problem `samples` times by sampling and once greedily, and check the answers.

    The same seed asks the same questions with the same random numbers, whoever else draws any.

    Args:
        model, tokenizer: as `tether.llm.models.load_model_and_tokenizer` gives them.
        task: checks the responses.
        problems: held-out problems.
        samples, temperature, max_response_tokens, batch_size, seed: of sampling; the response length is
            the task's unless given.
        chat_template_options: variables of the model's chat template.
    """
    length = max_response_tokens or task.max_response_tokens
    prompts = [problem.prompt for problem in problems]
    sampled = answer(
        model, tokenizer, prompts * samples,
        max_response_tokens=length, temperature=temperature, batch_size=batch_size, seed=seed,
        chat_template_options=chat_template_options,
    )  # fmt: skip
    greedy = answer(
        model, tokenizer, prompts,
        max_response_tokens=length, temperature=None, batch_size=batch_size, seed=seed,
        chat_template_options=chat_template_options,
    )  # fmt: skip
    rows = _rows(task, list(problems) * samples, sampled, greedy=False, count=len(problems))
    greedy_rows = _rows(task, problems, greedy, greedy=True, count=len(problems))
    return Evaluation(
        success=_mean(rows, "correct"),
        success_greedy=_mean(greedy_rows, "correct"),
        reward=_mean(rows, "reward"),
        rows=rows + greedy_rows,
    )


def evaluate(config: EvalConfig) -> Evaluation:
    """Load a model and measure it on a task's held-out problems, as `tether llm eval` does."""
    from tether.llm.models import load_model_and_tokenizer

    prepare_process(config.threads)
    task = make_task(config.task, **config.task_options)
    problems = task.problems(config.split, config.problems, config.seed)
    model, tokenizer = load_model_and_tokenizer(config.model, dtype=config.dtype)
    with closing(task):
        evaluation = evaluate_model(
            model, tokenizer, task, problems,
            samples=config.samples, temperature=config.temperature,
            max_response_tokens=config.max_response_tokens, batch_size=config.batch_size, seed=config.seed,
        )  # fmt: skip
    if config.output is not None:
        config.output.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(config.output, dump_json_lines(evaluation.rows))
    return evaluation


def _rows(
    task: Task, problems: Sequence[Problem], responses: Sequence[Response], *, greedy: bool, count: int
) -> list[dict[str, Any]]:
    verdicts = verify_all(
        task, [response.text for response in responses], [problem.answer for problem in problems]
    )
    return [
        {
            "problem": index % count,
            "prompt": problem.prompt,
            "reference": problem.answer,
            "response": response.text,
            "truncated": response.truncated,
            "correct": verdict.correct,
            "reward": verdict.reward,
            "greedy": greedy,
        }
        for index, (problem, response, verdict) in enumerate(zip(problems, responses, verdicts, strict=True))
    ]


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return sum(float(row[name]) for row in rows) / len(rows)


def print_evaluation(config: EvalConfig, evaluation: Evaluation) -> None:
    """Show success as a table, with 95 % intervals over problems."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{config.model} on {config.task} ({config.split})", title_justify="left")
    for name in ("responses", "problems", "success", "95 % interval"):
        table.add_column(name, justify="left" if name == "responses" else "right")
    greedy = [float(row["correct"]) for row in evaluation.rows if row["greedy"]]
    sampled = f"sampled, {config.samples} a problem, T = {config.temperature:g}"
    for name, interval in (
        (sampled, bootstrap_interval(evaluation.problem_success())),
        ("greedy", proportion_interval(sum(greedy) / len(greedy), len(greedy))),
    ):
        table.add_row(
            name,
            str(len(greedy)),
            f"{interval.value:.1%}",
            f"{interval.low:.1%} to {interval.high:.1%}",
        )
    Console().print(table)
