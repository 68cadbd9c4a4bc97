"""What a sampler reports of scripted rollouts, and the same without any of verl: whole rows in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from actor import Rollouts, jagged
from dense import Dense
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tether.integrations.sampler_reports import report_sequence
from tether.integrations.verl.sampler_fields import Turn, pack
from tether.losses import troll
from tether.losses.base import PolicyLoss


@dataclass
class Reports:
    """Of one token a row: the likeliest ids and the drawn one, [B, T, K], as float32 rounds them."""

    ids: Tensor
    log_probs: Tensor
    truncated: bool
    calls: list[int]
    """Of each sequence: the trainer's update calls behind the weights that sampled it."""
    updates: int = 1

    @classmethod
    def of(
        cls, sampler: Tensor, rollouts: Rollouts, top_k: int, truncated: bool, calls: list[int]
    ) -> Reports:
        """From the sampler's log-probabilities [B, T, V]; if truncated, it drew from its likeliest ids."""
        drawn = pad_sequence(rollouts.responses, batch_first=True)
        # Scripted tokens are anything: count them among the likeliest.
        ids = sampler.scatter(-1, drawn[..., None], torch.inf).topk(top_k).indices
        values = sampler.gather(-1, ids)
        if truncated:
            values = values.log_softmax(-1)
        return cls(ids, values.float(), truncated, calls)

    def fields(self, rollouts: Rollouts) -> dict[str, Tensor]:
        """What an update needs of its batch."""
        packed, own = [], []
        for row, (prompt, response, mask) in enumerate(
            zip(rollouts.prompts, rollouts.responses, rollouts.masks, strict=True)
        ):
            length, drawn = len(response), response.tolist()
            said = report_sequence(
                drawn,
                self.ids[row, :length].tolist(),
                self.log_probs[row, :length].tolist(),
                row,
                self.calls[row],
            )
            turn = Turn(prompt.tolist(), drawn, list(said), self.truncated)
            packed.append(
                pack(
                    [turn], prompt.tolist(), drawn, mask.tolist(), calls_of=lambda v: v, updates=self.updates
                )
            )
            own.append(torch.tensor([float(value) for value in said]))
        batch = {name: jagged([one[name] for one in packed]) for name in packed[0]}
        return batch | {"old_log_probs": jagged(own), "advantages": jagged(rollouts.advantages)}

    def loss(
        self, reference: Dense, rollouts: Rollouts, bounds: Tensor | float, **settings: Any
    ) -> PolicyLoss:
        """TROLL on the sampler's outcomes written out: the reported ids, and all others as one."""
        drawn, mask = (pad_sequence(part, batch_first=True) for part in (rollouts.responses, rollouts.masks))
        advantages = pad_sequence(rollouts.advantages, batch_first=True)
        new, old = reference.log_probs(rollouts).gather(-1, self.ids), self.log_probs.double()
        if self.truncated:
            new, old = new.log_softmax(-1), old.log_softmax(-1)
        else:
            new, old = (torch.cat((few, _rest(few)), -1) for few in (new, old))
        index = (self.ids == drawn[..., None]).int().argmax(-1)
        sampled, old_sampled = (side.gather(-1, index[..., None]).squeeze(-1) for side in (new, old))
        return troll(
            sampled,
            old_sampled,
            advantages,
            mask,
            response_ids=index,
            new=new,
            old=old,
            kl_bound=bounds,
            **settings,
        )


def _rest(few: Tensor) -> Tensor:
    return (-few.exp().sum(-1, keepdim=True)).log1p()
