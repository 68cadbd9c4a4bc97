"""Stands in for vLLM, which cannot be installed beside verl on a CPU, so that verl's vLLM server can be run.

Every name that verl imports is an empty class, but for outputs and sampling parameters, which look like
vLLM's: `RequestOutput`, `CompletionOutput`, `Logprob`, `FlatLogprobs` and `SamplingParams`, as far as used.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest.mock import patch

VERSION = "0.22.0"


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class FlatLogprobs(Sequence[dict[int, Logprob]]):
    """All positions in flat lists: the drawn id, then the likeliest ones, which may hold it again."""

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append_fast(self, token_ids: list[int], logprobs: list[float]) -> None:
        self.start_indices.append(len(self.token_ids))
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.ranks += [None, *range(1, len(token_ids))]
        self.decoded_tokens += [None] * len(token_ids)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            raise NotImplementedError
        span = range(self.start_indices[index], self.end_indices[index])
        return {self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i]) for i in span}


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: Any
    finish_reason: str | None
    index: int = 0
    text: str = ""
    cumulative_logprob: float | None = None
    routed_experts: Any = None
    stop_reason: Any = None


@dataclass
class RequestOutput:
    request_id: str
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Any = None
    num_cached_tokens: int | None = 0
    kv_transfer_params: Any = None
    metrics: Any = None


@dataclass
class SamplingParams:
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    flat_logprobs: bool = False


class Engine:
    """Answers as `AsyncLLM.generate` does: everything so far, at each step."""

    def __init__(self, rows: list[tuple[int, dict[int, float]]], finish_reason: str = "stop") -> None:
        self.rows, self.finish_reason = rows, finish_reason
        self.asked: list[SamplingParams] = []

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncIterator[RequestOutput]:
        self.asked.append(sampling_params)
        if not self.rows:
            yield RequestOutput(request_id, [], finished=True)
        for step in range(1, len(self.rows) + 1):
            done = step == len(self.rows)
            reported = None if sampling_params.logprobs is None else self._logprobs(step, sampling_params)
            tokens = [token for token, _ in self.rows[:step]]
            one = CompletionOutput(tokens, reported, self.finish_reason if done else None)
            yield RequestOutput(request_id, [one], finished=done)

    def _logprobs(self, steps: int, params: SamplingParams) -> Any:
        flat = FlatLogprobs()
        for token, row in self.rows[:steps]:
            likeliest = sorted(row, key=lambda one: -row[one])[: params.logprobs]
            flat.append_fast([token, *likeliest], [row[token], *(row[one] for one in likeliest)])
        return flat if params.flat_logprobs else [flat[step] for step in range(steps)]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in ("vllm", "mooncake", "nixl"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Module(ModuleType):
    __version__ = VERSION

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = {"SamplingParams": SamplingParams, "RequestOutput": RequestOutput}
        made = known.get(name) or type(name, (), {})
        setattr(self, name, made)
        return made


@contextmanager
def installed() -> Iterator[Any]:
    """verl's module of vLLM servers, while the stub is there."""
    before, finder, version = set(sys.modules), _Finder(), importlib.metadata.version
    sys.meta_path.insert(0, finder)
    with patch("importlib.metadata.version", lambda name: VERSION if name == "vllm" else version(name)):
        try:
            from verl.workers.rollout.vllm_rollout import vllm_async_server

            yield vllm_async_server
        finally:
            sys.meta_path.remove(finder)
            for name in set(sys.modules) - before:
                if name.startswith("vllm") or "vllm" in name.split(".")[-1] or ".vllm" in name:
                    del sys.modules[name]
