"""verl's vLLM server, which reports the likeliest ids of each token. Nothing here needs vLLM until it runs.

A server reports where its rollout configuration says how many ids (`custom.troll_top_k`); others are verl's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput

from tether.errors import ConfigError
from tether.integrations.sampler_reports import Reported, ids_to_ask_for, report_sequence
from tether.integrations.verl.delegate import Delegate
from tether.integrations.verl_switch import TOP_K


class ReportingEngine(Delegate):
    """vLLM's engine, asked for more log-probabilities than verl does; keeps each request's last output."""

    def __init__(self, inner: Any, top_k: int) -> None:
        super().__init__(inner)
        self._top_k = top_k
        self.finished: dict[str, Any] = {}

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """vLLM's outputs, unchanged."""
        if sampling_params.logprobs is not None:
            sampling_params.logprobs = self._top_k
            if hasattr(sampling_params, "flat_logprobs"):  # one object a request in place of one an id
                sampling_params.flat_logprobs = True
        outputs = self._inner.generate(
            prompt=prompt, sampling_params=sampling_params, request_id=request_id, **kwargs
        )
        async for output in outputs:
            self.finished[request_id] = output
            yield output


class ReportingServer:
    """Put before verl's vLLM server: its answers carry `Reported` log-probabilities."""

    config: Any
    engine: Any

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        """vLLM reports 20 ids at most unless it is told otherwise."""
        super()._preprocess_engine_kwargs(engine_kwargs)  # type: ignore[misc]
        top_k, most = self._top_k(), engine_kwargs.get("max_logprobs", 20)
        if most != -1 and most < top_k:
            engine_kwargs["max_logprobs"] = top_k

    def _top_k(self) -> int:
        return ids_to_ask_for(int(self.config.custom[TOP_K]), self.config.top_k)

    async def run_server(self, args: Any) -> None:
        """Start it; requests go through `ReportingEngine` from here on."""
        await super().run_server(args)  # type: ignore[misc]
        self.engine = ReportingEngine(self.engine, self._top_k())

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **kwargs: Any
    ) -> TokenOutput:
        """verl's answer, with the records in the place of its log-probabilities."""
        try:
            output: TokenOutput = await super().generate(  # type: ignore[misc]
                prompt_ids, sampling_params, request_id, **kwargs
            )
        finally:
            last = self.engine.finished.pop(request_id, None)
        if output.log_probs and last is not None:
            version = output.extra_fields.get("global_steps")
            report(output, *read_logprobs(last.outputs[0].logprobs), version=version)
        return output


def report(
    output: TokenOutput, ids: list[list[int]], log_probs: list[list[float | None]], *, version: int | None
) -> TokenOutput:
    """Put an engine's records into its answer: for rollout servers of one's own.

    Args:
        output: with the drawn tokens.
        ids, log_probs: of each token, the drawn one among them; those that were sampled from, after
            temperature and truncation.
        version: of the weights that sampled: verl's ``global_steps``.

    Raises:
        InvalidInputError: a drawn id that is not among those reported.

    Example:
        >>> answer = report(TokenOutput(token_ids=[5]), [[5, 7]], [[-0.1, -2.5]], version=3)
        >>> answer.log_probs[0].block.ids.tolist(), answer.log_probs[0].block.version
        ([[5, 7]], 3)
    """
    reported: list[Reported] = report_sequence(list(output.token_ids), ids, log_probs, 0, version)
    output.log_probs = list(reported)  # pydantic would make plain numbers of them in its constructor
    return output


def read_logprobs(logprobs: Any) -> tuple[list[list[int]], list[list[float | None]]]:
    """Ids and log-probabilities of each token from vLLM's output: a dictionary a token, or all in one object.

    vLLM's flat form lists the drawn id first and again where it is among the likeliest.
    """
    if hasattr(logprobs, "start_indices"):
        spans = zip(logprobs.start_indices, logprobs.end_indices, strict=True)
        rows = [dict(zip(logprobs.token_ids[a:b], logprobs.logprobs[a:b], strict=True)) for a, b in spans]
    else:
        rows = [{token: one.logprob for token, one in position.items()} for position in logprobs]
    return [list(row) for row in rows], [list(row.values()) for row in rows]


def reporting_replica(replica: type[Any]) -> type[Any]:
    """verl's replica of servers, which report where they are asked to."""

    class ReportingReplica(replica):
        """Starts the servers."""

        server_class: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            asked = (self.config.custom or {}).get(TOP_K)
            if asked is None:
                return
            mode = self.config.logprobs_mode
            if mode != "processed_logprobs":
                raise ConfigError(
                    f"actor_rollout_ref.rollout.logprobs_mode={mode} reports another distribution than was "
                    "sampled from. Set it to processed_logprobs."
                )
            self.server_class = ray.remote(_reporting_server(self.server_class))

    return ReportingReplica


def _reporting_server(server: Any) -> type[Any]:
    return type("ReportingVLLMServer", (ReportingServer, server.__ray_actor_class__), {})


def register(name: str = "vllm") -> None:
    """Have verl build replicas that report when it is asked for this rollout."""
    before: Callable[[], type[Any]] = RolloutReplicaRegistry._registry[name]
    RolloutReplicaRegistry.register(name, lambda: reporting_replica(before()))
