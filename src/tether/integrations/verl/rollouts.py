"""verl's agent loops, keeping what the engine reports of each token beside the tokens.

verl moves tokens of partial answers and of several turns through lists, and drops whatever else an engine
says. Here each answer of the engine is noted as it arrives; when a trajectory is done, its answers are found
again in its tokens: each begins where its prompt ended. Tokens of tools and templates belong to none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import ray
from pydantic import PrivateAttr
from torch import Tensor
from verl.experimental.agent_loop import AgentLoopOutput
from verl.protocol import DataProto
from verl.trainer.ppo.utils import need_critic
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.workers.rollout.replica import TokenOutput

from tether.errors import ConfigError
from tether.integrations.verl.delegate import Delegate
from tether.integrations.verl.sampler_fields import Turn, pack
from tether.integrations.verl_switch import SAMPLER_SWITCH, SWITCH, TOP_K
from tether.settings import TROLLSettings

#: verl's own servers that do not report; one that verl does not know may.
_SILENT = ("sglang", "trtllm")

_turns: ContextVar[list[Turn] | None] = ContextVar("troll_turns", default=None)


class RecordingClient(Delegate):
    """verl's client of rollout servers, noting the answers of the trajectory that asks.

    Only those at the temperature at which the trainer compares the network with them.
    """

    def __init__(self, inner: Any, temperature: float = 1.0) -> None:
        super().__init__(inner)
        self._temperature = temperature

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """As verl's: interrupted answers already put together, with the records of each part."""
        truncated = truncates(sampling_params)
        asked = sampling_params.get("temperature")
        comparable = math.isclose(1.0 if asked is None else asked, self._temperature, rel_tol=1e-6)
        output: TokenOutput = await self._inner.generate(
            request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs
        )
        turns = _turns.get()
        if turns is not None and comparable:
            log_probs = list(output.log_probs or [])
            turns.append(Turn(list(prompt_ids), list(output.token_ids), log_probs, truncated))
        return output


@functools.cache
def _recorded(kind: type[AgentLoopOutput]) -> type[AgentLoopOutput]:
    """A class of trajectories, verl's or an agent loop's own, whose records become fields of the batch."""

    class Recorded(kind):
        _records: dict[str, Tensor] = PrivateAttr(default_factory=dict)

        def as_dict(self) -> dict[str, Any]:
            return {**super().as_dict(), **self._records}

    return Recorded


@dataclass(frozen=True)
class TrainerSteps:
    """How the trainer's updates follow from the version of the weights, which verl counts in its steps."""

    calls_a_version: int
    """Of update_actor between two transfers of weights."""
    without: int
    """First versions that nothing was updated for (`trainer.critic_warmup`)."""
    updates_a_call: int
    """Optimizer steps, of a batch with as many responses as the configuration says."""

    @classmethod
    def read(cls, config: Any) -> TrainerSteps:
        """From verl's whole configuration.

        Example:
            >>> from omegaconf import OmegaConf
            >>> actor = {"ppo_mini_batch_size": 16, "ppo_epochs": 2}
            >>> trainer = {"critic_warmup": 0, "v1": {"trainer_mode": "sync", "sync": {}}}
            >>> data, critic = {"train_batch_size": 56}, {"enable": False}
            >>> config = {"trainer": trainer, "actor_rollout_ref": {"actor": actor}, "data": data}
            >>> TrainerSteps.read(OmegaConf.create({**config, "critic": critic}))
            TrainerSteps(calls_a_version=1, without=0, updates_a_call=8)
        """
        mode = config.trainer.v1.trainer_mode
        calls = int((config.trainer.v1.get(mode) or {}).get("parameter_sync_step", 1))
        actor = config.actor_rollout_ref.actor
        batch, mini_batch = int(config.data.train_batch_size) // calls, int(actor.ppo_mini_batch_size)
        # verl fills a batch up until actor and critic have whole mini-batches.
        of_critic = int(config.critic.ppo_mini_batch_size) if need_critic(config) else 1
        multiple = math.lcm(mini_batch, of_critic)
        updates = -(-batch // multiple) * multiple // mini_batch * int(actor.ppo_epochs)
        return cls(calls, max(0, int(config.trainer.critic_warmup) - 1), updates)

    def calls(self, version: int) -> int:
        """Of update_actor that lie behind a version."""
        return max(0, version - self.without) * self.calls_a_version


# What verl's worker is before Ray makes an actor of it, from which nothing can be derived.
_Worker: Any = AgentLoopWorkerTQ.__ray_actor_class__


class SamplerAgentLoopWorker(_Worker):
    """verl's agent-loop worker; its trajectories carry the sampler's records to the trainer."""

    llm_client: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        temperature = float(self.config.actor_rollout_ref.rollout.temperature)
        self.llm_client = RecordingClient(self.llm_client, temperature)
        self._steps = TrainerSteps.read(self.config)
        policy_loss = self.config.actor_rollout_ref.actor.policy_loss
        self._mass = float(policy_loss.get("troll_mass", TROLLSettings.mass))

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any
    ) -> Any:
        validates = trajectory["validate"]
        if validates:  # nothing is bounded by what an engine says of it, and each token would cost as much
            sampling_params = {**sampling_params, "logprobs": False}
        token = _turns.set(None if validates else [])
        try:
            return await super()._run_agent_loop(sampling_params, trajectory=trajectory, **kwargs)
        finally:
            _turns.reset(token)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        if validate:
            return await super()._agent_loop_postprocess(output, validate, **kwargs)
        whole = isinstance(output, list)
        recorded = [self._recorded(one) for one in (output if whole else [output])]
        return await super()._agent_loop_postprocess(recorded if whole else recorded[0], validate, **kwargs)

    def _recorded(self, output: AgentLoopOutput) -> AgentLoopOutput:
        records = pack(
            _turns.get() or [],
            output.prompt_ids,
            output.response_ids,
            output.response_mask,
            calls_of=self._steps.calls,
            updates=self._steps.updates_a_call,
            mass=self._mass,
        )
        made = output.model_copy()
        kind: Any = type(output)
        made.__class__ = _recorded(kind)
        made._records = records
        return made


