"""The distributions behind the tokens that moved most, a few entries of each: what a report draws as bars."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tether.integrations.trl_old_policy import IDS, old_support
from tether.projection.sparse import EMPTY
from tether.projection.tokens import ProjectedTokens

TOKENS = 2
"""So many tokens of a response, those of the largest KL, are kept with their distributions."""
ENTRIES = 6
"""So many entries of a distribution, besides the sampled one."""


def moved_tokens(
    trainer: Any, inputs: dict[str, Any], tokens: ProjectedTokens, row: int, tokenizer: Any
) -> list[dict[str, Any]]:
    """Old, new and projected probabilities of the likeliest entries of a response's most moved tokens.

    The old ones were recorded with the rollouts; the new ones take another pass over this response, without
    dropout; the projected ones follow from both, being proportional to new^s old^(1-s). Nothing is returned
    where that cannot be: no old distribution was recorded, the model is in shares, or it sees pictures.

    Args:
        trainer: an `OldPolicyTrainer`.
        inputs: of its loss, old policy included.
        tokens: what the loss found, [B, T].
        row: of the batch.
        tokenizer: writes the entries.

    Returns:
        For each token ``{"at": place in the response, "step": s, "entries": [...]}``, an entry being
        ``{"text", "old", "new", "projected", "sampled"}``: probabilities in [0, 1], the likeliest first.
    """
    if IDS not in inputs or "pixel_values" in inputs or trainer.accelerator.num_processes > 1:
        return []
    counted = inputs["completion_mask"][row].bool()
    kl = torch.where(counted & tokens.kl[row].isfinite(), tokens.kl[row].detach(), -1.0)
    places = kl.topk(min(TOKENS, len(kl))).indices.sort().values
    places = places[kl[places] > 0]
    if not len(places):
        return []
    new = _new_log_probs(trainer, inputs, row, places)
    old = old_support(inputs)[row, places]
    return [
        _entries(place, index, new, old, inputs, tokens, row, tokenizer) for index, place in enumerate(places)
    ]


@torch.no_grad()
def _new_log_probs(trainer: Any, inputs: dict[str, Any], row: int, places: Tensor) -> Tensor:
    """Of the whole vocabulary at those places, [places, V], at the temperature of the rollouts."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
    ids = torch.cat([prompt, inputs["completion_ids"][row]])[None]
    was_training = model.training
    model.eval()
    try:
        logits = model(input_ids=ids, logits_to_keep=places + len(prompt) - 1, use_cache=False).logits[0]
    finally:
        model.train(was_training)
    return (logits.float() / trainer.temperature).log_softmax(-1)


def _entries(
    place: Tensor,
    index: int,
    new: Tensor,
    old: Any,
    inputs: dict[str, Any],
    tokens: ProjectedTokens,
    row: int,
    tokenizer: Any,
) -> dict[str, Any]:
    """The sampled entry and the likeliest of those whose old probability was recorded."""
    sampled = inputs["completion_ids"][row, place]
    ids, old_log_probs = old.ids[index], old.log_probs[index].float()
    kept = (ids != EMPTY) & (ids != sampled)
    ids, old_log_probs = ids[kept], old_log_probs[kept]
    ids = torch.cat([sampled[None], ids])
    old_log_probs = torch.cat([tokens.old_log_probs[row, place][None].float(), old_log_probs])
    new_log_probs = new[index, ids]
    order = torch.maximum(old_log_probs, new_log_probs).argsort(descending=True)[:ENTRIES]
    if 0 not in order:
        order = torch.cat([order, order.new_zeros(1)])
    step = tokens.step[row, place].detach().nan_to_num(1.0)
    path = step * new_log_probs + (1 - step) * old_log_probs
    projected = (
        path - path[0] + tokens.projected_log_probs[row, place].detach() if step < 1 else new_log_probs
    )
    return {
        "at": int(place),
        "step": float(step),
        "entries": [
            {
                "text": tokenizer.decode([int(ids[entry])]),
                "old": float(old_log_probs[entry].exp()),
                "new": float(new_log_probs[entry].exp()),
                "projected": float(projected[entry].exp()),
                "sampled": int(entry) == 0,
            }
            for entry in order
        ],
    }  # fmt: skip
