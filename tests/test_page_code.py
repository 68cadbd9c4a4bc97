"""Every block of Python on the pages runs, in their order, or says on its first line what it needs."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pages
from tether.llm.models import embedded_model_path

#: What a page takes for granted: the reader's own data, reward, motions.
TRL_SCRIPT = """
    from datasets import Dataset
    dataset = Dataset.from_list([{"prompt": f"{number}+1="} for number in range(64)])
    def reward(completions, **columns): return [float(len(text) % 2) for text in completions]
"""
STAND_INS = {
    "docs/getting_started.md": TRL_SCRIPT,
    "docs/index.md": TRL_SCRIPT,
    "docs/episodic_envs.md": """
        import numpy as np
        desired_positions = desired_velocities = np.zeros((64, 250, 3))
        positions = velocities = better_positions = better_velocities = np.zeros((250, 3))
    """,
    "docs/performance.md": """
        import torch
        from tether import SparseLogProbs
        hidden, head = torch.randn(2, 3, 8, requires_grad=True), torch.nn.Linear(8, 20, bias=False)
        response_ids, response_mask, advantages = torch.randint(20, (2, 3)), torch.ones(2, 3), torch.ones(2)
        old = torch.randn(2, 3, 20).log_softmax(-1)
        ids = torch.stack([response_ids, (response_ids + 1) % 20], -1)
        old_support = SparseLogProbs.from_log_probs(ids, old.gather(-1, ids))
        old_log_probs = old.gather(-1, response_ids[..., None])[..., 0]
    """,
    "docs/step_back.md": TRL_SCRIPT
    + """
    import torch
    from tether import TROLLConfig, TROLLTrainer
    model, args = "Qwen/Qwen3-0.6B", TROLLConfig(output_dir="out")
    network, data = torch.nn.Linear(4, 3), []
    """,
    "docs/tasks.md": """
        from pathlib import Path
        Path("problems.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\\n' * 40)
        Path("my_checks.py").write_text("def is_right(response, answer): return response == answer")
    """,
}
PAGES = [page for page in pages.PAGES if pages.codes(page)]


@pytest.mark.parametrize("page", PAGES)
def test_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = ModuleType("the_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where its classes look for their module
    names = vars(module)
    exec(here(textwrap.dedent(STAND_INS.get(page, ""))), names)
    for code in pages.codes(page):
        if code.file:
            (tmp_path / code.file).write_text(code.text, encoding="utf-8")
        compiled = compile(here(code.text), str(code), "exec")
        if code.needs is None:
            exec(compiled, names)


def here(text: str) -> str:
    """The same with the model that ships in the place of a hub's, and without a GPU as the pages say."""
    text = text.replace("Qwen/Qwen3-0.6B", str(embedded_model_path()))
    return text.replace('output_dir="out"', 'output_dir="out", use_cpu=True')


@pytest.mark.slow
def test_the_three_lines_for_trl_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (diff,) = re.findall(r"```diff\n(.*?)```", pages.read("README.md"), re.DOTALL)
    kept = [line[1:] for line in diff.splitlines() if line[:1] in "+ "]
    dropped = [line[1:] for line in diff.splitlines() if line[:1] in "- "]
    names: dict[str, Any] = {"__name__": "README.md"}
    exec(textwrap.dedent(TRL_SCRIPT), names)
    exec(here("\n".join(dropped)), names)
    assert type(names["trainer"]).__name__ == "GRPOTrainer"
    exec(here("\n".join(kept)), names)
    trainer = names["trainer"]
    trainer.train()
    assert type(trainer).__name__ == "TROLLTrainer"
    assert [row for row in trainer.state.log_history if row.get("trust_region/kl_max", 0.0) > 0.0]
