"""How many rows in the published forms are judged: each with an honest solution and a wrong one."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tether.errors import DataError
from tether.llm.tasks import CodeTask
from tether.llm.tasks.code_rows import problem_of_row


def mbpp(solution: str, *asserted: str, setup: str = "", imports: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "text": "Write a function.",
        "code": solution.replace("\n", "\r\n"),
        "test_setup_code": setup,
        "test_imports": list(imports),
        "test_list": [f"assert {one}" for one in asserted],
        "challenge_test_list": [],
    }


def human_eval(stub: str, body: str, check: str, before: str = "") -> dict[str, Any]:
    return {
        "task_id": "Local/0",
        "prompt": f'{stub}\n    """Do it."""\n',
        "canonical_solution": f"    {body}\n",
        "test": f"{before}\n\nMETADATA = {{'author': 'tests'}}\n\n\ndef check(candidate):\n{check}\n",
        "entry_point": stub.rpartition("def ")[2].partition("(")[0],
    }


JUDGED = {
    "a list": mbpp(
        "def double(xs):\n    return [2 * x for x in xs]",
        "double([1, 2])==[2, 4] ",
        "double( [3],)==([6])",
        "double([])==[]",
    ),
    "a truth": mbpp("def even(n): return n % 2 == 0", "even(2) == True", "even(3) == False", "even(4)"),
    "not": mbpp("def odd(n): return n % 2 == 1", "not odd(2)", "odd(3)", "(odd(4)==False)"),
    "none": mbpp("def first(xs): return xs[0] if xs else None", "first([]) is None", "first([1]) == 1"),
    "a tuple or set": mbpp(
        "def both(a, b): return set(a) & set(b)", "both((1, 2), (2,)) == {2}", "set(both([3],[3]))=={3}"
    ),
    "sorted": mbpp(
        "def unique(xs): return list(set(xs))",
        "sorted(unique([2, 1, 2])) == [1, 2]",
        "set(unique('aa')) == {'a'}",
    ),
    "sets of tuples": mbpp(
        "def pairs(xs): return [(b, a) for a in xs for b in xs if a < b]",
        "set([tuple(sorted(p)) for p in pairs([1, 2, 3])]) == {(1, 2), (1, 3), (2, 3)}",
        "pairs([]) == []",
    ),
    "text": mbpp(
        "def shout(s): return s.upper() + '!'", "shout('a') == 'A' + '!'", 'shout("b").endswith("!")'
    ),
    "isclose": mbpp(
        "import math\ndef area(r): return math.pi * r ** 2",
        "math.isclose(area(10), 314.15926, rel_tol=0.001)",
        "math.isclose(area(1), 3.14, rel_tol=0.01)",
        imports=("import math",),
    ),
    "a function with the name of one of Python's": mbpp(
        "def sum(a, b):\n    return a + b", "sum(1, 2) == 3", "sum(0, 5) == 5"
    ),
    "round and len": mbpp(
        "def third(n): return [n / 3] * 3", "round(third(1)[0], 2) == 0.33", "len(third(2)) == 3"
    ),
    "an object as input": mbpp(
        "def depth(node): return 0 if node is None else 1 + depth(node.below)",
        "depth(root) == 2",
        "depth(None) == 0",
        setup="class Node:\n    def __init__(self, below=None):\n        self.below = below\n"
        "root = Node(Node())",
    ),
    "a lambda as input": mbpp(
        "def apply(f, x): return f(x)", "apply(lambda x: x + 1, 2) == 3", "apply(len, 'ab') == 2"
    ),
    "numpy": mbpp(
        "def halves(xs): return [x / 2 for x in xs]",
        "np.allclose(halves([1, 3]), [0.5, 1.5])",
        "halves([]) == []",
        imports=("import numpy as np",),
    ),
    "an iterator": mbpp(
        "def count(n): return iter(range(n))", "list(count(3)) == [0, 1, 2]", "sum(count(4)) == 6"
    ),
    "a counter": mbpp(
        "from collections import Counter\ndef tally(s): return Counter(s)",
        "tally('aab') == ({'a': 2, 'b': 1})",
        "tally('') == {}",
    ),
    "plain checks": human_eval(
        "from typing import List\n\n\ndef total(xs: List[int]) -> int:",
        "return sum(xs)",
        "    assert True, 'always'\n    assert candidate([1, 2]) == 3, 'sum'\n    assert candidate([]) == 0",
    ),
    "differences": human_eval(
        "def mean(xs):",
        "return sum(xs) / len(xs)",
        "    assert abs(candidate([1.0, 2.0]) - 3.0/2.0) < 1e-6\n"
        "    assert math.fabs(candidate([2]) - 2) < 1e-9",
        before="import math",
    ),
    "a loop": human_eval(
        "def power(n, k):",
        "return n ** k",
        "    for x in range(2, 8):\n        assert candidate(x, 2) == x * x\n"
        "    assert candidate(2, 10) == 1024",
    ),
    "computed values": human_eval(
        "def odd_squares(xs):",
        "return sum(x * x for x in xs if x % 2)",
        "    lst = list(range(-9, 10, 3))\n    want = sum([i**2 for i in lst if i % 2 != 0])\n"
        "    assert candidate(lst) == want, 'Error'",
    ),
    "inputs and results": human_eval(
        "def add(a, b):",
        "return a + b",
        "    inputs = [[1, 2], [3, 4]]\n    results = [3, 7]\n"
        "    for i, (inp, exp) in enumerate(zip(inputs, results)):\n        assert candidate(*inp) == exp",
    ),
    "a helper": human_eval(
        "def root(x):",
        "return x ** 0.5",
        "    assert near(candidate(4), 2)\n    assert near(candidate(2), 1.41421, tol=1e-4)",
        before="def near(a, b, tol=1e-6):\n    return abs(a - b) < tol",
    ),
    "a helper of the stub": human_eval(
        "def square(x):\n    return x * x\n\n\ndef fourth(x):",
        "return square(square(x))",
        "    assert candidate(2) == square(4)\n    assert candidate(3) == 81",
    ),
    "results compared": human_eval(
        "def rank(xs):",
        "return sorted(xs)",
        "    assert tuple(candidate([2, 1])) == tuple(rank([1, 2]))\n    assert candidate([3, 1]) == [1, 3]",
    ),
    "copied inputs": human_eval(
        "def drop(xs):",
        "return xs[1:]",
        "    assert candidate(copy.deepcopy([1, 2])) == [2]\n    assert candidate([]) == []",
        before="import copy",
    ),
    "a kept result": human_eval(
        "def split(s):",
        "return s.split()",
        "    result = candidate('a b')\n    assert isinstance(result, list)\n    assert result[0] == 'a'\n"
        "    assert len(result) == 2",
    ),
}
REFUSED = {
    "random inputs": human_eval(
        "def plus(a, b):",
        "return a + b",
        "    import random\n    for _ in range(9):\n        x = random.randint(0, 9)\n"
        "        assert candidate(x, x) == 2 * x",
    ),
    "a round trip": human_eval(
        "def encode(s):\n    return s[::-1]\n\n\ndef decode(s):",
        "return s[::-1]",
        "    for text in ['ab', 'cd']:\n        assert candidate(encode(text)) == text",
    ),
    "a round trip prepared": mbpp(
        "def decode(s): return s[::-1]",
        "decode(secret) == 'ab'",
        setup="def encode(s):\n    return s[::-1]\nsecret = encode('ab')",
    ),
    "an expected exception": human_eval(
        "def fail(x):",
        "raise ValueError",
        "    try:\n        candidate(1)\n        assert False\n    except ValueError:\n        pass",
    ),
    "a changed argument": human_eval(
        "def sort(xs):", "xs.sort()", "    xs = [2, 1]\n    candidate(xs)\n    assert xs == [1, 2]"
    ),
    "a result of no plain type": mbpp(
        "import datetime\ndef day(n): return datetime.date(2020, 1, n)",
        "day(2) == datetime.date(2020, 1, 2)",
        "day(3).year == 2020",
        imports=("import datetime",),
    ),
    "what the program must define": mbpp(
        "class Node: ...\ndef same(node): return node", "same(root) == 1", setup="root = Node(1)"
    ),
    "calls of two functions": mbpp("def f(x): return x", "f(1) == 1", "g(2) == 2"),
}


@pytest.fixture(scope="module")
def task() -> Iterator[CodeTask]:
    with CodeTask(time_limit=10.0) as shared:
        yield shared


def test_rows_that_can_be_judged_reward_their_solution_and_nothing_else(task: CodeTask) -> None:
    problems = {name: problem_of_row(name, row, "") for name, row in JUDGED.items()}
    answers = [problem.answer for problem in problems.values()]
    solved = task.verify_many([problem.metadata["solution"] for problem in problems.values()], answers)
    assert {name for name, verdict in zip(problems, solved, strict=True) if not verdict.correct} == set()
    entries = [json.loads(answer)["entry"] for answer in answers]
    idle = [f"```python\ndef {entry}(*arguments): return '?'\n```" for entry in entries]
    assert [verdict.reward for verdict in task.verify_many(idle, answers)] == [0.0] * len(JUDGED)


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_rows_that_cannot_be_judged_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"^rows.jsonl:3: "):
        problem_of_row("rows.jsonl:3", row, "")


def test_a_file_of_such_rows_reports_how_many_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [*JUDGED.values(), *REFUSED.values()]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "test.jsonl").write_text(json.dumps(mbpp("def f(x): return x", "f(1) == 1")))
    with caplog.at_level(logging.WARNING):
        task = CodeTask(tmp_path, instruction="")
        count = len(task.problems("train")) + len(task.problems("validation"))
    assert count == len(JUDGED) == 26
    assert f"Left out {len(REFUSED)} of {len(rows)} rows" in caplog.text
    with pytest.raises(DataError, match=r"train\.jsonl:27: "):
        CodeTask(tmp_path, unjudgeable="refuse").problems("train")
