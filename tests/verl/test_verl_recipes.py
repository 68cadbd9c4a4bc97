"""The launch scripts' overrides compose with verl's configuration and say what they claim."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir, initialize_config_module
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.reward_score import default_compute_score

import verl
from tether.integrations import verl_switch
from tether.integrations.verl import MODEL_TYPE, TROLLPolicyLossConfig

RECIPES = Path(__file__).parents[2] / "recipes" / "verl"
SCRIPTS = sorted(path.name for path in RECIPES.glob("qwen3_*.sh"))
METHODS = {"troll": "troll", "gspo-troll": "troll", "clip": "vanilla", "gspo": "gspo", "dppo": "dppo_tv"}

sys.path.insert(0, str(RECIPES))


def _run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(RECIPES / script), *arguments],
        env={**os.environ, "DRY_RUN": "1", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def _compose(script: str, *arguments: str, **environment: str) -> Any:
    ran = _run(script, *arguments, **environment)
    assert ran.returncode == 0, ran.stderr
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", ran.stdout.splitlines())


def test_there_are_scripts_for_both_tasks() -> None:
    assert SCRIPTS == ["qwen3_dapo_math.sh", "qwen3_gsm8k.sh"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_composes_with_every_method(script: str, method: str) -> None:
    config = _compose(script, METHOD=method)
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert config.trainer.use_v1
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.policy_loss.loss_mode == METHODS[method]
    assert get_policy_loss_fn(actor.policy_loss.loss_mode)
    if METHODS[method] == "troll":
        assert isinstance(actor.policy_loss, TROLLPolicyLossConfig)
        assert config.actor_rollout_ref.model.model_type == MODEL_TYPE
        assert config.actor_rollout_ref.model.external_lib == "tether.integrations.verl"
    assert actor.loss_agg_mode == ("seq-mean-token-mean" if method.startswith("gspo") else "token-mean")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_settings_are_the_papers(script: str) -> None:
    config = _compose(script)
    actor = config.actor_rollout_ref.actor
    loss = actor.policy_loss
    assert (loss.troll_kl_bound, loss.troll_alpha, loss.troll_top_k, loss.troll_mass) == (
        0.05,
        1.0,
        64,
        0.99999,
    )
    assert (actor.optim.lr, actor.optim.weight_decay, actor.grad_clip) == (1e-6, 0.0, 1.0)
    rollouts = config.data.train_batch_size, config.actor_rollout_ref.rollout.n, actor.ppo_mini_batch_size
    assert rollouts == (256, 8, 32)
    assert config.algorithm.adv_estimator == "grpo"
    assert not config.algorithm.rollout_correction.bypass_mode
    if "dapo" in script:
        assert (config.data.max_prompt_length, config.data.max_response_length) == (2048, 4096)


def test_machines_and_the_last_word_are_the_callers() -> None:
    config = _compose(
        "qwen3_dapo_math.sh",
        "actor_rollout_ref.actor.policy_loss.troll_region=sequence",
        "actor_rollout_ref.actor.optim.lr=5e-7",
        NODES="4",
        GPUS="4",
        MODEL="Qwen/Qwen3-4B",
    )
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (4, 4)
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen3-4B"
    assert config.actor_rollout_ref.actor.optim.lr == 5e-7
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor).policy_loss.troll_region == "sequence"


def test_the_switch_is_what_it_stands_for() -> None:
    """The lines that `tether verl --show` prints, composed without the switch."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        switched = compose("ppo_trainer", [verl_switch.SWITCH])
        spelt = compose("ppo_trainer", verl_switch.lines())
    assert switched == spelt
    policy_loss = omega_conf_to_dataclass(spelt.actor_rollout_ref.actor.policy_loss)
    assert verl_switch.settings().items() <= vars(TROLLPolicyLossConfig()).items()
    assert verl_switch.settings().items() <= vars(policy_loss).items()
    shown = verl_switch.describe()
    assert all(line in shown for line in [verl_switch.SWITCH, *verl_switch.lines()])
    assert f"verl {verl.__version__} is installed here (tested)" in shown


