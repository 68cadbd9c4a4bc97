"""A rollout server for verl on CPU, for these tests only: one request at a time in a Ray actor.

verl finds it by the rollout's name: the server's side in its registry of replicas (`RolloutReplicaRegistry`),
the worker's side, which sends weights, in its table of rollout classes.
"""

from __future__ import annotations

from typing import Any

import ray
import torch
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

NAME = "cpu"


def _actor_name(rank: int) -> str:
    return f"cpu_rollout_server_{rank}"


class CPUServer:
    """Samples with the weights it was sent last; there is no cache to put to sleep."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._model = AutoModelForCausalLM.from_pretrained(model).eval()
        self._global_steps = 0

    async def load(self, weights: dict[str, Any], global_steps: int | None) -> None:
        self._model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
        self._global_steps = global_steps or 0

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        prompt = torch.tensor([list(prompt_ids)])
        with torch.no_grad():
            whole = self._model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=0, top_p=1.0,
                temperature=sampling_params["temperature"] or 1.0,
                max_new_tokens=sampling_params.get("max_tokens") or 48,
            )  # fmt: skip
            logits = self._model(whole).logits[0, prompt.shape[1] - 1 : -1]
        tokens = whole[0, prompt.shape[1] :]
        log_probs = logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
        return TokenOutput(
            token_ids=tokens.tolist(),
            log_probs=log_probs.tolist(),
            stop_reason="completed",
            extra_fields={"global_steps": self._global_steps},
        )

    async def nothing(self, *_: Any, **__: Any) -> None:
        pass

    sleep = wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = nothing


class CPUReplica(RolloutReplica):
    """Starts the server."""

    async def launch_servers(self) -> None:
        server = ray.remote(num_cpus=0)(CPUServer).options(name=_actor_name(self.replica_rank))
        self._server_handle = server.remote(self.model_config.path)
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
