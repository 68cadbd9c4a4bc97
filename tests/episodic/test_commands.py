"""`tether episodic ...`: what presets and typed options mean, what is written, what is refused."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from point_runs import POINT, content, tether

from tether.episodic import commands
from tether.episodic.commands import film_run, summarise_evaluation
from tether.episodic.config import OnPolicyConfig
from tether.episodic.evaluate import Evaluation
from tether.episodic.options import (
    EvalConfig,
    RenderConfig,
    TrainConfig,
    defaults_for,
    train_config,
)
from tether.episodic.presets import PRESETS, preset, preset_for
from tether.episodic.sampler import EpisodeSampler
from tether.episodic.train import load_config
from tether.errors import CheckpointError, ConfigError, MissingDependencyError
from tether.experiments import RunFolder

TINY = (
    "--env", POINT, "--seed", "3", "--iterations", "4", "--episodes", "4", "--workers", "0",
    "--policy.hidden-sizes", "8", "--critic.hidden-sizes", "8", "--critic.epochs", "2",
    "--update.epochs", "2", "--update.segment-points", "5", "--motion.num-basis", "2",
    "--evaluate-every", "2", "--evaluation-episodes", "3", "--checkpoint-every", "2",
)  # fmt: skip
NO_CONTEXT = np.zeros((9, 0))
# Half a unit in the last of the six digits that a table of episodes has, relative.
SIX_DIGITS = 5e-6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "point"
    assert tether("episodic", "train", *TINY, "--output", str(path)) == 0
    return path


# What options mean.


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_typed_alone_is_the_preset(name: str) -> None:
    assert train_config(name).settings == preset(name)


@pytest.mark.parametrize("algo", ["tce", "bbrl"])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_has_a_variant_for_the_other_algorithm_on_the_same_environment(
    name: str, algo: str
) -> None:
    variant_name = preset_for(name, algo)
    assert variant_name is not None
    variant = preset(variant_name)
    assert (variant.algo, variant.env_id) == (algo, preset(name).env_id)


def test_an_environment_alone_takes_its_paper_preset() -> None:
    assert train_config(env="tether/HopperJump-v0").preset == "hopper-jump-paper"
    assert train_config(env="tether/HopperJump-v0", algo="bbrl").preset == "hopper-jump-bbrl"
    assert train_config(env=POINT).preset is None


def test_typed_options_override_the_preset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[TrainConfig] = []

    def note(config: TrainConfig) -> RunFolder:
        seen.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr(commands, "train_command", note)
    words = ("--preset", "hopper-jump-quick", "--seed", "7", "--trust-region.mean-bound", "0.25")
    assert tether("episodic", "train", *words) == 1
    expected = preset("hopper-jump-quick")
    assert isinstance(expected, OnPolicyConfig)
    expected = replace(expected, seed=7, trust_region=replace(expected.trust_region, mean_bound=0.25))
    assert seen[0].settings == expected
    # A file's preset and options, then one typed besides it.
    file = tmp_path / "settings.yaml"
    file.write_text("preset: hopper-jump-paper\niterations: 5\nepisodes: 3\n")
    assert tether("episodic", "train", "--config", str(file), "--episodes", "2") == 1
    assert seen[1].settings == replace(preset("hopper-jump-paper"), iterations=5, episodes=2)


def test_typed_options_of_the_environment_stand_beside_the_presets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[dict[str, Any]] = []

    def note(config: TrainConfig) -> RunFolder:
        seen.append(config.settings.env_options)
        raise ConfigError("enough")

    monkeypatch.setattr(commands, "train_command", note)
    file = tmp_path / "settings.yaml"
    file.write_text("preset: hopper-jump-sparse-long\nenv_options: {height_weight: 2}\n")
    memory = ("--preset", "hopper-jump-sparse-long")
    for words in (
        (*memory, "--env-options", "height_weight", "3"),
        (*memory, "--env_options", "show_memory", "False"),
        (*memory, "--env-options"),
        memory,
        ("--config", str(file)),
        ("--config", str(file), "--env-options", "show_memory", "False"),
    ):
        assert tether("episodic", "train", *words) == 1
    assert seen == [
        {"show_memory": True, "height_weight": 3},
        {"show_memory": False},
        {},
        {"show_memory": True},
        {"height_weight": 2},  # a file has them all
        {"height_weight": 2, "show_memory": False},
    ]


def test_a_branch_of_a_run_takes_other_settings_from_its_checkpoint_on(run: Path, tmp_path: Path) -> None:
    origin, branch = run / "checkpoints" / "step-000004", tmp_path / "branch"
    longer = (*TINY, "--iterations", "6", "--update.learning-rate", "1e-6", "--output", str(branch))
    assert tether("episodic", "train", *longer, "--branch-from", str(origin), "--no-film") == 0
    assert [row["step"] for row in content(branch)[0]] == [5, 6]
    assert load_config(branch).update.learning_rate == 1e-6
    assert tether("episodic", "eval", str(branch), "--episodes", "3") == 0


def test_runs_do_not_share_a_default_folder() -> None:
    folders = {
        replace(options, settings=replace(options.settings, seed=seed)).folder()
        for name in ("hopper-jump-quick", "metaworld-quick:reach-v3")
        for algo in ("tce", "bbrl")
        for options in [train_config(name, algo=algo)]
        for seed in (0, 1)
    }
    assert len(folders) == 8
    assert Path("runs/metaworld-quick-reach-v3-tce-seed1") in folders


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--preset", "hopper-jmp"), "hopper-jump-quick"),
        (("--preset", "hopper-jump-quick", "--env", POINT), "Give only one"),
        (("--algo", "ppo"), "'ppo'"),
        (("--env", POINT, "--algo", "bbrl", "--episodes", "1"), "Set episodes to 2 or more"),
        (("--env", "tether/Nothing-v0", "--iterations", "1"), "tether/HopperJump-v0"),
        (("--config", "/no/such/file.yaml"), "cannot be read"),
    ],
)
def test_wrong_names_are_one_message_that_says_what_is_known(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert tether("episodic", "train", *words, "--output", str(tmp_path / "run")) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "run").exists()


def test_nothing_typed_is_the_quick_demo() -> None:
    assert defaults_for([]) == train_config()
    assert train_config().preset == "hopper-jump-quick"


@pytest.mark.parametrize("option", ["--env", "--env-id", "--env_id"])
def test_an_environment_is_found_however_its_option_is_spelt(option: str) -> None:
    assert defaults_for([option, POINT]) == defaults_for([f"{option}={POINT}"]) == train_config(env=POINT)


def test_defaults_are_found_where_options_are_typed_with_an_equals_sign() -> None:
    assert defaults_for(["--algo=bbrl", "--preset=hopper-jump-quick"]) == train_config(
        "hopper-jump-bbrl-quick"
    )


def test_a_run_that_would_stop_before_its_first_iteration_is_refused(tmp_path: Path) -> None:
    assert tether("episodic", "train", *TINY, "--until", "0", "--output", str(tmp_path / "run")) == 2
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="until must be at least 1, got 0"):
        replace(train_config(env=POINT), until=0)


# What is written.


def test_training_leaves_numbers_a_checkpoint_and_the_exploration_picture(run: Path) -> None:
    folder = RunFolder.open(run)
    assert folder.finished
    assert [row["step"] for row in folder.metrics()] == [1, 2, 3, 4]
    assert [row["step"] for row in folder.evals()] == [0, 2, 4]
    assert [path.name for path in folder.figures()] == ["exploration.png"]
    config = load_config(run)
    assert isinstance(config, OnPolicyConfig)
    assert config.policy.hidden_sizes == (8,)


def test_a_run_without_a_film_is_told_why(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    def refuse(*_: object, **__: object) -> Path:
        raise MissingDependencyError("No OpenGL that works without a screen was found.")

    monkeypatch.setattr(commands, "render_motions", refuse)
    out = tmp_path / "run"
    assert tether("episodic", "train", *TINY, "--iterations", "1", "--output", str(out)) == 0
    assert "No film of this run: No OpenGL" in capsys.readouterr().err
    assert RunFolder.open(out).finished


def test_evaluation_shows_a_table_and_writes_what_it_shows(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "numbers.json"
    assert tether("episodic", "eval", str(run), "--episodes", "5", "--output", str(out)) == 0
    shown = capsys.readouterr().out
    numbers = json.loads(out.read_text())
    assert (numbers["env"], numbers["step"], numbers["episodes"]) == (POINT, 4, 5)
    assert "success at any step" in shown
    for policy in ("deterministic", "stochastic"):
        assert policy in shown
        assert f"{numbers[policy]['distance']['mean']:.4g}" in shown  # the environment's own number
        assert f"{numbers[policy]['return']['mean']:.4g}" in shown
    assert numbers["deterministic"]["return"] != numbers["stochastic"]["return"]
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.json"]


def test_an_evaluation_tells_what_became_of_each_episode(run: Path, tmp_path: Path) -> None:
    """In the order of `render --episode`, so that one that failed can be looked at."""
    table, out = tmp_path / "each.csv", tmp_path / "numbers.json"
    command = ("episodic", "eval", str(run), "--episodes", "5")
    assert tether(*command, "--output", str(out), "--each", str(table)) == 0
    with table.open() as file:
        rows = list(csv.DictReader(file))
    numbers = json.loads(out.read_text())
    assert [row["episode"] for row in rows] == [str(index) for index in range(5)] * 2
    for policy in ("deterministic", "stochastic"):
        mine = [row for row in rows if row["policy"] == policy]
        for name in ("success", "success_any", "distance", "return", "jerk"):
            values = np.array([float(row[name]) for row in mine])
            within = SIX_DIGITS * np.abs(values).max()
            assert abs(values.mean() - numbers[policy][name]["mean"]) <= within
    with EpisodeSampler(POINT) as sampler:
        starts = sampler.reset(seeds=commands.evaluation_seeds(5))
    told = [[float(row[f"context_{index}"]) for index in range(starts.contexts.shape[1])] for row in rows]
    np.testing.assert_allclose(told, np.tile(starts.contexts, (2, 1)), rtol=SIX_DIGITS)


def test_episodes_that_do_not_differ_give_no_interval(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One without width would pass for certainty."""
    numbers = commands.eval_command(EvalConfig(run, episodes=1))
    commands.print_evaluation(numbers)
    shown = capsys.readouterr().out
    found = numbers["deterministic"]
    assert found["return"]["mean_interval"] is None
    assert found["return"]["interquartile_mean_interval"] is None
    low, high = found["success"]["mean_interval"]  # Wilson's of a single episode
    assert high - low > 0.7
    assert f"{found['return']['mean']:.4g} to" not in shown


