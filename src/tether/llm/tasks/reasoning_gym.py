"""Any task of reasoning-gym, by name: generated puzzles with a scorer each."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import logging
import re
import sys
from collections.abc import Sequence
from typing import Any

from tether.errors import ConfigError, DataError, MissingDependencyError
from tether.llm.tasks.generated import DEFAULT_SIZES
from tether.llm.tasks.protocol import Problem, Split, Verdict, check_request, split_of

_log = logging.getLogger(__name__)

INSTRUCTION = "Put your final answer between <answer> and </answer>."

_TAG = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)
_LONGEST_ANSWER = 4096
_PATIENCE = 2000
_CORRECT = 1.0

# Calls that run text as Python. Seven scorers of reasoning-gym 0.1 apply them to the answer itself.
_EVALUATES = re.compile(
    r"(?<![\w.])(?:eval|exec)\(|\bsympify\(|\bimport parse_expr\b|\b(?:sp|sympy)\.parse_expr\("
)
_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|([A-Za-z_]\w*)|(\*\*|[-+*/^(),]))", re.ASCII)
_MATH_NAMES = frozenset(
    [
        *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "pi", "Abs"),
    ]
)
_LONGEST_EXPRESSION = 500
_LARGEST_EXPONENT = 99
_LONGEST_NUMBER = 30
# Exponents: 12, (3/2), (-1), x, (2*x). Anything larger could keep a processor busy for ever.
_EXPONENT = re.compile(
    r"\s*(?:(\d{1,4})(?!\d)|\(\s*-?\s*(\d{1,4})(?:\s*/\s*\d{1,4})?\s*\)"
    r"|[A-Za-z](?!\w)|\(\s*-?\s*(?:\d{1,2}\s*\*\s*)?[A-Za-z]\s*\))",
    re.ASCII,
)
_TOWER = re.compile(r"(?:\*\*|\^)\s*(?:[\w.]+|\([^()]*\))\s*(?:\*\*|\^)")
_CHUNK = 2000  # some data sets plan all their problems when they are made


class ReasoningGymTask:
    """Give a model problems of one reasoning-gym data set and score what it puts between answer tags.

    Problems are generated. Which split one belongs to is decided by a hash of its question, so none is
    in two. Some of reasoning-gym's scorers run an answer as Python code; an answer given to those must be
    a plain value or a formula, anything else scores 0 unseen.

    Args:
        dataset: The data set's name in reasoning-gym, such as ``"chain_sum"``.
        instruction: Appended to every question.
        require_tag: Whether an answer counts between tags alone. False takes a response without tags as
            a whole.
        partial_credit: Whether the reward is reasoning-gym's score, which may lie between 0 and 1. False
            rewards full scores alone.
        max_response_tokens: A response length that suits the data set.
        **options: The data set's own settings, such as ``min_terms=2``.

    Raises:
        ConfigError: An unknown data set, or settings it refuses.
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
        self.dataset = dataset
        self.instruction = instruction
        self.require_tag = require_tag
        self.partial_credit = partial_credit
        self.max_response_tokens = max_response_tokens
        self.options = options
        self._checked = _evaluates_answers(type(self._generator(0)).__module__)

    def problems(self, split: Split, limit: int | None = None, seed: int = 0) -> Sequence[Problem]:
        """Generate distinct problems of a split; the same arguments always give the same list.

        Args:
            split: ``"train"``, ``"validation"`` or ``"test"``.
            limit: How many; by default 8192 for training and 512 for each of the others.
            seed: Which ones.

        Raises:
            InvalidInputError: An unknown split, or `limit` below 1.
            DataError: The data set has fewer distinct problems than asked for.
        """
        check_request(split, limit)
        wanted = DEFAULT_SIZES[split] if limit is None else limit
        found: dict[str, Problem] = {}
        misses = index = 0
        while len(found) < wanted:
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
            if misses > _PATIENCE:
                raise DataError(
                    f"{self.dataset} gave only {len(found)} distinct problems for its {split} split, but "
                    f"{wanted} were asked for. Lower the limit, or choose settings with more variety."
                )
        return list(found.values())

    def verify(self, response: str, problem_answer: str) -> Verdict:
        """Reward a full score of reasoning-gym's own scorer with 1, or with `partial_credit` its score.

        Parts: ``"tagged"`` is 1 when the response has answer tags, ``"score"`` is the scorer's, and
        ``"refused"`` is 1 when an answer was too long or unsafe to be scored.

        Raises:
            DataError: `problem_answer` is none of this task's.
        """
        tagged = _TAG.findall(response)
        parts = {"tagged": float(bool(tagged)), "score": 0.0, "refused": 0.0}
        answer = tagged[-1] if tagged else ("" if self.require_tag else response.strip())
        seed, index = _place(problem_answer)
        if not answer:
            return Verdict(0.0, False, parts)
        if len(answer) > _LONGEST_ANSWER or (self._checked and not is_plain(answer)):
            parts["refused"] = 1.0
            return Verdict(0.0, False, parts)
        parts["score"] = self._score(answer, seed, index)
        correct = parts["score"] >= _CORRECT
        return Verdict(parts["score"] if self.partial_credit else float(correct), correct, parts)

    def _score(self, answer: str, seed: int, index: int) -> float:
        generator = self._generator(seed)
        try:
            score = float(generator.score_answer(answer, _entry(generator, index)))
        except Exception as error:  # noqa: BLE001 - scorers raise anything at all on answers they do not expect
            _log.debug("%s could not score %r: %s", self.dataset, answer[:80], error)
            return 0.0
        return min(max(score, 0.0), 1.0)

    def _problem(self, entry: dict[str, Any], seed: int, index: int) -> Problem:
        question = entry["question"].strip()
        content = f"{question}\n\n{self.instruction}" if self.instruction else question
        answer = str(entry["answer"])
        place = json.dumps({"answer": answer, "seed": seed, "index": index}, ensure_ascii=False)
        solution = {} if entry["answer"] is None else {"solution": f"<answer>{answer}</answer>"}
        return Problem([{"role": "user", "content": content}], place, solution)

    def _generator(self, seed: int) -> Any:
        return _generator(self.dataset, seed, tuple(sorted(self.options.items())))


