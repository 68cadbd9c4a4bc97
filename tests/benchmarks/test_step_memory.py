"""Peak memory of a step: every contestant trains on the same tokens, and the table says what was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rounding import SUMMED_ANOTHER_WAY, unit_of
from scripts import load_script
from tether.llm.models import embedded_model_path

step_memory = load_script("benchmarks/step_memory.py")


def test_responses_are_the_same_for_every_contestant() -> None:
    first, again = (step_memory.drawn_responses(99, 5)(["a"] * 4, None) for _ in range(2))
    assert first == again
    assert [len(ids) for ids in first["completion_ids"]] == [5] * 4
    assert 0 < min(map(min, first["completion_ids"])) <= max(map(max, first["completion_ids"])) < 99


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("trl")
    found = step_memory.measure(embedded_model_path(), step_memory.TRL, 32, str(folder))
    losses: list[float] = found["losses"]
    return losses


@pytest.mark.parametrize("contestant", [name for name in step_memory.CONTESTANTS if name != step_memory.TRL])
def test_every_contestant_makes_trls_first_update(contestant: str, trl: list[float], tmp_path: Path) -> None:
    """None compares another objective: before any update the regions of all of them do nothing."""
    if contestant == step_memory.LIGER:
        pytest.importorskip("liger_kernel")
    found = step_memory.measure(embedded_model_path(), contestant, 32, str(tmp_path))
    first, second = found["losses"]
    assert first == pytest.approx(trl[0], rel=1e-4)
    assert second != first


def test_a_drawn_model_has_its_shape_and_trains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    monkeypatch.setitem(step_memory.DRAWN, "small", step_memory.DRAWN["qwen3-0.6b"] | small)
    model = step_memory.drawn_model("small", tmp_path)
    found = step_memory.measure(model, "clip, Tether", 32, str(tmp_path / "run"))
    trls = step_memory.measure(model, step_memory.TRL, 32, str(tmp_path / "trl"))
    assert json.loads((model / "config.json").read_text()).items() >= small.items()
    unit = unit_of(found["losses"][0], terms=32)
    assert found["losses"][0] == pytest.approx(trls["losses"][0], rel=0, abs=SUMMED_ANOTHER_WAY * unit)


def test_a_process_of_its_own_says_what_it_took() -> None:
    found = step_memory.run(embedded_model_path(), "TROLL, exact", 32, limit=8)
    assert 1e6 < found["peak_bytes"] < 1e9


def test_a_process_that_takes_too_much_is_stopped_and_listed(tmp_path: Path) -> None:
    found = step_memory.run(embedded_model_path(), "TROLL, exact", 32, limit=0.05)
    assert found["stopped_at_bytes"] > 0.05e9
    kept = [{"contestant": "TRL's GRPOTrainer", "tokens": 32, "peak_bytes": 4_000_000}, found]
    kept.append({"contestant": "TROLL, exact", "tokens": 64, "peak_bytes": 1_000_000})
    table = step_memory.table(json.loads(json.dumps(kept)))
    assert "| TRL's GRPOTrainer | 4 MB (x 1.00) | not run |" in table
    assert "| TROLL, exact | stopped: the process took over " in table
    assert table.endswith("| 1 MB |")
