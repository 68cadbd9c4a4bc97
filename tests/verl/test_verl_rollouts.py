"""What an engine reports finds its way through verl's clients and agent loops to the tokens it is of."""

from __future__ import annotations

import asyncio
import copy
import pickle
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.experimental.agent_loop import AgentLoopOutput
from verl.protocol import DataProto
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import TokenOutput

from tether.errors import ConfigError, InvalidInputError
from tether.integrations.sampler_reports import Reported, report_sequence
from tether.integrations.verl import rollouts, sampler_fields
from tether.integrations.verl.rollouts import (
    RecordingClient,
    SamplerAgentLoopManager,
    SamplerAgentLoopWorker,
    TrainerSteps,
)
from tether.integrations.verl.vllm_reports import ReportingEngine, report

VOCABULARY = 10


def _rows(tokens: list[int], version: int) -> tuple[list[list[int]], list[list[float | None]]]:
    """Two ids of each token, with numbers that tell token and version."""
    ids = [[token, (token + 1) % VOCABULARY] for token in tokens]
    return ids, [[-0.1 * version - 0.01 * token, -3.0 - 0.01 * token] for token in tokens]


class _Engine:
    """A server that answers from a script of (tokens, version, stop reason)."""

    def __init__(self, script: list[tuple[list[int], int, str]]) -> None:
        self.script = script
        self.asked: list[list[int]] = []
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(self, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        self.asked.append(list(prompt_ids))
        tokens, version, reason = self.script.pop(0)
        answer = TokenOutput(token_ids=tokens, stop_reason=reason, extra_fields={"global_steps": version})
        if tokens:
            report(answer, *_rows(tokens, version), version=version)
        return pickle.loads(pickle.dumps(answer))  # noqa: S301  (as Ray hands it over)


class _Client(FullyAsyncLLMServerClient):
    """verl's client, which goes on where an answer was interrupted; one server, no load balancer."""

    def __init__(self, engine: _Engine) -> None:
        super().__init__(OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "cpu"}}}))
        self._engine = engine

    async def _acquire_server(self, request_id: str, **_: Any) -> tuple[str, Any]:
        return "one", self._engine

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        pass


@pytest.fixture(autouse=True)
def _impatient() -> Any:
    """verl waits a second before it goes on with an answer."""
    with patch("verl.workers.rollout.llm_server.asyncio.sleep", lambda _: asyncio.tasks.sleep(0)):
        yield


def _worker(client: Any) -> Any:
    worker = object.__new__(SamplerAgentLoopWorker)
    worker.llm_client = RecordingClient(client)
    worker._steps = TrainerSteps(calls_a_version=2, without=0, updates_a_call=4)
    worker._mass = 1.0
    return worker


def _batch_of(output: Any) -> dict[str, torch.Tensor]:
    """As the worker writes it, and one sequence's fields as the engine gets them."""
    fields = {**output.as_dict(), "old_log_probs": output.as_dict()["rollout_log_probs"]}
    whole = list_of_dict_to_tensordict([fields, {**fields, **_longer(fields)}])
    return {name: value for name, value in whole.items() if isinstance(value, torch.Tensor)}


def _longer(fields: dict[str, Any]) -> dict[str, Any]:
    """A second sequence of another length, so that verl makes jagged tensors."""
    names = ("responses", "response_mask", "old_log_probs", *sampler_fields.FIELDS[:-1])
    return {name: torch.cat((fields[name], fields[name])) for name in names}


def _run(worker: Any, turns: Any, *, validate: bool = False) -> Any:
    """A trajectory as verl's worker runs one, with `turns` as the agent loop."""
    kept = []

    async def agent_loop(
        self: Any, sampling_params: dict[str, Any], trajectory: dict[str, Any], **_: Any
    ) -> None:
        output = await turns(self.llm_client, sampling_params)
        await self._agent_loop_postprocess(output, trajectory["validate"], uid="a")

    async def keep(self: Any, output: Any, validate: bool, **_: Any) -> None:
        kept.append(output)

    base = AgentLoopWorkerTQ.__ray_actor_class__
    with (
        patch.object(base, "_run_agent_loop", agent_loop),
        patch.object(base, "_agent_loop_postprocess", keep),
    ):
        params = {"top_p": 1.0, "top_k": -1, "temperature": 1.0, "logprobs": True}
        asyncio.run(worker._run_agent_loop(params, trajectory={"validate": validate}, agent_name="any"))
    return kept[0]


