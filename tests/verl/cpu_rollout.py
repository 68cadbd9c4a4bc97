"""A rollout server for verl on CPU, for these tests only: one request at a time in a Ray actor.

verl finds it by the rollout's name: the server's side in its registry of replicas (`RolloutReplicaRegistry`),
the worker's side, which sends weights, in its table of rollout classes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import torch
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from tether.integrations.verl.rollouts import reported_ids
from tether.integrations.verl.vllm_reports import report

NAME = "cpu"
#: Tokens between two looks at whether to stop, and of an answer at most.
PART, LONGEST = 16, 48


def _actor_name(rank: int) -> str:
    return f"cpu_rollout_server_{rank}"


class CPUServer:
    """Samples with the weights it was sent last; there is no cache to put to sleep.

    Asked to, it reports the likeliest ids of each token. A few tokens at a time, so that answers can be
    interrupted: what is asked while weights change waits for them, as in vLLM.
    """

    def __init__(self, model: str, top_k: int | None = None) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._model = AutoModelForCausalLM.from_pretrained(model).eval()
        self._top_k = top_k
        self._global_steps = 0
        self._running = asyncio.Event()
        self._running.set()

    async def load(self, weights: dict[str, Any], global_steps: int | None) -> None:
        self._model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
        self._global_steps = global_steps or 0

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        await self._running.wait()
        version, left = self._global_steps, sampling_params.get("max_tokens") or LONGEST
        temperature = sampling_params["temperature"] or 1.0
        prompt = whole = torch.tensor([list(prompt_ids)])
        done = False
        while not done and self._running.is_set():
            with torch.no_grad():
                longer = self._model.generate(
                    input_ids=whole, attention_mask=torch.ones_like(whole), do_sample=True,
                    top_k=0, top_p=1.0, temperature=temperature, max_new_tokens=min(PART, left),
                )  # fmt: skip
            left -= longer.shape[1] - whole.shape[1]
            done = left <= 0 or longer.shape[1] - whole.shape[1] < PART
            done = done or int(longer[0, -1]) == self._model.generation_config.eos_token_id
            whole = longer
            await asyncio.sleep(0)
        return self._answer(whole, prompt.shape[1], temperature, version, "completed" if done else "aborted")

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
    """In the training worker: hands the weights over."""

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        state = {name: value.detach().float().cpu().numpy().copy() for name, value in weights}
        server = ray.get_actor(_actor_name(torch.distributed.get_rank()))
        await server.load.remote(state, global_steps)


RolloutReplicaRegistry.register(NAME, lambda: CPUReplica)
base._ROLLOUT_REGISTRY[(NAME, "async")] = "cpu_rollout.CPURollout"
