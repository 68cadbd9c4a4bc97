"""What the card of a model trained in TRL says about TROLL and Tether."""

from __future__ import annotations

import textwrap
from importlib.metadata import version
from pathlib import Path

from tether.experiments.files import atomic_write_text

#: As TRL's trainers keep it.
PAPER = {
    "title": "TROLL: Trust Regions improve Reinforcement Learning for Large Language Models",
    "id": "2510.03817",
    "citation": textwrap.dedent("""\
        @article{becker2025troll,
            title        = {{TROLL: Trust Regions improve Reinforcement Learning for Large Language Models}},
            author       = {Philipp Becker and Niklas Freymuth and Serge Thilges and Fabian Otto
                            and Gerhard Neumann},
            year         = 2025,
            eprint       = {arXiv:2510.03817},
        }"""),
}

_VERSIONS = "### Framework versions\n\n"


def name_tether(card: Path) -> None:
    """Add Tether's version to those that TRL's card lists."""
    text = card.read_text(encoding="utf-8")
    named = text.replace(_VERSIONS, f"{_VERSIONS}- Tether: {version('tether-rl')}\n", 1)
    atomic_write_text(card, named)
