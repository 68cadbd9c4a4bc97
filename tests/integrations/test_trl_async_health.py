"""A server without the weights it was given, and servers and workers that stop: each is named."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from async_rollouts import WeightsInProcess
from fake_vllm import fake_vllm
from tiny_language_model import make_prompts, make_tiny_model, make_tokenizer
from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig

from tether.errors import ConfigError, EngineError, StaleSamplerError, TetherWarning
from tether.integrations.trl_async import AsyncClipTrainer, AsyncTROLLConfig, AsyncTROLLTrainer
from tether.integrations.trl_async_records import CheckedQueue
from tether.integrations.trl_async_worker import record
from tether.integrations.trl_folder import FolderWeightTransfer, VLLMServer
from tether.integrations.vllm_server import SilentServerError


def count_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(letter.isdigit() for letter in text)) for text in completions]


def make_served(folder: Path, url: str, worker: Any = None, **settings: Any) -> AsyncTROLLTrainer:
    """A trainer with TRL's own rollout worker, or another, for a server at the address."""
    server = VLLMServer(url, silence=5.0)
    arguments: dict[str, Any] = {
        "output_dir": str(folder / "out"), "use_cpu": True, "bf16": False, "report_to": "none",
        "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "token_budget": 0,
        "per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 4, "max_staleness": 8,
        "learning_rate": 1e-2, "gradient_checkpointing": False, "max_completion_length": 6,
        "vllm_server_base_url": url, "troll_top_k": 6, **settings,
    }  # fmt: skip
    model = make_tiny_model()
    model.config._name_or_path = "tiny"
    return AsyncTROLLTrainer(
        model=model, reward_funcs=count_letters, args=AsyncTROLLConfig(**arguments),
        train_dataset=make_prompts(), processing_class=make_tokenizer(), rollout_worker=worker,
        weight_transfer=FolderWeightTransfer(folder / "served", server.reload, pause=server.pause,
                                             resume=server.resume, untie=True),
    )  # fmt: skip


@pytest.fixture
def pretend_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL asks for both when it makes a worker, which these tests do not start."""
    for name in ("is_vllm_available", "is_aiohttp_available"):
        monkeypatch.setattr(async_rollout_worker, name, lambda: True)


def _move(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


@pytest.mark.parametrize("keeps", ["", "lm_head", "model.layers"])
@pytest.mark.usefixtures("pretend_vllm")
def test_a_server_is_asked_whether_it_has_the_weights(tmp_path: Path, keeps: str) -> None:
    with fake_vllm() as server:
        trainer = make_served(tmp_path, server.url)
        before = {name: value for name, value in vars(trainer).items() if name.startswith("_step_")}
        assert "_step_forward_tokens" in before
        trainer._sync_weight()
        # What TRL counts of a step's training data is without the check's contexts.
        assert {name: getattr(trainer, name) for name in before} == before
        assert not trainer._metrics["train"]["trust_region/sampler_mismatch"]
        server.keeps = keeps
        _move(trainer.model)
        trainer.state.global_step = 3
        trainer.rollout_queue.latest.append(torch.arange(9))
        if keeps:
            with pytest.raises(StaleSamplerError, match="After the transfer of the weights of step 3"):
                trainer._sync_weight()
            return
        trainer._sync_weight()
    (found,) = trainer._metrics["train"]["trust_region/sampler_mismatch"]
    assert found < 1e-6
    asked = [body for path, body in server.asked if path == "/v1/completions"]
    assert [(body["max_tokens"], body["logprobs"], body["model"]) for body in asked] == [(1, 6, "tiny")] * 2


@pytest.mark.filterwarnings("error::tether.errors.TetherWarning")
@pytest.mark.usefixtures("pretend_vllm")
def test_a_first_token_that_is_certain_is_no_measure_of_the_others(tmp_path: Path) -> None:
    """As a reasoning model's is: what arithmetic does elsewhere is then no reason to warn or to stop."""
    with fake_vllm() as server:
        trainer = make_served(tmp_path, server.url)
        trainer.engine_dtype = torch.bfloat16
        check = trainer._transfer_check
        differences = iter([1e-5, 0.09, 0.14, 0.02])
        check._difference = lambda answers: next(differences)
        for step in range(4):
            trainer.state.global_step = step
            if step:
                trainer.rollout_queue.latest.append(torch.arange(9))
            trainer._sync_weight()
    assert trainer._metrics["train"]["trust_region/sampler_mismatch"] == [0.09, 0.14, 0.02]


