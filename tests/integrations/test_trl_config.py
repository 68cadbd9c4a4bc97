"""Settings that would silently mean something else are refused or warned about, with the remedy."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import math
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_language_model import make_tiny_model
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer, TrlParser

from tether.errors import ConfigError, MissingDependencyError, TetherWarning
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer

OWN_FIELDS = [field for field in dataclasses.fields(TROLLConfig) if field.name.startswith("troll_")]


def _config(tmp_path: Path, **overrides: Any) -> TROLLConfig:
    return TROLLConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **overrides)


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        ({"troll_kl_bound": 0.0}, "0.05 is the paper's"),
        ({"troll_kl_bound": -0.1}, "0.05 is the paper's"),
        ({"troll_kl_bound": math.nan}, "0.05 is the paper's"),
        ({"troll_alpha": -1.0}, "must be finite and not negative"),
        ({"troll_alpha": math.inf}, "must be finite and not negative"),
        ({"troll_alpha": math.nan}, "must be finite and not negative"),
        ({"troll_top_k": 0}, "64 is the paper's"),
        ({"troll_top_k": 2.5}, "an integer of at least 1"),
        (
            {"troll_kl_bound": "0.05"},
            "a positive number such as 0.05, got '0.05' of type str. Give it without quotes",
        ),
        ({"troll_kl_bound": None}, "leave it out for the default"),
        ({"troll_kl_bound": True}, "got True of type bool"),
        ({"troll_kl_bound": [0.05]}, "without quotes or brackets"),
        ({"troll_alpha": "1"}, "a number such as 1.0"),
        ({"troll_alpha": False}, "a number such as 1.0"),
        ({"troll_mass": "1 - 1e-5"}, "a number such as 0.99999"),
        ({"troll_mass": None}, "of type NoneType"),
        ({"troll_top_k": "64"}, "an integer of at least 1"),
        ({"troll_top_k": True}, "an integer of at least 1"),
        ({"troll_support": None}, 'text, such as "exact"'),
        ({"troll_support": ["exact"]}, "without quotes or brackets"),
        ({"troll_region": 1}, 'text, such as "token"'),
        ({"troll_pack_sequences": "yes"}, "True or False"),
        ({"troll_pack_sequences": 1}, "True or False"),
        ({"troll_mass": 0.0}, "mass=0.99999"),
        ({"troll_mass": 1.5}, "mass=0.99999"),
        ({"troll_support": "mean"}, "exact, bucket, paper"),
        ({"troll_region": "batch"}, "token, sequence"),
        ({"loss_type": "cispo"}, "GRPOTrainer for cispo"),
        ({"loss_type": "sapo"}, "GRPOTrainer for sapo"),
        ({"loss_type": "vespo"}, "GRPOTrainer for vespo"),
        ({"epsilon": 0.1}, "set troll_kl_bound"),
        ({"epsilon_high": 0.28}, "set troll_kl_bound"),
        ({"delta": 2.0}, "set troll_kl_bound"),
        ({"off_policy_mask_threshold": 0.5}, "Leave it unset"),
    ],
)
def test_refusals_name_the_setting_its_value_and_the_remedy(
    tmp_path: Path, overrides: dict[str, Any], remedy: str
) -> None:
    ((name, value),) = overrides.items()
    with pytest.raises(ConfigError) as refusal:
        _config(tmp_path, **overrides)
    message = str(refusal.value)
    assert name in message
    assert remedy in message
    assert str(value) in message or name == "off_policy_mask_threshold"


@pytest.mark.parametrize(
    "accepted",
    [
        {"troll_kl_bound": math.inf, "troll_alpha": 0.0},
        {"troll_mass": 1.0, "troll_top_k": 1},
        {"troll_kl_bound": 1, "troll_alpha": np.float64(0.5), "troll_mass": 1, "troll_top_k": np.int64(8)},
        {"beta": 0.1},
        {"top_p": 1.0, "top_k": 0, "min_p": 0.0},
        {"generation_kwargs": {"max_new_tokens": 5}},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    ],
)
def test_what_is_covered_is_accepted_without_a_warning(tmp_path: Path, accepted: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", TetherWarning)
        _config(tmp_path, **accepted)


@pytest.mark.parametrize(
    "overrides",
    [
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.05},
        {"repetition_penalty": 1.1},
        {"generation_kwargs": {"top_p": 0.9}},
        {"generation_kwargs": {"temperature": 0.5}},
    ],
)
def test_samplers_that_reshape_the_distribution_are_warned_about(
    tmp_path: Path, overrides: dict[str, Any]
) -> None:
    (value,) = overrides.values()
    name, value = next(iter(value.items())) if isinstance(value, dict) else (next(iter(overrides)), value)
    with pytest.warns(TetherWarning, match=rf"'{name}': {value}.*Leave these settings at their defaults"):
        _config(tmp_path, **overrides)


@pytest.mark.parametrize(
    ("given", "steps_per_generation"),
    [
        ({}, 8),
        ({"gradient_accumulation_steps": 4}, 32),
        ({"num_iterations": 3}, 1),
        ({"num_iterations": 3, "gradient_accumulation_steps": 4}, 4),
        ({"steps_per_generation": 2}, 2),
        ({"generation_batch_size": 24}, 3),
    ],
)
def test_each_batch_of_rollouts_serves_several_updates_unless_told_otherwise(
    tmp_path: Path, given: dict[str, int], steps_per_generation: int
) -> None:
    assert _config(tmp_path, **given).steps_per_generation == steps_per_generation


@pytest.mark.parametrize(
    ("trainer_class", "config_class"), [(TROLLTrainer, TROLLConfig), (OldPolicyTrainer, GRPOConfig)]
)
@pytest.mark.parametrize(
    ("schedule", "acts"),
    [
        ({"steps_per_generation": 1}, False),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 2}, False),
        ({"steps_per_generation": 1, "gradient_accumulation_steps": 2}, False),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2}, True),
        ({"steps_per_generation": 1, "num_iterations": 2}, True),
    ],
)
def test_warns_exactly_when_there_is_no_old_policy(
    make_trainer: Callable[..., Any],
    trainer_class: Any,
    config_class: Any,
    schedule: dict[str, int],
    acts: bool,
) -> None:
    """And TRL's own batch says whether there is one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TetherWarning)
        trainer = make_trainer(trainer_class, config_class, **schedule)
    messages = [str(w.message) for w in caught if issubclass(w.category, TetherWarning)]
    trainer.model.train()
    batch = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4)
    assert ("old_per_token_logps" in batch) == acts
    if acts:
        assert messages == []
    else:
        (message,) = messages
        accumulation = schedule.get("gradient_accumulation_steps", 1)
        assert f"multiple of gradient_accumulation_steps, such as {8 * accumulation}, or" in message
        assert "num_iterations to more than 1" in message


