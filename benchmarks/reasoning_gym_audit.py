"""Which data sets of reasoning-gym pay for wrong answers.

    python -m benchmarks.reasoning_gym_audit        (make audit-reasoning-gym)

For some problems of every data set, at its default settings, its own answer is scored as the task does it,
and so are wrong answers of many kinds (see benchmarks/reasoning_gym_answers.py). Everything runs in
`tether.llm.tasks.judge.Judge`. A data set is refused

- if it cannot be built,
- if its own answer does not score 1, or
- if a wrong answer scores 1;

and rewards of its partial credit are refused if an answer made without the right one scores 0.5 or more.
The right answer in another form, such as with words around it, may score anything; what scores 1 is noted.

Writes benchmarks/results/reasoning_gym/audit.json and README.md, and what the task reads:
src/tether/llm/tasks/reasoning_gym_audit.json. With names of data sets it prints those and writes nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from benchmarks import reasoning_gym_answers as answers
from tether.llm.tasks import reasoning_gym_scores
from tether.llm.tasks.judge import Judge

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "reasoning_gym"
PACKAGED = HERE.parent / "src" / "tether" / "llm" / "tasks" / "reasoning_gym_audit.json"
SEED = 7
PROBLEMS = 20
SECONDS = 2.0
BATCH_SECONDS = 120.0
CEILING = 0.5
SHOWN = 60
NEAR = "near: "

PAGE = """# Which data sets of reasoning-gym pay for wrong answers

    make audit-reasoning-gym

{summary}

Of each problem the data set's own answer and some forty wrong ones are scored, as the task scores them:
after its own checks (docs/tasks.md), in a process that is stopped after 2 s. "Made blindly" are answers
made without the right one: constants, NaN, empty lists, the question, a formula from it, another problem's
answer, very long texts. "near" are right answers spoiled: a number changed, negated, words or characters
reversed, half of it, a letter more or less, one guess among several. A data set is refused if its own
answer does not score 1 or a wrong one does. Of the others, partial credit is refused where a blind answer
scores {ceiling} or more; elsewhere "best wrong answer" says what a near miss is paid. Some data sets give no
answer of their own, so that only wrong ones were tried.

Left out, because they may happen to be right:

{left_out}

`audit.json` has the rows with the answers, which forms of the right answer score 1 as well ("accepted") and
which hostile answers were stopped ("stopped").

{table}
"""

Row = dict[str, Any]
Scored = tuple[float, str, str, str]
"""Score, kind, answer and reference."""


class Scorer:
    """Scores answers to one data set's problems, in processes that are stopped."""

    def __init__(self, dataset: str) -> None:
        file = reasoning_gym_scores.__file__
        self._single = Judge(f"{file}:scorer", seconds=SECONDS, setup=[dataset, "{}"])
        batch = f"{HERE / 'reasoning_gym_batch.py'}:scorer"
        self._batch = Judge(batch, seconds=BATCH_SECONDS, setup=[file, dataset, "{}"])

    def alone(self, problem: str, given: Iterable[str]) -> list[float | str]:
        """Each answer's score in a call of its own, as the task has it; or why there is none."""
        outcomes = self._single.ask_many([(problem, answer) for answer in given])
        return [outcome.failure or float(outcome.value or 0.0) for outcome in outcomes]

    def together(self, problem: str, given: list[str]) -> list[float]:
        """The answers' scores; one by one if one of them stops the batch. Without a score it is 0."""
        (outcome,) = self._batch.ask_many([(problem, given)])
        if outcome.failure is None:
            found: list[float] = outcome.value
            return found
        return [_number(found) for found in self.alone(problem, given)]


def _number(found: float | str) -> float:
    return found if isinstance(found, float) else 0.0


def audit(dataset: str) -> Row:
    """Score everything for one data set; its row of the results."""
    try:
        generator = reasoning_gym.create_dataset(dataset, seed=SEED, size=PROBLEMS)
        entries = [dict(generator[index]) for index in range(PROBLEMS)]
    except Exception as error:  # noqa: BLE001 - whatever keeps it from being built is the finding
        return {"verdict": f"it cannot be built at its default settings ({error})"}
    scorer = Scorer(dataset)
    own: dict[str, float] = {}
    wrong: list[Scored] = []
    accepted: set[str] = set()
    for entry in entries:
        problem = reasoning_gym_scores.as_text(entry)
        reference = None if entry["answer"] is None else str(entry["answer"])
        wrong += _score_wrong(scorer, dataset, problem, entry, _others(entries, reference))
        if reference is not None:
            (own[reference],) = (_number(found) for found in scorer.alone(problem, [reference]))
            spelled = list(answers.forms(reference))
            scores = scorer.together(problem, [text for _, text in spelled])
            accepted |= {kind for (kind, _), score in zip(spelled, scores, strict=True) if score == 1}
    outcomes = scorer.alone(reasoning_gym_scores.as_text(entries[0]), [text for _, text in answers.HOSTILE])
    stopped = [
        kind
        for (kind, _), found in zip(answers.HOSTILE, outcomes, strict=True)
        if found in ("timeout", "crash")
    ]
    return _row(own, wrong, accepted, stopped)


def _others(entries: list[dict[str, Any]], reference: str | None) -> list[str]:
    """The other problems' answers that are not the reference, each once."""
    found = dict.fromkeys(str(entry["answer"]) for entry in entries if entry["answer"] is not None)
    return [answer for answer in found if reference is None or not answers.same(answer, reference)]


