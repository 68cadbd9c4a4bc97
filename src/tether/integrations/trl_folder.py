"""New weights for an inference server through a folder that both can see, where there is no NCCL."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether.errors import ConfigError, TetherError
from tether.integrations.vllm_server import HEAD, WEIGHTS_FILE, VLLMServer

__all__ = ["FolderWeightTransfer", "VLLMServer", "write_for_vllm"]


class FolderWeightTransfer:
    """TRL's `WeightTransferProtocol`: writes a safetensors file, then has the engine read it.

    The file appears whole or not at all, so that an engine or a run that is cut off never reads half of one.

    Args:
        folder: where both processes find it under the same path; made if it is missing.
        reload: called with the folder once the weights are there; returns when the engine has them. See
            `VLLMServer`.
        pause, resume: called around each transfer, if the engine can wait.
        untie: also write the weight that is tied to the embeddings as a head of its own, for an engine that
            reads a folder of `write_for_vllm`.
        dtype: what the engine computes in, if known: other weights are rounded to it before they are written.
        make: whether to make the folder now; otherwise it has to be there when weights are sent.

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
        untie: bool = False,
        dtype: torch.dtype | None = None,
        make: bool = True,
    ) -> None:
        self._untie, self._dtype = untie, dtype
        self.folder = Path(folder).resolve()
        self._reload, self._pause, self._resume = reload, pause, resume
        if not make:
            return
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
        weights = {
            name: tensor.detach().to("cpu", self._dtype or tensor.dtype).contiguous()
            for name, tensor in iterator
        }
        if not weights:
            raise TetherError("There are no weights to transfer: every parameter of the model is frozen.")
        if self._untie and HEAD not in weights:
            weights[HEAD] = _embeddings(weights).clone()
        _write_whole(weights, self.folder)
        self._reload(self.folder)

    def resume(self) -> None:
        """After them."""
        if self._resume is not None:
            self._resume()

    def destroy(self) -> None:
        """Nothing to release; the last weights stay."""


def write_for_vllm(model: Any, tokenizer: Any, folder: Path) -> Path:
    """A model as a folder for ``vllm serve``, its head untied from the embeddings.

    On a CPU vLLM packs the head when it starts and, where it is tied, never again: a head of its own is
    reloaded with the rest.

    Args:
        model: of Transformers; of a PEFT model the model under the adapters.
        tokenizer: of that model.
        folder: made if it is missing.

    Returns:
        The folder.
    """
    import copy

    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = {
        name.replace(".base_layer", ""): weight.detach().cpu().contiguous()
        for name, weight in model.named_parameters()
        if "lora_" not in name
    }
    if HEAD not in weights:
        weights[HEAD] = _embeddings(weights).clone()
    _write_whole(weights, folder)
    return folder


def _embeddings(weights: dict[str, Tensor]) -> Tensor:
    found = [name for name in weights if name.endswith("embed_tokens.weight")]
    if len(found) != 1:
        raise TetherError(
            f"The head cannot be untied from the embeddings: {len(found)} weights are called "
            "...embed_tokens.weight. Untie it in the model (tie_word_embeddings=False)."
        )
    return weights[found[0]]


def _write_whole(weights: dict[str, Tensor], folder: Path) -> None:
    """The file appears at once, or the one before it stays."""
    from safetensors.torch import save_file

    unfinished = folder / f".{WEIGHTS_FILE}.{uuid.uuid4().hex}"
    try:
        save_file(weights, unfinished, metadata={"format": "pt"})
        os.replace(unfinished, folder / WEIGHTS_FILE)
    finally:
        unfinished.unlink(missing_ok=True)