async def _ask(client: Any, prompt: list[int], params: dict[str, Any]) -> TokenOutput:
    answer: TokenOutput = await client.generate("r", prompt_ids=prompt, sampling_params=params)
    return answer


def test_interrupted_answers_and_turns_keep_their_records_and_versions() -> None:
    """Two parts of one answer under two versions, a tool's tokens, and a second answer under a third."""
    engine = _Engine(
        [([5, 6], 1, "aborted"), ([], 1, "aborted"), ([7], 2, "completed"), ([2], 3, "completed")]
    )

    async def turns(client: Any, params: dict[str, Any]) -> AgentLoopOutput:
        first = await _ask(client, [8, 9], params)
        sequence = [8, 9, *first.token_ids, 0, 0]
        second = await _ask(client, sequence, {**params, "top_p": 0.9})
        responses = [*first.token_ids, 0, 0, *second.token_ids]
        numbers = [*first.log_probs, 0.0, 0.0, *second.log_probs]
        return AgentLoopOutput(prompt_ids=[8, 9], response_ids=responses, response_mask=[1, 1, 1, 0, 0, 1],
                               response_logprobs=numbers, metrics={}, extra_fields={})  # fmt: skip

    output = _run(_worker(_Client(engine)), turns)
    assert engine.asked == [[8, 9], [8, 9, 5, 6], [8, 9, 5, 6], [8, 9, 5, 6, 7, 0, 0]]
    fields = output.as_dict()
    assert fields["troll_sampler_count"].tolist() == [2, 2, 2, 0, 0, -2]
    assert fields["troll_sampler_calls"].tolist() == [2, 2, 4, -1, -1, 6]
    assert fields["troll_sampler_ids"].tolist() == [5, 6, 6, 7, 7, 8, 2, 3]
    with pytest.raises(
        InvalidInputError, match=r"position 5: the reported probabilities sum to 0\.\d+, but trunc"
    ):
        sampler_fields.unpack(_batch_of(output), VOCABULARY, None)
    fields["troll_sampler_count"].abs_()
    output._records["troll_sampler_count"].abs_()
    batch = _batch_of(output)

    def lags(made: dict[int, int], *, by_sequence: bool = False) -> list[int]:
        found = sampler_fields.lags(batch, calls=7, updates=3, made=made, by_sequence=by_sequence)
        assert found is not None
        return found[0].tolist()[:6]  # type: ignore[no-any-return]

    assert lags({}) == [23, 23, 15, 0, 0, 7]
    assert lags({}, by_sequence=True) == [23] * 6
    # What the engine really did in those calls that it saw: a batch with fewer responses, and one with more.
    assert lags({5: 2, 6: 7}) == [24, 24, 16, 0, 0, 10]
    policy = sampler_fields.unpack(batch, VOCABULARY, None)[:4]
    assert policy.sampled_ids.tolist() == [5, 6, 7, 2]
    told = torch.tensor(
        [_rows([token], version)[1][0] for token, version in ((5, 1), (6, 1), (7, 2), (2, 3))]
    )
    torch.testing.assert_close(policy.support.log_probs, told)
    torch.testing.assert_close(policy.support.log_tail, (1 - told.exp().sum(-1)).log(), atol=1e-6, rtol=0)


def test_tokens_an_agent_loop_changed_have_no_record() -> None:
    """One that was cut off and one that was rewritten; an answer that is not part of the trajectory."""
    engine = _Engine([([5, 6, 7], 1, "completed"), ([4], 1, "completed")])

    async def turns(client: Any, params: dict[str, Any]) -> AgentLoopOutput:
        answer = await _ask(client, [8, 9], params)
        await _ask(client, [1, 2, 3], params)
        numbers = answer.log_probs[:2]
        return AgentLoopOutput(prompt_ids=[8, 9], response_ids=[5, 0], response_mask=[1, 1],
                               response_logprobs=numbers, metrics={}, extra_fields={})  # fmt: skip

    output = _run(_worker(_Client(engine)), turns)
    assert output.as_dict()["troll_sampler_count"].tolist() == [2, 0]


