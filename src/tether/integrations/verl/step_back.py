"""The bound of `tether.step_back` on verl: when a call of update_actor ends, the network is within a budget
of the policy that verl scored the batch with, measured over the whole vocabulary.

That policy's weights are noted where its distributions are recorded; its hidden states are the store's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils.metric import AggregationType, Metric

from tether.integrations.verl.layout import CountedTokens, Partition
from tether.integrations.verl.losses import ScorePolicy
from tether.integrations.verl.settings import TROLLPolicyLossConfig
from tether.integrations.verl.store import OldPolicyStore, handles
from tether.integrations.verl.views import HiddenView
from tether.step_back import StepBack


class MeasureKL(ScorePolicy):
    """The same in a pass that measures: KL(new || old) of the tokens that count, which no batch gets."""

    def __init__(self, view: HiddenView, partition: Partition, store: OldPolicyStore) -> None:
        super().__init__(view, partition)
        self._store = store
        self.kl: list[Tensor] = []
        """Of each micro-batch, [n]."""

    def _see(self, rows: Tensor, tokens: CountedTokens, data: Any) -> dict[str, Tensor]:
        assert isinstance(self.view, HiddenView)
        self.kl.append(self.view.divergence(rows, tokens, data, self._store.take(data, rows.device)))
        return {}


class NetworkBound:
    """What a step back needs of one call of update_actor: its mini-batches, each sequence once.

    Args:
        measure: KL(new || old) of a mini-batch's tokens on this process, a tensor a micro-batch.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        settings: TROLLPolicyLossConfig,
        measure: Callable[[TensorDict], list[Tensor]],
    ) -> None:
        assert settings.troll_step_back is not None
        self._step_back = StepBack(
            module,
            settings.troll_step_back,
            statistic=settings.troll_step_back_statistic,
            passes=settings.troll_step_back_passes,
        )
        self._measure = measure
        self._mini_batches: list[TensorDict] = []
        self._known: set[tuple[int, ...]] = set()

    def record(self) -> None:
        """The weights are now those whose distributions were recorded."""
        self._forget()
        self._step_back.record()

    def add(self, data: TensorDict) -> None:
        """An update was made on this mini-batch; all processes say so together."""
        sequences = {tuple(handle) for handle in handles(data)}
        news = torch.tensor(int(not sequences <= self._known), device=data["response_mask"].device)
        torch.distributed.all_reduce(news, torch.distributed.ReduceOp.MAX)
        if news:  # to any process: all of them measure as often
            self._mini_batches.append(data)
            self._known |= sequences

    def enforce(self) -> dict[str, Metric]:
        """Bring the network within the budget; what was found and kept."""
        result = self._step_back.enforce(
            lambda: torch.cat([kl for data in self._mini_batches for kl in self._measure(data)])
        )
        self._forget()
        found = {
            "kl_before": result.divergence_before,
            "kl": result.divergence,
            "fraction": result.fraction,
            "passes": float(result.passes),
        }  # the same on every process
        return {
            f"actor/troll/step_back/{name}": Metric(AggregationType.MAX, value)
            for name, value in found.items()
        }

    def _forget(self) -> None:
        self._mini_batches, self._known = [], set()
