"""The README's figure of staleness: which runs it draws, and that it says what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import study_figure

from tether.errors import ConfigError
from tether.experiments import RunFolder, StudyTable, load_runs
from tether.kinds import KINDS


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Two seeds of TROLL at 1 and 8 updates, of which the second has only the first; at two rates."""
    for rate in (1e-4, 3e-4):
        for seed, updates in ((0, (1, 8)), (1, (1,))):
            for count in updates:
                settings = {
                    "trust_region": "troll", "kl_bound": 0.05, "updates_per_rollout": count,
                    "learning_rate": rate,
                }  # fmt: skip
                path = tmp_path / "study" / f"{rate}-{seed}-{count}"
                with RunFolder.create(path, kind="llm", label="x", seed=seed, settings=settings) as run:
                    run.log_eval(0, success=0.4)
                    run.log_eval(1, success=count / 10 + 1000 * rate)
                    run.mark_finished()
    return tmp_path / "study"


def test_seeds_that_lack_a_point_are_left_out(study: Path) -> None:
    [runs] = study_figure.parts(load_runs([study], KINDS), [3e-4]).values()
    curves = study_figure.final_by(study_figure.UPDATES, runs)
    assert list(curves) == ["TROLL"]
    [curve] = curves["TROLL"]
    assert curve.x.tolist() == [1, 8]
    assert curve.y.tolist() == pytest.approx([0.4, 1.1])


def test_tasks_and_rates_are_drawn_apart(study: Path, tmp_path: Path) -> None:
    settings = {"trust_region": "clip", "updates_per_rollout": 8, "learning_rate": 1e-4, "task": "chained"}
    with RunFolder.create(tmp_path / "other", kind="llm", label="x", seed=0, settings=settings) as run:
        run.log_eval(1, success=0.5)
    runs = load_runs([study, tmp_path / "other"], KINDS)
    by_rate = {title: len(part) for title, part in study_figure.parts(runs, [3e-4, 1e-4]).items()}
    assert by_rate == {
        "?, learning rate 0.0003": 3,
        "?, learning rate 0.0001": 3,
        "chained, learning rate 0.0001": 1,
    }
    assert [len(part) for part in study_figure.parts(runs, None).values()] == [6, 1]
    with pytest.raises(ConfigError, match=r"No run has the learning rate 0.01; there are \[0.0001, 0.0003\]"):
        study_figure.parts(runs, [0.01])


def test_a_method_is_drawn_where_it_has_runs(study: Path, tmp_path: Path) -> None:
    settings = {"trust_region": "clip", "updates_per_rollout": 8, "learning_rate": 1e-4, "task": "chained"}
    with RunFolder.create(study / "other", kind="llm", label="x", seed=0, settings=settings) as run:
        run.log_eval(1, success=0.5)
        run.mark_finished()
    study_figure.main(
        [str(study), "--learning-rates", "1e-4", "--methods", "clip", "--output", str(tmp_path)]
    )
    assert (tmp_path / "success-by-updates.png").is_file()


def test_settings_in_which_runs_of_a_method_differ_are_named(tmp_path: Path) -> None:
    for number, (method, settings) in enumerate(
        [
            ("troll", {"kl_bound": 0.05, "kl_stop": None}),
            ("troll", {"kl_bound": 0.05, "kl_stop": 0.1}),
            ("clip", {"kl_bound": 0.05, "clip_low": 0.1}),
            ("trm", {"loss_options": {"kl_bound": 0.2}}),
        ]
    ):
        everything = {**settings, "trust_region": method, "updates_per_rollout": 8, "learning_rate": 1e-4}
        with RunFolder.create(
            tmp_path / str(number), kind="llm", label="x", seed=0, settings=everything
        ) as run:
            run.log_eval(1, success=0.5)
    drawn = study_figure.final_by(study_figure.UPDATES, load_runs([tmp_path], KINDS))
    assert sorted(drawn) == ["TROLL", "TROLL kl_stop=0.1", "clip", "trm"]


