"""New weights for an inference server through a folder that both can see, where there is no NCCL."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from tether.errors import ConfigError, TetherError

_FILE, _HEAD = "model.safetensors", "lm_head.weight"
#: Seconds for what does not grow with the model.
_CONTROL_TIMEOUT = 60


class FolderWeightTransfer:
    """TRL's `WeightTransferProtocol`: writes a safetensors file, then has the engine read it.

    The file appears whole or not at all, so that an engine or a run that is cut off never reads half of one.

    Args:
        folder: where both processes find it under the same path; made if it is missing.
        reload: called with the folder once the weights are there; returns when the engine has them. See
            `VLLMServer`.
        pause, resume: called around each transfer, if the engine can wait.

    Raises:
        ConfigError: a folder that cannot be written to.

    Example:
        >>> import tempfile, torch
        >>> seen = []
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     transfer = FolderWeightTransfer(folder, lambda path: seen.append(sorted(os.listdir(path))))
        ...     transfer.send_weights(iter([("lm_head.weight", torch.ones(2, 2))]))
        >>> seen
        [['model.safetensors']]
    """

    def __init__(
        self,
        folder: str | Path,
        reload: Callable[[Path], None],
        *,
        pause: Callable[[], None] | None = None,
        resume: Callable[[], None] | None = None,
    ) -> None:
        self.folder = Path(folder).resolve()
        self._reload, self._pause, self._resume = reload, pause, resume
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"The folder for weights {self.folder} cannot be made: {error}.") from error
        if not os.access(self.folder, os.W_OK):
            raise ConfigError(f"The folder for weights {self.folder} cannot be written to.")

    def init_weight_transfer(self) -> None:
        """Nothing to set up."""

    def pause(self) -> None:
        """Before new weights."""
        if self._pause is not None:
            self._pause()

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Write what TRL streams and have it read.

        Raises:
            TetherError: no weights at all.
        """
        from safetensors.torch import save_file

        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in iterator}
        if not weights:
            raise TetherError("There are no weights to transfer: every parameter of the model is frozen.")
        unfinished = self.folder / f".{_FILE}.{uuid.uuid4().hex}"
        try:
            save_file(weights, unfinished)
            os.replace(unfinished, self.folder / _FILE)
        finally:
            unfinished.unlink(missing_ok=True)
        self._reload(self.folder)

    def resume(self) -> None:
        """After them."""
        if self._resume is not None:
            self._resume()

    def destroy(self) -> None:
        """Nothing to release; the last weights stay."""


class VLLMServer:
    """What a folder transfer asks of a ``vllm serve`` in development mode, over HTTP.

    Args:
        url: of the server, such as ``http://localhost:8000``.
        timeout: seconds for a reload.

    Example:
        ```python
        server = VLLMServer("http://localhost:8000")
        transfer = FolderWeightTransfer("weights", server.reload, pause=server.pause, resume=server.resume)
        ```
    """

    def __init__(self, url: str, *, timeout: float = 1800.0) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout

    def reload(self, folder: Path) -> None:
        """Have the server read the weights in a folder, and forget what it computed with others.

        Raises:
            TetherError: a server that is not there, does not do it, or would go on with an old head.
        """
        self._refuse_tied_head_on_cpu(folder)
        request = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._post("/collective_rpc", self.timeout, json=request)
        self._post("/reset_prefix_cache", _CONTROL_TIMEOUT)

    def pause(self) -> None:
        """Have it hold its requests, without dropping any.

        Raises:
            TetherError: as `reload`.
        """
        self._post("/pause", _CONTROL_TIMEOUT, params={"mode": "keep"})

    def resume(self) -> None:
        """Have it go on.

        Raises:
            TetherError: as `reload`.
        """
        self._post("/resume", _CONTROL_TIMEOUT)

    def _refuse_tied_head_on_cpu(self, folder: Path) -> None:
        """On a CPU vLLM keeps a packed copy of a head tied to the embeddings, and reloads all but that."""
        from safetensors import safe_open

        with safe_open(folder / _FILE, framework="pt") as file:
            if _HEAD in file.keys():  # noqa: SIM118 (no mapping)
                return
        answer = self._ask("GET", "/server_info", _CONTROL_TIMEOUT, params={"config_format": "json"})
        device = answer.json().get("vllm_config", {}).get("device_config", {}).get("device_type")
        if device == "cpu":
            raise TetherError(
                f"The vLLM server at {self.url} runs on a CPU, where it does not reload a head that is tied "
                f"to the embeddings, and the weights have no {_HEAD}: it would go on with the old one. "
                "Untie the head (tie_word_embeddings=False), serve on an accelerator, or give "
                "FolderWeightTransfer a reload of your own."
            )

    def _post(self, path: str, timeout: float, **request: Any) -> None:
        self._ask("POST", path, timeout, **request)

    def _ask(self, method: str, path: str, timeout: float, **request: Any) -> Any:
        import requests

        try:
            answer = requests.request(method, f"{self.url}{path}", timeout=timeout, **request)
        except requests.RequestException as error:
            raise TetherError(
                f"The vLLM server at {self.url} did not answer {path} within {timeout:g} s "
                f"({type(error).__name__}: {error}). Is it running?"
            ) from error
        if answer.status_code == 404:
            raise TetherError(
                f"The vLLM server at {self.url} does not know {path}. Start it with VLLM_SERVER_DEV_MODE=1."
            )
        if answer.status_code != 200:
            raise TetherError(
                f"The vLLM server at {self.url} failed at {path} ({answer.status_code}): "
                f"{answer.text[:500]}. It may have the old weights, or some of them: restart it."
            )
        return answer
