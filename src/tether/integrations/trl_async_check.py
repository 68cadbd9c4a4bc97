"""Whether a vLLM server has the weights it was just given: the next tokens of a few contexts, both ways."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

# First, because it says what to install where TRL is missing or another version.
from tether.integrations import trl_async_seam  # noqa: F401

# isort: split
import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop
from trl.experimental.async_grpo.packing import TreeRow

from tether.errors import warn
from tether.integrations.sampler_check import Mismatch, explained
from tether.integrations.sampler_reports import Reported
from tether.integrations.trl_async_records import CheckedRecords, RecordCollator, SamplerRecords
from tether.integrations.trl_async_worker import prompt_ids, read_choice
from tether.integrations.vllm_server import SilentServerError, VLLMServer

#: Prompts of the data set that are asked about before anything was sampled, and the longest context.
_PROMPTS, _LONGEST = 8, 512

_Answer = tuple[list[int], int, list[Reported]]


@dataclass(frozen=True)
class _Asked:
    """What the process that talks to the server heard, for all."""

    answers: list[_Answer]
    of_prompts: bool
    """They follow prompts alone, where a first token may be as good as certain: a measure of no others."""
    engine_dtype: torch.dtype | None


class TransferCheck:
    """Asks a server for one next token of some 16 contexts after each transfer, and scores them here.

    Compared is what the server reports of each, the log-probability a drawn token is expected to differ by:
    sum of mu |log mu - log pi| over the reported ids. The contexts are beginnings of the latest sequences, so
    that one pass of the engine answers, with the settings that rollouts are sampled with.

    Args:
        trainer: an asynchronous trainer of ours, with TRL's own rollout worker.
        server: that the worker talks to.
        top_k: ids to be reported.
        truncated: sampling keeps a set of ids, all of which are reported.
        tolerance: as in `sampler_check.explained`; infinity for no check.
    """

    def __init__(
        self, trainer: Any, server: VLLMServer, top_k: int, *, truncated: bool, tolerance: float | None
    ) -> None:
        self._trainer, self._server = trainer, server
        self._top_k, self._truncated, self._chosen = top_k, truncated, tolerance
        self._mismatch = Mismatch()
        self._warned = False

    def after_transfer(self, latest: Iterable[Tensor]) -> None:
        """Check the weights that the trainer has now; every process calls it.

        Args:
            latest: sequences to take contexts from; prompts of the data set if there are none.

        Raises:
            StaleSamplerError: the server's policy is another.
            EngineError: no answer.
        """
        if self._chosen is not None and math.isinf(self._chosen):
            return
        trainer = self._trainer
        asked: Any = None
        if trainer.accelerator.is_main_process:
            try:
                asked = self._ask([*latest])
            except Exception as error:  # noqa: BLE001 (raised in every process, or the others would wait)
                asked = error
        (heard,) = broadcast_object_list([asked], from_process=0)
        if isinstance(heard, Exception):
            raise heard
        if not heard.answers:
            return
        # Its own rounding may not make a process stop where the others go on.
        (mean,) = broadcast_object_list([self._difference(heard.answers)], from_process=0)
        tolerance = explained(trainer, heard.engine_dtype, self._chosen)
        self._mismatch.measured(trainer, len(heard.answers), mean, tolerance, comparable=not heard.of_prompts)

    def _ask(self, latest: list[Tensor]) -> _Asked:
        begun = [ids[: min(_LONGEST, len(ids) * thirds // 3)].tolist() for ids in latest for thirds in (1, 2)]
        contexts = dict.fromkeys(tuple(ids) for ids in begun or self._prompts() if ids)
        answers = self._complete([list(context) for context in contexts])
        return _Asked(answers, not begun, self._trainer.engine_dtype)

    @property
    def _settings(self) -> dict[str, Any]:
        """What the worker samples by: its own settings, and TRL's where it was given none."""
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(_AsyncRolloutLoop.__init__).parameters.items()
            if parameter.default is not parameter.empty
        }
        return {**defaults, **self._trainer.rollout_worker._loop_kwargs}

    def _prompts(self) -> list[list[int]]:
        settings = self._settings
        rows = [row for row in islice(settings["dataset"], _PROMPTS) if row.get("prompt")]
        tokenizer, options = settings["processing_class"], settings["chat_template_kwargs"] or {}
        return [prompt_ids(tokenizer, row["prompt"], **options)[:_LONGEST] for row in rows]

    def _complete(self, contexts: list[list[int]]) -> list[_Answer]:
        if not contexts:
            return []
        trainer = self._trainer
        if trainer.engine_dtype is None:
            name = str(self._server.info()["model_config"]["dtype"]).removeprefix("torch.")
            trainer.engine_dtype = getattr(torch, name, None)
        settings = self._settings
        sampling = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        payload = {
            "model": f"{trainer._lora_name}-v{trainer.model_version}" if trainer._lora_sync
            else settings["model_name"],
            "prompt": contexts, "max_tokens": 1, "n": 1, "seed": 0, "return_token_ids": True,
            "logprobs": self._top_k, "return_tokens_as_token_ids": True,
            **{name: settings[name] for name in sampling if settings[name] is not None},
        }  # fmt: skip
        try:
            choices = self._server.complete(payload, 2 / 3 * self._server.silence)["choices"]
        except SilentServerError:
            self._server.check(self._server.silence / 2)  # or it is only busy
            if not self._warned:
                warn(
                    "The vLLM server is too busy to be asked for a few tokens after new weights, so it is "
                    "not checked whether it has them. Give it room for more sequences than are under way "
                    "(--max-num-seqs)."
                )
                self._warned = True
            return []
        by_context = sorted(choices, key=lambda choice: int(choice["index"]))
        return [
            (context, int(choice["token_ids"][0]), read_choice(choice, self._top_k)[:1])
            for context, choice in zip(contexts, by_context, strict=True)
        ]

    @torch.no_grad()
    def _difference(self, answers: list[_Answer]) -> float:
        """Mean over the contexts."""
        trainer = self._trainer
        row, vocabulary = TreeRow(), trainer.vocabulary_size
        for number, (context, drawn, reported) in enumerate(answers):
            ids = torch.tensor([*context, drawn])
            mask = torch.zeros_like(ids)
            mask[-1] = 1
            records = SamplerRecords.of([*[0.0] * len(context), *reported])
            policy = records.policy(ids, mask, truncated=self._truncated, vocabulary_size=vocabulary)
            checked = CheckedRecords(policy, 0, mask.nonzero()[:, 0], len(ids))
            row.add({
                "input_ids": np.asarray(ids), "completion_mask": np.asarray(mask), "old_log_probs": checked,
                "advantage": 0.0, "group_id": number, "metrics": {},
            })  # fmt: skip
        collate = RecordCollator(DataCollatorForRollout(trainer.processing_class.pad_token_id))
        inputs = {name: value.to(trainer.accelerator.device) for name, value in collate([[row]]).items()}
        sink, trainer._metrics = trainer._metrics, {"train": defaultdict(list)}
        # What TRL counts of a step's training data, for its rates.
        counted = {name: value for name, value in vars(trainer).items() if name.startswith("_step_")}
        training = trainer.model.training
        trainer.model.eval()
        try:
            seen, old = trainer.see(inputs)
        finally:
            trainer.model.train(training)
            trainer._metrics = sink
            vars(trainer).update(counted)
        mass = old.log_probs.exp()
        apart = torch.where(mass > 0, mass * (old.log_probs - seen.log_probs).abs(), 0.0)
        return float((apart.sum(-1) / mass.sum(-1)).mean())
