"""The engine's loss and gradients against `tether.losses.troll` on dense float64 distributions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from actor import FLOAT64, VOCABULARY, Rollouts, gradients, make_actor, parameters
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3ForCausalLM

from tether.integrations.verl import TROLLPolicyLossConfig
from tether.losses import troll
from tether.losses.base import PolicyLoss
from tether.projection import SparseLogProbs


class Dense:
    """The same model without any of verl: one sequence at a time, float64, the whole vocabulary."""

    def __init__(self, folder: Path, state: dict[str, Tensor]) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
        self.model.load_state_dict({name: value.double() for name, value in state.items()})

    def log_probs(self, rollouts: Rollouts) -> Tensor:
        """[B, T, V] of the response tokens."""
        rows = []
        for prompt, response in zip(rollouts.prompts, rollouts.responses, strict=True):
            logits = self.model(torch.cat((prompt, response))[None]).logits[0] / rollouts.temperature
            rows.append(logits[len(prompt) - 1 : -1].log_softmax(-1))
        return pad_sequence(rows, batch_first=True)

    def loss(self, rollouts: Rollouts, old: Tensor, top_k: int | None, **settings: Any) -> PolicyLoss:
        ids, mask = (pad_sequence(part, batch_first=True) for part in (rollouts.responses, rollouts.masks))
        advantages = pad_sequence(rollouts.advantages, batch_first=True)
        new = self.log_probs(rollouts)
        sampled, old_sampled = (side.gather(-1, ids[..., None]).squeeze(-1) for side in (new, old))
        distributions: dict[str, Any] = {"new": new, "old": old}
        if top_k is not None:
            keep = {"mass": 1 - 1e-5, "keep_ids": ids}
            sparse_old = SparseLogProbs.from_logits(old, top_k, **keep)
            sparse_old = replace(sparse_old, log_tail_min=old.amin(-1))
            sparse_new = (
                SparseLogProbs.from_logits(new, sparse_old.ids.shape[-1] - 1, **keep)
                if settings.get("support") == "paper"
                else SparseLogProbs.at_ids(new, sparse_old.ids)
            )
            distributions = {"new": sparse_new, "old": sparse_old}
        return troll(sampled, old_sampled, advantages, mask, response_ids=ids, **distributions, **settings)


# So that it matters after two small steps.
KL_BOUND = 0.0005


pytestmark = pytest.mark.usefixtures("float64")

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int | None]] = {
    # name: TROLL's settings in verl, verl's actor settings, the same for the reference, top_k of it
    "exact": ({"troll_top_k": 6}, {}, {}, None),
    "no regression": ({"troll_top_k": 6, "troll_alpha": 0.0}, {}, {"alpha": 0.0}, None),
    "through the queue": ({"troll_top_k": 6, "troll_old_store": "queue"}, {}, {}, None),
    "every id": ({"troll_top_k": VOCABULARY, "troll_support": "bucket"}, {}, {}, None),
    "few ids": ({"troll_top_k": 6, "troll_support": "bucket"}, {}, {}, 6),
    "few ids, queue": (
        {"troll_top_k": 6, "troll_support": "bucket", "troll_old_store": "queue"},
        {},
        {},
        6,
    ),
    "the paper's tail": ({"troll_top_k": 6, "troll_support": "paper"}, {}, {"support": "paper"}, 6),
    "a sequence's mean": (
        {"troll_region": "sequence"},
        {"loss_agg_mode": "seq-mean-token-mean"},
        {"region": "sequence", "loss_agg_mode": "seq-mean-token-mean"},
        None,
    ),
    "GSPO's ratio": (
        {"troll_ratio": "sequence"},
        {"loss_agg_mode": "seq-mean-token-mean"},
        {"ratio_level": "sequence", "loss_agg_mode": "seq-mean-token-mean"},
        None,
    ),
    "sums": (
        {},
        {"loss_agg_mode": "seq-mean-token-sum"},
        {"loss_agg_mode": "seq-mean-token-sum"},
        None,
    ),
    "Dr.GRPO's sums": (
        {},
        {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 9},
        {"loss_agg_mode": "seq-mean-token-sum-norm", "max_response_length": 9},
        None,
    ),
}


@pytest.mark.parametrize(
    ("name", "packed"),
    [*((name, True) for name in CASES), ("exact", False), ("few ids", False)],
    ids=lambda value: value if isinstance(value, str) else ("packed" if value else "padded"),
)
def test_loss_and_gradients_are_those_of_the_reference(model: Path, name: str, packed: bool) -> None:
    """At a temperature of its own, two updates away from the old policy."""
    troll_settings, actor_settings, settings, top_k = CASES[name]
    rollouts = Rollouts.scripted()
    rollouts.temperature = 1.4
    actor = make_actor(
        model,
        TROLLPolicyLossConfig(troll_kl_bound=KL_BOUND, **troll_settings),
        packed=packed,
        learning_rate=1e-3,
        engine_settings=FLOAT64,
        **actor_settings,
    )
    old_policy = Dense(model, parameters(actor)).log_probs(rollouts).detach()
    old = rollouts.score(actor)
    for _ in range(2):
        rollouts.update(actor, old)
    reference = Dense(model, parameters(actor))

    metrics = rollouts.update(actor, old)
    expected = reference.loss(rollouts, old_policy, top_k, kl_bound=KL_BOUND, **settings)
    expected.loss.backward()

    assert metrics["loss"] == pytest.approx(expected.loss.item(), abs=1e-6, rel=1e-6)
    found = gradients(actor)
    for key, parameter in reference.model.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad, atol=1e-5, rtol=1e-5)
    assert expected.metrics["projected"] > 0.2
    names = [
        "kl_mean",
        "kl_max",
        "kl_projected_mean",
        "kl_projected_max",
        "projected",
        "regression",
        "ratio_max",
    ]
    for key in names + (["tail_mass", "certified", "uncertain"] if name == "few ids" else []):
        assert metrics[f"actor/troll/{key}"] == pytest.approx(
            float(expected.metrics[key]), rel=1e-4, abs=1e-6
        )
