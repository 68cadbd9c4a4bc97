"""The committed training curves as a picture, docs/images/episodic-curves.png, and as tables.

    python benchmarks/episodic_curves.py

Both come from the tables under benchmarks/results/episodic, nothing is trained. In the picture thin lines are
seeds, or the tasks of a suite, and the thick one is their mean; the tables are Markdown. What was found is in
docs/episodic_results.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tether.episodic.curves import markdown_table, suite_panels, suite_rows, task_panels, task_rows
from tether.experiments import StudyTable
from tether.experiments.plots import save_figure, small_multiples
from tether.kinds import KINDS

RESULTS = Path(__file__).parent / "results" / "episodic"
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "episodic-curves.png"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", type=Path, default=RESULTS / "episodic.csv")
    parser.add_argument("--output", type=Path, default=PICTURE)
    options = parser.parse_args()
    runs = StudyTable(options.table, KINDS).select()
    panels = [*suite_panels(runs), *task_panels(runs)]
    save_figure(small_multiples(panels, columns=2, width=4.1, height=2.6), options.output)
    print("\n\n".join(markdown_table(rows) for rows in (suite_rows(runs), task_rows(runs)) if rows))


if __name__ == "__main__":
    main()
