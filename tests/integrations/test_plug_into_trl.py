"""examples/plug_into_trl.py does what it says, with the model it is given."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tiny_language_model import make_tiny_model, make_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "plug_into_trl.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("plug_into_trl", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_trains_the_model_it_is_given_and_prints_each_step(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    example.main([str(tmp_path), "--steps", "5", "--learning-rate", "0.01"])
    printed = capsys.readouterr().out
    table = [line.split() for line in printed.split("projected\n")[1].splitlines()]
    assert [int(row[0]) for row in table] == [1, 2, 3, 4, 5]
    # Four updates a batch of rollouts: the reward comes with the first, the divergence with the others.
    assert [len(row) for row in table] == [4, 3, 3, 3, 4]
    divergences = [float(row[-2]) for row in table]
    assert divergences[0] == divergences[4] == 0.0
    assert min(divergences[1:4]) > 0
    assert float(table[1][-1].rstrip("%")) > 1


def test_reward_counts_right_digits(example: Any) -> None:
    given = ["1024", "1029", "24", " 1024 ", "10244", ""]
    rewards = example.share_of_right_digits(given, answer=["1024"] * 6)
    assert rewards == [1.0, 0.75, 0.0, 1.0, 0.8, 0.0]


def test_problems_are_additions_with_their_answers(example: Any) -> None:
    for problem in example.make_problems(50):
        first, second = problem["prompt"].rstrip("=").split("+")
        assert int(first) + int(second) == int(problem["answer"])
