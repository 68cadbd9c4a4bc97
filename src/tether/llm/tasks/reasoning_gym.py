"""Any task of reasoning-gym, by name: generated puzzles with a scorer each."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tether.errors import ConfigError, DataError, MissingDependencyError
from tether.llm.tasks.generated import DEFAULT_SIZES
from tether.llm.tasks.judge import Judge, Outcome
from tether.llm.tasks.protocol import Problem, Split, Verdict, after_thinking, check_request, split_of
from tether.llm.tasks.reasoning_gym_scores import as_text

_log = logging.getLogger(__name__)

INSTRUCTION = "Put your final answer between <answer> and </answer>."
LONGEST_ANSWER = 100_000
"""Characters an answer may have; longer ones score 0 unseen."""

_SCORER = f"{Path(__file__).with_name('reasoning_gym_scores.py')}:scorer"
_AUDIT = Path(__file__).with_name("reasoning_gym_audit.json")
_SECONDS = 2.0
_FLOOR = 0.1  # the most that scorers give to any attempt of the right form
_PATIENCE = 2000
_CHUNK = 2000  # some data sets plan all their problems when they are made


class ReasoningGymTask:
    """Give a model problems of one reasoning-gym data set and score what it puts between answer tags.

    Problems are generated. Which split one belongs to is decided by a hash of its question, so none is
    in two. What follows a response's thinking is searched for the last complete pair of answer tags; what
    it holds is scored in a process of its own, which is stopped after 2 s. Data sets whose scorer pays
    wrong answers are refused; docs/tasks.md says which and what else an answer must satisfy.

    Args:
        dataset: The data set's name in reasoning-gym, such as ``"chain_sum"``.
        instruction: Appended to every question.
        require_tag: Whether an answer counts between tags alone. False takes a response without tags as
            a whole.
        partial_credit: Whether the reward is reasoning-gym's score, which may lie between 0 and 1, where
            it is above 0.1. False rewards full scores alone.
        max_response_tokens: A response length that suits the data set.
        **options: The data set's own settings, such as ``min_terms=2``. A list may be given as its text,
            which is how a settings file or a command line hands it on: ``"['+', '-']"``.

    Raises:
        ConfigError: An unknown data set, settings it refuses, or a scorer that pays wrong answers.
        MissingDependencyError: reasoning-gym is not installed.

    Source: Stojanovski et al. 2025, arXiv 2505.24760.

    >>> task = ReasoningGymTask("chain_sum", max_terms=3)
    >>> problem = task.problems("train", limit=1)[0]
    >>> task.verify(problem.metadata["solution"], problem.answer).correct
    True
    """

    name = "reasoning_gym"
    chat = True

    def __init__(
        self,
        dataset: str = "chain_sum",
        instruction: str = INSTRUCTION,
        require_tag: bool = True,
        partial_credit: bool = False,
        max_response_tokens: int = 256,
        **options: Any,
    ) -> None:
        for fixed in ("seed", "size"):
            if fixed in options:
                raise ConfigError(
                    f"{fixed} is not the data set's to choose; problems() takes seed and limit."
                )
        _check_audited(dataset, partial_credit)
        self.dataset = dataset
        self.instruction = instruction
        self.require_tag = require_tag
        self.partial_credit = partial_credit
        self.max_response_tokens = max_response_tokens
        self.options = {name: _read(value) for name, value in options.items()}
        self._settings = _written(dataset, self.options)
        self._generator(0)
        self._judge = Judge(_SCORER, seconds=_SECONDS, setup=[dataset, self._settings])

    def problems(self, split: Split, limit: int | None = None, seed: int = 0) -> Sequence[Problem]:
        """Generate distinct problems of a split; the same arguments always give the same list.

        Args:
            split: ``"train"``, ``"validation"`` or ``"test"``.
            limit: How many at most; by default 8192 for training and 512 for each of the others. A data set
                that has fewer gives all that 2000 draws in a row add to.
            seed: Which ones.

        Raises:
            InvalidInputError: An unknown split, or `limit` below 1.
            DataError: The data set has no problem of the split.
        """
        check_request(split, limit)
        wanted = DEFAULT_SIZES[split] if limit is None else limit
        found: dict[str, Problem] = {}
        misses = index = 0
        while len(found) < wanted and misses <= _PATIENCE:
            place = _chunk_seed(seed, index // _CHUNK), index % _CHUNK
            index += 1
            try:
                entry = _entry(self._generator(place[0]), place[1])
            except IndexError:
                misses += 1
            else:
                question = entry["question"]
                is_new = question not in found and split_of(question) == split
                misses = 0 if is_new else misses + 1
                if is_new:
                    found[question] = self._problem(entry, *place)
        if not found:
            raise DataError(
                f"{self.dataset} gave no problem for its {split} split. Choose settings with more variety."
            )
        return list(found.values())

    def verify(self, response: str, problem_answer: str) -> Verdict:
        """Reward a full score of reasoning-gym's own scorer with 1, or with `partial_credit` its score.

        Parts: ``"tagged"`` is 1 when the response has answer tags, ``"score"`` is the scorer's,
        ``"refused"`` is 1 when an answer was too long or not harmless to a scorer that runs it, and
        ``"stopped"`` when scoring it was ended at the limit of time or memory.

        Raises:
            DataError: `problem_answer` is none of this task's.
        """
        return self.verify_many([response], [problem_answer])[0]

    def verify_many(self, responses: Sequence[str], problem_answers: Sequence[str]) -> list[Verdict]:
        """The verdicts `verify` would give, in order; a few answers are scored at a time."""
        places = [_place(answer) for answer in problem_answers]
        finals = [after_thinking(response) for response in responses]
        tagged = [tagged_answer(final) for final in finals]
        answers = [
            final.strip() if answer is None and not self.require_tag else answer or ""
            for final, answer in zip(finals, tagged, strict=True)
        ]
        asked = [index for index, answer in enumerate(answers) if 0 < len(answer) <= LONGEST_ANSWER]
        outcomes = self._judge.ask_many([(self._entry_text(*places[i]), answers[i]) for i in asked])
        scored = dict(zip(asked, outcomes, strict=True))
        return [
            self._verdict(answer, found is not None, scored.get(index))
            for index, (answer, found) in enumerate(zip(answers, tagged, strict=True))
        ]

    def _verdict(self, answer: str, tagged: bool, outcome: Outcome | None) -> Verdict:
        parts = {"tagged": float(tagged), "score": 0.0, "refused": 0.0, "stopped": 0.0}
        if outcome is None or (outcome.failure is None and outcome.value is None):
            parts["refused"] = float(bool(answer))
            return Verdict(0.0, False, parts)
        if outcome.failure is not None:  # scorers raise anything at all on answers they do not expect
            _log.debug("%s could not score %r: %s", self.dataset, answer[:80], outcome.reason)
            parts["stopped"] = float(outcome.failure != "raised")
            return Verdict(0.0, False, parts)
        score = parts["score"] = float(outcome.value)
        paid = score if self.partial_credit and score > _FLOOR else float(score == 1.0)
        return Verdict(paid, score == 1.0, parts)

    def _problem(self, entry: dict[str, Any], seed: int, index: int) -> Problem:
        question = entry["question"].strip()
        content = f"{question}\n\n{self.instruction}" if self.instruction else question
        answer = str(entry["answer"])
        place = json.dumps({"answer": answer, "seed": seed, "index": index}, ensure_ascii=False)
        solution = {} if entry["answer"] is None else {"solution": f"<answer>{answer}</answer>"}
        return Problem([{"role": "user", "content": content}], place, solution)

    def _generator(self, seed: int) -> Any:
        return _generator(self.dataset, seed, self._settings)

    def _entry_text(self, seed: int, index: int) -> str:
        return _entry_text(self._generator(seed), index)


def tagged_answer(response: str) -> str | None:
    """What the last complete pair of answer tags holds, without white space around it; None without one.

    >>> tagged_answer("<answer>3</answer>, no: <answer> 4 </answer> <answer>5")
    '4'
    """
    last_end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, max(last_end, 0))
    if start < 0:
        return None
    start += len("<answer>")
    return response[start : response.find("</answer>", start)].strip()


@functools.cache
def _audit() -> dict[str, Any]:
    """What ``make audit-reasoning-gym`` found: the version, and the data sets to refuse with reasons."""
    found: dict[str, Any] = json.loads(_AUDIT.read_text(encoding="utf-8"))
    return found


def _check_audited(dataset: str, partial_credit: bool) -> None:
    audit = _audit()
    reason = audit["refused"].get(dataset)
    if reason is not None:
        raise ConfigError(
            f"The data set {dataset!r} of reasoning-gym is refused: {reason}. Choose another; docs/tasks.md, "
            "reasoning-gym, says how they were examined."
        )
    reason = audit["no_partial_credit"].get(dataset)
    if partial_credit and reason is not None:
        raise ConfigError(
            f"partial_credit is refused for {dataset!r} of reasoning-gym: {reason}. Set it to False to "
            "reward full scores alone; docs/tasks.md, reasoning-gym, says how they were examined."
        )


@functools.cache
def _warn_of_other_version() -> None:
    installed = importlib.metadata.version("reasoning-gym")
    if installed != _audit()["version"]:
        _log.warning(
            "The scorers of reasoning-gym %s were examined for rewards of wrong answers, but %s is "
            "installed. Run make audit-reasoning-gym for that one.",
            _audit()["version"],
            installed,
        )


def _read(value: Any) -> Any:
    """A setting: of a text that is a list or a dictionary as Python writes it, that."""
    if not isinstance(value, str) or not value.startswith(("[", "(", "{")):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def _written(dataset: str, options: dict[str, Any]) -> str:
    """The settings as Python writes them, for the scorer's process and as a key."""
    text = repr(dict(sorted(options.items())))
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ConfigError(
            f"The settings of {dataset!r} hold something other than plain values: {text}. Give numbers, "
            "text, lists or dictionaries."
        ) from error
    return text