class SamplerAgentLoopManager(AgentLoopManagerTQ):
    """`rollout.agent.agent_loop_manager_class` for the region around the sampler.

    Raises:
        ConfigError: a configuration under which what is reported would not be what is bounded.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        refuse_configuration(config)
        super().__init__(config, *args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SamplerAgentLoopWorker)

    def generate_sequences(self, prompts: Any) -> None:
        """As verl's; a trainer that wants padded answers back is refused."""
        if isinstance(prompts, DataProto):
            raise ConfigError(
                "policy_loss.troll_anchor=sampler sends its records through TransferQueue, and this is a "
                "trainer without: the old one, or one built on it. Set trainer.use_v1=True in "
                "verl.trainer.main_ppo, with trainer.v1.trainer_mode=sync, colocate_async or separate_async."
            )
        super().generate_sequences(prompts)


def truncates(sampling_params: Mapping[str, Any]) -> bool:
    """Whether sampling keeps a set of ids.

    Example:
        >>> truncates({"top_k": -1, "top_p": 1.0}), truncates({"top_k": 8}), truncates({"min_p": 0.1})
        (False, True, True)
    """
    top_p, top_k, min_p = (sampling_params.get(name) for name in ("top_p", "top_k", "min_p"))
    return (top_p is not None and top_p < 1) or (top_k is not None and top_k > 0) or bool(min_p)


def reported_ids(rollout: Any) -> int | None:
    """How many ids a server is to report of each token; None if it is not asked."""
    asked = (rollout.get("custom") or {}).get(TOP_K)
    return None if asked is None else int(asked)


def refuse_configuration(config: Any) -> None:
    """See `SamplerAgentLoopManager`."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    if actor.policy_loss.get("troll_anchor") != "sampler":
        raise ConfigError(
            "agent_loop_manager_class records the sampler, and policy_loss.troll_anchor is "
            f"{actor.policy_loss.get('troll_anchor')!r}. Use {SAMPLER_SWITCH}, which sets both."
        )
    if not (config.algorithm.get("rollout_correction") or {}).get("bypass_mode"):
        raise ConfigError(
            "policy_loss.troll_anchor=sampler needs no scoring pass, which verl makes unless "
            "algorithm.rollout_correction.bypass_mode=True. Set it."
        )
    for name in ("rollout_is", "rollout_rs"):
        asked_for = config.algorithm.rollout_correction.get(name)
        if asked_for is not None:
            raise ConfigError(
                f"algorithm.rollout_correction.{name}={asked_for} is not read "
                "where verl scores nothing, and policy_loss.troll_anchor=sampler has the sampler inside its "
                f"bound. Set it to null; or use {SWITCH}, around the trainer's policy, which reads it."
            )
    if not rollout.calculate_log_probs:
        raise ConfigError(
            "policy_loss.troll_anchor=sampler needs log-probabilities of the engine. Set "
            "actor_rollout_ref.rollout.calculate_log_probs=True."
        )
    asked = reported_ids(rollout)
    if asked is None or asked < 1:
        raise ConfigError(
            "The rollout servers are not told how many ids to report. Set "
            f"+actor_rollout_ref.rollout.custom.{TOP_K}=64, or use {SAMPLER_SWITCH}."
        )
    if truncates(rollout) and not 0 < (rollout.top_k or 0) <= asked:
        raise ConfigError(
            f"actor_rollout_ref.rollout.top_k={rollout.top_k} (top_p={rollout.top_p}) may keep more ids of a "
            f"token than the {asked} that are reported. Set rollout.top_k={asked} or fewer, or report more "
            "(actor_rollout_ref.actor.policy_loss.troll_top_k)."
        )
    if rollout.get("logprobs_mode", "processed_logprobs") != "processed_logprobs":
        raise ConfigError(
            f"actor_rollout_ref.rollout.logprobs_mode={rollout.logprobs_mode} reports another distribution "
            "than was sampled from. Set it to processed_logprobs."
        )
    if rollout.name in _SILENT:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={rollout.name} reports nothing but the drawn tokens' "
            "log-probabilities. Set it to vllm, or policy_loss.troll_anchor=trainer with "
            f"algorithm.rollout_correction.bypass_mode=False ({SWITCH})."
        )
    if rollout.disaggregation.enabled:
        raise ConfigError(
            "actor_rollout_ref.rollout.disaggregation.enabled=True has servers of its own, which report "
            "nothing. Set it to False, or policy_loss.troll_anchor=trainer."
        )
