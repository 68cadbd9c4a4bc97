"""What the documentation site is made of besides the pages in this folder: a hook for MkDocs.

The methods' pages, the index of papers and the API reference are written here from one source each: the
docstrings, the table of what every method is checked against (`tests/losses/sources.py`) and the kept runs of
the studies. The build fails on a public name without a docstring; broken links fail it through MkDocs.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

#: The public modules, by the chapter of the reference they stand in.
REFERENCE: dict[str, tuple[str, ...]] = {
    "Projections": (
        "tether.projection.categorical",
        "tether.projection.sparse",
        "tether.projection.gaussian",
        "tether.projection.divergence",
        "tether.projection.certificate",
        "tether.projection.compact",
        "tether.projection.sampled",
        "tether.settings",
        "tether.projection.tokens",
    ),
    "LM heads": (
        "tether.ops.linear",
        "tether.ops.trust_region",
        "tether.ops.divergence",
        "tether.ops.hidden_states",
    ),
    "The network": ("tether.step_back",),
    "Losses": (
        "tether.losses",
        "tether.losses.base",
        "tether.losses.linear",
        "tether.losses.project",
        "tether.losses.sampler",
        "tether.losses.aggregate",
        "tether.losses.value_clip",
    ),
    "Advantages": ("tether.advantages",),
    "TRL": (
        "tether.integrations.trl",
        "tether.integrations.trl_config",
        "tether.integrations.trl_trainer",
        "tether.integrations.trl_losses",
        "tether.integrations.trl_advantages",
        "tether.integrations.trl_critic",
        "tether.integrations.trl_kl_stop",
        "tether.integrations.trl_step_back",
        "tether.integrations.trl_sampler",
        "tether.integrations.trl_lag",
        "tether.integrations.trl_async",
        "tether.integrations.trl_async_records",
        "tether.integrations.trl_folder",
        "tether.integrations.sampler_check",
        "tether.integrations.loss_options",
    ),
    "Language models": (
        "tether.llm.config",
        "tether.llm.compare_config",
        "tether.llm.train",
        "tether.llm.compare",
        "tether.llm.evaluate",
        "tether.llm.models",
        "tether.llm.tasks",
        "tether.llm.tasks.protocol",
    ),
    "Robots": (
        "tether.episodic.prodmp",
        "tether.episodic.policy",
        "tether.episodic.config",
        "tether.episodic.learner",
        "tether.episodic.algorithms",
        "tether.episodic.presets",
        "tether.episodic.options",
        "tether.episodic.train",
        "tether.episodic.sampler",
        "tether.episodic.adapters",
        "tether.episodic.environments",
    ),
    "Experiments": (
        "tether.experiments.runs",
        "tether.experiments.statistics",
        "tether.experiments.comparison",
        "tether.experiments.run_data",
        "tether.experiments.run_kind",
        "tether.experiments.study_table",
        "tether.experiments.report",
    ),
    "Errors": ("tether.errors",),
}


# ---------------------------------------------------------------------- MkDocs's events


def on_config(config: Any) -> Any:
    """Add the written pages, and any page of this folder that nobody placed, to the navigation."""
    missing = [f"{name}: {what}" for name, what in undocumented()]
    if missing:
        raise SystemExit("Public names without a docstring:\n  " + "\n  ".join(missing))
    written = {chapter: f"reference/{_slug(chapter)}.md" for chapter in REFERENCE}
    for entry in config.nav:
        if "Methods" in entry:
            entry["Methods"] += [{name: f"methods/{name}.md"} for name in method_names()]
        if "Reference" in entry:
            entry["Reference"] += [{chapter: path} for chapter, path in written.items()]
        if "Guides" in entry:
            placed = set(_pages_in(config.nav))
            entry["Guides"] += [page.name for page in sorted(guides()) if page.name not in placed]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Hand the written pages to MkDocs."""
    from mkdocs.structure.files import File

    for path, content in {**written_pages(), **written_pictures()}.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave this folder, right on a code host, become the plain path; a wrong one fails."""

    def plain(match: re.Match[str]) -> str:
        text, target = match.group(1), match.group(2).partition("#")[0]
        path = (ROOT / "docs" / Path(page.file.src_uri).parent / target).resolve()
        if not path.exists():
            raise SystemExit(f"{page.file.src_uri} links to {target}, which does not exist.")
        if path.is_relative_to(ROOT / "docs"):
            return match.group(0)  # a page of the site, which MkDocs checks
        name = path.relative_to(ROOT)
        return text if str(name) in text else f"{text} (`{name}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)]+)\)", plain, markdown)


# ---------------------------------------------------------------------- pages


def written_pages() -> dict[str, str]:
    """Every page that is written here: its path and its text."""
    pages = {f"methods/{name}.md": method_page(name) for name in method_names()}
    pages["papers.md"] = papers_page()
    pages["study_results.md"] = study_tables().results_page()
    for chapter, modules in REFERENCE.items():
        pages[f"reference/{_slug(chapter)}.md"] = "\n\n".join(
            [f"# {chapter}", *(f"::: {module}" for module in modules)]
        )
    return pages


def written_pictures() -> dict[str, str]:
    """Every picture that is drawn here: its path and its SVG."""
    curves = _beside("docs", "method_curves")
    themes = {"light": "", "dark": "-dark"}
    return {
        f"methods/{name}{suffix}.svg": curves.figure_svg(name, theme)
        for name in method_names()
        for theme, suffix in themes.items()
    }


def method_names() -> list[str]:
    """The losses, TROLL first."""
    losses = _losses()
    return sorted(losses, key=lambda name: (name != "troll", name))


def method_page(name: str) -> str:
    """One method: its rule, defaults and code, what it is checked against, what the studies say."""
    rows = [method for method in _sources().METHODS if method.function == name]
    checked = [
        f"- {method.paper}{f' ({method.variant})' if method.variant else ''}: {', '.join(_checks(method))}"
        for method in rows
    ]
    return "\n\n".join(
        [
            f"# {name}",
            _beside("docs", "method_curves").section(name),
            f"In configs: `{_in_configs(name)}`.",
            f"::: tether.losses.{name}.{name}",
            "## Checked against",
            "\n".join(checked),
            "## What we measured",
            study_tables().results_of(name),
        ]
    )


def papers_page() -> str:
    """Every paper that the code names, and where."""
    found: dict[str, set[str]] = {}
    for path in sorted((SOURCE / "tether").rglob("*.py")):
        for number in re.findall(r"arXiv (\d{4}\.\d{5})", path.read_text(encoding="utf-8")):
            found.setdefault(number, set()).add(path.relative_to(SOURCE).as_posix())
    named = dict(_paper_names())
    lines = ["# Papers", "Every paper that the code cites, and the files that do.", ""]
    lines += ["| paper | name here | cited in |", "|---|---|---|"]
    for number, files in sorted(found.items(), reverse=True):
        cited = ", ".join(f"`{file}`" for file in sorted(files))
        lines.append(f"| [{number}](https://arxiv.org/abs/{number}) | {named.get(number, '')} | {cited} |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------- what is checked


def undocumented() -> Iterator[tuple[str, str]]:
    """Public functions, classes and methods of the reference's modules without a docstring."""
    modules = [module for chapter in REFERENCE.values() for module in chapter]
    for module in [*modules, *(f"tether.losses.{name}" for name in _losses())]:
        tree = ast.parse(_file_of(module).read_text(encoding="utf-8"))
        if not ast.get_docstring(tree):
            yield module, "the module"
        yield from ((module, what) for what in _undocumented_in(tree.body, ""))


