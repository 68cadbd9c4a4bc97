"""Algorithms, presets and environments by name: what is found, and what is said where nothing is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tether.episodic.algorithms import ALGORITHMS, build_learner, find_algorithm
from tether.episodic.bbrl import BBRL
from tether.episodic.config import EpisodicConfig, OnPolicyConfig
from tether.episodic.environments import make_position_controlled
from tether.episodic.off_policy import TOPERL
from tether.episodic.presets import PRESETS, choose, preset
from tether.episodic.sampler import EpisodeSampler
from tether.episodic.tce import TCE
from tether.episodic.train import train
from tether.errors import CheckpointError, ConfigError

POINT = "tether/PointReach-v0"


@dataclass(frozen=True)
class EagerConfig(OnPolicyConfig):
    """TCE with a setting of its own."""

    algo: str = "test_names:Eager"
    eagerness: float = 2.0


class Eager(TCE):
    config_type = EagerConfig


class Forgetful(TCE):
    """Keeps something that a checkpoint cannot hold."""

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "memory": self}

    def state_dict(self) -> dict[str, Any]:
        return {"weights": np.zeros(3)}


class Clashing(TCE):
    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "generator": self.policy}


def small_hopper() -> EagerConfig:
    return EagerConfig("tether/HopperJump-v0", eagerness=5.0)


NOT_A_CONFIG = {"env": POINT}


def not_a_config() -> dict[str, str]:
    return NOT_A_CONFIG


@pytest.fixture
def sampler() -> Iterator[EpisodeSampler]:
    with EpisodeSampler(POINT) as sampler:
        yield sampler


def test_every_built_in_algorithm_is_found_and_other_names_are_imported() -> None:
    assert [find_algorithm(name) for name in ALGORITHMS] == [TCE, BBRL, TOPERL]
    assert find_algorithm("test_names:Eager") is Eager
    assert preset("test_names:small_hopper") == small_hopper()


@pytest.mark.parametrize(
    ("find", "name", "message"),
    [
        (find_algorithm, "tec", r"Unknown algorithm 'tec'\. Did you mean 'tce'\? Known: bbrl, tce"),
        (find_algorithm, "test_names:Eagr", r"test_names has no 'Eagr'\. Did you mean 'Eager'\?"),
        (find_algorithm, "no_such_module:Learner", r"'no_such_module' cannot be imported.*PYTHONPATH"),
        (find_algorithm, "test_names:EagerConfig", r"a subclass of tether\.episodic\.learner\.Learner"),
        (
            preset,
            "hopper-jmp-quick",
            r"'hopper-jmp-quick'\. Did you mean 'hopper-jump-quick'\?",
        ),
        (preset, "metaworld-papr:reach-v3", r"Unknown preset 'metaworld-papr'.*'metaworld-paper'"),
        (preset, "test_names:not_a_config", "no EpisodicConfig"),
        (make_position_controlled, "tether/HoperJump-v0", "Did you mean 'tether/HopperJump-v0'"),
        (make_position_controlled, "tether/HoperJump-v0", r"HopperJump-v0, .* and \d+ more\. Your own"),
        (make_position_controlled, "test_names:my/Robot-v0", "Unknown environment 'test_names:my/Robot-v0'"),
        (make_position_controlled, "CartPole-v1", r"gymnasium knows CartPole-v1, .* register_adapter"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest_known_one(
    find: Callable[[str], Any], name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find(name)


def test_settings_of_another_algorithm_are_refused(sampler: EpisodeSampler) -> None:
    with pytest.raises(ConfigError, match="'tce' is configured by OnPolicyConfig, got EpisodicConfig"):
        build_learner(EpisodicConfig(POINT), sampler.spec)


def test_what_a_checkpoint_cannot_hold_is_refused_before_training(tmp_path: Path) -> None:
    config = OnPolicyConfig(POINT, algo="test_names:Forgetful", num_workers=0)
    with pytest.raises(CheckpointError, match=r"torch\.from_numpy"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_names_that_every_state_has_cannot_be_parts(sampler: EpisodeSampler) -> None:
    learner = build_learner(OnPolicyConfig(POINT, algo="test_names:Clashing"), sampler.spec)
    with pytest.raises(ConfigError, match=r"may not use the names \['generator'\]"):
        learner.state()


@pytest.mark.parametrize("name", sorted(name for name in PRESETS if "toperl" not in name))
def test_an_algorithm_without_a_variant_of_a_preset_takes_what_both_share(name: str) -> None:
    """All of it for one that only adds a setting to TCE's."""
    config = choose(name, algo="test_names:Eager")[1]
    assert isinstance(config, EagerConfig)
    expected = preset(name).as_dict() | {"algo": "test_names:Eager", "eagerness": 2.0}
    assert config.as_dict() == expected
