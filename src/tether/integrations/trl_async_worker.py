"""TRL's rollout worker with a sampler's records, and a look at whether it and its vLLM server are alive.

The worker is a process of its own, which talks to the server. Either may be killed or stop, in the middle of
anything; the trainer is told which, and why as far as is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import Any

# First, because it says what to install where TRL is missing or another version.
from tether.integrations import trl_async_seam  # noqa: F401

# isort: split
from trl.chat_template_utils import add_response_schema
from trl.experimental.async_grpo.async_rollout_worker import (
    AsyncRolloutWorker,
    TurnRecord,
    _AsyncRolloutLoop,
    _chain_to_sequences,
)

from tether.errors import ConfigError, EngineError, InvalidInputError
from tether.integrations.sampler_reports import Reported, report_sequence
from tether.integrations.trl_async_records import LOOK_AT_ITS_OUTPUT, SamplerRecords

#: Seconds: a killed process's pipes close a moment before it counts as ended.
_DYING = 1.0
#: Seconds for which a group of responses may be judged; then its rewards count as hung.
_JUDGING = 3600
# What terminals and schedulers send to all processes of a group at once. What becomes of it is the trainer's
# to say, which needs more rollouts to finish a batch and save.
_OF_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()))


class RecordingLoop(_AsyncRolloutLoop):
    """TRL's rollouts from a vLLM server, which also says what the likeliest ids of each token were.

    Prompts may be plain text, as in `GRPOTrainer`, and without tools any chat template will do. Ends with the
    process that started it, which alone heeds Ctrl-C. Rewards may take an hour for a group.
    """

    def __init__(self, *, report_top_k: int, **kwargs: Any) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:  # from the first: who is killed meanwhile never hears that this one is ready
            threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
            for number in _OF_THE_TRAINER:
                signal.signal(number, _leave)  # not to be ignored: what rewards start would inherit that
        self._reads_tools = bool(kwargs.get("tools") or kwargs.get("environment_factory"))
        if not self._reads_tools and not _knows_template(kwargs["processing_class"]):
            # TRL wants to know how a tool call is read, and there will be none.
            kwargs["processing_class"].response_schema = {}
        else:
            self._reads_tools = True
        super().__init__(**kwargs)
        self._report_top_k = report_top_k

    async def _generate_one(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if self._reads_tools and not isinstance(prompt, str):
            return await super()._generate_one(prompt, *args, **kwargs)
        options = {"chat_template": self.chat_template, **self.chat_template_kwargs}
        ids = prompt_ids(self.tokenizer, prompt, **options)
        began = self._loop.time()
        drawn, log_probs = await self._generate_one_turn(ids)
        text = self.tokenizer.decode(drawn, skip_special_tokens=True)
        completion = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        turns = [TurnRecord(ids, drawn, log_probs)]
        sequences, tally = _chain_to_sequences(turns, uuid.uuid4().hex, self._fork_threshold_tokens)
        self._push_rollout_metrics(
            turns=1, sequences=len(sequences), completion_ids=drawn, tally=tally, loop_exhausted=False,
            duration_s=self._loop.time() - began,
        )  # fmt: skip
        return completion, drawn, sequences, 0, 0, None

    async def _post(self, path: str, payload: dict[str, Any], *rest: Any, **kwargs: Any) -> dict[str, Any]:
        if path != "/v1/completions":
            answer: dict[str, Any] = await super()._post(path, payload, *rest, **kwargs)
            return answer
        asked = {**payload, "logprobs": self._report_top_k, "return_tokens_as_token_ids": True}
        answer = await super()._post(path, asked, *rest, **kwargs)
        for choice in answer["choices"]:
            choice["logprobs"]["token_logprobs"] = read_choice(choice, self._report_top_k)
        return answer

    async def _score_group(self, group: Any) -> list[Any]:
        alive = asyncio.create_task(self._show_life())
        try:
            samples: list[Any] = await super()._score_group(group)
        finally:
            alive.cancel()
        sequences = [one for of_completion in group.completions_sequences for one in of_completion]
        for sample, sequence in zip(samples, sequences, strict=True):
            sample.old_log_probs = SamplerRecords.of(sequence.old_log_probs)
        return samples

    async def _show_life(self) -> None:
        """While rewards are computed, TRL's loops wait: for them, or for a place in the queue before them."""
        for _ in range(_JUDGING):
            self._heartbeat_value.value = time.time()
            await asyncio.sleep(1.0)


def prompt_ids(tokenizer: Any, prompt: Any, **options: Any) -> list[int]:
    """What a prompt is to the model: text as it is, messages through the chat template."""
    if isinstance(prompt, str):
        ids: list[int] = tokenizer(prompt)["input_ids"]
        return ids
    templated: list[int] = tokenizer.apply_chat_template(
        prompt, return_dict=False, add_generation_prompt=True, **options
    )
    return templated


