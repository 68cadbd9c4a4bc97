"""A rollout server for verl on CPU, for these tests only, in a Ray actor.

verl finds it by the rollout's name: the server's side in its registry of replicas (`RolloutReplicaRegistry`),
the worker's side, which sends weights, in its table of rollout classes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from tether.integrations.verl.rollouts import reported_ids
from tether.integrations.verl.vllm_reports import report

NAME = "cpu"
#: Tokens between two looks at whether to stop, and of an answer at most.
PART, LONGEST = 16, 48


def _actor_name(rank: int) -> str:
    return f"cpu_rollout_server_{rank}"


@dataclass(eq=False)
class _Request:
    """One answer under way."""

    prompt: list[int]
    left: int
    temperature: float
    version: int
    answer: asyncio.Future[TokenOutput]
    tokens: list[int] = field(default_factory=list)


class CPUServer:
    """Samples with the weights it was sent last; there is no cache to put to sleep.

    All that is asked at a time is sampled together, a few tokens at a time, so that answers can be
    interrupted: what is asked while weights change waits for them, as in vLLM. Asked to, it reports the
    likeliest ids of each token.
    """

    def __init__(self, model: str, top_k: int | None = None) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._model = AutoModelForCausalLM.from_pretrained(model).eval()
        self._end = self._model.generation_config.eos_token_id
        self._top_k = top_k
        self._global_steps = 0
        self._running = asyncio.Event()
        self._running.set()
        self._active: list[_Request] = []
        self._serving: asyncio.Task[None] | None = None

    async def load(self, weights: dict[str, Any], global_steps: int | None) -> None:
        self._model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
        self._global_steps = global_steps or 0

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        await self._running.wait()
        request = _Request(
            list(prompt_ids),
            sampling_params.get("max_tokens") or LONGEST,
            sampling_params["temperature"] or 1.0,
            self._global_steps,
            asyncio.get_running_loop().create_future(),
        )
        self._active.append(request)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await request.answer

    async def _serve(self) -> None:
        while self._active:
            await asyncio.sleep(0.01)  # others may ask, or interrupt
            if self._running.is_set():
                together = [r for r in self._active if r.temperature == self._active[0].temperature]
                try:
                    self._advance(together)
                except Exception as error:  # noqa: BLE001 (raised where the answers are awaited)
                    for request in together:
                        if not request.answer.done():
                            request.answer.set_exception(error)
            else:
                for request in self._active:
                    self._finish(request, "aborted")
            self._active = [request for request in self._active if not request.answer.done()]

    def _advance(self, requests: list[_Request]) -> None:
        sequences = [request.prompt + request.tokens for request in requests]
        width, step = max(map(len, sequences)), min(PART, *(request.left for request in requests))
        rows = [[self._end] * (width - len(row)) + row for row in sequences]
        masks = [[0] * (width - len(row)) + [1] * len(row) for row in sequences]
        with torch.no_grad():
            longer = self._model.generate(
                input_ids=torch.tensor(rows), attention_mask=torch.tensor(masks), do_sample=True, top_k=0,
                top_p=1.0, temperature=requests[0].temperature, max_new_tokens=step, pad_token_id=self._end,
            )  # fmt: skip
        for request, row in zip(requests, longer[:, width:].tolist(), strict=True):
            new = row[: row.index(self._end) + 1] if self._end in row else row
            request.tokens += new
            request.left -= len(new)
            if request.left <= 0 or new[-1] == self._end:
                self._finish(request, "completed")

    def _finish(self, request: _Request, reason: str) -> None:
        whole = torch.tensor([request.prompt + request.tokens])
        request.answer.set_result(
            self._answer(whole, len(request.prompt), request.temperature, request.version, reason)
        )

    def _answer(
        self, whole: torch.Tensor, start: int, temperature: float, version: int, reason: str
    ) -> TokenOutput:
        tokens = whole[0, start:]
        with torch.no_grad():
            log_probs = (self._model(whole).logits[0, start - 1 : -1] / temperature).log_softmax(-1)
        own = log_probs.gather(-1, tokens[:, None]).squeeze(-1)
        output = TokenOutput(
            token_ids=tokens.tolist(),
            log_probs=own.tolist(),
            stop_reason=reason,
            extra_fields={"global_steps": version},
        )
        if self._top_k is None or not len(tokens):
            return output
        top = log_probs.topk(self._top_k)
        pairs = [
            dict(zip(*row, strict=True))
            for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        pairs = [
            {**few, token: o} for few, token, o in zip(pairs, tokens.tolist(), own.tolist(), strict=True)
        ]
        return report(output, [[*few] for few in pairs], [[*few.values()] for few in pairs], version=version)

    async def abort_all_requests(self, **_: Any) -> None:
        self._running.clear()

    async def resume_generation(self, *_: Any) -> None:
        self._running.set()

    async def nothing(self, *_: Any, **__: Any) -> None:
        pass

    sleep = wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    start_profile = stop_profile = nothing


class CPUReplica(RolloutReplica):
    """Starts the server."""

    async def launch_servers(self) -> None:
        server = ray.remote(num_cpus=0)(CPUServer).options(name=_actor_name(self.replica_rank))
        self._server_handle = server.remote(self.model_config.path, reported_ids(self.config))
        self._server_address = _actor_name(self.replica_rank)
        self.servers = [self._server_handle]


class CPURollout(base.BaseRollout):
    """In the training worker, or in one of its own beside the server: hands the weights over."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = replica_rank

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        state = {
            name: value.detach().float().cpu().numpy().copy()
            async for name, value in ensure_async_iterator(weights)
        }
        rank = self.replica_rank if self.replica_rank >= 0 else torch.distributed.get_rank()
        server = ray.get_actor(_actor_name(rank))
        await server.load.remote(state, global_steps)


RolloutReplicaRegistry.register(NAME, lambda: CPUReplica)
base._ROLLOUT_REGISTRY[(NAME, "async")] = "cpu_rollout.CPURollout"
