"""How long robot runs came along: tables of docs/episodic_results.md, a column for each evaluation asked for.

    python benchmarks/robot_progress.py box-pushing-dense-long --steps 3 10.6 50 --rows success exploring
    python benchmarks/robot_progress.py table-tennis-long --iterations 300 600 1200
    python benchmarks/robot_progress.py "metaworld-long-*-v3" --run bbrl-seed0 --steps 5 10 --per-run
    python benchmarks/robot_progress.py --page    # every such table of the page, its words in a comment above

Runs are grids of benchmarks/results/robots/long.csv, or else of off-policy.csv beside it. One seed of each is
read, or with --per-run several.
What training measured is a mean over the whole interval between two evaluations.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from tether.episodic.curves import markdown_table
from tether.experiments import StudyTable
from tether.experiments.run_data import RunData
from tether.kinds import KINDS

_RESULTS = Path(__file__).parent / "results" / "robots"
TABLES = (_RESULTS / "long.csv", _RESULTS / "off-policy.csv")
PAGE = Path(__file__).parent.parent / "docs" / "episodic_results.md"
ON_PAGE = re.compile(r"(<!-- robot_progress (?P<words>.+) -->\n\n)(?:\|.*\n)+")
_MILLION = 1e6


def of_sixteen(value: float) -> str:
    return f"{100 * value:.0f} %"


def share(value: float) -> str:
    return f"{100 * value:.{int(value < 0.1)}f} %"


def amount(value: float) -> str:
    return f"{value:.{0 if abs(value) >= 10 else 2}f}"


def length(metres: float) -> str:
    return f"{100 * metres:.0f} cm" if metres < 1 else f"{metres:.1f} m"


#: Name of a row -> where it is from, the metric, its text and how it is written.
ROWS: Mapping[str, tuple[str, str, str, Callable[[float], str]]] = {
    "hits": ("evals", "hit_ball_greedy", "the mean motion hits the ball, of 16 episodes", of_sixteen),
    "returned": ("evals", "returned_greedy", "it comes down on the other half", of_sixteen),
    "success": ("evals", "success_greedy", "success of the mean motion, of 16 episodes", of_sixteen),
    "exploring-hits": ("metrics", "hit_ball", "hits while exploring", share),
    "exploring-returned": ("metrics", "returned", "returned while exploring", share),
    "exploring": ("metrics", "success", "success while exploring", share),
    "exploring-return": ("metrics", "return_mean", "return while exploring", amount),
    "return": ("evals", "return_greedy", "return of the mean motion", amount),
    "distance": ("evals", "goal_distance_greedy", "distance from the target at the end, mean motion", length),
    "turn": ("evals", "goal_angle_greedy", "turn from the target's", "{:.2f} rad".format),
    "landing": ("evals", "landing_error_greedy", "ball from the target, mean motion", length),
    "jerk": ("evals", "jerk_greedy", "jerk of the mean motion", "{:.0f}".format),
    "entropy": ("metrics", "entropy", "entropy (nats)", "{:.0f}".format),
}


def progress(
    runs: Sequence[RunData], of: str, columns: Sequence[float], names: Sequence[str]
) -> list[dict[str, str]]:
    """A row for each name and run that measured it; of several runs each row says which.

    Args:
        runs: with evaluations.
        of: "iteration" or "steps", in millions: what the columns are.
        columns: where; the evaluation nearest to it is shown.
        names: of `ROWS`.
    """
    heads = [_head(of, column) for column in columns]
    evaluated = [[nearest(run, of, column) for column in columns] for run in runs]
    found = []
    for source, metric, text, write in (ROWS[name] for name in names):
        for run, steps in zip(runs, evaluated, strict=True):
            measured = {row["step"]: row.get(metric) for row in getattr(run, source)}
            whole = [_of_a_whole_interval(run, step) for step in steps] if source == "metrics" else steps
            values = [measured[step] for step in whole]
            if None not in values:
                label = f"{text}, {_variant(run)}" if len(runs) > 1 else text
                found.append({of: label, **dict(zip(heads, map(write, values), strict=True))})
    return found


def per_run(runs: Sequence[Sequence[RunData]], of: str, columns: Sequence[float]) -> list[dict[str, str]]:
    """A row for the seeds of each run: success of the mean motion on the way, and what it came to.

    Args:
        runs: seeds of one algorithm each, with evaluations.
        of: "iteration" or "steps", in millions: what the columns are.
        columns: where, in order; all that is no success at the last step is of the last of them.
    """
    found = []
    for seeds in runs:
        ends = [_evaluations_to(run, of, columns[-1]) for run in seeds]
        shares = {
            _head(of, column): [_evaluations_to(run, of, column)[-1]["success_greedy"] for run in seeds]
            for column in columns
        }
        found.append({
            "task": _task(seeds[0]),
            **{head: _listed(map(of_sixteen, values)) for head, values in shares.items()},
            "at any step": _listed(of_sixteen(rows[-1]["success_any_greedy"]) for rows in ends),
            "always 100 % from": _listed(_solved_from(rows, of) for rows in ends),
            "return": _listed(f"{rows[-1]['return_greedy']:.0f}" for rows in ends),
            "jerk": _listed(f"{rows[-1]['jerk_greedy']:.0f}" for rows in ends),
            "minutes": _listed(
                f"{_seconds(run, rows[-1]['step']) / 60:.0f}" for run, rows in zip(seeds, ends, strict=True)
            ),
        })  # fmt: skip
    return found


def _evaluations_to(run: RunData, of: str, column: float) -> Sequence[Mapping[str, Any]]:
    """A run's evaluations up to the one nearest to an iteration or to millions of environment steps."""
    last = nearest(run, of, column)
    return [row for row in run.evals if row["step"] <= last]