def test_an_evaluation_within_limits_says_what_they_cost(run: Path, tmp_path: Path) -> None:
    def evaluated(*words: str) -> dict[str, Any]:
        output, each = tmp_path / "evaluation.json", tmp_path / "each.csv"
        files = ("--output", str(output), "--each", str(each))
        assert tether("episodic", "eval", str(run), "--episodes", "6", *words, *files) == 0
        found: dict[str, Any] = json.loads(output.read_text())
        return found

    free = evaluated()
    assert "limits" not in free
    assert "slowed" not in free["deterministic"]
    wide = evaluated("--limits.velocity", "1000", "--limits.position-high", "inf", "50")
    assert wide["limits"]["velocity"] == [1000.0, 1000.0]
    assert wide["limits"]["position_high"] == [None, 50.0]
    for policy in ("deterministic", "stochastic"):
        assert wide[policy]["return"]["mean"] == pytest.approx(free[policy]["return"]["mean"], rel=1e-9)
        assert (wide[policy]["slowed"]["mean"], wide[policy]["refused"]["mean"]) == (1.0, 0.0)
    slow = evaluated("--limits.velocity", "0.05")["deterministic"]
    assert slow["slowed"]["mean"] > 2
    assert slow["return"]["mean"] != free["deterministic"]["return"]["mean"]
    refused = evaluated("--limits.velocity", "0.05", "--on-violation", "refuse")
    assert refused["on_violation"] == "refuse"
    assert refused["stochastic"]["refused"]["mean"] == 1.0
    assert refused["stochastic"]["slowed"]["known"] == 0
    assert refused["stochastic"]["jerk"]["mean"] < 1e-9 * free["stochastic"]["jerk"]["mean"]
    with (tmp_path / "each.csv").open() as file:
        assert {row["refused"] for row in csv.DictReader(file)} == {"1"}


