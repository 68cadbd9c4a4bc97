"""examples/plug_into_trl.py does what it says, with the model it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_language_model import make_tiny_model, make_tokenizer

from scripts import load_script


@pytest.fixture(scope="module")
def example() -> Any:
    return load_script("examples/plug_into_trl.py")


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