def test_what_was_sampled_at_another_temperature_than_the_trainers_has_no_record() -> None:
    """The network would be compared with it at the configured one; greedy rows, or a loop's own setting."""
    engine = _Engine([([5], 1, "completed"), ([6], 1, "completed"), ([7], 1, "completed")])

    async def turns(client: Any, params: dict[str, Any]) -> AgentLoopOutput:
        sequence, numbers = [8, 9], []
        for temperature in (0.7, 1.0, 0):
            answer = await _ask(client, sequence, {**params, "temperature": temperature})
            sequence, numbers = sequence + answer.token_ids, numbers + answer.log_probs
        return AgentLoopOutput(prompt_ids=[8, 9], response_ids=sequence[2:], response_mask=[1, 1, 1],
                               response_logprobs=numbers, metrics={}, extra_fields={})  # fmt: skip

    worker = _worker(_Client(engine))
    worker.llm_client = RecordingClient(worker.llm_client._inner, temperature=0.7)
    assert _run(worker, turns).as_dict()["troll_sampler_count"].tolist() == [2, 0, 0]


def _packed(
    turns: list[sampler_fields.Turn], response: list[int], mask: list[int] | None = None
) -> tuple[list[int], list[float]]:
    """How many ids each token's record has, and the first of their log-probabilities."""
    fields = sampler_fields.pack(
        turns, [1, 2], response, mask or [1] * len(response), calls_of=lambda version: version, updates=1
    )
    counts = fields["troll_sampler_count"].tolist()
    firsts = np.cumsum([0, *counts])[:-1]
    values = fields["troll_sampler_log_probs"]
    return counts, [round(values[i].item(), 3) for i, n in zip(firsts, counts, strict=True) if n]


def test_of_a_token_no_more_ids_travel_than_hold_the_mass_that_was_asked_for() -> None:
    """And the drawn one; but all of a truncated turn, and of what is no distribution, to be refused."""
    rows = [[0.5, 0.3, 0.15, 0.04], [0.95, 0.03, 0.01, 0.005], [0.04, 0.03, 0.02, 0.9]]
    ids, drawn = [[3, 4, 5, 6]] * 3, [5, 5, 6]

    def kept(probabilities: list[list[float]], *, truncated: bool = False) -> list[list[int]]:
        numbers: list[list[float | None]] = [np.log(row).tolist() for row in probabilities]
        said = list(report_sequence(drawn, ids, numbers, 0, version=1))
        fields = sampler_fields.pack(
            [sampler_fields.Turn([1], drawn, said, truncated)], [1], drawn, [1, 1, 1],
            calls_of=lambda version: version, updates=1, mass=0.9,
        )  # fmt: skip
        counts = fields["troll_sampler_count"].abs().tolist()
        return [part.tolist() for part in fields["troll_sampler_ids"].split(counts)]

    assert kept(rows) == [[3, 4, 5], [3, 5], [6]]
    assert kept(rows, truncated=True) == ids
    assert kept([[*row[:3], np.nan] for row in rows]) == ids
    assert kept([[2 * p for p in row] for row in rows]) == ids


