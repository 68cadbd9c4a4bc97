"""A method and an estimator in Python, in YAML and on the command line: one thing, spelt three ways."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tether.cli import _parse, main, read_grid
from tether.errors import ConfigError
from tether.experiments.settings_file import write_settings
from tether.llm.config import TrainConfig
from tether.llm.estimators import ESTIMATORS, find_estimator
from tether.llm.methods import TROLL, Clip, LossMethod, find_method, method_names
from tether.settings import TROLLSettings


def typed(*arguments: str) -> TrainConfig:
    return _parse(TrainConfig, "tether llm train", list(arguments))


def best_of_group(rewards: torch.Tensor, group_ids: torch.Tensor, *, share: float = 0.5) -> torch.Tensor:
    return rewards - share * torch.stack([rewards[group_ids == group].max() for group in group_ids])


OWN = f"{__name__}:best_of_group"


def test_the_three_spellings_are_one(tmp_path: Path) -> None:
    python = TrainConfig(method=TROLL(kl_bound=0.1), estimator=find_estimator("ppo")(gae_lambda=0.9))
    by_name = {"method": {"name": "troll", "kl_bound": 0.1}, "estimator": {"name": "ppo", "gae_lambda": 0.9}}
    file = tmp_path / "run.yaml"
    file.write_text("method: {name: troll, kl_bound: 0.1}\nestimator: {name: ppo, gae-lambda: 0.9}\n")
    line = ("--method.kl-bound", "0.1", "--estimator", "ppo", "--estimator.gae_lambda=0.9")
    assert python == TrainConfig(**by_name) == typed("--config", str(file)) == typed(*line)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*method_names(), *ESTIMATORS, OWN])
def test_what_is_written_down_for_a_run_is_read_back(name: str, tmp_path: Path) -> None:
    setting = "estimator" if name in {*ESTIMATORS, OWN} - {"gspo"} else "method"
    config = TrainConfig(**{setting: name})  # type: ignore[arg-type]
    assert typed("--config", str(write_settings(tmp_path / "run.yaml", config))) == config


def test_trolls_options_are_declared_where_trolls_settings_are() -> None:
    assert issubclass(TROLL, TROLLSettings)
    assert vars(TROLLSettings()).items() <= TROLL().options().items()


def test_a_name_typed_besides_a_file_takes_the_files_options_with_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("method: {name: troll, kl_bound: 0.1, alpha: 2}\nsteps: 8\n")
    assert typed("--config", str(file), "--method", "clip").method == Clip()
    assert typed("--config", str(file), "--method", "troll").method == TROLL(0.1, 2)
    assert typed("--config", str(file), "--method", "clip").steps == 8


def test_a_value_of_another_type_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        typed("--method", "dppo", "--method.divergence", "kl")
    assert "top-k-kl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--trust-region", "dppo"), "--trust-region is --method now."),
        (("train", "--kl-bound=0.1"), "--kl-bound is --method.kl-bound now."),
        (("train", "--value_clip", "inf"), "--value_clip is --estimator.clip-range now."),
        (("train", "--loss-options", "cap", "3"), "--loss-options is --method.<option> now."),
        (("compare", "--trust-regions", "clip"), "--trust-regions is --methods now."),
        (("compare", "--train.gae-lambda", "1"), "--train.gae-lambda is --train.estimator.gae-lambda now."),
        (("train", "--method", "trpo"), "Unknown method 'trpo'"),
        (("train", "--method"), "--method needs a name after it"),
    ],
)
def test_an_option_of_before_says_what_it_is_called_now(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        main(("llm", *arguments))
    assert ending.value.code == 1
    assert message in capsys.readouterr().err


def test_so_does_a_key_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("trust_regions: [troll]\ntrain: {kl_bound: 0.1}\n")
    with pytest.raises(ConfigError, match="--trust-regions is --methods now"):
        read_grid(file)


def test_widths_of_the_clip_follow_the_ratio() -> None:
    sequences = find_estimator("gspo")().spec.trl
    assert Clip().widths({}) == (0.2, 0.2)
    assert Clip().widths(dict(sequences)) == (3e-4, 4e-4)
    assert Clip(clip_low=0.1).widths(dict(sequences)) == (0.1, 4e-4)
    assert find_method("none")().widths({}) == (math.inf, math.inf)  # type: ignore[attr-defined]


def test_a_losss_options_are_checked_by_the_loss() -> None:
    with pytest.raises(ConfigError, match="tau_pos must be greater than 0"):
        find_method("sapo")(tau_pos=0.0)
    with pytest.raises(ConfigError, match="got 'wide'"):
        find_method("sapo")(tau_pos="wide")


def test_an_estimators_options_are_checked_by_the_estimator() -> None:
    with pytest.raises(ConfigError, match=r"reinforce_plus_plus refuses its options: gamma .* got 1\.5"):
        find_estimator("reinforce_plus_plus")(gamma=1.5)
    assert find_estimator("reinforce_plus_plus")(gamma=0.9).changed() == {"gamma": 0.9}


@pytest.mark.parametrize("name", sorted(set(method_names()) - {"troll", "clip", "none"}))
def test_every_option_of_every_loss_is_explained(name: str) -> None:
    assert issubclass(find_method(name), LossMethod)
    for option in find_method(name).__dataclass_fields__.values():
        help_texts = getattr(option.type, "__metadata__", [None])
        assert help_texts[0] is None or help_texts[0].documentation, f"{name}.{option.name}"


def test_an_estimator_from_outside_has_options_too() -> None:
    config = typed("--estimator", OWN, "--estimator.share", "1")
    assert config.settings()["estimator"] == {"name": OWN, "share": 1.0}
    estimator: Any = config.estimator.for_trainer()
    assert estimator.compute(torch.tensor([1.0, 3.0]), torch.ones(2, 2), 2).tolist() == [-2.0, 0.0]
    assert not config.estimator.compares_all


def test_which_estimators_compare_responses_of_different_problems() -> None:
    assert {name for name in ESTIMATORS if find_estimator(name)().compares_all} == {
        "ppo", "reinforce_plus_plus",
    }  # fmt: skip
