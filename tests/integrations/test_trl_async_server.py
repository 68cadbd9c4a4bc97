"""What is asked of an inference server: records with its answers, and weights through a folder."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trl.experimental.async_grpo.async_rollout_worker import (
    TurnRecord,
    _AsyncRolloutLoop,
    _chain_to_sequences,
)

from tether.errors import ConfigError, EngineError, InvalidInputError, TetherError
from tether.integrations.trl_async_records import SamplerRecords
from tether.integrations.trl_async_worker import RecordingLoop, check_records, read_choice, record
from tether.integrations.trl_folder import FolderWeightTransfer, VLLMServer
from tether.integrations.vllm_server import SilentServerError

_CHOICE = {
    "token_ids": [7, 3],
    "logprobs": {
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [
            {"token_id:7": -0.5, "token_id:1": -1.5},
            {"token_id:3": -3.0, "token_id:2": -0.1, "token_id:9": -9999.0},
        ],
    },
}


def _turn(
    choice: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], list[int], list[float]]:
    """One turn of TRL's loop with an answer of the server's; also what it was asked."""
    asked: dict[str, Any] = {}

    async def post(_self: Any, path: str, payload: dict[str, Any], *_: Any) -> dict[str, Any]:
        asked.update(payload, path=path)
        return {"choices": [choice]}

    async def once(make: Callable[[], Any], **_: Any) -> Any:
        return await make()

    monkeypatch.setattr(_AsyncRolloutLoop, "_post", post)
    loop = RecordingLoop.__new__(RecordingLoop)
    loop._report_top_k, loop._retry, loop.lora_name, loop.model_name = 5, once, None, "tiny"  # type: ignore[method-assign]
    loop.max_tokens, loop.temperature, loop.top_p, loop.top_k, loop.min_p = 8, 1.0, 1.0, 0, None
    loop.repetition_penalty, loop.request_timeout = 1.0, 9
    ids, log_probs = asyncio.run(loop._generate_one_turn([4, 4]))
    return asked, ids, log_probs


def test_records_follow_their_tokens_over_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through TRL's own code: an answer, two turns with a tool between, scoring."""
    asked, ids, log_probs = _turn(_CHOICE, monkeypatch)
    assert (asked["path"], asked["logprobs"], asked["return_tokens_as_token_ids"]) == (
        "/v1/completions",
        5,
        True,
    )
    first = TurnRecord([4, 4], ids, log_probs)
    second = TurnRecord([4, 4, 7, 3, 8, 8], ids, log_probs)
    sequences, _ = _chain_to_sequences([first, second], "one", 4)

    async def scored(_self: Any, group: Any) -> list[Any]:
        return [
            SimpleNamespace(old_log_probs=np.asarray(s.old_log_probs)) for s in group.completions_sequences[0]
        ]

    monkeypatch.setattr(_AsyncRolloutLoop, "_score_group", scored)
    loop = RecordingLoop.__new__(RecordingLoop)
    (sample,) = asyncio.run(loop._score_group(SimpleNamespace(completions_sequences=[sequences])))
    records: SamplerRecords = sample.old_log_probs
    assert records.positions.tolist() == [2, 3, 6, 7]
    assert records.length == 8
    assert records.own.tolist() == pytest.approx([-0.5, -3.0, -0.5, -3.0])
    assert records.ids.tolist() == [[7, 1, -1], [3, 2, 9], [7, 1, -1], [3, 2, 9]]
    policy = records.policy(
        torch.tensor([4, 4, 7, 3, 8, 8, 7, 3]), torch.tensor([0, 0, 1, 1, 0, 0, 1, 1]),
        truncated=False, vocabulary_size=29,
    )  # fmt: skip
    assert policy.log_probs.tolist() == pytest.approx([-0.5, -3.0, -0.5, -3.0])
    tails = 1 - np.exp([[-0.5, -1.5], [-3.0, -0.1]]).sum(-1)
    assert policy.support.log_tail.exp().tolist() == pytest.approx([*tails, *tails], rel=1e-5)


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        ({"top_logprobs": None}, "reported none"),
        ({"top_logprobs": [{"token_id:7": -0.5}, {}]}, "reported none"),
        ({"top_logprobs": [{" the": -0.5}, {"token_id:3": -0.1}]}, "by its text"),
        ({"top_logprobs": [{"token_id:7": -0.5}, {"token_id:2": -0.1}]}, "position 1: the engine drew id 3"),
    ],
)
def test_answers_without_records_are_refused(logprobs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_choice({"token_ids": [7, 3], "logprobs": logprobs}, 5)


class _OwnLoop(_AsyncRolloutLoop):
    pass


class _OwnRecordingLoop(RecordingLoop):
    pass


@pytest.mark.parametrize(
    ("loop", "run"), [(_AsyncRolloutLoop, RecordingLoop), (_OwnRecordingLoop, _OwnRecordingLoop)]
)
def test_a_worker_is_told_to_record(loop: Any, run: Any) -> None:
    worker: Any = SimpleNamespace(_loop_cls=loop, _loop_kwargs={}, start=None, check_health=None, stop=None)
    check_records(worker)
    record(worker, 64, lambda: None)
    assert worker._loop_cls is run
    assert worker._loop_kwargs == {"report_top_k": 64}


def test_a_worker_whose_own_loop_does_not_record_is_refused() -> None:
    """It would lose the loop: what it does besides, and silently."""
    with pytest.raises(ConfigError, match=r"runs _OwnLoop, .* Derive that from .*RecordingLoop"):
        check_records(SimpleNamespace(_loop_cls=_OwnLoop))  # type: ignore[arg-type]


class _Server(BaseHTTPRequestHandler):
    seen: list[tuple[str, bytes]]
    status: dict[str, int]
    device = b"cuda"
    body = b""  # of every answer, if there is one

    def health(self) -> int:
        return 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.seen.append((self.path, body))
        self.send_response(self.status.get(self.path, 200))
        self.end_headers()
        self.wfile.write(self.body or b"out of memory")

    def do_GET(self) -> None:
        self.seen.append((self.path, b""))
        self.send_response(self.health() if self.path == "/health" else 200)
        self.end_headers()
        settings = b'{"vllm_config": {"device_config": {"device_type": "%s"}}}' % self.device
        self.wfile.write(self.body or settings)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Any]:
    handler = type("Handler", (_Server,), {"seen": [], "status": {}})
    with HTTPServer(("127.0.0.1", 0), handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield SimpleNamespace(
            handler=handler,
            url=f"http://127.0.0.1:{made.server_port}",
            seen=handler.seen,
            status=handler.status,
        )
        made.shutdown()
        thread.join()


def test_a_server_reads_whole_files_between_pause_and_resume(server: Any, tmp_path: Path) -> None:
    vllm = VLLMServer(server.url)
    transfer = FolderWeightTransfer(tmp_path / "w", vllm.reload, pause=vllm.pause, resume=vllm.resume)
    transfer.init_weight_transfer()
    weights = {"lm_head.weight": torch.arange(6.0).view(2, 3).t(), "b": torch.ones(2, dtype=torch.bfloat16)}
    for _ in range(2):
        transfer.pause()
        transfer.send_weights(iter(weights.items()))
        transfer.resume()
    transfer.destroy()
    paths = [path for path, _ in server.seen]
    assert paths == ["/pause?mode=keep", "/collective_rpc", "/reset_prefix_cache", "/resume"] * 2
    assert str(tmp_path / "w").encode() in server.seen[1][1]
    assert [file.name for file in (tmp_path / "w").iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "w" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in weights.items())


@pytest.mark.parametrize(
    ("status", "message"), [(404, "VLLM_SERVER_DEV_MODE=1"), (500, r"\(500\): out of memory")]
)
def test_a_server_that_cannot_is_named(server: Any, tmp_path: Path, status: int, message: str) -> None:
    server.status["/collective_rpc"] = status
    transfer = FolderWeightTransfer(tmp_path, VLLMServer(server.url).reload)
    with pytest.raises(TetherError, match=message):
        transfer.send_weights(iter([("a", torch.ones(1))]))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_tied_head_that_a_cpu_would_keep_is_refused(server: Any, tmp_path: Path, device: str) -> None:
    server.handler.device = device.encode()
    transfer = FolderWeightTransfer(tmp_path, VLLMServer(server.url).reload)
    transfer.send_weights(iter([("lm_head.weight", torch.ones(1))]))
    server.seen.clear()
    if device == "cuda":
        transfer.send_weights(iter([("a", torch.ones(1))]))
        return
    with pytest.raises(TetherError, match="does not reload a head that is tied"):
        transfer.send_weights(iter([("a", torch.ones(1))]))
    assert [path for path, _ in server.seen] == ["/server_info?config_format=json"]


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"[]", b'{"data": []}', b'{"choices": []}'])
@pytest.mark.parametrize("ask", ["model_name", "complete"])
def test_something_else_that_answers_there_is_named(server: Any, ask: str, body: bytes) -> None:
    server.handler.body = body
    found = VLLMServer(server.url)
    with pytest.raises(EngineError, match=r"is no vLLM server: to /v1/\w+ it said .* Give the address"):
        found.model_name() if ask == "model_name" else found.complete({}, 5.0)


