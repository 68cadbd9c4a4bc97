"""Rollouts for TRL's asynchronous trainer without a server: sampled in the trainer's process, lag at will."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tiny_language_model import CHARACTERS, make_tiny_model
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from tether.integrations.sampler_reports import report_sequence
from tether.integrations.trl_async_records import SamplerRecords


class WeightsInProcess:
    """A `WeightTransferProtocol` that keeps every version it is sent."""

    def __init__(self) -> None:
        self.versions: list[dict[str, torch.Tensor]] = []

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.versions.append({name: tensor.clone() for name, tensor in iterator})


class WorkerInProcess(queue.Queue):  # type: ignore[type-arg]
    """A `RolloutWorkerProtocol`, and its queue: a group is sampled when the trainer asks and none waits.

    Samples with the weights of `lag` versions ago. Each completion has two turns with a tool's token between.
    """

    def __init__(
        self,
        weights: WeightsInProcess,
        *,
        lag: int = 0,
        top_k: int = 6,
        generations: int = 4,
        truncates: bool = False,
    ) -> None:
        super().__init__()
        self.rollout_buffer, self.metrics_queue = self, queue.Queue()  # type: ignore[var-annotated]
        self._weights, self._lag, self._top_k, self._generations = weights, lag, top_k, generations
        self._model = make_tiny_model()
        self._truncates = truncates
        self._groups = 0
        self._random = torch.Generator().manual_seed(5)
        self.sent: list[RolloutSample] = []
        self.spoil: Any = None  # changes a sample before it is sent

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...

    def update_model_version(self, model_version: int) -> None:
        assert model_version == len(self._weights.versions)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self.empty():
            self._roll_out()
        return super().get(block, timeout)

    @torch.no_grad()
    def _roll_out(self) -> None:
        version = max(1, len(self._weights.versions) - self._lag)
        self._model.load_state_dict(self._weights.versions[version - 1])
        prompt = [self._groups % 8, CHARACTERS.index("+"), self._groups % 5, CHARACTERS.index("=")]
        drawn = [self._complete(prompt, sequence) for sequence in range(self._generations)]
        rewards = np.array([sum(token < 10 for token in ids[4:]) for ids, _, _ in drawn], dtype=float)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        for (ids, mask, values), advantage in zip(drawn, advantages, strict=True):
            sample = RolloutSample(
                prompt=[], completion=[], input_ids=np.array(ids), completion_mask=np.array(mask),
                old_log_probs=SamplerRecords.of(values), advantage=float(advantage),  # type: ignore[arg-type]
                model_version=version, group_id=self._groups, metrics={"reward": 0.0},
            )  # fmt: skip
            if self.spoil is not None:
                sample = self.spoil(sample)
            self.sent.append(sample)
            self.put(sample)
        self._groups += 1

    def _complete(self, prompt: list[int], sequence: int) -> tuple[list[int], list[int], list[float]]:
        ids, mask, values = list(prompt), [0] * len(prompt), [0.0] * len(prompt)
        for _turn in range(2):
            turn: list[int] = []
            likeliest, numbers = [], []
            for _ in range(2 + sequence):
                log_probs = self._model(torch.tensor([ids + turn])).logits[0, -1].log_softmax(-1)
                if self._truncates:
                    least = log_probs.topk(self._top_k).values[-1]
                    log_probs = torch.where(log_probs < least, -torch.inf, log_probs).log_softmax(-1)
                turn.append(int(torch.multinomial(log_probs.exp(), 1, generator=self._random)))
                top = log_probs.topk(self._top_k).indices.tolist()
                row = list(dict.fromkeys([turn[-1], *top]))
                likeliest.append(row)
                numbers.append(log_probs[row].tolist())
            values += report_sequence(turn, likeliest, numbers, sequence)
            ids, mask = ids + turn, mask + [1] * len(turn)
            ids, mask, values = [*ids, CHARACTERS.index("a")], [*mask, 0], [*values, 0.0]  # a tool's answer
        return ids, mask, values
