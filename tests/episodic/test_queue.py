"""Studies trained in pieces, into one table and one page."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tether.episodic.commands import train_command
from tether.episodic.config import OnPolicyConfig
from tether.episodic.options import CompareConfig
from tether.episodic.queue import Study, check_table, queue_command, read_queue
from tether.episodic.train import train
from tether.errors import ConfigError
from tether.experiments import RunFolder, StudyTable
from tether.kinds import KINDS

ROBOTS = Path(__file__).parents[2] / "benchmarks" / "robots"
SMALL = "{episodes: 4, evaluation_episodes: 2, evaluate_every: 1, checkpoint_every: 1, motion.num_basis: 2}"


def test_a_study_takes_each_algorithms_own_preset_and_changes_what_it_is_told(tmp_path: Path) -> None:
    study = Study(
        "metaworld-long:reach-v3", ("tce", "bbrl"), (0, 1), 100, "mine", {"update.epochs": 7, "episodes": 3}
    )
    runs = study.runs(tmp_path)
    assert study.name == "metaworld-long-reach-v3-mine"
    assert [(run.label, run.settings.seed, run.until) for run in runs] == [
        ("tce, mine", 0, 100), ("tce, mine", 1, 100), ("bbrl, mine", 0, 100), ("bbrl, mine", 1, 100),
    ]  # fmt: skip
    assert runs[0].output == tmp_path / study.name / "tce-seed0"
    for run in runs:
        values = run.settings.as_dict()
        assert values["env_id"] == "tether/MetaWorld-reach-v3"
        assert (values["episodes"], values["update"]["epochs"]) == (3, 7)
    assert runs[2].settings.as_dict()["policy_input"] == "context"


def test_a_label_may_hold_a_slash(tmp_path: Path) -> None:
    """A folder in a folder would not be found in the table under the study's name."""
    study = Study("metaworld-quick:reach-v3", label="region 1/16")
    assert study.name == "metaworld-quick-reach-v3-region-1-16"
    (run,) = study.runs(tmp_path)
    assert run.folder() == tmp_path / study.name / "tce-seed0"
    assert run.label == "tce, region 1/16"


