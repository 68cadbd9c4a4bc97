"""One self-contained HTML page about some runs."""

from __future__ import annotations

from tether.experiments.report.page import write_report

__all__ = ["write_report"]
