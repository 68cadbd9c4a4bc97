"""A server for one run: up with it, gone with it; and which settings go with asynchronous rollouts."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import short_run

from tether.errors import ConfigError, EngineError
from tether.llm import serve_child
from tether.llm.async_training import TaskReward, _settings, _written_ahead
from tether.llm.config import TrainConfig
from tether.llm.methods import TROLL
from tether.llm.preflight import check_before_loading
from tether.llm.rollouts import engine_memory, writes_compactly
from tether.llm.serving import Server, check_port, free_port, serving
from tether.llm.tasks import make_task

# Answers 200 to everything, and has a child of its own.
_HEALTHY = """
import http.server, subprocess, sys
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


def _server(folder: Path, program: str) -> Server:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    return Server([sys.executable, "-c", program, str(port)], url, folder / "log", {})


def _gone(pid: int, seconds: float = 30) -> bool:
    """Whether the process ends in time; it may vanish between any two questions about it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_a_server_answers_inside_the_block_and_is_gone_after_it(tmp_path: Path) -> None:
    server, said = _server(tmp_path, _HEALTHY), []
    with serving(server, said.append):
        child = int((tmp_path / "log").read_text().split()[0])
        assert psutil.pid_exists(child)
    assert _gone(child)
    assert said[0] == f"Starting vLLM at {server.url}; its log: {server.log}"
    assert said[-1].startswith("vLLM answers")


def test_a_server_that_ends_inside_the_block_is_told_of_at_once(tmp_path: Path) -> None:
    server, said = _server(tmp_path, _HEALTHY), Queue[str]()
    with serving(server, said.put):
        child = psutil.Process(int((tmp_path / "log").read_text().split()[0]))
        child.parent().kill()
        lines = [said.get(timeout=30) for _ in range(3)]
    assert lines[-1].startswith("vLLM has ended (exit code 137)."), lines


def test_a_server_is_gone_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), serving(_server(tmp_path, _HEALTHY), lambda _: None):
        1 / 0  # noqa: B018
    assert _gone(int((tmp_path / "log").read_text().split()[0]))


def test_a_server_that_ends_while_it_starts_is_told_by_its_last_line(tmp_path: Path) -> None:
    server = _server(tmp_path, "raise SystemExit('out of memory, as it were')")
    with (
        pytest.raises(EngineError, match=r"exit code 1\). Its last line: 'out of memory, as it were'"),
        serving(server, lambda _: None),
    ):
        pass


def test_a_server_does_not_outlive_a_killed_trainer(tmp_path: Path) -> None:
    child = str(Path(serve_child.__file__))
    trainer = subprocess.Popen([sys.executable, "-c", (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, {child!r}, 'sleep', '601'], stdin=subprocess.PIPE,"
        " start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )], stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert trainer.stdout is not None
    watcher = psutil.Process(int(trainer.stdout.readline()))
    deadline = time.monotonic() + 30
    while not watcher.children():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (server,) = watcher.children()
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    assert _gone(server.pid)
    assert _gone(watcher.pid)


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"vllm_port={port} cannot be used \(Address already in use"):
            check_port(port)
    check_port(port)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_lag": 0}, "max_lag must be at least 1"),
        ({"method": "dppo"}, "trains with method troll or clip, got 'dppo'"),
        ({"estimator": "rloo"}, "estimator grpo; got 'rloo'"),
        ({"kl_stop": 0.1}, "kl_stop=0.1 does not go with"),
        ({"reference_penalty": 0.1}, "reference_penalty=0.1 does not go with"),
        ({"lag": 4}, "set max_lag"),
        ({"lora_rank": 4, "quantization": "nf4"}, "quantization='nf4' does not go with"),
        ({"vllm_port": 8000, "vllm_server": "http://localhost:8000"}, "Give one of the two"),
        ({"rollouts": "vllm", "vllm_port": 8000}, "is of the server that rollouts='vllm-async' starts"),
        ({"rollouts": "vllm", "max_lag": 32}, "max_lag=32 is of rollouts='vllm-async'; got rollouts='vllm'"),
        ({"method": TROLL(support="paper")}, "method.support='paper' invents a probability"),
        ({"method": TROLL(mass=0.5)}, "method.mass=0.5 does not go with"),
    ],
)
def test_settings_that_asynchronous_rollouts_cannot_have_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        short_run.config(tmp_path / "run", **{"rollouts": "vllm-async", **changes})


def test_the_anchor_of_asynchronous_rollouts_is_the_sampler(tmp_path: Path) -> None:
    assert short_run.config(tmp_path / "run", rollouts="vllm-async").settings()["anchor"] == "sampler"


def test_a_busy_server_is_given_the_time_a_response_takes(tmp_path: Path) -> None:
    """After TRL's ten minutes it is asked for it again, from the beginning."""
    config = short_run.config(tmp_path / "run", rollouts="vllm-async")
    assert _settings(config, make_task(config.task), tmp_path)["request_timeout"] > 86_400


