"""Which block of a response is its code, and that finding it takes time linear in the response."""

from __future__ import annotations

from typing import Any

import pytest
from reading_time import grows_linearly

from tether.llm.tasks.code_judge import extract_code

SIZE = 12_500


@pytest.mark.parametrize(
    ("response", "entry", "code"),
    [
        ("```python\na\n```\n```python\nb\n```", None, "b"),
        ("```python\ndef f(): 1\n```\nUse:\n```python\nf()\n```", "f", "def f(): 1"),
        ("```python\ndef f(): 1\n```\n```python\ndef f(): 2\n```\n```\nout\n```", "f", "def f(): 2"),
        ("```python\ndef f(): 1\n```\n```python\ndef f_all(): 2\n```", "f", "def f(): 1"),
        ("```\na\n```", None, "a"),
        ("```py\na\nb", None, "a\nb"),
        ("```Python3 \na\n```\n", None, "a"),
        ("Here: ```python\na\n```", None, "a"),
        ("```python\n\na\n\n\nb\n```", None, "\na\n\n\nb"),
        ("```python\n```", None, ""),
        ("```python\r\na\r\n```\r\n", None, "a\r"),
    ],
)
def test_the_last_block_that_defines_the_function_is_the_code(
    response: str, entry: str | None, code: str
) -> None:
    assert extract_code(response, entry) == (True, code)


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("<think>\n```python\nx = 1\n```\n</think>\n```python\nx = 2\n```", (True, "x = 2")),
        ("Maybe\n```python\nx = 1\n```\n</think>x = 2", (False, "x = 2")),
        ("<think>\n```python\nx = 1\n```", (False, "")),
    ],
)
def test_code_that_was_only_thought_of_does_not_count(response: str, code: tuple[bool, str]) -> None:
    assert extract_code(response) == code


@pytest.mark.parametrize(
    "response", ["no block", "", "Use `f` or ``g``.", "```x = 1``` is code", "```json\n1\n```"]
)
def test_without_a_block_of_python_the_whole_response_is_the_code(response: str) -> None:
    assert extract_code(response) == (False, response)


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("~~~python\na\n~~~", "a"),
        ("~~~\na\n```\nb\n~~~", "a\n```\nb"),
        ("````python\na\n```\nb\n````", "a\n```\nb"),
        ('```python\ndef f():\n    """\n    ```\n    f()\n    ```\n    """\n    return 1\n```\nDone', None),
        ("1. Like this:\n   ```python\n   def f():\n       return 1\n   ```", "def f():\n    return 1"),
        ("````markdown\nSo:\n```python\na\n```\n````", "a"),
        ("```markdown\n```python\na\n```\n```\nDone.", "a"),
        ("```python\na\n```\n```json\n{}\n```\nand\n```text\nb\n```", "a"),
        ("```json\n{}\n```\nthen\n```python\na\n```", "a"),
        ("```python\na\n```python\nb\n```", "b"),
        ("```bash\npip install x\n\n```python\na\n```", "a"),
        ("I write it in ```json form``` or not.\n```python\na\n```", "a"),
        ("```python\na\n``` That is all.", "a"),
    ],
)
def test_fences_nest_and_indent_as_in_markdown(response: str, code: str | None) -> None:
    expected = response.split("\n", 1)[1].rpartition("\n```")[0] if code is None else code
    assert extract_code(response) == (True, expected)


FAMILIES = {
    "spaces": lambda n: "```" + " " * n,
    "spaces in lines": lambda n: ("```" + " " * 100 + "\n") * (n // 104),
    "indented": lambda n: " " * n + "```python",
    "backquotes": lambda n: "`" * n,
    "backquotes and newlines": lambda n: "```\n" * (n // 4),
    "tildes": lambda n: "~~~\n" * (n // 4),
    "mixed fences": lambda n: "```\n~~~\n" * (n // 8),
    "newlines": lambda n: "```python" + "\n" * n,
    "openings": lambda n: "```python\n" * (n // 10),
    "openings in a line": lambda n: "```python " * (n // 10),
    "unclosed": lambda n: "```python\n" + "x" * n,
    "ever deeper": lambda n: "".join(" " * (i % 200) + "```md\n" for i in range(n // 106)),
    "ever longer": lambda n: "".join("`" * (3 + i) + "md\n" for i in range(int((2 * n) ** 0.5))),
    "definitions": lambda n: "```\n" + "def " * (n // 4),
    "definitions and spaces": lambda n: "```\n" + ("def" + " " * 50) * (n // 53),
    "tabs and returns": lambda n: "```\t\r\n" * (n // 6),
    "no line ends": lambda n: "\u2028\x0b\x0c\x1c" * (n // 4),
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_finding_the_code_takes_linear_time(family: Any) -> None:
    assert grows_linearly(lambda text: extract_code(text, "solve"), family, SIZE)