def _solved_from(rows: Sequence[Mapping[str, Any]], of: str) -> str:
    """Since when every evaluation's motions have all succeeded, to the last of these rows."""
    failed = [index for index, row in enumerate(rows) if row["success_greedy"] < 1]
    if not failed:
        return "the start"
    if failed[-1] == len(rows) - 1:
        return "not"
    row = rows[failed[-1] + 1]
    return _head(of, row["step"] if of == "iteration" else row["env_steps"] / _MILLION)


def _seconds(run: RunData, step: int) -> float:
    """What training had taken by an iteration."""
    (row,) = (row for row in run.metrics if row["step"] == step)
    return float(row["time_s"])


def _listed(values: Iterable[str]) -> str:
    """The values of several seeds in a cell, as one where they are the same."""
    every = list(values)
    return every[0] if len(set(every)) == 1 else ", ".join(every)


def _task(run: RunData) -> str:
    """The environment without its suite and version, the algorithm, what was changed of its settings."""
    settings = run.config.settings
    name = settings["env_id"].removeprefix("tether/").removeprefix("MetaWorld-").rpartition("-v")[0]
    changed = run.config.label.partition(", ")[2]
    return ", ".join(filter(None, [name, settings["algo"].upper(), changed]))


def nearest(run: RunData, of: str, column: float) -> int:
    """The iteration of the evaluation nearest to an iteration or to millions of environment steps.

    Raises:
        SystemExit: where there is none within the interval between two.
    """
    name, wanted = ("step", column) if of == "iteration" else ("env_steps", column * _MILLION)
    found, last = min(run.evals, key=lambda row: abs(row[name] - wanted)), run.evals[-1]
    interval = run.config.settings["evaluate_every"] * last[name] / last["step"]
    if abs(found[name] - wanted) > interval:
        raise SystemExit(
            f"{run.path} has no evaluation near {_head(of, column)}; its last is of iteration "
            f"{last['step']:,} after {last['env_steps']:,} steps."
        )
    return int(found["step"])


def _variant(run: RunData) -> str:
    """What a label such as "tce, twice the region" says besides the algorithm."""
    return run.config.label.partition(", ")[2] or "as published"


def _of_a_whole_interval(run: RunData, step: int) -> int:
    """The last evaluation's iteration for one at the end, before which there were too few for a mean."""
    every = int(run.config.settings["evaluate_every"])
    return step // every * every if step > every else step


def _head(of: str, column: float) -> str:
    return f"{column:,.0f}" if of == "iteration" else f"{column:.3g}M"


def table(options: argparse.Namespace) -> str:
    """The table that was asked for."""
    runs = [seeds for pattern in options.grids for seeds in chosen(pattern, options.run)]
    of, columns = ("iteration", options.iterations) if options.iterations else ("steps", options.steps)
    if options.per_run:
        return markdown_table(per_run(runs, of, columns))
    return markdown_table(progress([run for (run,) in runs], of, columns, options.rows))


@cache
def measured() -> dict[tuple[str, str], RunData]:
    """Every run by the names of its grid and its own; the long one, where both tables have it."""
    every = [run for table in reversed(TABLES) for run in StudyTable(table, KINDS).select()]
    return {(run.path.parent.name, run.path.name): run for run in every}


def chosen(pattern: str, names: Sequence[str]) -> list[list[RunData]]:
    """The runs of those names in each grid that a pattern such as "metaworld-long-*" fits, by algorithm.

    Raises:
        SystemExit: no grid has them all.
    """
    runs = measured()
    grids = sorted({grid for grid, _ in runs if fnmatchcase(grid, pattern)})
    by_algo = [list(of) for _, of in groupby(names, lambda name: name.partition("-seed")[0])]
    found = [
        [runs[grid, name] for name in seeds]
        for grid in grids
        for seeds in by_algo
        if all((grid, name) in runs for name in seeds)
    ]
    if not found:
        raise SystemExit(f"{TABLES[0]} and {TABLES[1].name} have no {' and '.join(names)} of {pattern}.")
    return found


def written_anew(page: str) -> str:
    """A page with each of its tables as the runs have it now; those under a comment with their words."""
    return ON_PAGE.sub(lambda found: f"{found[1]}{table(asked(shlex.split(found['words'])))}\n", page)


def asked(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options in words, by default the command's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grids", nargs="*", metavar="grid", help="with --per-run a pattern, too")
    parser.add_argument("--run", nargs="+", default=["tce-seed0"])
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--iterations", type=int, nargs="+")
    when.add_argument("--steps", type=float, nargs="+", help="millions of environment steps")
    when.add_argument("--page", action="store_true", help="write the page's tables anew")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--per-run", action="store_true", help="a row for each grid, its seeds in a cell")
    options = parser.parse_args(words)
    if not options.page and not (options.grids and (options.iterations or options.steps)):
        parser.error("a grid is needed, and --iterations or --steps, or --page alone")
    if len(options.run) > 1 and not options.per_run:
        parser.error("several seeds go with --per-run")
    return options


def main() -> None:
    options = asked()
    if options.page:
        PAGE.write_text(written_anew(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table(options))


if __name__ == "__main__":
    main()
