"""What cannot work is refused, with the key to change."""

from __future__ import annotations

import subprocess
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from actor import Rollouts, make_actor
from verl.trainer.distillation import distillation_ppo_loss
from verl.workers.utils.losses import ppo_loss

from tether.errors import ConfigError, MissingDependencyError, TetherError
from tether.integrations.verl import TROLLPolicyLossConfig, environment
from tether.integrations.verl.losses import refuse_data_format
from tether.integrations.verl.vocabulary import refuse_megatron_settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"troll_kl_bound": 0.0}, r"policy_loss\.troll_kl_bound must be a positive number of nats, got 0\.0"),
        ({"troll_kl_bound": float("nan")}, "troll_kl_bound must be a positive number of nats, got nan"),
        ({"troll_alpha": -1.0}, r"troll_alpha .* got -1\.0"),
        ({"troll_top_k": 0}, r"troll_top_k must be an integer of at least 1, got 0"),
        ({"troll_top_k": 40_000}, "troll_top_k must be at most 32766, got 40000"),
        ({"troll_mass": 0.0}, r"troll_mass must lie in \(0, 1\], got 0\.0"),
        ({"troll_old_store": "disk"}, "troll_old_store must be one of local, queue, got 'disk'"),
        ({"troll_support": "none"}, "troll_support must be one of exact, bucket, paper"),
        ({"troll_region": "batch"}, "troll_region must be one of token, sequence"),
        ({"troll_ratio": "batch"}, "troll_ratio must be one of token, sequence"),
    ],
)
def test_a_setting_out_of_range_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TROLLPolicyLossConfig(**settings)


def test_fused_kernels_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.use_fused_kernels=True"):
        make_actor(model, model_settings={"use_fused_kernels": True})


def test_pad_to_length_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor\.pad_to_length=True"):
        make_actor(model, engine_settings={"pad_to_length": True})


def test_sums_over_logits_that_are_not_formed_are_refused(model: Path) -> None:
    """verl's engine would take hidden states for logits; those of a bucket are real."""
    batch = Rollouts.scripted().batch(
        calculate_entropy=True, compute_loss=False, calculate_sum_pi_squared=True
    )
    with pytest.raises(ConfigError, match=r"calculate_sum_pi_squared=True.*troll_support=bucket"):
        make_actor(model).infer_batch(batch.copy())
    bucket = make_actor(model, TROLLPolicyLossConfig(troll_support="bucket")).infer_batch(batch)
    assert "sum_pi_squared" in bucket.keys()  # noqa: SIM118  (a TensorDict)


@pytest.mark.parametrize("store", ["local", "queue"])
@pytest.mark.parametrize("support", ["exact", "bucket"])
def test_a_batch_without_old_distributions_is_refused(model: Path, support: str, store: str) -> None:
    """Bypass mode never scores the old policy; the v0 trainer drops the fields."""
    rollouts = Rollouts.scripted()
    actor = make_actor(model, TROLLPolicyLossConfig(troll_support=support, troll_old_store=store))
    old = rollouts.score(actor)
    for field in [name for name in old if name.startswith("troll_")]:
        del old[field]
    with pytest.raises(ConfigError, match=r"bypass_mode=False.*use_v1=True"):
        rollouts.update(actor, old)


def test_a_padded_batch_is_refused(model: Path) -> None:
    rollouts = Rollouts.scripted()
    actor = make_actor(model)
    batch = rollouts.batch(calculate_entropy=True, compute_loss=False)
    batch["responses"] = batch["responses"].to_padded_tensor(0)
    with pytest.raises(ConfigError, match=r"trainer\.use_v1=True"):
        actor.infer_batch(batch)


def test_distillation_at_once_is_refused(model: Path) -> None:
    rollouts = Rollouts.scripted()
    actor = make_actor(model)
    old = rollouts.score(actor)
    config = actor.loss_fn.keywords["config"]
    actor.set_loss_fn(partial(distillation_ppo_loss, config=config, distillation_config=None))
    with pytest.raises(ConfigError, match=r"distillation\.enabled=False"):
        rollouts.update(actor, old)