def test_a_server_that_is_not_there_is_named() -> None:
    """At once, and not as if it had been waited for."""
    with pytest.raises(EngineError, match=r"did not answer /pause \(ConnectionError"):
        VLLMServer("http://127.0.0.1:9").pause()


def test_a_proxy_is_not_asked_for_the_server(monkeypatch: pytest.MonkeyPatch, server: Any) -> None:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    VLLMServer(server.url).check()
    assert [path for path, _ in server.seen] == ["/health", "/is_sleeping"]


def test_a_server_that_loads_its_model_is_waited_for(monkeypatch: pytest.MonkeyPatch, server: Any) -> None:
    monkeypatch.setattr("tether.integrations.vllm_server._LOADING", 0.01)
    statuses = [503, 503]
    monkeypatch.setattr(server.handler, "health", lambda _: statuses.pop() if statuses else 200)
    VLLMServer(server.url).wait(30.0)
    assert server.seen == [("/health", b"")] * 3
    with pytest.raises(EngineError, match=r"did not answer /health .* given 0.05 s .*vllm_server_timeout"):
        VLLMServer("http://127.0.0.1:9").wait(0.05)


@pytest.mark.parametrize(
    ("status", "said", "message"),
    [
        (
            404,
            "The model `tiny` does not exist.",
            "`tiny` does not exist.* It serves 'served' and was asked for 'tiny': .*--served-model-name tiny",
        ),
        (
            400,
            "Requested sample logprobs of 64, which is greater than max allowed: 20",
            r"\(400\).* max allowed: 20.* asked for logprobs=64: start it with --max-logprobs -1",
        ),
        (400, "The prompt is too long", r"\(400\): .*The prompt is too long"),
    ],
)
def test_a_request_that_a_server_refuses_is_told_in_its_own_words(
    server: Any, status: int, said: str, message: str
) -> None:
    server.status["/v1/completions"] = status
    server.handler.body = json.dumps({"error": {"message": said}, "data": [{"id": "served"}]}).encode()
    with pytest.raises(EngineError, match=message) as refused:
        VLLMServer(server.url).complete({"model": "tiny", "logprobs": 64}, 5.0)
    assert not isinstance(refused.value, SilentServerError)
    assert "VLLM_SERVER_DEV_MODE" not in str(refused.value)
    assert "old weights" not in str(refused.value)


def test_a_transfer_that_is_cut_off_leaves_the_weights_before_it(tmp_path: Path) -> None:
    transfer = FolderWeightTransfer(tmp_path, lambda _: None)
    transfer.send_weights(iter([("a", torch.zeros(2))]))

    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        transfer.send_weights(breaks())
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert load_file(tmp_path / "model.safetensors")["a"].tolist() == [0, 0]
    with pytest.raises(TetherError, match="no weights to transfer"):
        transfer.send_weights(iter([]))


def test_weights_are_written_as_the_engine_computes_with_them(tmp_path: Path) -> None:
    """What it would round on reading is half the file."""
    sent = {"a": torch.rand(64, 64), "model.embed_tokens.weight": torch.rand(8, 4)}
    FolderWeightTransfer(tmp_path, lambda _: None, untie=True, dtype=torch.bfloat16).send_weights(
        iter(sent.items())
    )
    written = load_file(tmp_path / "model.safetensors")
    head = sent["model.embed_tokens.weight"]
    assert written.keys() == {*sent, "lm_head.weight"}
    for name, weight in {**sent, "lm_head.weight": head}.items():
        assert written[name].equal(weight.bfloat16())


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        FolderWeightTransfer(tmp_path / "file" / "folder", lambda _: None)