def read_choice(choice: dict[str, Any], top_k: int) -> list[Reported]:
    """The records in one choice of a vLLM server's completions.

    Raises:
        InvalidInputError: an answer without them, or without a drawn id.
    """
    top = choice["logprobs"].get("top_logprobs")
    if not top or any(not one for one in top):
        raise InvalidInputError(
            f"vLLM was asked for the {top_k} likeliest ids of each token and reported none. Start it with "
            "`vllm serve --logprobs-mode processed_logprobs --max-logprobs -1`."
        )
    return report_sequence(
        choice["token_ids"],
        [[_token_id(name) for name in one] for one in top],
        [[*one.values()] for one in top],
        0,
    )


def _token_id(name: str) -> int:
    """Of a token that vLLM names by its id."""
    found = re.fullmatch(r"token_id\D(\d+)", name)
    if found is None:
        raise InvalidInputError(
            f"vLLM reported the token {name!r} by its text, which does not tell its id. Use a version that "
            "knows return_tokens_as_token_ids."
        )
    return int(found[1])


def check_records(worker: AsyncRolloutWorker) -> None:
    """Refuse a worker whose own way to write rollouts would be replaced by one that records.

    Raises:
        ConfigError: its loop is neither TRL's nor a `RecordingLoop`.
    """
    loop = worker._loop_cls
    if loop is not _AsyncRolloutLoop and not issubclass(loop, RecordingLoop):
        raise ConfigError(
            f"The rollout worker {type(worker).__name__} runs {loop.__name__}, which does not report the "
            "sampler's distributions. Derive that from tether.integrations.trl_async_worker.RecordingLoop."
        )


def record(worker: AsyncRolloutWorker, top_k: int, check_server: Callable[[], None]) -> None:
    """Have TRL's own worker report, once it starts, and say by name what has stopped.

    Args:
        worker: not started yet, and passed by `check_records`.
        top_k: ids asked for.
        check_server: raises `EngineError` if the server does not answer; called while the trainer waits.
    """
    if worker._loop_cls is _AsyncRolloutLoop:
        worker._loop_cls = RecordingLoop
    worker._loop_kwargs["report_top_k"] = top_k
    start, check_health, stop = worker.start, worker.check_health, worker.stop

    def check_what_it_talks_to() -> None:
        with abandoning(worker):
            check_server()

    def start_and_let_go() -> None:
        start()
        process = worker._process
        if process is not None:
            # At the program's end, before multiprocessing waits for what it told to terminate.
            Finalize(None, process.kill, exitpriority=0)
        # With the child alone holding the end that writes, its death is the end of the file. Otherwise a
        # trainer would wait for ever for the rest of a sample that was cut off.
        worker.rollout_buffer._writer.close()

    def name_what_stopped(stale_after_s: float) -> None:
        try:
            check_health(stale_after_s)
        except RuntimeError as error:
            cause = str(error.__cause__ or error).strip().splitlines()
            check_what_it_talks_to()  # of which the worker's failure is often the echo
            raise EngineError(f"The rollout worker failed: {cause[0]}. {LOOK_AT_ITS_OUTPUT}") from error
        process = worker._process
        if process is not None and not process.is_alive():
            raise EngineError(
                f"The rollout worker's process {process.pid} has ended (exit code {process.exitcode}). "
                f"{LOOK_AT_ITS_OUTPUT}"
            )
        check_what_it_talks_to()

    def stop_unless_gone() -> None:
        process = worker._process
        if process is not None and process.pid is not None:
            process.join(_DYING)
            if not process.is_alive():
                # A killed process had a thread waiting for TRL's event; setting that waits for the thread.
                worker._process = None
        stop()

    worker.start = start_and_let_go
    worker.check_health = name_what_stopped
    worker.stop = stop_unless_gone


@contextlib.contextmanager
def abandoning(worker: Any) -> Iterator[None]:
    """Where a server may be found not to answer: the worker, which waits for it as well, then ends at once.

    Asked to stop it would wait on for answers, and the one who is to be told of the server with it.
    """
    try:
        yield
    except EngineError:
        process = getattr(worker, "_process", None)
        if process is not None:
            process.kill()
            process.join()
        raise


def _knows_template(tokenizer: Any) -> bool:
    """Whether TRL can read a tool call in this tokenizer's conversations."""
    names = ("response_template", "response_schema")
    if any(getattr(tokenizer, name, None) is not None for name in names):
        return True
    try:
        add_response_schema(tokenizer)
    except ValueError:
        return False
    return True


def _leave(*_: Any) -> None:
    """A signal to the trainer."""


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)