def test_the_evaluation_of_the_current_folder_has_the_runs_name(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    assert commands.eval_command(EvalConfig(Path(), episodes=1))["run"] == run.name


def test_the_evaluation_of_a_run_repeats_its_last_one(run: Path) -> None:
    numbers = commands.eval_command(EvalConfig(run, episodes=3))
    last = RunFolder.open(run).evals()[-1]
    assert numbers["deterministic"]["return"]["mean"] == pytest.approx(last["return_greedy"], rel=1e-12)
    assert (run / "evaluation.json").is_file()


def test_aggregates_are_scipys_and_unknown_numbers_are_left_out() -> None:
    values = np.array([9.0, 1.0, 2.0, np.nan, 3.0, 100.0, 4.0, 5.0, 6.0])
    success = np.array([True, True] + [False] * 7)
    result = Evaluation(success, success, values, values, {"height": values}, NO_CONTEXT, True)
    found = summarise_evaluation(result, "height")
    known = values[~np.isnan(values)]
    assert found["height"]["known"] == 8
    assert found["height"]["interquartile_mean"] == pytest.approx(scipy.stats.trim_mean(known, 0.25))
    assert found["return"]["mean"] == pytest.approx(known.mean())
    wilson = scipy.stats.binomtest(2, 9).proportion_ci(method="wilson")
    share = summarise_evaluation(result, "success")["success"]
    assert share["mean_interval"] == pytest.approx([wilson.low, wilson.high])
    assert "interquartile_mean" not in share  # 0: the middle half of two successes in nine
    nothing = np.full(9, np.nan)
    empty = Evaluation(success, success, values, values, {"height": nothing}, NO_CONTEXT, True)
    assert summarise_evaluation(empty, "height")["height"] == {"known": 0}


def test_an_evaluation_shows_what_the_task_is_judged_by_and_no_other_success() -> None:
    """Hopper Jump has a height and no success: 0 % beside a good jump would look like a failure."""
    values = np.ones(4)
    never, once = np.zeros(4, bool), np.array([True, False, False, False])
    result = Evaluation(
        never, once, values, values, {"distance": values, "max_height": values}, NO_CONTEXT, True
    )
    assert list(summarise_evaluation(result, "max_height")) == ["max_height", "distance", "return", "jerk"]
    shares = summarise_evaluation(result, "success")
    assert list(shares) == ["success", "success_any", "distance", "max_height", "return", "jerk"]
    assert (shares["success"]["mean"], shares["success_any"]["mean"]) == (0.0, 0.25)


def test_a_number_called_like_success_is_no_share() -> None:
    never, seconds = np.zeros(2, bool), np.array([3.0, 4.0])
    result = Evaluation(never, never, seconds, seconds, {"success_seconds": seconds}, NO_CONTEXT, True)
    found = summarise_evaluation(result, "success_seconds")["success_seconds"]
    assert (found["mean"], found["mean_interval"]) == (3.5, [3.0, 4.0])


def test_what_happened_in_some_episodes_is_a_share_whatever_its_name() -> None:
    never, returned, distance = np.zeros(4, bool), np.array([1.0, 0.0, 1.0, 1.0]), np.arange(4.0)
    result = Evaluation(never, never, distance, distance, {"returned": returned}, NO_CONTEXT, True)
    found = summarise_evaluation(result, "success")
    wilson = scipy.stats.binomtest(3, 4).proportion_ci(method="wilson")
    assert found["returned"]["mean_interval"] == pytest.approx([wilson.low, wilson.high])
    assert set(found["returned"]) == {"known", "mean", "mean_interval"}
    assert "interquartile_mean" in found["return"]


def test_films_show_the_untrained_mean_motion_beside_the_trained(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}

    def note(env_id: str, motions: Any, seed: int, out: Path, **_: object) -> Path:
        seen.update(env_id=env_id, motions=motions, seed=seed)
        return out

    monkeypatch.setattr(commands, "render_motions", note)
    assert film_run(RenderConfig(run, tmp_path / "a.gif", episode=2)) == tmp_path / "a.gif"
    assert seen["env_id"] == POINT
    assert seen["seed"] == commands.evaluation_seeds(3)[2]
    assert list(seen["motions"]) == ["untrained", "trained"]
    assert not np.array_equal(seen["motions"]["untrained"][0], seen["motions"]["trained"][0])


@pytest.mark.parametrize(("headline", "shown"), [("success", {"success", "kl"}), ("max_height", {"kl"})])
def test_success_is_shown_only_where_the_task_is_judged_by_it(
    headline: str, shown: set[str], tmp_path: Path
) -> None:
    settings = {"headline": headline}
    RunFolder.create(tmp_path / "a", kind="episodic", label="tce", seed=0, settings=settings).close()
    assert set(commands.shown_numbers(tmp_path / "a", {"success": 0.0, "kl": 1.0})) == shown


# What is refused.


def test_runs_and_checkpoints_that_are_not_there_are_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("eval", "render"):
        assert tether("episodic", command, str(tmp_path / "none")) == 1
        assert "none" in capsys.readouterr().err
        assert tether("episodic", command, str(run), "--step", "3") == 1
        assert "no checkpoint of step 3; it has those of steps [2, 4]" in capsys.readouterr().err


def test_a_language_models_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "llm"
    RunFolder.create(path, kind="llm", label="troll", seed=0, settings={}).close()
    with pytest.raises(CheckpointError, match="'llm'"):
        commands.eval_command(EvalConfig(path))
    with pytest.raises(CheckpointError, match="'llm'"):
        commands.train_command(replace(train_config(env=POINT), output=path, resume=True))


def test_a_run_of_another_environment_is_neither_overwritten_nor_resumed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run)
    for words in (TINY, ("--preset", "hopper-jump-quick", "--resume", "--workers", "0")):
        assert tether("episodic", "train", *words, "--output", str(run)) == 1
        assert str(run) in capsys.readouterr().err
    assert content(run) == before


