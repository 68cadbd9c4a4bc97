"""How often a model solves held-out problems: inside training, and as a command of its own."""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tether.errors import CheckpointError, ConfigError
from tether.experiments.files import FolderLock, atomic_write_json, dump_json, load_json
from tether.experiments.run_start import check_empty
from tether.llm.answers import LoadedModel, Row, collect_answers
from tether.llm.eval_config import PAGE_FILE, EvalConfig
from tether.llm.evaluation_page import write_page
from tether.llm.generate import answer_and_judge
from tether.llm.measures import TaskResult, difference, summarise_problems
from tether.llm.models import model_fingerprint
from tether.llm.process import prepare_process
from tether.llm.tasks import Problem, Task, make_task
from tether.llm.tasks.training import closing

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONFIG_FILE, RESULTS_FILE = "config.json", "results.json"
_FINGERPRINTS = "fingerprints"  # of the models, by side, beside the settings


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate_model` measured."""

    success: float
    """Share of sampled responses that are right."""
    success_greedy: float
    """Share of problems whose most likely response is right."""
    reward: float
    """Mean reward of the sampled responses."""
    problems: int
    """How many there were, each asked all of its samples."""


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
    compact: bool = False,
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
        compact: how `tether.llm.generate.answer` writes.
    """
    ask = functools.partial(
        answer_and_judge, model, tokenizer, task, max_response_tokens=max_response_tokens,
        batch_size=batch_size, seed=seed, chat_template_options=chat_template_options, compact=compact,
    )  # fmt: skip
    sampled = [verdict for _, verdict in ask(list(problems) * samples, temperature=temperature)]
    greedy = [verdict for _, verdict in ask(problems, temperature=None)]
    return Evaluation(
        success=statistics.fmean(verdict.correct for verdict in sampled),
        success_greedy=statistics.fmean(verdict.correct for verdict in greedy),
        reward=statistics.fmean(verdict.reward for verdict in sampled),
        problems=len(problems),
    )


def evaluate(config: EvalConfig) -> list[TaskResult]:
    """Measure a model, and a baseline, on the held-out problems of tasks, as `tether llm eval` does.

    With an output folder, every batch is kept (``<task>-<side>.jsonl``), the same call goes on after a kill
    with the same outcome, and ``results.json`` and ``report.html`` are written at the end.

    Raises:
        CheckpointError: the output folder holds another measurement, or one of a model whose files have
            changed since; another process measures into it.
        ConfigError, DataError: a model, task or data that cannot be had.
    """
    prepare_process(config.threads)
    if config.output is None:
        return _measure(config)
    with _claimed(config.output, config):
        results = _measure(config)
        _write_results(config, results, config.output)
    return results


def _measure(config: EvalConfig) -> list[TaskResult]:
    rows: dict[str, dict[str, list[Row]]] = {name: {} for name in config.task}
    for side, model in config.models.items():
        for name, answered in _answer_all(config, side, model).items():
            rows[name][side] = answered
    return [_result(config, name, rows[name]) for name in config.task]


def _answer_all(config: EvalConfig, side: str, model: str) -> dict[str, list[Row]]:
    """All tasks by one model, loaded once, if anything is left to ask."""
    loaded: list[LoadedModel] = []
    with ExitStack() as stack:
        # All tasks and problems first: a mistake in the last one must not cost the answers to the others.
        tasks = {name: make_task(name, **config.options_of(name)) for name in config.task}
        for task in tasks.values():
            stack.enter_context(closing(task))
        problems = {
            name: task.problems(config.split, config.problems, config.seed) for name, task in tasks.items()
        }

        def load() -> LoadedModel:
            if not loaded:
                loaded.append(_load(config, model))
                _check_template(loaded[0].tokenizer, model, tasks)
            return loaded[0]

        answered = {}
        for name, task in tasks.items():
            file = None if config.output is None else config.output / f"{name.replace(':', '.')}-{side}.jsonl"
            with _progress(f"{model} on {name}", len(problems[name])) as done:
                answered[name] = collect_answers(config, load, task, name, problems[name], file, done)
    loaded.clear()
    gc.collect()  # the next model may need the room
    return answered


def _check_template(tokenizer: PreTrainedTokenizerBase, model: str, tasks: Mapping[str, Task]) -> None:
    """Refuse tasks the model cannot be asked before it is asked any."""
    chats = [name for name, task in tasks.items() if task.chat]
    if chats and tokenizer.chat_template is None:
        raise ConfigError(
            f"{' and '.join(chats)} ask in conversations, but {model!r} has no chat template. Use an "
            "instruction-tuned model, put a chat_template into its tokenizer, or leave these tasks out."
        )


def _load(config: EvalConfig, model: str) -> LoadedModel:
    from tether.llm.models import load_model_and_tokenizer

    accelerated = config.device == "auto" and torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if accelerated else None
    return LoadedModel(*load_model_and_tokenizer(model, dtype=config.dtype, device=device or "cpu"))


@contextmanager
def _claimed(folder: Path, config: EvalConfig) -> Iterator[None]:
    """A folder to begin a measurement in, or to go on with the same one, into which nobody else writes."""
    file = folder / CONFIG_FILE
    if not file.exists():
        check_empty(folder, "measurement")
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder):
        old = load_json(file.read_bytes()) if file.exists() else None
        settings = load_json(dump_json(config.settings()))
        prints = {side: model_fingerprint(model) for side, model in config.models.items()}
        if old is not None:
            known = old.pop(_FINGERPRINTS, {})  # earlier versions wrote down none
            _refuse_other_settings(folder, old, settings)
            prints = _same_models(folder, config, known, prints)
        atomic_write_json(file, {**settings, _FINGERPRINTS: prints})
        yield


def _refuse_other_settings(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    # A measurement older than a setting did then what the default does now.
    old = load_json(dump_json(EvalConfig().settings())) | old
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if changed:
        listed = "; ".join(f"{name}: {old.get(name)!r} then, {new.get(name)!r} now" for name in changed)
        raise CheckpointError(
            f"{folder} holds another measurement ({listed}). Use the same settings to go on with it, or "
            "another output folder."
        )


def _same_models(
    folder: Path, config: EvalConfig, old: Mapping[str, str | None], new: Mapping[str, str | None]
) -> dict[str, str | None]:
    """The fingerprint of each side as it was first known."""
    for side, model in config.models.items():
        if new[side] is not None and old.get(side) not in (None, new[side]):
            raise CheckpointError(
                f"{folder} holds answers of another {side}: the files of {model} have changed since. Choose "
                "another output folder."
            )
    return {side: old.get(side) or found for side, found in new.items()}


def _result(config: EvalConfig, name: str, rows: dict[str, list[Row]]) -> TaskResult:
    return TaskResult(
        task=name,
        rows=rows,
        summaries={side: summarise_problems(answered, config.ks) for side, answered in rows.items()},
        difference=difference(rows["model"], rows["baseline"], config.ks) if "baseline" in rows else None,
    )


def _write_results(config: EvalConfig, results: Sequence[TaskResult], folder: Path) -> None:
    content = {
        result.task: {
            **{side: _plain(asdict(summary)) for side, summary in result.summaries.items()},
            **({} if result.difference is None else {"difference": _plain(asdict(result.difference))}),
        }
        for result in results
    }
    atomic_write_json(folder / RESULTS_FILE, content)
    write_page(folder / PAGE_FILE, config, results)


def _plain(values: Any) -> Any:
    """JSON has text keys only."""
    if isinstance(values, dict):
        return {str(key): _plain(value) for key, value in values.items()}
    return values


@contextmanager
def _progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; in a log file, a line now and then."""
    from tether.experiments import TrainingProgress

    with TrainingProgress(total, label) as progress:
        yield lambda count: progress.update(count)