def test_an_engine_that_does_not_project_is_named(model: Path) -> None:
    """TROLL's loss in verl's own engine: model_type was forgotten."""
    rollouts = Rollouts.scripted()
    actor = make_actor(model)
    old = rollouts.score(actor)
    theirs = make_actor(model, types.SimpleNamespace(get=lambda *_: "vanilla"))  # type: ignore[arg-type]
    theirs.set_loss_fn(actor.loss_fn)
    with pytest.raises(ConfigError, match=r"external_lib=tether.integrations.verl.*model_type=troll"):
        rollouts.update(theirs, old)


def test_a_loss_with_other_settings_than_the_engine_is_refused(model: Path) -> None:
    rollouts = Rollouts.scripted()
    actor = make_actor(model, TROLLPolicyLossConfig(troll_top_k=8))
    old = rollouts.score(actor)
    other = make_actor(model, TROLLPolicyLossConfig(troll_top_k=16))
    assert actor.loss_fn.func is ppo_loss
    actor.set_loss_fn(other.loss_fn)
    with pytest.raises(ConfigError, match="other settings than this engine was built with"):
        rollouts.update(actor, old)


def test_a_token_that_counts_only_later_is_refused(model: Path) -> None:
    rollouts = Rollouts.scripted()
    actor = make_actor(model)
    old = rollouts.score(actor)
    rollouts.masks[1] = torch.ones_like(rollouts.masks[1])
    with pytest.raises(TetherError, match="1 response tokens count in this update but did not"):
        rollouts.update(actor, old)


def test_megatrons_padded_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="use_remove_padding=True"):
        refuse_data_format("bshd")


def test_a_trl_without_the_class_verl_patches_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As TRL 1.16 is: importable, but without AutoModelForCausalLMWithValueHead."""
    trl = types.ModuleType("trl")
    trl.__version__ = "1.16.0"  # type: ignore[attr-defined]
    trl.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "trl", trl)
    with pytest.raises(
        MissingDependencyError, match=r"TRL 1\.16\.0 is installed beside verl.*pip uninstall trl"
    ):
        environment.check_environment()


def test_the_plugin_is_found_by_importing_verl_alone() -> None:
    """Through the entry point: no line of configuration names the package."""
    code = (
        "import verl, sys;"
        "from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as losses;"
        "from verl.workers.engine import EngineRegistry as engines;"
        "assert 'tether.integrations.verl' in sys.modules;"
        "assert 'troll' in losses and set(engines._engines['troll']) >= {'fsdp', 'fsdp2'}"
    )
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120, cwd=Path(__file__).parent
    )


def test_importing_tether_never_imports_verl() -> None:
    code = (
        "import sys, tether, tether.losses, tether.ops, tether.integrations.logits_hooks;"
        "heavy = {'verl', 'ray', 'transformers', 'tensordict', 'transfer_queue'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_settings_are_verls_when_verl_reads_them() -> None:
    """From a DictConfig with `_target_`, as on the command line; unknown keys stay refused."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    target = {"_target_": "tether.integrations.verl.TROLLPolicyLossConfig", "loss_mode": "troll"}
    config = omega_conf_to_dataclass(OmegaConf.create({**target, "troll_kl_bound": 0.1, "dro_beta": None}))
    assert isinstance(config, TROLLPolicyLossConfig)
    assert config.troll_kl_bound == 0.1
    with pytest.raises(Exception, match="troll_kl_bond"):
        omega_conf_to_dataclass(OmegaConf.create({**target, "troll_kl_bond": 0.1}))


@pytest.mark.parametrize(
    "setting",
    [
        {"context_parallel_size": 2},
        {"dynamic_context_parallel": True},
        {"override_transformer_config": {"fp8": "hybrid"}},
    ],
)
def test_megatron_layouts_nobody_wrote_down_are_refused(setting: dict[str, Any]) -> None:
    default = {
        "context_parallel_size": 1,
        "dynamic_context_parallel": False,
        "override_transformer_config": {},
    }
    refuse_megatron_settings(types.SimpleNamespace(**default))
    with pytest.raises(ConfigError, match=rf"actor\.megatron\.{next(iter(setting))}.*strategy=fsdp2"):
        refuse_megatron_settings(types.SimpleNamespace(**{**default, **setting}))