def _score_wrong(
    scorer: Scorer, dataset: str, problem: str, entry: dict[str, Any], others: list[str]
) -> list[Scored]:
    reference = None if entry["answer"] is None else str(entry["answer"])
    given = list(answers.wrong(dataset, entry["question"], reference, others))
    scores = scorer.together(problem, [text for _, _, text in given])
    return [
        (score, kind if blind else f"{NEAR}{kind}", text, reference or "")
        for (blind, kind, text), score in zip(given, scores, strict=True)
    ]


def _row(own: dict[str, float], wrong: list[Scored], accepted: set[str], stopped: list[str]) -> Row:
    wrong = sorted(wrong, key=lambda found: found[1].startswith(NEAR))  # show a blind one where there is
    worst = max(wrong, key=lambda found: found[0])
    blind = max((found for found in wrong if not found[1].startswith(NEAR)), key=lambda found: found[0])
    row: Row = {"own": min(own.values(), default=None), "wrong": _shown(worst), "blind": _shown(blind)}
    row |= {"answers": len(wrong), "accepted": sorted(accepted), "stopped": stopped, "verdict": "ok"}
    failed = [text for text, score in own.items() if score != 1]
    if failed:
        row["verdict"] = f"its own answer scores {own[failed[0]]:.3g} ({failed[0][:SHOWN]!r})"
    score, kind, text, reference = worst
    if score == 1:
        right = f" where {reference[:SHOWN]!r} is right" if reference else ""
        row["verdict"] = f"a wrong answer scores 1 ({kind}: {text[:SHOWN]!r}{right})"
    return row


def _shown(scored: Scored) -> list[Any]:
    score, kind, text, reference = scored
    rounded = score if score == 1 else min(round(score, 3), 0.999)  # only a full score may look like one
    return [rounded, kind, text[:SHOWN], reference[:SHOWN]]


def refused(rows: dict[str, Row]) -> dict[str, str]:
    """The data sets to refuse, and why."""
    return {name: row["verdict"] for name, row in rows.items() if row["verdict"] != "ok"}


def no_partial_credit(rows: dict[str, Row]) -> dict[str, str]:
    """The other data sets whose partial credit pays answers made without the right one."""
    return {
        name: f"an answer made without the right one scores {row['blind'][0]:g} ({row['blind'][1]})"
        for name, row in rows.items()
        if row["verdict"] == "ok" and row["blind"][0] >= CEILING
    }


def table(rows: dict[str, Row]) -> str:
    """The results as a table in Markdown."""
    lines = [
        "| data set | own | best wrong answer | made blindly | partial credit | verdict |",
        "|---|---|---|---|---|---|",
    ]
    without = no_partial_credit(rows)
    for name, row in rows.items():
        if "wrong" not in row:
            lines.append(f"| {name} | | | | | refused: {row['verdict']} |")
            continue
        own = "none given" if row["own"] is None else f"{row['own']:g}"
        wrong, guess = (f"{row[part][0]:g}: {row[part][1]}" for part in ("wrong", "blind"))
        ok = row["verdict"] == "ok"
        credit = "" if not ok else "no" if name in without else "yes"
        verdict = "ok" if ok else "**refused**: " + row["verdict"]
        lines.append(f"| {name} | {own} | {wrong} | {guess} | {credit} | {_cell(verdict)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _summary(rows: dict[str, Row]) -> str:
    scored = sum(row.get("answers", 0) for row in rows.values())
    return (
        f"reasoning-gym {importlib.metadata.version('reasoning-gym')}: {len(rows)} data sets, {PROBLEMS} "
        f"problems of each (seed {SEED}), {scored:,} wrong answers. Refused: {len(refused(rows))}. Partial "
        f"credit refused for {len(no_partial_credit(rows))} more."
    )


def _left_out() -> str:
    exceptions = answers.MAY_BE_RIGHT.items()
    return "\n".join(f"- {name}: {', '.join(kinds)} ({reason})" for name, (kinds, reason) in exceptions)


def write(rows: dict[str, Row]) -> None:
    """The raw results, the page with the table, and what the task reads."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    version = importlib.metadata.version("reasoning-gym")
    lines = ",\n".join(
        f'"{name}": {json.dumps(row, ensure_ascii=False, sort_keys=True)}' for name, row in rows.items()
    )
    about = json.dumps({"version": version, "seed": SEED, "problems": PROBLEMS})
    (RESULTS / "audit.json").write_text(f'{about[:-1]}, "data_sets": {{\n{lines}\n}}}}\n', encoding="utf-8")
    packaged = {
        "version": version,
        "refused": refused(rows),
        "no_partial_credit": no_partial_credit(rows),
    }
    text = json.dumps(packaged, indent=2, ensure_ascii=False, sort_keys=True)
    PACKAGED.write_text(text + "\n", encoding="utf-8")
    (RESULTS / "README.md").write_text(
        PAGE.format(summary=_summary(rows), table=table(rows), left_out=_left_out(), ceiling=CEILING),
        encoding="utf-8",
    )


def main() -> None:
    """Audit the named data sets, or all and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="data sets to look at; all by default")
    names = parser.parse_args().names
    rows = {}
    for name in names or sorted(DATASETS):
        rows[name] = audit(name)
        print(name, json.dumps(rows[name], ensure_ascii=False), flush=True)
    print(_summary(rows))
    if not names:
        write(rows)


if __name__ == "__main__":
    main()
