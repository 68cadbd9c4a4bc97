"""What holds for the package as a whole."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import tether

ROOT = Path(__file__).parents[1]


def test_importing_tethers_core_loads_torch_and_nothing_heavy():
    code = (
        "import sys, tether; tether.troll, tether.project_categorical, tether.linear_log_probs;"
        "heavy = {'transformers', 'trl', 'verl', 'ray', 'datasets', 'matplotlib', 'scipy', 'gymnasium'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize(
    "settings", ["tether.llm.config", "tether.llm.compare_config", "tether.llm.eval_config"]
)
def test_options_of_language_models_are_read_without_torch(settings):
    """So that help and a mistyped option answer at once."""
    code = f"import sys, {settings}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_every_public_name_exists_and_is_documented():
    for name in tether.__all__:
        assert (getattr(tether, name).__doc__ or "").strip(), name


@pytest.mark.parametrize("name", ["TROLLConfig", "TROLLTrainer"])
def test_integrations_are_found_from_the_top(name):
    assert getattr(tether, name).__module__.startswith("tether.integrations.trl")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        tether.no_such_name  # noqa: B018


def test_every_command_of_the_workflows_is_a_target_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    workflows = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in _workflows()]
    steps = [step for flow in workflows for job in flow["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert len(commands) >= 8
    for command in commands:
        program, target, *_ = command.split()
        assert program == "make", command
        assert target in targets, command


def test_actions_of_others_are_pinned_to_a_commit():
    used = [line for path in _workflows() for line in path.read_text("utf-8").splitlines() if "uses:" in line]
    assert used
    for line in used:
        assert re.search(r"uses: \S+@[0-9a-f]{40} # v\d", line), line


def _workflows() -> list[Path]:
    return sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_on_the_package_index_the_readme_links_to_the_repository() -> None:
    """Which shows it alone: what is relative would lead nowhere."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    hook = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    (fragment,) = hook["fragments"]
    text = (ROOT / fragment["path"]).read_text(encoding="utf-8")
    assert re.search(r"\]\(docs/", text)
    for change in hook["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    targets = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert len(targets) > 30
    assert all(target.startswith(("https://", "#")) for target in targets)
    assert "https://github.com/tether-rl/tether/blob/main/docs/trl.md" in targets
