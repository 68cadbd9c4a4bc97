"""A server that answers as ``vllm serve`` does, from the tiny model: `fake_vllm.py PORT`, or in a thread.

It has the weights it was told to read, but for those it is told to keep (`keeps`), and rounds logits as it
is told to (`step`).
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_language_model import make_tiny_model


class FakeVLLM(ThreadingHTTPServer):
    """Listens on a port of this machine; 0 for a free one."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Answers)
        self.model = make_tiny_model().eval()
        self.lock, self.random = threading.Lock(), torch.Generator().manual_seed(1)
        self.keeps, self.step = "", 0.0
        self.asked: list[tuple[str, dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def reload(self, folder: str) -> None:
        weights = load_file(Path(folder) / "model.safetensors")
        kept = {name for name in weights if self.keeps and name.startswith(self.keeps)}
        own = self.model.state_dict()
        self.model.load_state_dict({name: own[name] if name in kept else weights.get(name, own[name])
                                    for name in own})  # fmt: skip

    @torch.no_grad()
    def complete(self, index: int, prompt: list[int], asked: dict[str, Any]) -> dict[str, Any]:
        drawn: list[int] = []
        top = []
        for _ in range(asked["max_tokens"]):
            logits = self.model(torch.tensor([prompt + drawn])).logits[0, -1].float()
            if self.step:
                logits = (logits / self.step).round() * self.step
            if asked.get("top_k", 0) > 0:  # as vLLM in torch: ids like the last one stay, too
                logits[logits < logits.topk(asked["top_k"]).values[-1]] = -torch.inf
            log_probs = (logits / asked["temperature"]).log_softmax(-1)
            drawn.append(int(torch.multinomial(log_probs.exp(), 1, generator=self.random)))
            ids = dict.fromkeys([drawn[-1], *log_probs.topk(asked["logprobs"]).indices.tolist()])
            top.append({f"token_id:{i}": max(float(log_probs[i]), -9999.0) for i in ids})
        own = [one[f"token_id:{i}"] for one, i in zip(top, drawn, strict=True)]
        return {"index": index, "token_ids": drawn,
                "logprobs": {"token_logprobs": own, "top_logprobs": top}}  # fmt: skip


class _Answers(BaseHTTPRequestHandler):
    server: FakeVLLM

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = json.loads(text) if text else {}
        path = self.path.partition("?")[0]
        self.server.asked.append((path, asked))
        answer: dict[str, Any] = {}
        with self.server.lock:
            if path == "/collective_rpc":
                self.server.reload(asked["kwargs"]["weights_path"])
            elif path == "/v1/completions":
                prompts = asked["prompt"] if isinstance(asked["prompt"][0], list) else [asked["prompt"]]
                answer["choices"] = [
                    self.server.complete(index, prompt, asked) for index, prompt in enumerate(prompts)
                ]
        self._send(answer)

    def do_GET(self) -> None:
        self._send({
            "vllm_config": {"model_config": {"dtype": "torch.float32"}, "device_config": {}},
            "data": [{"id": "tiny"}],
        })  # fmt: skip

    def _send(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def fake_vllm() -> Iterator[FakeVLLM]:
    """One in a thread of this process."""
    with FakeVLLM() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    FakeVLLM(int(sys.argv[1])).serve_forever()