@pytest.mark.usefixtures("pretend_vllm")
def test_all_processes_judge_by_what_one_of_them_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not talk to the server takes over its precision and the difference, and stops as well."""
    sent: list[Any] = []
    with fake_vllm() as server:
        trainer = make_served(tmp_path, server.url)
        check = trainer._transfer_check
        monkeypatch.setattr(
            "tether.integrations.trl_async_check.broadcast_object_list",
            lambda objects, from_process: sent.extend(objects) or objects,
        )
        monkeypatch.setattr(check, "_difference", lambda answers: 0.0035)  # of float32, but not of bfloat16
        with pytest.raises(StaleSamplerError, match=r"differ from the trainer's by 0.0035"):
            check.after_transfer([torch.arange(9)])
    assert trainer.engine_dtype == torch.float32
    trainer.engine_dtype, heard = None, iter(sent)
    monkeypatch.setattr(type(trainer.accelerator), "is_main_process", False)
    monkeypatch.setattr(
        "tether.integrations.trl_async_check.broadcast_object_list", lambda *_, **__: [next(heard)]
    )
    monkeypatch.setattr(check, "_difference", lambda answers: 0.0)
    with pytest.raises(StaleSamplerError, match=r"differ from the trainer's by 0.0035"):
        check.after_transfer([])


@pytest.mark.usefixtures("pretend_vllm")
def test_ids_as_likely_as_the_last_one_kept_are_reported_too(tmp_path: Path) -> None:
    """Which vLLM keeps, and half precision makes many of: none of what sampling keeps may be missing."""
    with fake_vllm() as server:
        server.step = 0.25
        trainer = make_served(tmp_path, server.url, top_k=6, troll_sampler_tolerance=1.0)
        trainer._sync_weight()
        (asked,) = [body for path, body in server.asked if path == "/v1/completions"]
    assert asked["logprobs"] == trainer.rollout_worker._loop_kwargs["report_top_k"] == 12


@pytest.mark.usefixtures("pretend_vllm")
def test_an_infinite_tolerance_asks_nothing(tmp_path: Path) -> None:
    with fake_vllm() as server:
        trainer = make_served(tmp_path, server.url, troll_sampler_tolerance=float("inf"))
        trainer._sync_weight()
        assert "/v1/completions" not in [path for path, _ in server.asked]


def make_worker(url: str) -> Any:
    """TRL's, with nothing but what it needs."""
    return async_rollout_worker.AsyncRolloutWorker(
        model_name="tiny", dataset=make_prompts(), reward_funcs=[count_letters],
        processing_class=make_tokenizer(), eos_token_ids=[28], vllm_server_url=url,
    )  # fmt: skip


@pytest.mark.usefixtures("pretend_vllm")
def test_the_server_is_asked_with_the_settings_of_a_worker_of_ones_own(tmp_path: Path) -> None:
    """Those that it was not given are TRL's."""
    with fake_vllm() as server:
        make_served(tmp_path, server.url, make_worker(server.url))._sync_weight()
        (asked,) = [body for path, body in server.asked if path == "/v1/completions"]
    assert (asked["temperature"], asked["top_p"], asked["top_k"]) == (1.0, 1.0, 0)


class _OwnLoop(async_rollout_worker._AsyncRolloutLoop):
    pass


