from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tether.errors import CheckpointError, InvalidInputError
from tether.experiments.files import (
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_text,
    dump_json,
    last_measurement,
    load_json,
    read_json_lines,
)


def strict_json(text: str) -> object:
    """Parse as the JSON standard has it: Python's reader is told to refuse NaN and Infinity."""

    def refuse(word: str) -> object:
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_floats_that_are_not_finite_stay_valid_json_and_come_back() -> None:
    value = {"a": [math.nan, 1.5, -math.inf], "b": {"c": math.inf}}
    text = dump_json(value)
    strict_json(text)
    back = load_json(text)
    assert math.isnan(back["a"][0])
    assert back["a"][1:] == [1.5, -math.inf]
    assert back["b"] == {"c": math.inf}


def test_a_text_that_spells_nan_stays_a_text() -> None:
    assert load_json(dump_json({"text": "NaN", "other": "Infinity"})) == {"text": "NaN", "other": "Infinity"}


def test_any_text_survives_even_half_a_surrogate_pair() -> None:
    text = 'line\nend "quoted" \ud83d half, \u2028 separator, \x00 null, 漢字'
    assert load_json(dump_json({"text": text}).encode("utf-8")) == {"text": text}
    assert "\n" not in dump_json({"text": text})


def test_numpy_and_torch_scalars_are_numbers() -> None:
    value = {"a": np.float32(0.5), "b": torch.tensor(2), "c": np.bool_(True), "d": Path("x")}
    assert strict_json(dump_json(value)) == {"a": 0.5, "b": 2, "c": True, "d": "x"}


@pytest.mark.parametrize("value", [torch.zeros(3), {1: 2}, object(), {1, 2}])
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(InvalidInputError, match="JSON"):
        dump_json(value)


def test_a_failed_write_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = atomic_write_text(tmp_path / "config.json", "old")

    def no_rename(source: str, to: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", no_rename)
    with pytest.raises(OSError, match="disk full"):
        atomic_write_text(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["config.json"]


def test_the_new_content_is_on_disk_before_it_takes_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("fsync"), fsync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("replace"), replace(a, b))[1])
    atomic_write_bytes(tmp_path / "deep" / "file", b"data")
    assert events[:2] == ["fsync", "replace"]
    assert (tmp_path / "deep" / "file").read_bytes() == b"data"


def test_json_files_are_written_for_people_too(tmp_path: Path) -> None:
    assert atomic_write_json(tmp_path / "a.json", {"b": 1}).read_text() == '{\n  "b": 1\n}\n'


def test_a_line_cut_while_being_written_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    whole = '{"step": 1}\n{"step": 2, "x": 1.0}\n'
    for cut in range(len(whole) + 1):
        file.write_text(whole[:cut])
        assert [record["step"] for record in read_json_lines(file)] == [1, 2][: whole[:cut].count("\n")]


@pytest.mark.parametrize("length", [1, 2**15, 2**16, 2**18])
def test_the_last_measurement_is_the_last_whole_line_however_long(tmp_path: Path, length: int) -> None:
    file = tmp_path / "metrics.jsonl"
    assert last_measurement(file) is None
    file.write_text('{"step": 1')
    assert last_measurement(file) is None
    lines = [dump_json({"step": step, "text": str(step) * length}) for step in (1, 2, 3)]
    file.write_text("\n".join(lines))
    assert last_measurement(file) == {"step": 2, "text": "2" * length}
    for damaged in ("[1]", '{"step": "x"}', "{"):
        file.write_text(f"{lines[0]}\n{damaged}\n")
        with pytest.raises(CheckpointError, match=r"[Ll]ast line of .*metrics\.jsonl"):
            last_measurement(file)


@pytest.mark.parametrize("damaged", ['{"step": 1\n', "[1]\n", "\n", '{"x": {"$float": "many"}}\n'])
def test_a_damaged_line_is_named_by_file_and_number(tmp_path: Path, damaged: str) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text('{"step": 0}\n' + damaged + '{"step": 2}\n')
    with pytest.raises(CheckpointError, match=r"[Ll]ine 2 of .*lines\.jsonl"):
        read_json_lines(file)
