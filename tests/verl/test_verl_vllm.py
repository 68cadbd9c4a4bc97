"""verl's own vLLM server, on a stand-in for vLLM: what it is asked for, and what becomes of its outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import stub_vllm
from verl.workers.config import RolloutConfig
from verl.workers.rollout import replica

from tether.errors import ConfigError
from tether.integrations.sampler_reports import Reported
from tether.integrations.verl.vllm_reports import ReportingEngine, ReportingServer, reporting_replica

#: Drawn ids and what vLLM says of the likeliest ones; 7 is not among the two likeliest.
ROWS = [(5, {5: -0.2, 6: -2.0, 7: -4.0}), (7, {5: -0.5, 6: -1.2, 7: -3.5}), (6, {6: -0.1, 5: -2.5, 7: -6.0})]


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    with stub_vllm.installed() as module:
        yield module


def _server(module: Any, engine: Any, **settings: Any) -> Any:
    """verl's server as it is after it started, without a process or a port."""
    server = object.__new__(type("Server", (ReportingServer, module.vLLMHttpServer), {}))
    values = {
        "name": "vllm",
        "max_model_len": 100,
        "response_length": 32,
        "custom": {"troll_top_k": 2},
        **settings,
    }
    server.config = RolloutConfig(**values)
    server.model_config = SimpleNamespace(processor=None, lora_rank=0, lora={})
    server.engine = ReportingEngine(engine, 2)
    server.global_steps, server.replica_rank, server._admitting = 4, 0, 0
    server._disaggregation_role, server._submission_paused, server._rejecting = "null", False, False
    server._resume_event = asyncio.Event()
    server._resume_event.set()
    return server


def _ask(server: Any, **params: Any) -> Any:
    asked = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "logprobs": True, **params}
    return asyncio.run(server.generate([1, 2, 3], asked, "one"))


@pytest.mark.parametrize("flat", [True, False])
def test_the_likeliest_ids_come_with_the_tokens(
    module: Any, flat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not flat:  # as in versions that do not know it
        fields = {
            n: f for n, f in stub_vllm.SamplingParams.__dataclass_fields__.items() if n != "flat_logprobs"
        }
        older = type("SamplingParams", (), {"__init__": lambda self, **kw: self.__dict__.update(
            {n: f.default for n, f in fields.items()} | kw)})  # fmt: skip
        monkeypatch.setattr(module, "SamplingParams", older)
        monkeypatch.setattr(stub_vllm.Engine, "_logprobs", _as_dictionaries)
    engine = stub_vllm.Engine(ROWS)
    server = _server(module, engine)
    output = _ask(server)
    assert engine.asked[0].logprobs == 2
    assert output.token_ids == [5, 7, 6]
    assert all(isinstance(value, Reported) for value in output.log_probs)
    assert [float(value) for value in output.log_probs] == pytest.approx([-0.2, -3.5, -0.1])
    block = output.log_probs[0].block
    assert block.version == 4
    assert [sorted(row) for row in block.ids.tolist()] == [[-1, 5, 6], [5, 6, 7], [-1, 5, 6]]
    said = dict(zip(block.ids[1].tolist(), block.log_probs[1].tolist(), strict=True))
    assert said == pytest.approx(ROWS[1][1])
    assert not server.engine.finished


def _as_dictionaries(self: Any, steps: int, params: Any) -> Any:
    rows = []
    for token, row in self.rows[:steps]:
        likeliest = sorted(row, key=lambda one: -row[one])[: params.logprobs]
        rows.append({one: stub_vllm.Logprob(row[one]) for one in [token, *likeliest]})
    return rows


def test_an_interrupted_request_reports_what_it_has(module: Any) -> None:
    output = _ask(_server(module, stub_vllm.Engine(ROWS[:1], "abort")))
    assert (output.stop_reason, output.token_ids) == ("aborted", [5])
    assert isinstance(output.log_probs[0], Reported)
    empty = _server(module, stub_vllm.Engine([]))
    assert _ask(empty).token_ids == []
    assert not empty.engine.finished


def test_who_asks_for_no_log_probabilities_gets_none(module: Any) -> None:
    engine = stub_vllm.Engine(ROWS)
    assert _ask(_server(module, engine), logprobs=False).log_probs is None
    assert engine.asked[0].logprobs is None


def test_vllms_limit_is_raised(module: Any) -> None:
    server = _server(module, None, custom={"troll_top_k": 64})
    for given, expected in (({}, 64), ({"max_logprobs": 128}, 128), ({"max_logprobs": -1}, -1)):
        server._preprocess_engine_kwargs(given)
        assert given["max_logprobs"] == expected
    # Ids as likely as the last one that sampling keeps are kept, too.
    truncated: dict[str, Any] = {}
    _server(module, None, custom={"troll_top_k": 64}, top_k=50)._preprocess_engine_kwargs(truncated)
    assert truncated["max_logprobs"] == 100


def test_servers_report_where_they_are_asked_to(module: Any) -> None:
    """verl's registry has our replica for "vllm", whose servers are verl's own unless the switch is set."""
    found = replica.RolloutReplicaRegistry.get("vllm")
    assert issubclass(found, module.vLLMReplica)
    assert found is not module.vLLMReplica

    def servers(**settings: Any) -> Any:
        made = reporting_replica(module.vLLMReplica)(
            0, RolloutConfig(name="vllm", tensor_model_parallel_size=1, **settings), None, 1
        )
        return made.server_class.__ray_actor_class__

    assert servers() is module.vLLMHttpServer
    assert issubclass(servers(custom={"troll_top_k": 8}), ReportingServer)
    with pytest.raises(ConfigError, match=r"logprobs_mode=raw_logprobs .* Set it to processed_logprobs"):
        servers(custom={"troll_top_k": 8}, logprobs_mode="raw_logprobs")