@pytest.mark.parametrize(("name", "algo"), [("hopper-jump-bbrl", "bbrl"), ("hopper-jump-paper", "tce")])
def test_a_study_that_names_no_algorithm_takes_its_presets_own(name: str, algo: str, tmp_path: Path) -> None:
    (run,) = Study(name).runs(tmp_path)
    assert (run.settings.algo, run.label) == (algo, algo)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preset: hopper-jump-quick", "must hold a list of studies"),
        ("- {presets: hopper-jump-quick}", "unknown key 'presets'.*preset"),
        ("- {seeds: [1]}", "names no preset"),
        ("- {preset: hopper-jump-quick}\n- {preset: hopper-jump-quick}", "hopper-jump-quick occurs twice"),
        (
            "- {preset: hopper-jump-quick}\n- {preset: hopper-jump-paper, seeds: [1]}",
            "hopper-jump-quick and hopper-jump-paper both train 'tce' on HopperJump-v0.*a label",
        ),
        ("- {preset: 5}", r"queue\.yaml: A study has preset = 5; give its name"),
        ("- {preset: hopper-jump-quick, label: 3}", "label = 3; give text"),
        ("- {preset: hopper-jump-quick, algos: [tce, 3]}", r"algos = \('tce', 3\); give names"),
        ("- {preset: hopper-jump-quick, algos: []}", r"algos = \(\); give names"),
        ("- {preset: hopper-jump-quick, seeds: [0, true]}", r"seeds = \(0, True\); give whole numbers"),
        ("- {preset: hopper-jump-quick, seeds: }", r"seeds = \(None,\); give whole numbers"),
        ("- {preset: hopper-jump-quick, seeds: [0, 1, 1]}", r"seeds = \(0, 1, 1\); give each once"),
        ("- {preset: hopper-jump-quick, algos: [tce, tce]}", r"algos = \('tce', 'tce'\); give each once"),
        ("- {preset: hopper-jump-quick, until: x}", "until = 'x'; give a whole number from 1"),
        ("- {preset: hopper-jump-quick, until: 0}", "until = 0; give a whole number from 1"),
        ("- {preset: hopper-jump-quick, settings: [a]}", r"settings = \['a'\]; give values by names"),
        ("- {preset: hopper-jump-quick, settings: {algo: bbrl}}", "have algo, which algos and seeds decide"),
        ("- {preset: hopper-jump-quick, settings: {seed: 3}}", "have seed, which algos and seeds decide"),
        ("- {preset: hopper-jump-quick, settings: {3: 1}}", r"settings = \{3: 1\}; give values by names"),
    ],
)
def test_a_queue_that_cannot_be_meant_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "queue.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_queue(tmp_path / "queue.yaml")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed.x": 1}, r"Unknown setting seed\.x: seed is 0, with nothing below it"),
        ({"critic": 3}, r"critic is 3; give settings by name, as critic\.NAME"),
        ({"critic": {3: 1}}, r"Unknown setting critic\.3\."),
        ({"episodes": "x"}, "episodes is 'x'; give a whole number"),
        ({"episodes": 2.5}, r"episodes is 2\.5; give a whole number"),
        ({"iterations": True}, "iterations is True; give a whole number"),
        ({"policy.hidden_sizes": 64}, r"policy\.hidden_sizes is 64; give a list, each a whole number"),
        ({"policy.hidden_sizes": [64, 0.5]}, r"policy\.hidden_sizes is \[64, 0\.5\]; give a list"),
        ({"update.shift_rewards": "no"}, r"update\.shift_rewards is 'no'; give true or false"),
        ({"update.learning_rate": "fast"}, r"update\.learning_rate is 'fast'; give a number"),
        ({"precision": "float16"}, "precision is 'float16'; give one of float32, float64"),
        ({"trust_region.target_entropy": "x"}, r"target_entropy is 'x'; give a number or none"),
        ({"env_options": 3}, "env_options is 3; give values by names"),
    ],
)
def test_settings_of_a_study_that_there_are_not_are_named(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        Study("hopper-jump-quick", settings=settings).runs(tmp_path)


def test_numbers_and_lists_of_a_file_become_what_the_settings_have(tmp_path: Path) -> None:
    """YAML reads 3e-4 as a text."""
    (tmp_path / "queue.yaml").write_text(
        "- {preset: hopper-jump-quick, settings: {update.learning_rate: 3e-4, policy.hidden_sizes: [8, 8],"
        " trust_region.mean_bound: 1, trust_region.target_entropy: }}"
    )
    (run,) = read_queue(tmp_path / "queue.yaml")[0].runs(tmp_path)
    assert isinstance(run.settings, OnPolicyConfig)
    assert (run.settings.update.learning_rate, run.settings.policy.hidden_sizes) == (3e-4, (8, 8))
    assert (run.settings.trust_region.mean_bound, run.settings.trust_region.target_entropy) == (1, None)


def test_two_presets_of_a_task_are_told_apart_by_a_label(tmp_path: Path) -> None:
    queue = tmp_path / "queue.yaml"
    queue.write_text("- {preset: hopper-jump-quick}\n- {preset: hopper-jump-paper, label: published}")
    assert len(read_queue(queue)) == 2
    queue.write_text(
        "- {preset: table-tennis-quick}\n"
        "- {preset: table-tennis-paper, settings: {env_options: {violations: refused}}}"
    )
    assert len(read_queue(queue)) == 2  # another task


def test_a_lone_algorithm_and_a_lone_seed_need_no_list(tmp_path: Path) -> None:
    (tmp_path / "queue.yaml").write_text("- {preset: hopper-jump-quick, algos: bbrl, seeds: 3}")
    (run,) = read_queue(tmp_path / "queue.yaml")[0].runs(tmp_path)
    assert (run.settings.algo, run.settings.seed) == ("bbrl", 3)


@pytest.mark.parametrize("path", sorted(ROBOTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_queues_of_the_repository_can_be_trained(path: Path, tmp_path: Path) -> None:
    runs = [run for study in read_queue(path) for run in study.runs(tmp_path)]
    assert len({run.output for run in runs}) == len(runs) > 10
    for run in runs:
        assert run.until is None or run.until <= run.settings.iterations


def test_a_queue_is_trained_in_pieces_and_keeps_the_longest_of_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH")))))
    queue, table = tmp_path / "queue.yaml", tmp_path / "kept" / "small.csv"
    queue.write_text(f"- {{preset: 'queue_presets:point', until: 2, settings: {SMALL}}}")
    config = CompareConfig(tmp_path / "runs", queue=queue, results=table, jobs=1)
    page = queue_command(config)
    name = "queue_presets-point"
    folder = tmp_path / "runs" / name / "tce-seed0"
    run = RunFolder.open(folder)
    assert not run.finished
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [1, 2]
    kept = StudyTable(table, KINDS).runs(name)["tce-seed0"]
    assert [row["step"] for row in kept.evals] == [0, 1, 2]
    assert "PointReach-v0" in page.read_text()

    # Each process takes seconds to start, so from here on this one trains.
    monkeypatch.setattr(
        "tether.episodic.queue.train_all", lambda runs, config: [train_command(run) for run in runs]
    )
    queue.write_text(queue.read_text().replace("until: 2", "until: 3"))
    queue_command(config)
    assert [row["step"] for row in StudyTable(table, KINDS).runs(name)["tce-seed0"].evals] == [0, 1, 2, 3]

    # On another machine runs that had come to their end are not trained again.
    elsewhere = CompareConfig(tmp_path / "elsewhere", queue=queue, results=table, jobs=1)
    assert "PointReach-v0" in queue_command(elsewhere).read_text()
    assert not (tmp_path / "elsewhere" / name).exists()

    # Others begin anew there: what was measured before stays until they are longer.
    queue.write_text(queue.read_text().replace("until: 3", "until: 4"))
    for until, steps in ((1, [0, 1, 2, 3]), (4, [0, 1, 2, 3, 4])):
        monkeypatch.setattr(
            "tether.episodic.queue.train_all",
            lambda runs, config, until=until: [train_command(replace(run, until=until)) for run in runs],
        )
        queue_command(elsewhere)
        assert [row["step"] for row in StudyTable(table, KINDS).runs(name)["tce-seed0"].evals] == steps


def test_first_seeds_of_all_studies_come_before_second_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, trained = tmp_path / "queue.yaml", []
    queue.write_text(
        "- {preset: hopper-jump-quick, algos: [tce, bbrl], seeds: [2, 1]}\n"
        "- {preset: table-tennis-quick, seeds: [0, 1]}"
    )
    monkeypatch.setattr("tether.episodic.queue.train_all", lambda runs, config: trained.extend(runs))
    with pytest.raises(ConfigError, match="No run of the queue has measured anything yet"):
        queue_command(CompareConfig(tmp_path / "runs", queue=queue))
    assert [f"{run.folder().parent.name} {run.folder().name}" for run in trained] == [
        "hopper-jump-quick tce-seed2", "hopper-jump-quick bbrl-seed2", "table-tennis-quick tce-seed0",
        "hopper-jump-quick tce-seed1", "hopper-jump-quick bbrl-seed1", "table-tennis-quick tce-seed1",
    ]  # fmt: skip


def test_a_run_killed_in_its_last_iteration_is_kept_whole_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(step: int, numbers: dict[str, float]) -> None:
        if step == 5:
            raise KeyboardInterrupt

    def train_as(report: Any) -> None:
        monkeypatch.setattr(
            "tether.episodic.queue.train_all",
            lambda runs, config: [
                train(run.settings, run.folder(), resume=True, report=report) for run in runs
            ],
        )

    queue, table = tmp_path / "queue.yaml", tmp_path / "small.csv"
    queue.write_text(f"- {{preset: 'queue_presets:point', settings: {SMALL}}}")
    config = CompareConfig(tmp_path / "runs", queue=queue, results=table)
    for report, ends in ((killed, False), (None, True)):
        train_as(report)
        with nullcontext() if ends else pytest.raises(KeyboardInterrupt):
            queue_command(config)
        (run,) = StudyTable(table, KINDS).select()
        assert (run.steps, run.evals[-1]["step"], run.finished) == (5, 5 if ends else 4, ends)


def test_runs_of_a_queue_with_other_settings_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tether.episodic.queue.train_all", lambda runs, config: [train_command(run) for run in runs]
    )
    queue, table = tmp_path / "queue.yaml", tmp_path / "small.csv"
    queue.write_text(f"- {{preset: 'queue_presets:point', until: 1, settings: {SMALL}}}")
    config = CompareConfig(tmp_path / "runs", queue=queue, results=table)
    queue_command(config)
    before = table.read_bytes()
    longer = queue.read_text().replace("until: 1", "until: 3")
    queue.write_text(longer.replace("{episodes: 4", "{episodes: 5"))
    told = "was run with other settings .episodes: 4 there, 5 here.*another"
    with pytest.raises(ConfigError, match=f"runs/queue_presets-point/tce-seed0 {told} output folder"):
        queue_command(config)
    elsewhere = replace(config, output=tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"small\.csv/queue_presets-point/tce-seed0 {told} table"):
        queue_command(elsewhere)
    assert table.read_bytes() == before
    assert not elsewhere.output.exists()


@pytest.mark.parametrize("queue", ["ablation", "long", "short"])
def test_the_kept_runs_of_the_repository_are_those_of_their_queue(queue: str) -> None:
    results = ROBOTS.parent / "results" / "robots"
    studies = read_queue(ROBOTS / f"{queue}.yaml")
    table = StudyTable(results / f"{queue}.csv", KINDS)
    assert sum(len(table.runs(study.name)) for study in studies) == len(table.select()) >= 6
    check_table(studies, table)


def test_a_table_without_a_queue_and_no_time_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="results is for the runs of a queue"):
        CompareConfig(results=tmp_path / "t.csv")
    with pytest.raises(ConfigError, match="minutes must be positive, got 0"):
        CompareConfig(minutes=0)
