"""One pass of the network through TRL's scoring loop: what the forward is asked besides, and what it said."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from tether.errors import TetherError
from tether.integrations.exact_head import OldTokens
from tether.integrations.sparse_head import SparseHeadOutput
from tether.losses import PolicyLoss
from tether.projection import ProjectedTokens, SparseLogProbs


class Evaluation:
    """Stands in for the model in TRL's scoring loop: adds keywords to each call and keeps the outputs.

    TRL splits a batch into chunks of rows; per-row keywords are split alongside. It is handed to TRL as the
    model, so that what belongs to one pass never lives in the trainer.
    """

    def __init__(self, model: Any, keywords: dict[str, Any]) -> None:
        self.model = model
        self._keywords = keywords
        self._row = 0
        self._outputs: list[SparseHeadOutput] = []
        self._scored: tuple[Tensor, Tensor | None] | None = None

    def __call__(self, **kwargs: Any) -> SparseHeadOutput:
        rows = slice(self._row, self._row + kwargs["input_ids"].size(0))
        self._row = rows.stop
        extra = {
            name: value[rows] if isinstance(value, (Tensor, OldTokens)) else value
            for name, value in self._keywords.items()
        }
        output = self.model(**kwargs, **extra)
        self._outputs.append(output)
        return output

    def keep(self, log_probs: Tensor, entropies: Tensor | None) -> None:
        """Note what TRL made of the outputs, [B, T]: the sampled tokens' log-probabilities, and entropies."""
        self._scored = log_probs, entropies

    @property
    def log_probs(self) -> Tensor:
        """Of the sampled tokens under the network, [B, T]; differentiable."""
        return self._read()[0]

    @property
    def entropies(self) -> Tensor:
        """Of the network's distributions, [B, T]."""
        entropies = self._read()[1]
        assert entropies is not None
        return entropies

    def _read(self) -> tuple[Tensor, Tensor | None]:
        if self._scored is None:
            raise TetherError(
                "TRL computed a loss without evaluating the model here, so there is nothing to project. An "
                "override of _get_per_token_logps_and_entropies must call super() with the model it is given."
            )
        return self._scored

    @property
    def support(self) -> SparseLogProbs:
        """The network's distributions on their supports, [B, T, K]."""
        tokens = self.log_probs.shape[1]
        parts = [output.support(tokens) for output in self._outputs]
        least = [part.log_tail_min for part in parts if part.log_tail_min is not None]
        return SparseLogProbs(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.log_probs for part in parts]),
            torch.cat([part.log_tail for part in parts]),
            torch.cat(least) if least else None,
        )

    @property
    def hidden(self) -> Tensor | None:
        """Its last hidden states, [B, T, D], if they were kept."""
        tokens = self.log_probs.shape[1]
        parts = [output.hidden[:, -tokens:] for output in self._outputs if output.hidden is not None]
        return torch.cat(parts) if parts else None

    @property
    def policy_loss(self) -> PolicyLoss | None:
        """The loss, if the forward was asked for it; it alone is differentiable then."""
        output = self._outputs[0]
        if output.loss is None:
            return None
        return PolicyLoss(output.loss, output.loss_metrics or {})

    @property
    def kl(self) -> Tensor:
        """KL(new || old) of each token over the whole vocabulary, [B, T]; needs `old_tokens`."""
        tokens = self.log_probs.shape[1]
        return torch.cat([output["kl"][:, -tokens:] for output in self._outputs])

    def projected(self, old_log_probs: Tensor, mask: Tensor, *, bounded: bool) -> ProjectedTokens:
        """What exact evaluation found, [B, T].

        Args:
            old_log_probs: of the sampled tokens, as they were recorded.
            mask: tokens that count.
            bounded: whether there is a bound that could project anything.
        """
        log_probs = self.log_probs
        tokens = log_probs.shape[1]
        names = {field.name for field in fields(ProjectedTokens)} & set(self._outputs[0].keys())
        found: dict[str, Any] = {
            name: torch.cat([output[name][:, -tokens:] for output in self._outputs]) for name in names
        }
        projected = found["projected"] & (mask > 0)
        acts = {
            "projected_log_probs": torch.where(projected, found["projected_log_probs"], log_probs),
            "regression": torch.where(projected, found["regression"], 0.0),
            "step": torch.where(projected, found["step"], 1.0),
            "projected_kl": found["projected_kl"] if bounded else None,
        }
        known = {**found, **acts, "projected": projected, "old_log_probs": old_log_probs}
        return ProjectedTokens(new_log_probs=log_probs, **known)