def test_where_there_is_nothing_to_resume_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("episodic", "train", *TINY, "--iterations", "1", "--resume", "--output", str(tmp_path / "new"))
    assert tether(*words) == 0
    assert "Nothing to resume in" in capsys.readouterr().err
    assert tether(*words) == 0
    assert "Nothing to resume in" not in capsys.readouterr().err


def test_an_option_is_no_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert tether("episodic", "train", "--preset", "--output", "here") == 2
    assert "Missing value for argument '--preset'" in " ".join(capsys.readouterr().err.split())


def test_an_environment_without_pictures_cannot_be_rendered(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tether("episodic", "render", str(run)) == 1
    assert "has no pictures" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["tyro", "gymnasium"])
def test_without_the_extra_the_command_names_it(package: str) -> None:
    """As an installation of something else leaves it; an import of None fails as one of nothing."""
    code = (
        f"import sys; sys.modules[{package!r}] = None; import tether.cli as c; c.main(['episodic', 'train'])"
    )
    ended = subprocess.run([sys.executable, "-c", code, "episodic", "train"], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "pip install 'tether-rl[episodic]'" in ended.stderr
    assert "Traceback" not in ended.stderr


# Crashes.


def test_a_killed_command_resumes_to_the_files_of_an_uninterrupted_one(tmp_path: Path) -> None:
    words = (*TINY, "--iterations", "50", "--no-film")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert tether("episodic", "train", *words, "--output", str(whole)) == 0
    command = [sys.executable, "-m", "tether", "episodic", "train", *words, "--output", str(killed)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not list(killed.glob("checkpoints/step-*/COMPLETE")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 2 <= len(RunFolder.open(killed).metrics()) < 50
    assert tether("episodic", "train", *words, "--output", str(killed), "--resume") == 0
    assert content(killed) == content(whole)
    pictures = [path / "figures" / "exploration.png" for path in (whole, killed)]
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
