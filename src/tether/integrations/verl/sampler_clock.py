"""How old the sampler's weights are, in optimizer steps, and what the region does by it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from verl.utils.device import get_device_id
from verl.utils.metric import AggregationType, Metric

from tether.integrations.lag_metrics import lag_means, lag_sums, sum_by_lag
from tether.integrations.verl import sampler_fields
from tether.projection import ProjectedTokens


class Lags:
    """Of one optimizer step's mini-batch.

    Args:
        data: the sequences of this process.
        calls, updates: of the trainer's update that are done, and optimizer steps of the present one.
        made, by_sequence: see `sampler_fields.lags`.
        group: of the processes that have the other sequences.
    """

    def __init__(
        self, data: Any, calls: int, updates: int, made: Mapping[int, int], *, by_sequence: bool, group: Any
    ) -> None:
        self._count = functools.partial(
            sampler_fields.lags, calls=calls, updates=updates, made=made, by_sequence=by_sequence
        )
        lag, mask = self.of(data), sampler_fields.padded(data["response_mask"])
        oldest = torch.zeros(len(mask), dtype=torch.long, device=mask.device) if lag is None else lag.amax(1)
        # All processes have all groups, and every micro-batch its share of each: verl adds shares up. A
        # mini-batch may still be in host memory, where not every process group can add.
        device = get_device_id()
        self._tokens = sum_by_lag((mask > 0).sum(1).double(), oldest).to(device)
        known = torch.tensor(float(lag is not None), device=device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(self._tokens, group=group)
            torch.distributed.all_reduce(known, torch.distributed.ReduceOp.MIN, group=group)
        self._known = bool(known > 0)

    def of(self, data: Any) -> Tensor | None:
        """Of a micro-batch's tokens, [B, T]; None where a sampler does not count its weights."""
        return self._count(data)

    def metrics(self, tokens: ProjectedTokens, data: Any) -> dict[str, Metric]:
        """Of a micro-batch: the oldest lag, and its part of the means by lag."""
        lag = self.of(data)
        if not self._known or lag is None:
            return {}
        mask = sampler_fields.padded(data["response_mask"])
        sums = lag_sums(tokens, lag.amax(1), mask).double()
        sums[:, 0] = self._tokens.to(sums.device)
        share = data["dp_size"]  # of which verl takes the mean
        means = {
            f"actor/troll/{name}": Metric(AggregationType.SUM, value * share)
            for name, value in lag_means(sums).items()
            if tokens.uncertain is not None or not name.endswith("/uncertain")
        }
        return {"actor/troll/lag": Metric(AggregationType.MAX, float(lag.max()))} | means
