"""The picture of the modules and their imports in CONTRIBUTING.md, made from the source.

    make picture

A room is a group of modules that someone looks for by one name. An arrow says that modules of one room import
modules of another. Arrows that follow from others are left out, and so are those to errors, names and
settings, which everything may import.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import grimp
import networkx as nx

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
BEGIN, END = "<!-- made by make picture: begin -->\n", "<!-- made by make picture: end -->\n"
EVERYWHERE = (
    "tether", "tether.errors", "tether.names", "tether.settings", "tether.signatures", "tether.__main__",
)  # fmt: skip

#: Package -> its rooms: what is found there, and the modules, of which the first match counts.
ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "command line": {"commands: cli": ("cli", "kinds")},
    "llm": {
        "training a language model: train, trainers, callbacks": ("llm*",),
        "evaluation: evaluate, answers, page": ("llm.eval*", "llm.answers", "llm.measures"),
        "a grid of runs: compare, grid": ("llm.compare*", "llm.grid"),
        "models and what they write: models, generate": (
            *("llm.models", "llm.generate", "llm.process"),
        ),
        "a task: one file each": ("llm.tasks*",),
        "sandbox for model-written code": ("llm.sandbox*",),
    },
    "episodic": {
        "an algorithm: learner, algorithms, presets, tce, bbrl": (
            *("episodic.learner", "episodic.algorithms", "episodic.presets", "episodic.vetted"),
            *("episodic.on_policy", "episodic.off_policy", "episodic.motion_policy"),
            *("episodic.tce", "episodic.bbrl", "episodic.config"),
        ),
        "motion and networks: prodmp, policy, critic": (
            *("episodic.prodmp", "episodic.policy", "episodic.critic", "episodic.networks"),
            *("episodic.segment_critic", "episodic.replay"),
            *("episodic.statistics", "episodic.segments", "episodic.plans", "episodic.via_points"),
        ),
        "an environment: envs, adapters, sampler": (
            *("episodic.env*", "episodic.adapters", "episodic.controllers", "episodic.sampler"),
            *("episodic.workers", "episodic.episodes"),
        ),
        "training a motion: train, commands, export": ("episodic*",),
    },
    "integrations": {
        "TRL: trl_trainer first": (
            *("integrations.trl*", "integrations.*_head", "integrations.head_check", "integrations.packing"),
            *("integrations.sampler_check", "integrations.lag_metrics", "integrations.vllm*"),
            *("integrations.seams", "integrations.shared_prefixes", "integrations.decoding"),
        ),
        "verl": ("integrations.verl*",),
        "another engine: logits_hooks": ("integrations*",),
    },
    "experiments": {
        "reports and plots": ("experiments.report*", "experiments.plot*"),
        "what runs come to: comparison, summary": (
            "experiments.comparison", "experiments.cost", "experiments.summary",
        ),
        "run folders and tables: runs, study_table": ("experiments*",),
    },
    "losses": {
        "a loss: one file each": ("losses*",),
        "advantages": ("advantages",),
        "the network's bound: step_back": ("step_back*",),
    },
    "ops": {"LM heads without logits: linear, trust_region": ("ops*",)},
    "projection": {
        "Gaussians": ("projection.gaussian*",),
        "token distributions: START HERE, solve, categorical, sparse": ("projection*",),
    },
}  # fmt: skip


def room_of(module: str) -> tuple[str, str] | None:
    """Package and room of a module; None for what everything imports.

    Raises:
        LookupError: a module that no room holds.
    """
    if module in EVERYWHERE:
        return None
    name = module.removeprefix("tether.")
    found = [
        (len(pattern.rstrip("*")), package, room)
        for package, rooms in ROOMS.items()
        for room, patterns in rooms.items()
        for pattern in patterns
        if fnmatchcase(name, pattern)
    ]
    if not found:
        raise LookupError(f"{module} is in no room. Add it to ROOMS in {Path(__file__).name}.")
    return max(found)[1:]  # the longest pattern says most


def picture() -> str:
    """The picture as Mermaid text.

    Raises:
        LookupError: a module that no room holds, or a room without modules.
        ValueError: rooms that import each other in a circle.
    """
    imports = grimp.build_graph("tether", cache_dir=None)
    rooms = nx.DiGraph()
    for module in imports.modules:
        here = room_of(module)
        if here is None:
            continue
        rooms.add_node(here)
        if imports.find_children(module):
            continue  # a package's front door, which hands on what is in its rooms
        there = map(room_of, imports.find_modules_directly_imported_by(module))
        rooms.add_edges_from((here, other) for other in there if other not in (None, here))
    listed = [(package, room) for package, inside in ROOMS.items() for room in inside]
    empty = set(listed) - set(rooms)
    if empty:
        raise LookupError(f"No module is in {min(empty)}. Correct ROOMS in {Path(__file__).name}.")
    if not nx.is_directed_acyclic_graph(rooms):
        raise ValueError(f"Rooms import each other: {nx.find_cycle(rooms)}.")
    names = {room: f"r{number}" for number, room in enumerate(listed)}
    lines = ["```mermaid", "flowchart TD"]
    for package, inside in ROOMS.items():
        lines.append(f'  subgraph {package.replace(" ", "_")}["{package}"]')
        lines += [f'    {names[package, room]}["{room}"]' for room in inside]
        lines.append("  end")
    arrows = sorted(nx.transitive_reduction(rooms).edges, key=lambda edge: tuple(map(listed.index, edge)))
    lines += [f"  {names[start]} --> {names[end]}" for start, end in arrows]
    return "\n".join([*lines, "```", ""])


def with_picture(text: str) -> str:
    """A page with the picture between its marks brought up to date."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{picture()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_picture(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
