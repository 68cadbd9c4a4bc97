"""Checks before training: each finds what it is for, and what becomes of it is the user's choice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from short_run import config

from tether.errors import ConfigError, TetherWarning
from tether.llm import preflight
from tether.llm.config import TrainConfig
from tether.llm.models import embedded_model_path, load_model_and_tokenizer, read_config_and_tokenizer
from tether.llm.preflight import (
    _container_limit,
    available_memory,
    check_before_loading,
    check_rewards,
    estimate_memory,
)
from tether.llm.tasks import make_task
from tether.llm.tasks.arithmetic import ArithmeticTask
from tether.llm.tasks.protocol import Verdict
from tether.llm.train import train


class Rewarding(ArithmeticTask):
    """Arithmetic with rewards of its own."""

    def __init__(self, *rewards: float) -> None:
        super().__init__()
        self.rewards = rewards
        self.asked = 0

    def verify(self, response: str, problem_answer: str) -> Verdict:
        reward = self.rewards[self.asked % len(self.rewards)]
        self.asked += 1
        return Verdict(reward, reward >= 1)


@pytest.fixture(scope="module")
def embedded() -> tuple[Any, Any]:
    return load_model_and_tokenizer("embedded")


def memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(preflight, "available_memory", lambda device: (size, "memory"))


def disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: usage)


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4}, {"dtype": "bfloat16"}, {"optimizer": "sgd"}])
def test_weights_gradients_and_moments_are_counted_exactly(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Against the tensors of a model after a step of the optimizer."""
    from peft import LoraConfig, get_peft_model

    settings = config(tmp_path, **changes)
    model, _ = load_model_and_tokenizer("embedded", dtype=settings.dtype)
    base_size = sum(weight.nbytes for weight in model.parameters())
    if settings.lora_rank:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    sgd = settings.optimizer == "sgd"
    optimizer = torch.optim.SGD(trained, momentum=0.9) if sgd else torch.optim.AdamW(trained)
    model(torch.arange(3, 30)[None]).logits.sum().backward()
    gradients = sum(weight.grad.nbytes for weight in trained)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim > 0]
    estimate = estimate_memory(settings, read_config_and_tokenizer("embedded")[0])
    assert estimate.weights == base_size
    assert estimate.gradients == gradients
    assert estimate.optimizer == sum(moment.nbytes for moment in moments)


def test_a_reference_model_and_a_critic_are_counted(tmp_path: Path) -> None:
    model_config = read_config_and_tokenizer("embedded")[0]

    def fixed(**changes: Any) -> int:
        return estimate_memory(config(tmp_path, **changes), model_config).fixed

    parameters = estimate_memory(config(tmp_path), model_config).parameters  # head tied to embedding
    assert fixed(reference_penalty=0.1) - fixed() == 4 * parameters
    assert fixed(estimator="ppo") - fixed() == 4 * 4 * parameters
    assert fixed(lag=8) - fixed() == 3 * 4 * parameters  # four updates a batch