@functools.lru_cache(maxsize=16)
def _generator(dataset: str, seed: int, options: tuple[tuple[str, Any], ...]) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise MissingDependencyError("This task needs reasoning-gym. Install tether-rl[llm].") from error
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        raise ConfigError(
            f"reasoning-gym has no data set {dataset!r}. It has: {', '.join(sorted(DATASETS))}."
        )
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=_CHUNK, **dict(options))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"reasoning-gym refuses the settings of {dataset!r}: {error}. Correct them."
        ) from error


@functools.lru_cache(maxsize=4096)
def _entry(generator: Any, index: int) -> dict[str, Any]:
    """One problem; scoring needs it again."""
    return dict(generator[index])


def _chunk_seed(seed: int, chunk: int) -> int:
    """Seeds of a data set's parts; problem i of a part is made from seed + i, so they must lie apart."""
    return (seed * 1000 + chunk) * _CHUNK % 2**31


@functools.cache
def _evaluates_answers(module: str) -> bool:
    """Whether the module that scores answers runs text as code anywhere.

    >>> import reasoning_gym.games.countdown
    >>> _evaluates_answers("reasoning_gym.games.countdown")
    True
    """
    return bool(_EVALUATES.search(inspect.getsource(sys.modules[module])))


def is_plain(answer: str) -> bool:
    """Whether an answer is a plain value, words or a formula, so that running it as Python does no harm.

    >>> is_plain("[[1, 0], [0, 1]]"), is_plain("(25 - 3) * x**2 + sin(x)")
    (True, True)
    >>> is_plain("__import__('os').system('id')"), is_plain("9**9**9"), is_plain("x.real")
    (False, False, False)
    """
    try:
        ast.literal_eval(answer)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        words = re.fullmatch(r"[\w\s]*", answer, re.ASCII) is not None  # a name alone does nothing
        return words or (len(answer) <= _LONGEST_EXPRESSION and _is_formula(answer))
    return True


def _is_formula(text: str) -> bool:
    """Numbers, operators, single letters and known functions; no tower of powers, no large exponent."""
    text = text.strip()
    position = nested = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return False
        digits, name, operator = match.groups()
        rest = text[match.end() :]
        if digits is not None and len(digits) > _LONGEST_NUMBER:
            return False
        if name is not None and name not in _MATH_NAMES and (len(name) > 1 or rest.lstrip().startswith("(")):
            return False
        if operator in ("**", "^"):
            exponent = _EXPONENT.match(rest)
            if exponent is None or int(exponent[1] or exponent[2] or 0) > _LARGEST_EXPONENT:
                return False
            nested += text[:position].rstrip().endswith(")")
        position = match.end()
    return bool(text) and nested <= 2 and not _TOWER.search(text)


def _place(problem_answer: str) -> tuple[int, int]:
    try:
        place = json.loads(problem_answer)
        return int(place["seed"]), int(place["index"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"The answer {problem_answer[:60]!r} does not say which problem it belongs to. Take it from a "
            "problem of the reasoning_gym task."
        ) from error
