"""How long robot runs came along: tables of docs/episodic_results.md, a column for each evaluation asked for.

    python benchmarks/robot_progress.py box-pushing-dense-long --steps 3 10.6 50 --rows success exploring
    python benchmarks/robot_progress.py table-tennis-long --iterations 300 600 1200
    python benchmarks/robot_progress.py --page    # every such table of the page, its words in a comment above

Runs are grids of benchmarks/results/robots/long.csv, of which one seed is read. What training measured is a
mean over the whole interval between two evaluations.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tether.episodic.curves import markdown_table
from tether.experiments import StudyTable
from tether.experiments.run_data import RunData
from tether.kinds import KINDS

TABLE = Path(__file__).parent / "results" / "robots" / "long.csv"
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
    runs = [StudyTable(TABLE, KINDS).select(grid, options.run)[0] for grid in options.grids]
    of, columns = ("iteration", options.iterations) if options.iterations else ("steps", options.steps)
    return markdown_table(progress(runs, of, columns, options.rows))


def written_anew(page: str) -> str:
    """A page with each of its tables as the runs have it now; those under a comment with their words."""
    return ON_PAGE.sub(lambda found: f"{found[1]}{table(asked(shlex.split(found['words'])))}\n", page)


def asked(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options in words, by default the command's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grids", nargs="*", metavar="grid")
    parser.add_argument("--run", default="tce-seed0")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--iterations", type=int, nargs="+")
    when.add_argument("--steps", type=float, nargs="+", help="millions of environment steps")
    when.add_argument("--page", action="store_true", help="write the page's tables anew")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    options = parser.parse_args(words)
    if not options.page and not (options.grids and (options.iterations or options.steps)):
        parser.error("a grid is needed, and --iterations or --steps, or --page alone")
    return options


def main() -> None:
    options = asked()
    if options.page:
        PAGE.write_text(written_anew(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table(options))


if __name__ == "__main__":
    main()