@pytest.mark.parametrize(
    "changes",
    [{"estimator": "ppo"}, {"lag": 8, "sampler_weight": 2.0}],
    ids=["critic", "lag"],
)
def test_a_checkpoint_with_more_than_the_model_is_as_large_as_its_files(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    one = config(tmp_path / "run", **changes)
    written = max(
        sum(file.stat().st_size for file in folder.rglob("*"))
        for folder in train(one).path.glob("checkpoints/step-*")
    )
    estimate = estimate_memory(one, read_config_and_tokenizer("embedded")[0])
    assert estimate.checkpoint == pytest.approx(written, rel=0.1)


def test_what_is_spread_over_processes_needs_a_share_in_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_config = read_config_and_tokenizer("embedded")[0]
    whole = estimate_memory(config(tmp_path), model_config)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert estimate_memory(config(tmp_path), model_config).fixed == whole.fixed, "DDP"
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    zero2 = estimate_memory(config(tmp_path), model_config)
    assert zero2.weights == whole.weights
    assert zero2.optimizer + zero2.gradients == (whole.optimizer + whole.gradients) // 4
    for name, value in (("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"), ("ACCELERATE_USE_FSDP", "true")):
        monkeypatch.setenv(name, value)
        spread = estimate_memory(config(tmp_path), model_config)
        assert spread.fixed == pytest.approx(whole.fixed / 4, abs=4)
        assert spread.checkpoint == whole.checkpoint, "the disk holds all of it"


def test_a_model_that_cannot_fit_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory(monkeypatch, 5_000_000)
    monkeypatch.setattr("tether.llm.models.load_model_and_tokenizer", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=r"need 8\.\d+ MB .* and 5 MB of memory are free. Set lora_rank"):
        train(config(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_tight_fit_is_warned_of_and_refused_by_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task("arithmetic")
    memory(monkeypatch, 8_900_000)
    with pytest.warns(TetherWarning, match="leaves little to compute with"):
        check_before_loading(config(tmp_path), task)
    with pytest.raises(ConfigError, match="leaves little to compute with"):
        check_before_loading(config(tmp_path, preflight="refuse"), task)
    check_before_loading(config(tmp_path, preflight="off"), task)


def test_free_memory_is_a_plausible_number() -> None:
    import psutil

    available, _ = available_memory("cpu")
    assert 0 < available <= psutil.virtual_memory().total


def test_every_control_group_above_limits_and_cached_files_give_way(tmp_path: Path) -> None:
    def group(path: str, limit: str, used: int, cached: int) -> None:
        folder = tmp_path / "cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon {used - cached}\ninactive_file {cached}\n")

    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    root.mkdir()
    membership.write_text("0::/slurm/job_7/step\n")
    assert _container_limit(root, membership) is None
    group("slurm/job_7/step", "max", 900, 0)
    group("slurm/job_7", "1000", 900, 600)
    assert _container_limit(root, membership) == 1000 - 300
    group("slurm", "1100", 1000, 200)
    assert _container_limit(root, membership) == 1100 - 800
    assert _container_limit(root, tmp_path / "missing") is None


# ---------------------------------------------------------------------- disk


def test_a_disk_without_room_for_one_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk(monkeypatch, 1_000_000)
    with pytest.raises(ConfigError, match=r"3 checkpoints of .* and 1 MB are free. Free space"):
        check_before_loading(config(tmp_path / "a" / "b"), make_task("arithmetic"))


def test_a_disk_without_room_for_all_checkpoints_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk(monkeypatch, 12_000_000)
    with pytest.warns(TetherWarning, match=r"lower keep_checkpoints \(2\)"):
        check_before_loading(config(tmp_path), make_task("arithmetic"))
    check_before_loading(config(tmp_path, keep_checkpoints=1, lora_rank=2), make_task("arithmetic"))


def test_the_size_of_a_checkpoint_is_that_of_the_files(uninterrupted: Path) -> None:
    folder = uninterrupted / "checkpoints" / "step-000016"
    written = sum((folder / name).stat().st_size for name in ("model.safetensors", "optimizer.pt"))
    estimate = estimate_memory(config(uninterrupted), read_config_and_tokenizer("embedded")[0])
    assert estimate.checkpoint == pytest.approx(written, rel=0.05)


# ---------------------------------------------------------------------- lengths, template, precision


def test_responses_beyond_the_models_positions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Prompts of 8 tokens and responses of 600 do not fit .* 512"):
        check_before_loading(config(tmp_path, max_response_tokens=600), make_task("arithmetic"))


def test_a_task_in_conversations_needs_a_chat_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'embedded' has no chat template"):
        train(config(tmp_path / "run", task="code"))


def test_small_steps_on_bfloat16_weights_are_warned_of(tmp_path: Path) -> None:
    task = make_task("arithmetic")
    with pytest.warns(TetherWarning, match="less than their last digit"):
        check_before_loading(config(tmp_path, dtype="bfloat16", learning_rate=1e-6), task)
    check_before_loading(config(tmp_path, dtype="bfloat16", learning_rate=1e-6, lora_rank=4), task)
    check_before_loading(config(tmp_path, dtype="bfloat16", learning_rate=1e-6, optimizer="sgd"), task)
    # The arithmetic behind it: Adam's step on a weight of 0.02 leaves it as it is.
    weight = torch.tensor(0.02, dtype=torch.bfloat16)
    assert weight - 1e-6 == weight


def test_a_damaged_model_config_is_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(embedded_model_path(), tmp_path / "model"))
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(Exception, match="cannot be loaded"):
        check_before_loading(config(tmp_path / "run", model=str(folder)), make_task("arithmetic"))


def test_a_row_without_answer_is_refused_before_training(tmp_path: Path) -> None:
    rows = [{"question": f"{n}+1?", "answer": f"#### {n + 1}"} for n in range(40)]
    rows[7].pop("answer")
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(Exception, match=r"rows\.jsonl:8: no text in field 'answer'"):
        train(config(tmp_path / "run", task="gsm8k", task_options={"path": str(file)}))


# ---------------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ((0.0,), "None of 32 responses to 8 training problems was right .* likely below 9%"),
        ((1.0,), "All of 32 responses to 8 training problems were right"),
        ((0.0,) * 4 + (1.0,) * 4, "those to one problem all have the same reward"),
    ],
)
def test_rewards_that_teach_nothing_are_warned_of_or_refused(
    tmp_path: Path, embedded: tuple[Any, Any], rewards: tuple[float, ...], message: str
) -> None:
    with pytest.warns(TetherWarning, match=message):
        check_rewards(config(tmp_path), *embedded, Rewarding(*rewards))
    with pytest.raises(ConfigError, match=message):
        check_rewards(config(tmp_path, preflight="refuse"), *embedded, Rewarding(*rewards))
    check_rewards(config(tmp_path, preflight="off"), *embedded, Rewarding(*rewards))


