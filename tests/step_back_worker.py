"""One of two processes that bound a network together over gloo; started by test_step_back.py.

    python step_back_worker.py OUT      with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set

Writes OUT/RANK.json.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ranks import end_rank
from step_back_policy import BUDGET, Policy
from tether import kl_categorical
from tether.step_back import Statistic, StepBack, StepBackResult


class _Network(nn.Module):
    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.first, self.second = policy.parameters

    def forward(self, inputs: Tensor) -> Tensor:
        return (torch.tanh(inputs @ self.first) @ self.second).log_softmax(-1)


def _bound(statistic: Statistic, *, sharded: bool) -> list[float]:
    """The first process has 50 of the 200 tokens, the second the others."""
    policy = Policy(0, 0.1)
    network = _Network(policy)
    if sharded:
        fully_shard(network, mesh=init_device_mesh("cpu", (2,)))
    own = slice(0, 50) if dist.get_rank() == 0 else slice(50, None)
    bound = StepBack(network, BUDGET, statistic=statistic)
    bound.record()
    with torch.no_grad():
        for parameter, step in zip(network.parameters(), policy.step, strict=True):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local += step.chunk(2)[dist.get_rank()] if sharded else step

    @torch.no_grad()
    def measure() -> Tensor:
        return kl_categorical(network(policy.inputs[own]), policy.old[own])

    result: StepBackResult = bound.enforce(measure)
    weights = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in network.parameters()]
    flat = torch.cat([weight.flatten() for weight in weights]).tolist()
    return [result.fraction, result.divergence_before, result.divergence, float(result.passes), *flat]


def _spoiled_in_one() -> list[float]:
    place = nn.Parameter(torch.zeros(1))
    bound = StepBack([place], BUDGET)
    bound.record()
    with torch.no_grad():
        place += math.nan if dist.get_rank() == 0 else 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = bound.enforce(lambda: torch.zeros(1))
    return [result.fraction, float(place)]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    numbers = {
        f"{kind} {statistic}": _bound(statistic, sharded=kind == "sharded")
        for kind in ("replicated", "sharded")
        for statistic in ("mean", "max", 0.9)
    }
    numbers["spoiled in one"] = _spoiled_in_one()
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(numbers))
    end_rank()


if __name__ == "__main__":
    main()