def test_mass_and_temperature_are_the_configured_ones() -> None:
    engine = _Engine([([5], 1, "completed")])

    async def turns(client: Any, params: dict[str, Any]) -> AgentLoopOutput:
        answer = await _ask(client, [8, 9], {**params, "temperature": 0.6})
        return AgentLoopOutput(prompt_ids=[8, 9], response_ids=[5], response_mask=[1],
                               response_logprobs=answer.log_probs, metrics={}, extra_fields={})  # fmt: skip

    worker: Any = object.__new__(SamplerAgentLoopWorker)
    worker.llm_client = _Client(engine)
    words = [
        "actor_rollout_ref.actor.policy_loss.troll_mass=0.8",
        "actor_rollout_ref.rollout.temperature=0.6",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        worker.config = compose("ppo_trainer", ["+tether=troll_sampler", *words])
    with patch.object(AgentLoopWorkerTQ.__ray_actor_class__, "__init__", lambda self: None):
        worker.__init__()
    assert _run(worker, turns).as_dict()["troll_sampler_count"].tolist() == [1]


def test_trainers_that_take_padded_answers_are_refused() -> None:
    """verl's old trainer and those built on it ask the manager of the configuration, too."""
    manager = object.__new__(SamplerAgentLoopManager)
    with pytest.raises(ConfigError, match=r"use_v1=True.*sync, colocate_async or separate_async"):
        manager.generate_sequences(DataProto())


def _answer(drawn: list[int], log_probs: list[float]) -> sampler_fields.Turn:
    said = report_sequence(drawn, [[token] for token in drawn], [[one] for one in log_probs], 0, version=1)
    return sampler_fields.Turn([1, 2], drawn, list(said), truncated=False)


@pytest.mark.parametrize("order", [1, -1])
def test_of_several_answers_to_one_prompt_the_one_that_was_kept_has_the_records(order: int) -> None:
    """As in best-of-n: the last token of both is the same, drawn after different ones."""
    kept, other = _answer([5, 6, 7], [-0.1, -0.2, -0.3]), _answer([5, 9, 7], [-1.1, -1.2, -1.3])
    assert _packed([kept, other][::order], [5, 6, 7]) == ([1, 1, 1], [-0.1, -0.2, -0.3])


def test_what_was_drawn_after_a_token_that_was_changed_has_no_record() -> None:
    """The policy after the new token is not the one that was reported, though its own token still stands."""
    counts, _ = _packed([_answer([5, 6, 7], [-0.1, -0.2, -0.3]), _answer([9], [-1.0])], [5, 8, 7], [1, 0, 1])
    assert counts == [1, 0, 0]


def test_trajectories_at_once_do_not_mix() -> None:
    """verl's worker runs many in one process."""

    async def both() -> list[int]:
        async def one(start: int) -> int:
            rollouts._turns.set([])
            client = RecordingClient(_Client(_Engine([([start], 1, "aborted"), ([start], 1, "completed")])))
            await _ask(client, [start], {})
            turns = rollouts._turns.get()
            assert turns is not None
            return sum(turn.token_ids.count(start) for turn in turns)

        return list(await asyncio.gather(one(3), one(4)))

    assert asyncio.run(both()) == [2, 2]


def test_validation_carries_nothing_more() -> None:
    # verl 0.9.0 expects the fields that every agent loop of its own fills in.
    extra = {"turn_scores": [], "tool_rewards": []}
    output = AgentLoopOutput(
        prompt_ids=[1], response_ids=[2], response_mask=[1], metrics={}, extra_fields=extra
    )
    kept = []

    async def keep(self: Any, output: Any, validate: bool, **_: Any) -> None:
        kept.append(output)

    with patch.object(AgentLoopWorkerTQ.__ray_actor_class__, "_agent_loop_postprocess", keep):
        asyncio.run(_worker(None)._agent_loop_postprocess(output, True))
        asyncio.run(_worker(None)._agent_loop_postprocess([output, output], False))
    assert kept[0] is output
    assert [one.as_dict()["troll_sampler_count"].tolist() for one in kept[1]] == [[0], [0]]


@pytest.mark.parametrize("validate", [True, False])
def test_an_engine_is_not_asked_for_what_no_validation_uses(validate: bool) -> None:
    """Log-probabilities; and their turns are not kept."""
    asked, noted = [], []

    async def turns(client: Any, params: dict[str, Any]) -> AgentLoopOutput:
        asked.append(params["logprobs"])
        answer = await _ask(client, [8, 9], params)
        noted.append(rollouts._turns.get())
        return AgentLoopOutput(prompt_ids=[8, 9], response_ids=answer.token_ids, response_mask=[1],
                               metrics={}, extra_fields={})  # fmt: skip

    _run(_worker(_Client(_Engine([([5], 1, "completed")]))), turns, validate=validate)
    assert asked == [not validate]
    assert noted[0] is None if validate else len(noted[0]) == 1


@pytest.mark.parametrize("wrap", [RecordingClient, lambda inner: ReportingEngine(inner, 8)])
def test_what_stands_before_a_client_or_an_engine_can_be_copied(wrap: Any) -> None:
    """And pickled, as Ray may: both ask for attributes before there are any."""
    wrapped = wrap(SimpleNamespace(name="verl's"))
    for again in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):  # noqa: S301
        assert type(again) is type(wrapped)
        assert again.name == "verl's"
        with pytest.raises(AttributeError, match="other"):
            again.other  # noqa: B018