@functools.lru_cache(maxsize=16)
def _generator(dataset: str, seed: int, settings: str) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise MissingDependencyError("This task needs reasoning-gym. Install tether-rl[llm].") from error
    from reasoning_gym.factory import DATASETS

    _warn_of_other_version()
    if dataset not in DATASETS:
        raise ConfigError(
            f"reasoning-gym has no data set {dataset!r}. It has: {', '.join(sorted(DATASETS))}."
        )
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=_CHUNK, **ast.literal_eval(settings))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"reasoning-gym refuses the settings of {dataset!r}: {error}. Correct them."
        ) from error


@functools.lru_cache(maxsize=4096)
def _entry(generator: Any, index: int) -> dict[str, Any]:
    """One problem; scoring needs it again."""
    return dict(generator[index])


@functools.lru_cache(maxsize=4096)
def _entry_text(generator: Any, index: int) -> str:
    return as_text(_entry(generator, index))


def _chunk_seed(seed: int, chunk: int) -> int:
    """Seeds of a data set's parts; problem i of a part is made from seed + i, so they must lie apart."""
    return (seed * 1000 + chunk) * _CHUNK % 2**31


def _place(problem_answer: str) -> tuple[int, int]:
    try:
        place = json.loads(problem_answer)
        return int(place["seed"]), int(place["index"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"The answer {problem_answer[:60]!r} does not say which problem it belongs to. Take it from a "
            "problem of the reasoning_gym task."
        ) from error