def _undocumented_in(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node) and not _inherits_its_meaning(node):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _undocumented_in(node.body, f"{prefix}{node.name}.")


def _inherits_its_meaning(node: ast.stmt) -> bool:
    """Overloads and forward passes say what they do where they are declared."""
    if not isinstance(node, ast.FunctionDef):
        return False
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    return "overload" in decorators or node.name == "forward"


def guides() -> list[Path]:
    """The pages of this folder."""
    return sorted((ROOT / "docs").glob("*.md"))


# ---------------------------------------------------------------------- inside


def study_tables() -> Any:
    """The kept runs of the studies, as tables."""
    return _beside("docs", "study_tables")


def _sources() -> Any:
    """The table of methods the tests check, which is where papers and sources are written down."""
    return _beside("tests/losses", "sources")


def _beside(folder: str, module: str) -> Any:
    """A module of a folder that is no package."""
    path = str(ROOT / folder)
    if path not in sys.path:
        sys.path.insert(0, path)
    return importlib.import_module(module)


def _losses() -> list[str]:
    from tether.losses import LOSSES

    return list(LOSSES)


def _paper_names() -> Iterator[tuple[str, str]]:
    for entry in [*_sources().METHODS, *_sources().ESTIMATORS]:
        name, _, number = entry.paper.rpartition(", ")
        if name:
            yield number, name


def _checks(method: Any) -> list[str]:
    return [method.elsewhere] if method.elsewhere else [reference.source for reference in method.references]


def _in_configs(name: str) -> str:
    also = {"troll": "troll", "ppo_clip": "ppo_clip (or clip, TRL's own)", "unclipped": "unclipped (or none)"}
    return f"method: {also.get(name, name)}"


def _pages_in(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list):
        for entry in nav:
            yield from _pages_in(entry)
    elif isinstance(nav, dict):
        for entry in nav.values():
            yield from _pages_in(entry)


def _file_of(module: str) -> Path:
    path = SOURCE / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _slug(chapter: str) -> str:
    return chapter.lower().replace(" ", "-")