def test_without_an_old_policy_training_is_plain_policy_gradient(train: Callable[..., Any]) -> None:
    with pytest.warns(TetherWarning, match="its own old policy"):
        trainer = train(TROLLTrainer, TROLLConfig, steps_per_generation=1, max_steps=2)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 2
    assert not any(name.startswith("trust_region/") for row in rows for name in row)


def test_default_config_has_an_old_policy(
    tmp_path: Path, make_trainer: Callable[..., Any], settings: Any
) -> None:
    settings.pop("steps_per_generation")
    with warnings.catch_warnings():
        warnings.simplefilter("error", TetherWarning)
        assert make_trainer(TROLLTrainer, TROLLConfig).args.steps_per_generation == 8


def test_troll_with_another_config_is_refused(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"needs args=TROLLConfig\(output_dir=\.\.\.\), got GRPOConfig"):
        make_trainer(TROLLTrainer, GRPOConfig)


@pytest.mark.parametrize(
    ("trainer_class", "config_class", "name"),
    [(TROLLTrainer, TROLLConfig, "TROLL"), (OldPolicyTrainer, GRPOConfig, "GRPO")],
)
def test_without_args_the_defaults_go_to_a_folder_named_after_the_model(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, trainer_class: Any, config_class: Any,
    name: str,
) -> None:  # fmt: skip
    """TRL's rule, with the name of the trainer."""
    on_a_cpu = functools.partial(config_class, use_cpu=True, bf16=False, steps_per_generation=2)
    monkeypatch.setattr(trainer_class, "_config_class", on_a_cpu)
    model = make_tiny_model()
    model.config._name_or_path = "someone/tiny-model"
    trainer = make_trainer(trainer_class, lambda **_: None, model=model)
    assert type(trainer.args) is config_class
    assert trainer.args.output_dir == f"tiny-model-{name}"


