"""Exported policies repeat the run: torch, ONNX, the description and the tables."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tether.cli import main
from tether.episodic import export
from tether.episodic.config import OnPolicyConfig
from tether.episodic.envs.point_reach import PointReachAdapter
from tether.episodic.evaluate import evaluation_seeds
from tether.episodic.export import export_run, inputs_of
from tether.episodic.options import ExportConfig
from tether.episodic.plans import MotionLimits
from tether.episodic.policy import PolicyConfig
from tether.episodic.sampler import EpisodeSampler
from tether.episodic.tce import TCE
from tether.episodic.train import load_learner, train
from tether.errors import CheckpointError, ConfigError, MissingDependencyError, MotionLimitError

pytest.importorskip("onnxruntime")


def trained(folder, **changes):
    settings = {
        "num_workers": 0, "episodes": 4, "iterations": 2, "evaluation_episodes": 2, "evaluate_every": 2,
    } | changes  # fmt: skip
    return train(OnPolicyConfig("tether/PointReach-v0", **settings), folder).path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("export") / "run")


@pytest.fixture(scope="module")
def exported(run):
    return export_run(
        ExportConfig(run, motions=2, limits=MotionLimits(velocity=0.5, acceleration=(2.0, 3.0)))
    )


def own_motions(run, number):
    with EpisodeSampler("tether/PointReach-v0") as sampler:
        learner = load_learner(run, sampler.spec)
        starts = sampler.reset(seeds=evaluation_seeds(number))
    return inputs_of(learner, starts), learner.act(starts, explore=False)


@pytest.mark.parametrize("number", [1, 5])
def test_the_files_need_nothing_of_tether(run, exported, number):
    """Of any number of motions; read with the libraries alone."""
    import onnxruntime

    inputs, motions = own_motions(run, number)
    program = torch.export.load(exported / "motion.pt2").module()
    _, positions, velocities = program(**inputs)
    assert positions.numpy() == pytest.approx(motions.positions, abs=1e-6)
    assert velocities.numpy() == pytest.approx(motions.velocities, abs=1e-6)
    session = onnxruntime.InferenceSession(str(exported / "motion.onnx"))
    found = session.run(["positions", "velocities"], {name: value.numpy() for name, value in inputs.items()})
    assert found[0] == pytest.approx(motions.positions, abs=1e-6)
    assert found[1] == pytest.approx(motions.velocities, abs=1e-6)


@pytest.mark.parametrize(
    ("formats", "changes"),
    [
        (("onnx",), {"precision": "float64", "policy_input": "context"}),
        (("torch",), {"policy": PolicyConfig(activation="tanh", contextual_covariance=True)}),
        (("torch",), {"precision": "float64", "policy": PolicyConfig(covariance="diagonal")}),
    ],
)
def test_every_kind_of_policy(tmp_path, formats, changes):
    run = trained(tmp_path / "run", **changes)
    folder = export_run(ExportConfig(run, output=tmp_path / "files", formats=formats))
    said = json.loads((folder / "motion.json").read_text())
    checked = said["checked"]
    assert set(checked) == set(formats)
    entries = said["inputs"]["observation"]["entries_of_the_first_observation"]
    assert entries == ([0, 1] if "policy_input" in changes else "all")
    assert max(checked.values()) <= 1e-6


def test_the_description_says_what_a_program_needs(exported):
    said = json.loads((exported / "motion.json").read_text())
    assert said["inputs"]["observation"] == {
        "shape": ["motions", 6], "entries_of_the_first_observation": "all",
    }  # fmt: skip
    assert said["inputs"]["velocity"]["units"] == ["m/s", "m/s"]
    assert said["outputs"]["positions"]["shape"] == ["motions", 50, 2]
    assert said["seconds_between_steps"] * said["steps"] == pytest.approx(said["seconds"])
    assert said["limits"]["velocity"] == [0.5, 0.5]
    assert said["limits"]["acceleration"] == [2.0, 3.0]
    assert said["limits"]["position_low"] == [None, None]  # other programs read no infinity
    assert said["iteration"] == 2


def test_the_tables_are_within_the_limits(exported):
    table = np.loadtxt(exported / "motion_1.csv", delimiter=",", skiprows=1)
    assert np.abs(table[:, 3:5]).max() <= 0.5 * (1 + 1e-4)
    assert (np.abs(table[:, 5:7]).max(axis=0) <= np.array([2.0, 3.0]) * (1 + 1e-4)).all()
    assert not (exported / "motion_2.csv").exists()


def test_limits_that_forbid_the_motion_leave_everything_as_it_was(run, tmp_path):
    refuse = ExportConfig(
        run, output=tmp_path / "x", formats=("torch",), limits=MotionLimits(velocity=1e-3),
        on_violation="refuse",
    )  # fmt: skip
    with pytest.raises(MotionLimitError, match="too fast"):
        export_run(refuse)
    assert not (tmp_path / "x").exists()
    export_run(ExportConfig(run, output=tmp_path / "x", formats=(), motions=2))
    before = {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()}
    with pytest.raises(MotionLimitError, match="too fast"):
        export_run(refuse)
    assert {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()} == before


def test_an_export_takes_the_place_of_the_one_before(run, tmp_path):
    folder = tmp_path / "x"
    export_run(ExportConfig(run, output=folder, formats=(), motions=3))
    (folder / "motion.pt2").write_text("of an earlier export")
    (folder / "notes.txt").write_text("of a person")
    export_run(ExportConfig(run, output=folder, formats=(), motions=1, limits=MotionLimits(velocity=0.4)))
    assert sorted(path.name for path in folder.iterdir()) == ["motion.json", "motion_0.csv", "notes.txt"]
    assert np.loadtxt(folder / "motion_0.csv", delimiter=",", skiprows=1)[:, 3:5].max() <= 0.4 * (1 + 1e-4)


def test_tables_are_compared_with_the_runs_own_motions(run, tmp_path, monkeypatch):
    plan = export.plan_motion

    def off(*motion, **options):
        return replace(found := plan(*motion, **options), positions=found.positions + 1e-5)

    monkeypatch.setattr(export, "plan_motion", off)
    with pytest.raises(CheckpointError, match=r"motion_0\.csv differs from the run's own motions by 1e-05"):
        export_run(ExportConfig(run, output=tmp_path / "x", formats=()))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("seen", "entries"), [("context", [1, 0, 2, 3, 4, 5]), ("observation", "all")])
def test_a_context_in_an_order_of_its_own_is_described_as_that(tmp_path, monkeypatch, seen, entries):
    monkeypatch.setattr(PointReachAdapter, "context_indices", (1, 0, 2, 3, 4, 5))
    run = trained(tmp_path / "run", policy_input=seen, iterations=1, evaluate_every=1)
    folder = export_run(ExportConfig(run, formats=()))
    said = json.loads((folder / "motion.json").read_text())["inputs"]["observation"]
    assert said == {"shape": ["motions", 6], "entries_of_the_first_observation": entries}


class SeesTheWay(TCE):
    """Sees where the goal is from the point, which is as many numbers as the context has."""

    def seen(self, starts):
        return starts.contexts - starts.positions

    @property
    def seen_size(self):
        return 2


def test_what_is_no_entry_of_the_observation_is_described_as_none(tmp_path):
    run = trained(tmp_path / "run", algo="test_export:SeesTheWay", iterations=1, evaluate_every=1)
    folder = export_run(ExportConfig(run, formats=("torch",)))
    said = json.loads((folder / "motion.json").read_text())["inputs"]["observation"]
    assert said == {"shape": ["motions", 2], "entries_of_the_first_observation": None}


def test_the_command(run, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["episodic", "export", str(run), "--output", str(tmp_path / "o"), "--formats", "torch",
              "--limits.velocity", "2.5", "--motions", "0"])  # fmt: skip
    assert ended.value.code == 0
    assert "Written and compared" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["motion.json", "motion.pt2"]
    limits = json.loads((tmp_path / "o" / "motion.json").read_text())["limits"]
    assert limits["velocity"] == [2.5, 2.5]


def test_onnx_that_is_not_installed_is_named_first(run, tmp_path, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name)
    )
    with pytest.raises(MissingDependencyError, match=r"onnxscript.*tether-rl\[export\]"):
        export_run(ExportConfig(run, output=tmp_path / "none"))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("output", ["taken", "taken/below"])
def test_an_output_that_is_a_file_is_refused_before_anything_is_computed(run, tmp_path, monkeypatch, output):
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setattr(export, "load_learner", None)
    with pytest.raises(ConfigError, match=r"must be a folder, but .*/taken is a file"):
        export_run(ExportConfig(run, output=tmp_path / output, formats=()))


def test_an_export_of_nothing_is_refused(run):
    with pytest.raises(ConfigError, match="at least one file"):
        ExportConfig(run, formats=(), motions=0)
    with pytest.raises(ConfigError, match="motions"):
        ExportConfig(run, motions=-1)
    assert math.isinf(MotionLimits().velocity)