@pytest.mark.parametrize(("responses", "bound"), [(2, "78%"), (300, "1%")])
def test_the_bound_after_no_success_is_the_rate_at_which_that_has_one_chance_in_twenty(
    responses: int, bound: str
) -> None:
    rate = float(bound.rstrip("%")) / 100
    assert (1 - rate) ** responses == pytest.approx(0.05, abs=0.01)
    [found] = preflight._reward_findings([[0.0] * responses], 0, False)
    assert f"likely below {bound} " in found.text


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus"])
def test_rewards_that_differ_between_problems_pass_where_these_are_compared(
    tmp_path: Path, embedded: tuple[Any, Any], estimator: str
) -> None:
    between = (0.0,) * 4 + (1.0,) * 4
    check_rewards(config(tmp_path, preflight="refuse", estimator=estimator), *embedded, Rewarding(*between))
    with pytest.raises(ConfigError, match="None of 32 responses"):
        check_rewards(config(tmp_path, preflight="refuse", estimator=estimator), *embedded, Rewarding(0.0))


def test_rewards_that_differ_within_a_problem_pass(tmp_path: Path, embedded: tuple[Any, Any]) -> None:
    check_rewards(config(tmp_path, preflight="refuse"), *embedded, Rewarding(0.0, 0.0, 1.0))
    check_rewards(config(tmp_path, preflight="refuse"), *embedded, Rewarding(0.0, 0.0, 0.1))


def test_responses_that_never_end_are_warned_of(tmp_path: Path, embedded: tuple[Any, Any]) -> None:
    with pytest.warns(TetherWarning, match=r"100% of 32 responses were cut off .* \(end token"):
        check_rewards(config(tmp_path, max_response_tokens=1), *embedded, Rewarding(0.0, 1.0))


def test_the_look_at_rewards_leaves_random_numbers_alone(tmp_path: Path, embedded: tuple[Any, Any]) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check_rewards(config(tmp_path), *embedded, make_task("arithmetic"))
    assert torch.equal(torch.rand(3), expected)


def test_the_choice_of_checks_is_no_setting_of_the_run() -> None:
    assert TrainConfig(preflight="off").settings() == TrainConfig().settings()