def test_a_record_travels_between_processes() -> None:
    values = report(TokenOutput(token_ids=[1, 2]), *_rows([1, 2], 3), version=3).log_probs
    again = pickle.loads(pickle.dumps(values))  # noqa: S301
    assert again == values
    assert all(isinstance(value, Reported) for value in again)
    assert again[0].block is again[1].block
    assert again[0].block.ids.tolist() == [[1, 2], [2, 3]]


@pytest.mark.parametrize(
    ("batch", "mini_batch", "of_critic", "updates"),
    [(64, 16, None, 4), (96, 64, None, 2), (100, 32, None, 4), (48, 64, None, 1), (64, 32, 48, 3)],
)
def test_a_batch_is_filled_up_to_whole_mini_batches_before_its_updates_are_counted(
    batch: int, mini_batch: int, of_critic: int | None, updates: int
) -> None:
    """As verl does, for actor and critic together."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [
            f"data.train_batch_size={batch}", f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch}",
            f"critic.enable={of_critic is not None}", f"critic.ppo_mini_batch_size={of_critic or 1}",
        ])  # fmt: skip
    trainer = SimpleNamespace(config=config, use_critic=of_critic is not None, global_steps=1)
    multiple = PPOTrainer._get_required_batch_multiple(trainer, 8)
    responses = -(-batch * config.actor_rollout_ref.rollout.n // multiple) * multiple
    assert responses // (mini_batch * config.actor_rollout_ref.rollout.n) == updates
    assert TrainerSteps.read(config).updates_a_call == updates


class _Judged(AgentLoopOutput):
    """As an agent loop of one's own may return it, with a field of the batch."""

    step_rewards: list[float] = []  # noqa: RUF012  (pydantic's)

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "process_rewards": torch.tensor(self.step_rewards)}


def test_what_an_agent_loops_own_output_adds_to_the_batch_stays() -> None:
    output = _Judged(
        prompt_ids=[1], response_ids=[2], response_mask=[1], metrics={}, step_rewards=[0.5],
        extra_fields={"turn_scores": [], "tool_rewards": []},
    )  # fmt: skip
    recorded = _worker(None)._recorded(output)
    assert isinstance(recorded, _Judged)
    assert recorded.step_rewards == [0.5]
    assert recorded.as_dict().keys() == output.as_dict().keys() | set(sampler_fields.FIELDS)
    assert "troll_sampler_count" not in output.as_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["algorithm.rollout_correction.rollout_is=token"], r"rollout_is=token.*null.*\+tether=troll"),
        (["algorithm.rollout_correction.rollout_rs=token_k1"], "rollout_rs=token_k1"),
        (["actor_rollout_ref.actor.policy_loss.troll_anchor=trainer"], "troll_anchor is 'trainer'"),
        (["algorithm.rollout_correction.bypass_mode=False"], r"bypass_mode=True\. Set it"),
        (["actor_rollout_ref.rollout.calculate_log_probs=False"], "calculate_log_probs=True"),
        (["actor_rollout_ref.rollout.custom.troll_top_k=0"], "not told how many ids to report"),
        (["actor_rollout_ref.rollout.top_k=100"], r"more ids of a token than the 64.*rollout.top_k=64"),
        (["actor_rollout_ref.rollout.top_p=0.9"], r"more ids of a token than the 64.*rollout.top_k=64"),
        (["actor_rollout_ref.rollout.logprobs_mode=raw_logprobs"], "Set it to processed_logprobs"),
        (["actor_rollout_ref.rollout.name=sglang"], r"name=sglang reports nothing.*vllm.*\+tether=troll"),
        (
            ["actor_rollout_ref.rollout.disaggregation.enabled=True"],
            "servers of its own, which report nothing",
        ),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_its_remedy(
    changes: list[str], message: str
) -> None:
    with initialize_config_module("verl.trainer.config", version_base=None):
        words = ["+tether=troll_sampler", "actor_rollout_ref.rollout.name=vllm"]
        good, config = compose("ppo_trainer", words), compose("ppo_trainer", [*words, *changes])
    rollouts.refuse_configuration(good)
    with pytest.raises(ConfigError, match=message):
        rollouts.refuse_configuration(config)