@pytest.mark.parametrize(
    ("prompts", "responses", "updates", "max_lag", "under_way"),
    [(16, 8, 8, 8, 80), (64, 8, 8, 4, 112), (8, 8, 8, 4, 8), (4, 4, 1, 1, 16), (2, 8, 4, 1, 8)],
)
def test_no_more_is_written_ahead_than_can_be_learned_from_in_time(
    tmp_path: Path, prompts: int, responses: int, updates: int, max_lag: int, under_way: int
) -> None:
    config = short_run.config(
        tmp_path / "run", rollouts="vllm-async", prompts_per_rollout=prompts, responses_per_prompt=responses,
        updates_per_rollout=updates, max_lag=max_lag, save_every=0, eval_every=0,
    )  # fmt: skip
    ahead = _written_ahead(config)
    assert ahead == {"max_inflight_tasks": under_way, "queue_maxsize": prompts * responses // updates}
    if under_way > max(responses, ahead["queue_maxsize"]):  # the least that an update needs
        in_all = sum(ahead.values()) + 2 * responses  # judged, and waiting for it
        assert in_all == (max_lag - 1) * config.responses_per_update


def test_the_memory_of_a_server_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = short_run.config(tmp_path / "run", rollouts="vllm-async")
    assert engine_memory(config, 10**9) == 4 * 10**9 + 2**30 + int(1.5e9)
    assert engine_memory(short_run.config(tmp_path, rollouts="vllm-async", vllm_server="http://x"), 9) == 0
    monkeypatch.setattr("tether.llm.preflight.available_memory", lambda _: (10**9, "memory"))
    with pytest.raises(ConfigError, match=r"vLLM 2\.58 GB\), and 1 GB of memory are free"):
        check_before_loading(config, make_task("arithmetic"))
    check_before_loading(TrainConfig(device="cpu"), make_task("arithmetic"))


def test_rewards_travel_to_another_process() -> None:
    reward = TaskReward("arithmetic", {"digits": 3})
    assert reward(["374+258="], ["632"], answer=["632"]) == [1.0]
    copied = pickle.loads(pickle.dumps(reward))  # noqa: S301 (our own)
    assert copied(["374+258="], ["633"], answer=["632"]) == [0.0]


@pytest.mark.parametrize(
    ("rollouts", "layers", "compact"),
    [
        ("vllm-async", ["full_attention", "sliding_attention"], True),
        ("vllm-async", ["full_attention", "conv"], False),
        ("compact", ["full_attention"], True),
        ("vllm", ["full_attention"], False),
        ("transformers", ["full_attention"], False),
    ],
)
def test_evaluations_beside_an_asynchronous_engine_are_compact_where_the_model_allows_it(
    tmp_path: Path, rollouts: str, layers: list[str], compact: bool
) -> None:
    text = SimpleNamespace(layer_types=layers)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    assert writes_compactly(short_run.config(tmp_path, rollouts=rollouts), model) == compact