@pytest.mark.usefixtures("pretend_vllm")
def test_a_worker_that_would_lose_its_own_loop_is_refused(tmp_path: Path) -> None:
    worker = make_worker("http://127.0.0.1:9")
    worker._loop_cls = _OwnLoop
    with pytest.raises(ConfigError, match="runs _OwnLoop"):
        make_served(tmp_path, "http://127.0.0.1:9", worker)


@pytest.mark.usefixtures("pretend_vllm")
def test_only_a_server_that_is_silent_counts_as_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_vllm() as server:
        trainer = make_served(tmp_path, server.url)
        monkeypatch.setattr(VLLMServer, "complete", _refuse_by(EngineError("It serves another model.")))
        with pytest.raises(EngineError, match="It serves another model"):
            trainer._sync_weight()
        monkeypatch.setattr(VLLMServer, "complete", _refuse_by(SilentServerError("too late")))
        with pytest.warns(TetherWarning, match="too busy to be asked"):
            trainer._sync_weight()


def _refuse_by(error: Exception) -> Callable[..., None]:
    def refuse(*_: Any) -> None:
        raise error

    return refuse


@pytest.mark.usefixtures("pretend_vllm")
def test_a_server_is_waited_for_before_the_first_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the settings say; what is not there later is named at once."""
    waited = []
    real = VLLMServer.wait
    monkeypatch.setattr(
        VLLMServer, "wait", lambda self, timeout: (waited.append(timeout), real(self, timeout))
    )
    with fake_vllm() as server:
        trainer = make_served(tmp_path, server.url, vllm_server_timeout=77.0)
        for _ in range(2):
            trainer._sync_weight()
    assert waited == [77.0]


@pytest.mark.usefixtures("pretend_vllm")
def test_settings_are_trls_where_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    on_cpu = functools.partial(AsyncGRPOConfig, use_cpu=True, bf16=False, report_to="none")
    monkeypatch.setattr("tether.integrations.trl_async_base.AsyncGRPOConfig", on_cpu)
    model = make_tiny_model()
    model.config._name_or_path = "somewhere/tiny"
    trainer = AsyncClipTrainer(
        model, count_letters, train_dataset=make_prompts(), processing_class=make_tokenizer(),
        weight_transfer=WeightsInProcess(), support_top_k=6,
    )  # fmt: skip
    assert trainer.args.output_dir == "tiny-AsyncGRPO"
    with pytest.raises(ConfigError, match=r"'repetition_penalty': 1.1.* changes every log-probability"):
        AsyncClipTrainer(model, count_letters, on_cpu("out", repetition_penalty=1.1), support_top_k=6)


# ---------------------------------------------------------------------- servers that stop


@pytest.fixture
def stopped_server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server's address, and its process, which sleeps."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("ask", ["check", "pause", "resume"])
def test_a_server_that_sleeps_is_named(stopped_server: tuple[str, subprocess.Popen[bytes]], ask: str) -> None:
    url, process = stopped_server
    began = time.monotonic()
    with pytest.raises(EngineError, match=rf"{url} did not answer /\w+ within 0.5 s"):
        getattr(VLLMServer(url, silence=0.5), ask)()
    assert time.monotonic() - began < 5
    process.kill()
    process.wait()
    with pytest.raises(EngineError, match="did not answer"):
        getattr(VLLMServer(url, silence=0.5), ask)()


def test_a_server_that_sleeps_while_it_reads_weights_is_named(
    monkeypatch: pytest.MonkeyPatch, stopped_server: tuple[str, subprocess.Popen[bytes]]
) -> None:
    monkeypatch.setattr("tether.integrations.vllm_server._LOOK_EVERY", 0.1)
    server = VLLMServer(stopped_server[0], timeout=600, silence=0.5)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"did not answer /health within 0.5 s"):
        server._while_it_answers(lambda: server._ask("POST", "/collective_rpc", 600))
    assert time.monotonic() - began < 10


def test_what_a_reload_raises_reaches_the_caller() -> None:
    def fails() -> None:
        raise EngineError("no memory")

    with pytest.raises(EngineError, match="no memory"):
        VLLMServer("http://127.0.0.1:9")._while_it_answers(fails)


# ---------------------------------------------------------------------- workers that stop


def _worker(**changes: Any) -> Any:
    def nothing(*_: Any) -> None:
        pass

    alive = SimpleNamespace(pid=7, exitcode=None, is_alive=lambda: True, kill=nothing, join=nothing)
    healthy = {
        "_loop_cls": async_rollout_worker._AsyncRolloutLoop, "_loop_kwargs": {},
        "start": nothing, "stop": nothing, "check_health": nothing, "_process": alive,
    }  # fmt: skip
    return SimpleNamespace(**{**healthy, **changes})


def _refuse(text: str) -> Callable[..., None]:
    def refuse(*_: Any) -> None:
        raise EngineError(text) if text.startswith("The vLLM") else RuntimeError(text)

    return refuse


@pytest.mark.parametrize(
    ("changes", "server", "message"),
    [
        ({}, _refuse("The vLLM server is silent"), "The vLLM server is silent"),
        ({"check_health": _refuse("heartbeat stale")}, lambda: None, "worker failed: heartbeat stale"),
        ({"check_health": _refuse("timeout")}, _refuse("The vLLM server is silent"), "server is silent"),
        (
            {"_process": SimpleNamespace(pid=7, exitcode=-9, is_alive=lambda: False)},
            lambda: None,
            r"process 7 has ended \(exit code -9\)",
        ),
    ],
)
def test_what_stopped_is_named(changes: dict[str, Any], server: Callable[[], None], message: str) -> None:
    worker = _worker(**changes)
    record(worker, 6, server)
    with pytest.raises(EngineError, match=message):
        worker.check_health(60.0)


def test_a_healthy_worker_passes() -> None:
    worker = _worker()
    record(worker, 6, lambda: None)
    worker.check_health(60.0)


def _write_half_a_message(queue: Any, ready: Any) -> None:
    queue._writer._send(b"\x00\x10\x00\x00 the beginning")  # of a message of a million bytes
    ready.set()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_sample_cut_off_by_a_kill_does_not_hang_the_trainer() -> None:
    context = torch.multiprocessing.get_context("fork")
    queue, ready = context.Queue(), context.Event()
    child = context.Process(target=_write_half_a_message, args=(queue, ready))
    worker = _worker(start=child.start, rollout_buffer=queue)
    record(worker, 6, lambda: None)
    worker.start()
    checked = CheckedQueue(queue, {}, truncated=False, vocabulary_size=9)
    raised: list[BaseException] = []

    def read() -> None:
        try:
            checked.get(timeout=30)
        except BaseException as error:  # noqa: BLE001 (looked at below)
            raised.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(30)
    assert not reader.is_alive()
    with pytest.raises(EngineError, match="process that writes rollouts has ended"):
        raise raised[0]


def _wait_to_be_told(told: Any, ready: Any) -> None:
    threading.Thread(target=told.wait, daemon=True).start()  # as TRL's worker does
    time.sleep(0.2)
    ready.set()
    time.sleep(600)


@pytest.mark.parametrize("found", [False, True], ids=["it was killed", "its server does not answer"])
def test_a_worker_that_is_gone_is_not_waited_for(found: bool) -> None:
    """TRL's own `stop` would wait for a thread of the killed process to take notice."""
    context = torch.multiprocessing.get_context("fork")
    told, ready = context.Event(), context.Event()
    child = context.Process(target=_wait_to_be_told, args=(told, ready))
    worker = _worker(_process=child, _stop_event_mp=told)
    worker.stop = functools.partial(async_rollout_worker.AsyncRolloutWorker.stop, worker)
    record(worker, 6, _refuse("The vLLM server is silent"))
    child.start()
    assert ready.wait(30)
    if found:
        with pytest.raises(EngineError, match="server is silent"):
            worker.check_health(60.0)
    else:
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    stopping = threading.Thread(target=worker.stop, daemon=True)
    stopping.start()
    stopping.join(10)
    assert not stopping.is_alive()
    assert worker._process is None