def test_noise_on_embeddings_is_warned_about_for_it_looks_like_divergence(
    make_trainer: Callable[..., Any],
) -> None:
    with pytest.warns(TetherWarning, match=r"neftune_noise_alpha=5 adds fresh noise.*Leave it unset"):
        make_trainer(TROLLTrainer, TROLLConfig, neftune_noise_alpha=5)


def test_takes_the_arguments_of_grpo_by_position(
    tmp_path: Path, tokenizer: Any, prompts: Any, make_model: Any
) -> None:
    def arguments(config_class: Any) -> tuple[Any, ...]:
        config = config_class(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none",
                              steps_per_generation=8)  # fmt: skip
        return (
            make_model(),
            [lambda completions, **_: [0.0] * len(completions)],
            config,
            prompts,
            prompts,
            tokenizer,
        )

    plain, ours = GRPOTrainer(*arguments(GRPOConfig)), TROLLTrainer(*arguments(TROLLConfig))
    assert ours.train_dataset is plain.train_dataset is prompts
    assert ours.eval_dataset is plain.eval_dataset
    assert type(ours.processing_class) is type(plain.processing_class)


def test_trl_parser_reads_our_fields_from_the_command_line_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("troll_alpha: 0.5\ntroll_region: sequence\nuse_cpu: true\nbf16: false\n")
    given = (
        f"--config {file} --output_dir {tmp_path} --troll_kl_bound inf --troll_support paper --troll_top_k 16"
    )
    (config,) = TrlParser((TROLLConfig,)).parse_args_and_config(given.split())
    assert isinstance(config, TROLLConfig)
    assert config.troll_kl_bound == math.inf
    assert (config.troll_support, config.troll_top_k, config.troll_alpha) == ("paper", 16, 0.5)
    assert config.troll_region == "sequence"


def test_help_of_every_field_is_shown() -> None:
    parser = HfArgumentParser(TROLLConfig, formatter_class=argparse.RawTextHelpFormatter)
    shown = " ".join(parser.format_help().split())  # fails on a % that is not escaped
    assert len(OWN_FIELDS) == 14
    for field in OWN_FIELDS:
        help_text = field.metadata["help"]
        assert len(help_text) > 30
        assert help_text.replace("%%", "%") in shown
        assert help_text.rstrip().endswith(".")


def test_config_survives_pickling_as_trainers_save_it(tmp_path: Path) -> None:
    config = _config(tmp_path, troll_kl_bound=0.1)
    assert pickle.loads(pickle.dumps(config)).to_dict() == config.to_dict()  # noqa: S301


def test_the_core_imports_neither_trl_nor_transformers() -> None:
    code = (
        "import sys, tether, tether.losses, tether.ops, tether.integrations; "
        "print(sorted({'trl', 'transformers', 'datasets', 'accelerate', 'peft'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_missing_trl_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tether.integrations.trl")
    monkeypatch.delitem(sys.modules, "tether.integrations.trl_config")
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'tether-rl\[llm\]'") as error:
        importlib.import_module("tether.integrations.trl")
    assert isinstance(error.value, ImportError)
