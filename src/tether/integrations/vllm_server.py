"""A running ``vllm serve`` over HTTP: new weights, records of a few tokens, and whether it still answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tether.errors import EngineError

WEIGHTS_FILE, HEAD = "model.safetensors", "lm_head.weight"
#: Seconds between two looks at a server that has a long request to answer.
_LOOK_EVERY = 5.0
#: Seconds for all that a server knows of itself.
_INFO = 300.0
#: Seconds between two looks at a server that loads its model.
_LOADING = 1.0
#: No proxy, whatever http_proxy says, which many clusters set: TRL's rollout worker knows of none either.
_DIRECTLY: Any = {"http": None, "https": None, "all": None}


class SilentServerError(EngineError):
    """A server that did not answer in time; it may have a lot to do."""


class VLLMServer:
    """What training asks of a ``vllm serve`` in development mode.

    Args:
        url: of the server, such as ``http://localhost:8000``.
        timeout: seconds for a reload of the weights.
        silence: seconds without an answer after which a server is given up, to anything that does not grow
            with the model.

    Example:
        ```python
        server = VLLMServer("http://localhost:8000")
        transfer = FolderWeightTransfer("weights", server.reload, pause=server.pause, resume=server.resume)
        ```
    """

    def __init__(self, url: str, *, timeout: float = 1800.0, silence: float = 30.0) -> None:
        self.url, self.timeout, self.silence = url.rstrip("/"), timeout, silence

    def wait(self, timeout: float) -> None:
        """Until it answers, which it does not while it loads its model.

        Args:
            timeout: seconds.

        Raises:
            EngineError: it does not answer by then; with why it did not the last time.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._ask("GET", "/health", self.silence)
                return
            except EngineError as error:
                if time.monotonic() >= deadline:
                    raise EngineError(
                        f"{error} It was given {timeout:g} s to load its model: where that takes longer, "
                        "raise vllm_server_timeout."
                    ) from error
            time.sleep(_LOADING)

    def reload(self, folder: Path) -> None:
        """Have the server read the weights in a folder, and forget what it computed with others.

        Raises:
            EngineError: a server that is not there, stops answering while it reads, does not do it, or would
                go on with an old head.
        """
        self._refuse_tied_head_on_cpu(folder)
        request = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._while_it_answers(lambda: self._ask("POST", "/collective_rpc", self.timeout, json=request))
        self._ask("POST", "/reset_prefix_cache", self.silence)

    def pause(self) -> None:
        """Have it hold its requests, without dropping any.

        Raises:
            EngineError: as `reload`.
        """
        self._ask("POST", "/pause", self.silence, params={"mode": "keep"})

    def resume(self) -> None:
        """Have it go on.

        Raises:
            EngineError: as `reload`.
        """
        self._ask("POST", "/resume", self.silence)

    def check(self, silence: float | None = None) -> None:
        """See whether its engine answers; between two steps of it, however many requests wait.

        Args:
            silence: seconds, if it has been silent for some already.

        Raises:
            EngineError: it does not, within `silence` seconds and a quarter.
        """
        silence = self.silence if silence is None else silence
        began = time.monotonic()
        self._ask("GET", "/health", silence)
        left = silence - (time.monotonic() - began)
        self._ask("GET", "/is_sleeping", max(left, silence / 4))

    def complete(self, payload: dict[str, Any], timeout: float) -> dict[str, Any]:
        """An answer to ``/v1/completions``.

        Raises:
            SilentServerError: none in time.
            EngineError: as `reload`; another model than it serves, or more log-probabilities than it reports.
        """
        return self._read(self._ask("POST", "/v1/completions", timeout, json=payload), "choices")

    def model_name(self) -> str:
        """What requests have to call its model.

        Raises:
            EngineError: as `reload`.
        """
        name: str = self._read(self._ask("GET", "/v1/models", self.silence), "data")["data"][0]["id"]
        return name

    def info(self) -> dict[str, Any]:
        """The settings it runs with.

        Raises:
            EngineError: as `reload`.
        """
        # It also looks at the whole machine then, which may take a minute.
        answer = self._ask("GET", "/server_info", _INFO, params={"config_format": "json"})
        found: dict[str, Any] = self._read(answer).get("vllm_config", {})
        return found

    def _refuse_tied_head_on_cpu(self, folder: Path) -> None:
        """On a CPU vLLM keeps a packed copy of a head tied to the embeddings, and reloads all but that."""
        from safetensors import safe_open

        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            if HEAD in file.keys():  # noqa: SIM118 (no mapping)
                return
        if self.info().get("device_config", {}).get("device_type") == "cpu":
            raise EngineError(
                f"The vLLM server at {self.url} runs on a CPU, where it does not reload a head that is tied "
                f"to the embeddings, and the weights have no {HEAD}: it would go on with the old one. "
                "Serve a folder written by tether.integrations.trl_folder.write_for_vllm and pass "
                "FolderWeightTransfer(..., untie=True), or serve on an accelerator."
            )

    def _while_it_answers(self, ask: Callable[[], Any]) -> None:
        """Wait for a long request, and meanwhile see whether the server still answers short ones."""
        done, raised = threading.Event(), []

        def run() -> None:
            try:
                ask()
            except BaseException as error:  # noqa: BLE001 (raised below, where it is waited for)
                raised.append(error)
            done.set()

        threading.Thread(target=run, daemon=True).start()
        while not done.wait(_LOOK_EVERY):
            self._ask("GET", "/health", self.silence)
        if raised:
            raise raised[0]

    def _read(self, answer: Any, entry: str | None = None) -> dict[str, Any]:
        """What an answer says, with at least one thing in that entry."""
        try:
            said = answer.json()
        except ValueError:
            said = None
        if isinstance(said, dict) and (entry is None or said.get(entry)):
            return said
        raise EngineError(
            f"What answers at {self.url} is no vLLM server: to {answer.request.path_url} it said "
            f"{answer.text[:200]!r}. Give the address of `vllm serve`."
        )

    def _ask(self, method: str, path: str, timeout: float, **request: Any) -> Any:
        import requests

        try:
            answer = requests.request(
                method, f"{self.url}{path}", timeout=timeout, proxies=_DIRECTLY, **request
            )
        except requests.RequestException as error:
            silent = isinstance(error, requests.Timeout)
            within = f" within {timeout:g} s" if silent else ""
            raise (SilentServerError if silent else EngineError)(
                f"The vLLM server at {self.url} did not answer {path}{within} "
                f"({type(error).__name__}: {error}). See whether it runs."
            ) from error
        if answer.status_code != 200:
            raise EngineError(
                f"The vLLM server at {self.url} failed at {path} ({answer.status_code}): "
                f"{answer.text[:500]}. {self._remedy(path, answer, request.get('json'))}"
            )
        return answer

    def _remedy(self, path: str, answer: Any, asked: Any) -> str:
        """For an answer that says no."""
        if path == "/v1/completions" and answer.status_code == 404 and "does not exist" in answer.text:
            return (
                f"It serves {self.model_name()!r} and was asked for {asked['model']!r}: start it with "
                f"--served-model-name {asked['model']}."
            )
        if path == "/v1/completions" and "logprobs" in answer.text:
            return f"It was asked for logprobs={asked['logprobs']}: start it with --max-logprobs -1."
        if path.startswith("/v1/"):
            return "See what it printed last."
        if answer.status_code == 404:
            return "Start it with VLLM_SERVER_DEV_MODE=1."
        return "It may have the old weights, or some of them: restart it."
