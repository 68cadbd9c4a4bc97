"""What the page of an evaluation says, on answers made up for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tether.llm.eval_config import EvalConfig
from tether.llm.evaluation_page import outcome, write_page
from tether.llm.measures import TaskResult, difference, summarise_problems


def row(right: int, samples: int = 4, greedy: bool | None = None) -> dict[str, Any]:
    def response(correct: bool) -> dict[str, Any]:
        more = {"text": "x", "parts": {}, "truncated": False, "length": 1}
        return {"correct": correct, "reward": float(correct), **more}

    return {
        "prompt": "p", "reference": "r", "greedy": None if greedy is None else response(greedy),
        "samples": [response(n < right) for n in range(samples)],
    }  # fmt: skip


def measured(model: list[dict[str, Any]], baseline: list[dict[str, Any]] | None = None) -> TaskResult:
    rows = {"model": model} | ({} if baseline is None else {"baseline": baseline})
    return TaskResult(
        task="chained",
        rows=rows,
        summaries={
            side: summarise_problems(answered, (1, 2, 4) if answered[0]["samples"] else ())
            for side, answered in rows.items()
        },
        difference=None if baseline is None else difference(model, baseline, (1, 2, 4)),
    )


@pytest.mark.parametrize(
    ("model", "baseline", "words"),
    [
        (4, 1, "mine does better than theirs: 100.0 % against 25.0 % of the sampled responses are right, "
               "+75.0 points."),
        (1, 3, "mine does worse than theirs: 25.0 % against 75.0 % of the sampled responses are right, "
               "-50.0 points."),
        (2, 2, "mine and theirs are not told apart: 50.0 % against 50.0 % of the sampled responses are "
               "right, +0.0 points."),
    ],
)  # fmt: skip
def test_the_outcome_says_who_is_ahead_and_by_how_much(model: int, baseline: int, words: str) -> None:
    config = EvalConfig(model="mine", baseline="theirs", samples=4)
    assert outcome(config, measured([row(model)] * 20, [row(baseline)] * 20)) == words


def test_the_outcome_claims_nothing_where_the_interval_holds_zero() -> None:
    """One problem better, one worse by more: the sign of the mean is not believed."""
    config = EvalConfig(model="mine", baseline="theirs", samples=4)
    said = outcome(config, measured([row(4), row(1), row(2)] * 2, [row(3), row(4), row(2)] * 2))
    assert "not told apart" in said
    assert "-16.7 points (" in said


@pytest.mark.parametrize(("problems", "told"), [(1, False), (5, False), (6, True)])
def test_few_problems_name_no_winner(problems: int, told: bool) -> None:
    """Also where all of them go one way and the interval has no width."""
    config = EvalConfig(model="mine", baseline="theirs", samples=4)
    said = outcome(config, measured([row(4)] * problems, [row(0)] * problems))
    assert ("mine does better" in said) is told
    told_nothing = "cannot be told from so few problems on which they differ: 100.0 % against 0.0 %"
    assert (told_nothing in said) is not told


@pytest.mark.parametrize(("differing", "told"), [(4, False), (5, False), (6, True)])
@pytest.mark.parametrize("samples", [0, 4])
def test_few_problems_among_many_alike_name_no_winner(samples: int, differing: int, told: bool) -> None:
    """The bootstrap's interval excludes zero from four on; flipping signs never reaches 5 % before six."""

    def answered(right: bool) -> dict[str, Any]:
        return row(samples if right else 0, samples, None if samples else right)

    ahead = [answered(True)] * differing + [answered(False)] * (200 - differing)
    result = measured(ahead, [answered(False)] * 200)
    gap = result.difference and (result.difference.success or result.difference.greedy)
    assert gap
    assert gap.low > 0
    said = outcome(EvalConfig(model="mine", baseline="theirs", samples=samples), result)
    assert ("mine does better" in said) is told
    assert ("cannot be told from so few problems on which they differ" in said) is not told


def test_one_problem_is_no_certainty() -> None:
    config = EvalConfig(model="mine", samples=4)
    result = measured([row(2)])
    assert outcome(config, result) == "50.0 % (5.5-94.5) of the sampled responses are right."
    every = measured([row(4), row(4)]).summaries["model"]
    assert every.pass_at[2].high - every.pass_at[2].low > 0.5


def test_the_outcome_of_one_model_is_its_share_right() -> None:
    config = EvalConfig(model="mine", samples=0)
    said = outcome(config, measured([row(0, 0, True)] * 3 + [row(0, 0, False)]))
    assert re.fullmatch(r"75\.0 % \(30\.1-95\.4\) of the problems are right greedily\.", said)


def test_the_choices_say_how_many_problems_they_leave(tmp_path: Path) -> None:
    config = EvalConfig(model="mine", baseline="theirs", samples=4, page_problems=3, greedy=False)
    result = measured([row(4), row(4), row(0), row(4)], [row(1), row(2), row(0), row(1)])
    text = write_page(tmp_path / "page.html", config, [result]).read_text()
    choices = re.findall(r'id="only-(\w+)"( disabled)?> ([^<]+)<', text)
    assert choices == [
        ("better", "", "better than the baseline (2)"),
        ("worse", " disabled", "worse (0)"),
        ("same", "", "the same (1)"),
    ]


def test_settings_stand_as_one_writes_them(tmp_path: Path) -> None:
    config = EvalConfig(model="mine", task=("chained",), task_options={"terms": 3}, samples=4)
    text = write_page(tmp_path / "page.html", config, [measured([row(1, greedy=True)])]).read_text()
    cells = dict(re.findall(r"<tr><td>(\w+)</td><td>([^<]*)</td></tr>", text))
    assert cells["task"] == "chained"
    assert cells["task_options"] == "terms: 3"
    assert cells["greedy"] == "yes"
    assert cells["max_response_tokens"] == cells["baseline"] == "-"