def test_the_age_of_data_is_its_lag_and_without_one_the_updates_before_the_last(tmp_path: Path) -> None:
    for lag, updates in ((0, 2), (4, 4), (64, 8)):
        settings = {"trust_region": "clip", "updates_per_rollout": updates, "lag": lag, "learning_rate": 1e-4}
        with RunFolder.create(tmp_path / str(lag), kind="llm", label="x", seed=0, settings=settings) as run:
            run.log_eval(1, success=lag / 100)
            run.mark_finished()
    [curve] = study_figure.final_by(study_figure.LAG, load_runs([tmp_path], KINDS))["clip"]
    assert curve.x.tolist() == [1, 4, 64]
    assert curve.y.tolist() == [0, 0.04, 0.64]
    study_figure.main([str(tmp_path), "--by-lag"])
    assert (tmp_path / "success-by-lag-dark.png").is_file()


def test_model_families_are_drawn_apart(tmp_path: Path) -> None:
    for model in ("embedded", "embedded-llama"):
        settings = {"trust_region": "clip", "updates_per_rollout": 8, "learning_rate": 1e-4, "model": model}
        with RunFolder.create(tmp_path / model, kind="llm", label="x", seed=0, settings=settings) as run:
            run.log_eval(1, success=0.5)
    runs = load_runs([tmp_path], KINDS)
    assert sorted(study_figure.parts(runs, [1e-4])) == [
        "first family, learning rate 0.0001", "second family, learning rate 0.0001"
    ]  # fmt: skip
    assert list(study_figure.parts(runs[:1], [1e-4])) == ["learning rate 0.0001"]


def test_pictures_are_written_for_light_and_dark(study: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    study_figure.main([str(study), "--learning-rates", "0.0001", "0.0003", "--output", str(tmp_path / "out")])
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["success-by-updates-dark.png", "success-by-updates.png"]
    assert all((tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG") for name in written)


def test_a_method_without_runs_is_named(study: Path) -> None:
    with pytest.raises(ConfigError, match="No finished runs of clip; there are TROLL"):
        study_figure.main([str(study), "--learning-rates", "3e-4", "--methods", "clip"])


def test_runs_that_differ_in_something_else_are_not_mixed(study: Path) -> None:
    with pytest.raises(
        ConfigError, match="two runs of TROLL with 1 updates on each batch of responses and seed 0"
    ):
        study_figure.main([str(study)])


def test_training_is_drawn_by_batches_of_responses(tmp_path: Path) -> None:
    for method, seed, updates in (("troll", 0, 8), ("troll", 1, 8), ("clip", 0, 8)):
        settings = {"trust_region": method, "updates_per_rollout": updates, "learning_rate": 1e-4}
        path = tmp_path / f"{method}-{seed}"
        with RunFolder.create(path, kind="llm", label="x", seed=seed, settings=settings) as run:
            for step in (8, 16):
                run.log(step, entropy=1 / step, kl_mean=0.01 * step)
                run.log_eval(step, success=step / 16)
            run.mark_finished()
    runs = load_runs([tmp_path], KINDS)
    curves = study_figure.over_training(runs, "entropy", evaluated=False)
    assert {method: len(seeds) for method, seeds in curves.items()} == {"clip": 1, "TROLL": 2}
    assert curves["TROLL"][0].x.tolist() == [1, 2]
    assert curves["TROLL"][0].y.tolist() == [1 / 8, 1 / 16]
    assert study_figure.over_training(runs, "success", evaluated=True)["clip"][0].y.tolist() == [0.5, 1.0]
    study_figure.main([str(tmp_path), "--over-training"])
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "over-training-dark.png",
        "over-training.png",
    ]
    with pytest.raises(ConfigError, match="two runs of clip with seed 0"):
        study_figure.over_training([*runs, *runs], "entropy", evaluated=False)


def test_a_grid_of_a_table_is_drawn_like_its_folder(study: Path, tmp_path: Path) -> None:
    table = StudyTable(tmp_path / "s.csv", KINDS)
    table.add("grid", load_runs([study], KINDS))
    table.add("other", load_runs([study], KINDS))
    drawn = study_figure.final_by(
        study_figure.UPDATES, study_figure.parts(load_runs([study], KINDS), [3e-4])["learning rate 0.0003"]
    )
    kept = study_figure.parts(load_runs([table.path / "grid"], KINDS), [3e-4])["learning rate 0.0003"]
    assert [curve.y.tolist() for curve in study_figure.final_by(study_figure.UPDATES, kept)["TROLL"]] == [
        curve.y.tolist() for curve in drawn["TROLL"]
    ]
    study_figure.main([str(table.path / "grid"), "--learning-rates", "3e-4"])
    assert (tmp_path / "success-by-updates.png").is_file()