def test_a_file_of_ones_own_has_the_last_word_over_the_switch_among_its_defaults(tmp_path: Path) -> None:
    """As the page writes it; on the command line the switch would overrule the file."""
    page = (Path(__file__).parents[2] / "docs" / "verl.md").read_text(encoding="utf-8")
    start = page.index("    hydra: {searchpath")
    written = textwrap.dedent(page[start : page.index("\n\n", start)])
    (tmp_path / "mine.yaml").write_text(written + "\n")
    (tmp_path / "other.yaml").write_text(written.replace("{tether: troll}, ", "") + "\n")
    with initialize_config_dir(str(tmp_path), version_base=None):
        mine, other = compose("mine"), compose("other", [verl_switch.SWITCH])
    bounds = [config.actor_rollout_ref.actor.policy_loss.troll_kl_bound for config in (mine, other)]
    assert bounds == [0.1, verl_switch.settings()["troll_kl_bound"]]
    assert "'- tether: troll', before '- _self_'" in verl_switch.describe()
    assert mine.actor_rollout_ref.actor.policy_loss.loss_mode == MODEL_TYPE


@pytest.mark.parametrize("switch", [verl_switch.SWITCH, verl_switch.SAMPLER_SWITCH])
def test_what_is_shown_beside_a_switch_makes_exact_support_work_with_verls_defaults(switch: str) -> None:
    shown = [line for line in verl_switch.describe().splitlines() if f" {switch} " in line]
    assert len(shown) == 1
    words = [word for word in shown[0].split() if "=" in word]
    sizes = [f"actor_rollout_ref.{part}=1" for part in (
        "actor.ppo_micro_batch_size_per_gpu", "rollout.log_prob_micro_batch_size_per_gpu",
    )]  # fmt: skip
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*words, *sizes, "actor_rollout_ref.rollout.name=vllm"])
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.policy_loss.troll_support == "exact"
    assert (actor.engine.strategy, config.actor_rollout_ref.ref.strategy) == ("fsdp2", "fsdp2")
    assert not config.actor_rollout_ref.model.use_fused_kernels


def test_the_samplers_switch_is_what_it_stands_for() -> None:
    with initialize_config_module("verl.trainer.config", version_base=None):
        named = "actor_rollout_ref.rollout.name=vllm"
        switched = compose("ppo_trainer", [verl_switch.SAMPLER_SWITCH, named])
        spelt = compose("ppo_trainer", verl_switch.lines(verl_switch.sampler_configuration()))
    assert switched.actor_rollout_ref.rollout.custom.troll_top_k == 64
    assert switched.algorithm.rollout_correction.bypass_mode
    for part in ("actor", "model"):
        assert switched.actor_rollout_ref[part] == spelt.actor_rollout_ref[part]
    assert switched.algorithm == spelt.algorithm
    assert switched.actor_rollout_ref.rollout.agent == spelt.actor_rollout_ref.rollout.agent
    assert load_class_from_fqn(verl_switch.MANAGER, "AgentLoopManager").__name__ == "SamplerAgentLoopManager"
    loss = omega_conf_to_dataclass(switched.actor_rollout_ref.actor.policy_loss)
    assert loss.around_sampler
    omega_conf_to_dataclass(switched.actor_rollout_ref.rollout)
    shown = verl_switch.describe()
    assert all(line in shown for line in verl_switch.lines(verl_switch.sampler_configuration()))


def test_the_trainer_is_started_by_the_python_that_was_named() -> None:
    """Whose environment has verl; `echo` says what it is asked."""
    ran = _run("qwen3_gsm8k.sh", DRY_RUN="", PYTHON="echo")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("-m verl.trainer.main_ppo algorithm.adv_estimator=grpo")


def test_an_unknown_method_is_named() -> None:
    ran = _run("qwen3_gsm8k.sh", METHOD="ppo")
    assert ran.returncode != 0
    assert "METHOD=ppo is unknown; choose troll" in ran.stderr


def test_gsm8k_rows_are_what_verls_scorer_reads() -> None:
    from prepare_data import gsm8k_row

    row = gsm8k_row({"question": "How much?", "answer": "2 * 600 = 1,200\n#### 1,200"}, "train", 7)
    assert row["reward_model"]["ground_truth"] == "1200"
    for response, reward in (("So it is\n#### 1,200", 1.0), ("So it is\n#### 12", 0.0)):
        assert (
            default_compute_score(row["data_source"], response, row["reward_model"]["ground_truth"]) == reward
        )
    with pytest.raises(ValueError, match="row 7 of train: the answer does not end"):
        gsm8k_row({"question": "How much?", "answer": "none"}, "train", 7)


def test_repeated_problems_are_kept_once() -> None:
    from prepare_data import unique_problems

    rows = [{"prompt": [{"role": "user", "content": text}], "n": i} for i, text in enumerate("abab")]
    assert [row["n"] for row in unique_problems(rows)] == [0, 1]
