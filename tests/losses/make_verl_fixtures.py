"""Write verl_fixtures.json: batches, and what verl's own functions return on them.

verl needs ray and is no dependency of Tether, so its outcomes are kept as numbers. To make them anew, in
an environment of its own (CPU is enough):

    python -m pip install torch verl==0.9.1
    python tests/losses/make_verl_fixtures.py

Everything is in float64. Each entry names the function of verl, its arguments and the batch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PATH = Path(__file__).with_name("verl_fixtures.json")
CORE = "verl.trainer.ppo.core_algos"
CORRECTION = "verl.trainer.ppo.rollout_corr_helper"

TOKEN_MEAN, SEQUENCE_MEAN = "token-mean", "seq-mean-token-mean"


def _importance_sampling(
    level: str, threshold: float | str
) -> tuple[str, str, dict[str, Any], dict[str, Any]]:
    """Policy gradient with importance weights: cut at one number, dropped outside "low_high"."""
    correction = {"loss_type": "reinforce", "rollout_is": level, "rollout_is_threshold": threshold}
    return "bypass_mode", TOKEN_MEAN, {}, {"rollout_correction": correction}


#: Name in the registry: function, loss_agg_mode, fields of ActorConfig, fields of PolicyLossConfig.
LOSSES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "clip": ("vanilla", TOKEN_MEAN, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1e9}, {}),
    "clip-higher": (
        "vanilla",
        TOKEN_MEAN,
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e9},
        {},
    ),
    "dual-clip": (
        "vanilla",
        TOKEN_MEAN,
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1.5},
        {},
    ),
    "unclipped": (
        "vanilla",
        TOKEN_MEAN,
        {"clip_ratio_low": 1e9, "clip_ratio_high": 1e9, "clip_ratio_c": 1e18},
        {},
    ),
    "gspo": ("gspo", SEQUENCE_MEAN, {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}, {}),
    "gspo-wide": ("gspo", SEQUENCE_MEAN, {"clip_ratio_low": 0.3, "clip_ratio_high": 0.4}, {}),
    "cispo": ("cispo", TOKEN_MEAN, {"clip_ratio_low": 1.0, "clip_ratio_high": 0.5}, {}),
    "cispo-both": ("cispo", TOKEN_MEAN, {"clip_ratio_low": 0.3, "clip_ratio_high": 0.5}, {}),
    "sapo": ("sapo", SEQUENCE_MEAN, {"tau_pos": 1.0, "tau_neg": 1.05}, {}),
    "sapo-narrow": ("sapo", SEQUENCE_MEAN, {"tau_pos": 3.0, "tau_neg": 5.0}, {}),
    "gmpo": ("geo_mean", SEQUENCE_MEAN, {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}, {}),
    "dppo-tv": (
        "dppo_tv",
        TOKEN_MEAN,
        {"clip_ratio_low": 0.15, "clip_ratio_high": 0.15, "clip_ratio_c": 20.0},
        {},
    ),
    "dppo-tv-capped": (
        "dppo_tv",
        TOKEN_MEAN,
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.3, "clip_ratio_c": 1.2},
        {},
    ),
    "dppo-kl": (
        "dppo_kl",
        TOKEN_MEAN,
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0},
        {},
    ),
    "clip-cov": (
        "clip_cov",
        TOKEN_MEAN,
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
        {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.05, "clip_cov_ub": 5.0},
    ),
    "clip-cov-unclipped": (
        "clip_cov",
        TOKEN_MEAN,
        {"clip_ratio_low": 1e9, "clip_ratio_high": 1e9},
        {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.05, "clip_cov_ub": 5.0},
    ),
    "kl-cov": ("kl_cov", TOKEN_MEAN, {}, {"kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0}),
    "tis": _importance_sampling("token", 1.1),
    "tis-sequence": _importance_sampling("sequence", 2.0),
    "icepop": _importance_sampling("token", "0.8_1.25"),
}

#: Seed of torch's generator before each call: clip_cov draws.
SEED = 3


def batches() -> dict[str, dict[str, Any]]:
    """Sampled tokens after a few updates, after many, and with an advantage a token."""
    torch.manual_seed(0)
    made = {}
    for name, drift in (("fresh", 0.15), ("stale", 0.8), ("token-advantages", 0.5)):
        old = torch.rand(4, 6, dtype=torch.float64).mul(0.93).add(0.05).log()
        new = (old + drift * torch.randn(4, 6, dtype=torch.float64)).clamp_max(-0.02)
        mask = torch.ones(4, 6)
        mask[0, 4:], mask[2, 2], mask[3, 1:] = 0, 0, 0  # ragged, a tool's output inside, a single token
        shape = (4, 6) if name == "token-advantages" else (4, 1)
        advantages = torch.randn(shape, dtype=torch.float64).expand(4, 6)
        made[name] = {"log_probs": new, "old_log_probs": old, "advantages": advantages, "response_mask": mask}
    return made


def loss_of(name: str, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Loss and gradient of one of verl's policy losses."""
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    function, mode, fields, policy_fields = LOSSES[name]
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(**policy_fields),
        **fields,
    )
    leaf = batch["log_probs"].clone().requires_grad_()
    torch.manual_seed(SEED)
    loss, _ = importlib.import_module(CORE).get_policy_loss_fn(function)(
        old_log_prob=batch["old_log_probs"],
        log_prob=leaf,
        advantages=batch["advantages"].clone(),
        response_mask=batch["response_mask"],
        loss_agg_mode=mode,
        config=config,
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss, gradient


def kl_estimate_of(name: str, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Token mean of kl_penalty(old, new): KL(old || new) from samples of old."""
    leaf = batch["log_probs"].clone().requires_grad_()
    kl = importlib.import_module(CORE).kl_penalty(batch["old_log_probs"], leaf, name)
    loss = (kl * batch["response_mask"]).sum() / batch["response_mask"].sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss, gradient


def rejection_of(option: str, threshold: float, batch: dict[str, Tensor]) -> Tensor:
    """verl's rejection of sequences by their largest token divergence: the mask that is left."""
    mask, _ = importlib.import_module(CORRECTION).compute_rollout_rejection_mask(
        batch["log_probs"] - batch["old_log_probs"], batch["response_mask"], option, threshold
    )
    return mask


def averages() -> dict[str, Any]:
    """Losses of three responses, the last without a token that counts, averaged in every mode: with the size
    of the whole batch, which verl's trainers give, and without."""
    loss = torch.tensor([[1.0, 3.0, 100.0], [5.0, 100.0, 100.0], [100.0, 100.0, 100.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.float64)
    agg_loss = importlib.import_module(CORE).agg_loss
    return {
        "token_loss": loss.tolist(),
        "response_mask": mask.tolist(),
        "modes": {
            mode: {
                "alone": agg_loss(loss, mask, mode).item(),
                "global_batch_size=3": agg_loss(loss, mask, mode, global_batch_size=3).item(),
            }
            for mode in (TOKEN_MEAN, SEQUENCE_MEAN, "seq-mean-token-sum", "seq-mean-token-sum-norm")
        },
    }


def advantages() -> dict[str, Any]:
    """Every estimator on the same six responses to three prompts, listed out of order."""
    import numpy as np

    core = importlib.import_module(CORE)
    torch.manual_seed(1)
    mask = torch.ones(6, 5, dtype=torch.float64)
    mask[0, 3:], mask[1, 2], mask[4, 1:] = 0, 0, 0
    rewards = torch.tensor([1.0, 0.0, 0.25, -0.5, 1.0, 2.0], dtype=torch.float64)
    groups = [5, 9, 5, 9, 7, 7]
    last = [int(row.nonzero().max()) for row in mask]
    token_rewards = 0.1 * torch.randn(6, 5, dtype=torch.float64) * mask
    for row, (reward, position) in enumerate(zip(rewards, last, strict=True)):
        token_rewards[row, position] += reward
    outcome = torch.zeros(6, 5, dtype=torch.float64)
    outcome[torch.arange(6), last] = rewards
    values = torch.randn(6, 5, dtype=torch.float64)
    index = np.array(groups)

    class Gamma:
        gamma = 0.9

    def first(pair: tuple[Tensor, Tensor]) -> list[Any]:
        return pair[0].tolist()

    gae_advantages, gae_returns = core.compute_gae_advantage_return(token_rewards, values, mask, 0.95, 0.8)
    return {
        "rewards": rewards.tolist(),
        "groups": groups,
        "response_mask": mask.tolist(),
        "token_rewards": token_rewards.tolist(),
        "values": values.tolist(),
        "grpo": first(core.compute_grpo_outcome_advantage(outcome.clone(), mask, index, epsilon=1e-6)),
        "dr_grpo": first(
            core.compute_grpo_outcome_advantage(outcome.clone(), mask, index, norm_adv_by_std_in_grpo=False)
        ),
        "rloo": first(core.compute_rloo_outcome_advantage(outcome.clone(), mask, index)),
        "reinforce_plus_plus_baseline": first(
            core.compute_reinforce_plus_plus_baseline_outcome_advantage(outcome.clone(), mask, index)
        ),
        "reinforce_plus_plus gamma=0.9": first(
            core.compute_reinforce_plus_plus_outcome_advantage(token_rewards, mask, Gamma())
        ),
        "gae gamma=0.95 lam=0.8": gae_advantages.tolist(),
        "gae gamma=0.95 lam=0.8 returns": gae_returns.tolist(),
    }


def main() -> None:
    """Compute everything and write the file."""
    inputs = batches()
    losses = []
    for name, (function, mode, fields, policy_fields) in LOSSES.items():
        for batch_name, batch in inputs.items():
            loss, gradient = loss_of(name, batch)
            losses.append(
                {
                    "name": name,
                    "function": f"{CORE}.get_policy_loss_fn({function!r})",
                    "arguments": {"loss_agg_mode": mode, **fields, **policy_fields},
                    "batch": batch_name,
                    "loss": loss.item(),
                    "gradient": gradient.tolist(),
                }
            )
    for estimate in ("k1", "k2", "k3"):
        for batch_name, batch in inputs.items():
            loss, gradient = kl_estimate_of(estimate, batch)
            losses.append(
                {
                    "name": f"kl-{estimate}",
                    "function": f"{CORE}.kl_penalty",
                    "arguments": {"kl_penalty": estimate},
                    "batch": batch_name,
                    "loss": loss.item(),
                    "gradient": gradient.tolist(),
                }
            )
    rejections = [
        {
            "function": f"{CORRECTION}.compute_rollout_rejection_mask",
            "arguments": {"rollout_rs": option, "rollout_rs_threshold": threshold},
            "batch": batch_name,
            "mask": rejection_of(option, threshold, batch).tolist(),
        }
        for option, threshold in (("seq_max_k2", 0.3), ("seq_max_k3", 0.3))
        for batch_name, batch in inputs.items()
    ]
    document = {
        "provenance": {
            "package": "verl",
            "version": importlib.metadata.version("verl"),
            "licence": "Apache-2.0",
            "script": "tests/losses/make_verl_fixtures.py",
            "seed": SEED,
        },
        "batches": {
            name: {key: value.tolist() for key, value in batch.items()} for name, batch in inputs.items()
        },
        "losses": losses,
        "rejections": rejections,
        "averages": averages(),
        "advantages": advantages(),
    }
    PATH.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
