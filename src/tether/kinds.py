"""The kinds of run this package trains, for whatever reads runs of any kind."""

from __future__ import annotations

from tether.episodic.run_kind import EPISODIC_RUNS
from tether.experiments.run_kind import RunKind
from tether.llm.run_kind import LLM_RUNS

KINDS: dict[str, RunKind] = {kind.name: kind for kind in (LLM_RUNS, EPISODIC_RUNS)}
"""By name, as `tether.experiments.write_report` takes them."""
