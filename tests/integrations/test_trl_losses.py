"""The rivals in TRL's trainer: where TRL has the same method, the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from courses import CourseRounding
from tiny_language_model import largest_difference, make_tiny_model
from trl import GRPOConfig, GRPOTrainer

from tether.errors import ConfigError, TetherWarning
from tether.integrations.loss_options import check_loss_options, looks_at_distributions, loss_options
from tether.integrations.trl_losses import PolicyLossTrainer
from tether.losses import LOSSES, aggregate
from tether.losses.tokens import read_tokens, weighted_log_likelihood

# Adam divides by the root of a tiny second moment and would blow rounding errors up.
PLAIN_DESCENT = {"optim": "sgd", "learning_rate": 0.01, "max_grad_norm": 1e9, "max_steps": 4}
RIVALS = sorted(set(LOSSES) - {"troll"})


def rival(name: str, **options: Any) -> dict[str, Any]:
    return {"trainer_arguments": {"policy_loss": name, "loss_options": options}}


def losses_of(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def assert_same_course(trl: Any, ours: Any, rounding: CourseRounding) -> None:
    assert losses_of(ours) == pytest.approx(losses_of(trl), abs=rounding.logged["loss"])
    assert largest_difference(trl.model, ours.model) <= rounding.weights
    assert largest_difference(trl.model, make_tiny_model()) > 1e-3  # something was learned


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"loss_type": "grpo"}, id="grpo"),
        pytest.param({"loss_type": "dapo"}, id="dapo"),
        pytest.param({"loss_type": "bnpo"}, id="bnpo"),
        pytest.param({"loss_type": "dr_grpo"}, id="dr_grpo"),
        pytest.param({"loss_type": "luspo", "learning_rate": 0.002}, id="luspo"),
        pytest.param(
            {"loss_type": "dapo", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4,
             "steps_per_generation": 4},
            id="accumulation",
        ),
        pytest.param(
            {"loss_type": "grpo", "steps_per_generation": 1, "learning_rate": 0.002},
            id="one update a batch",
            marks=pytest.mark.filterwarnings("ignore:Every batch of rollouts serves a single update"),
        ),
        pytest.param({"loss_type": "dapo", "mask_truncated_completions": True}, id="masked truncation"),
        pytest.param({"loss_type": "grpo", "entropy_coef": 0.05}, id="entropy bonus"),
    ],
)  # fmt: skip
def test_the_clip_on_this_path_is_trls_own_clip(
    train: Callable[..., Any], course_rounding: Any, changes: dict[str, Any]
) -> None:
    settings = {**PLAIN_DESCENT, **changes}
    trl = train(GRPOTrainer, GRPOConfig, **settings)
    ours = train(PolicyLossTrainer, GRPOConfig, **rival("ppo_clip"), **settings)
    assert_same_course(trl, ours, course_rounding(trl))
    if settings.get("steps_per_generation") != 1:
        clipped = [row["trust_region/clipped"] for row in ours.state.log_history if "loss" in row]
        expected = [row["clip_ratio/region_mean"] for row in trl.state.log_history if "loss" in row]
        assert clipped == pytest.approx(expected, abs=1e-6)
        assert max(clipped) > 0, "the clip never acted, so this test compared nothing"


def test_gspo_on_this_path_is_trls_gspo(train: Callable[..., Any], course_rounding: Any) -> None:
    settings = {**PLAIN_DESCENT, "loss_type": "grpo"}
    clip = {"epsilon": 0.02, "epsilon_high": 0.03}
    trl = train(GRPOTrainer, GRPOConfig, importance_sampling_level="sequence", **clip, **settings)
    options = {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03}
    ours = train(PolicyLossTrainer, GRPOConfig, **rival("gspo", **options), **settings)
    assert_same_course(trl, ours, course_rounding(trl))
    assert max(row.get("trust_region/clipped", 0.0) for row in ours.state.log_history) > 0


def test_sapo_on_this_path_is_trls_sapo(train: Callable[..., Any], course_rounding: Any) -> None:
    trl = train(GRPOTrainer, GRPOConfig, loss_type="sapo", **PLAIN_DESCENT)
    ours = train(PolicyLossTrainer, GRPOConfig, loss_type="grpo", **rival("sapo"), **PLAIN_DESCENT)
    assert_same_course(trl, ours, course_rounding(trl))


def test_a_reference_penalty_is_trls_own(
    train: Callable[..., Any], course_rounding: Any, tmp_path: Any
) -> None:
    """The reference comes from the folder the model was loaded from, as in TRL."""
    folder = str(tmp_path / "model")
    make_tiny_model().save_pretrained(folder)
    settings = {**PLAIN_DESCENT, "beta": 0.2, "model_init_kwargs": {"dtype": "float32"}, "model": folder}
    trl = train(GRPOTrainer, GRPOConfig, **settings)
    ours = train(PolicyLossTrainer, GRPOConfig, **rival("ppo_clip"), **settings)
    assert_same_course(trl, ours, course_rounding(trl))
    assert max(row.get("kl", 0.0) for row in ours.state.log_history) > 1e-4


def test_the_samplers_importance_weights_act_as_in_trl(
    train: Callable[..., Any], course_rounding: Any
) -> None:
    """What TRL computes where vLLM samples, here drawn: its flags are set while its loss is computed."""

    class Weighted(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            generator = torch.Generator().manual_seed(self.state.global_step)
            noise = torch.randn(output["completion_ids"].shape, generator=generator)
            return {**output, "importance_sampling_ratio": (0.5 * noise).exp()}

    class Corrected(Weighted):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            self.use_vllm = self.vllm_importance_sampling_correction = True
            loss = super()._compute_loss(model, inputs)
            self.use_vllm = self.vllm_importance_sampling_correction = False
            return loss

    class Ours(PolicyLossTrainer, Weighted):
        pass

    settings = {**PLAIN_DESCENT, "loss_type": "dapo"}
    trl = train(Corrected, GRPOConfig, **settings)
    ours = train(Ours, GRPOConfig, **rival("ppo_clip"), **settings)
    assert_same_course(trl, ours, course_rounding(trl))
    plain = train(GRPOTrainer, GRPOConfig, **settings)
    assert largest_difference(plain.model, trl.model) > 1e-4


@pytest.mark.parametrize("name", RIVALS)
def test_every_rival_trains_and_is_measured(train: Callable[..., Any], name: str) -> None:
    options = {"clip_cov": {"clip_cov_low": 0.0, "clip_cov_ratio": 0.1}}.get(name, {})
    trainer = train(
        PolicyLossTrainer, GRPOConfig, **rival(name, **options), **{**PLAIN_DESCENT, "max_steps": 3}
    )
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert max(row["trust_region/kl_max"] for row in rows) > 0
    assert all(row["trust_region/ratio_max"] > 0.5 for row in rows)
    assert largest_difference(trainer.model, make_tiny_model()) > 1e-4


@pytest.mark.parametrize(
    ("name", "options"),
    [("dppo", {"divergence": "top-k-kl"}), ("kl_penalty", {"kl_estimate": "exact"})],
)
def test_losses_of_whole_distributions_get_the_old_support(
    train: Callable[..., Any], name: str, options: dict[str, Any]
) -> None:
    trainer = train(PolicyLossTrainer, GRPOConfig, **rival(name, **options), **PLAIN_DESCENT)
    measured = "trust_region/divergence_max" if name == "dppo" else "trust_region/kl_max"
    assert max(row.get(measured, 0.0) for row in trainer.state.log_history) > 1e-3


def test_the_random_tokens_of_clip_cov_do_not_touch_other_random_numbers(
    train: Callable[..., Any], course_rounding: Any
) -> None:
    """With a coefficient that takes nothing out but draws, the run is the clip-free one."""
    settings = {**PLAIN_DESCENT, "loss_type": "bnpo"}
    plain = train(PolicyLossTrainer, GRPOConfig, **rival("unclipped"), **settings)
    options = {"clip_cov_low": 1e6, "clip_cov_high": 2e6}
    drawn = train(PolicyLossTrainer, GRPOConfig, **rival("clip_cov", **options), **settings)
    assert largest_difference(plain.model, drawn.model) <= course_rounding(plain).weights


@pytest.mark.parametrize("name", RIVALS)
def test_options_are_those_of_the_function(name: str) -> None:
    options = loss_options(name)
    check_loss_options(name, {key: option.default for key, option in options.items()})
    assert not {"new", "old", "lag", "loss_agg_mode", "generator"} & set(options)
    with pytest.raises(ConfigError, match="no option 'nonsense'"):
        check_loss_options(name, {"nonsense": 1})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo_clip", {"clip_ratio_low": -0.1}, "clip_ratio_low must be at least 0, got -0.1"),
        ("ppo_clip", {"clip_ratio_low": "wide"}, "clip_ratio_low must be at least 0, got 'wide'"),
        ("dppo", {"divergence": "hellinger"}, "divergence must be one of"),
        ("trm", {"kl_bound": -1.0}, "kl_bound"),
        ("pspo", {"smoothing": 1.0}, "smoothing must lie"),
        ("reinforce", {}, "Unknown policy loss 'reinforce'"),
    ],
)
def test_options_out_of_range_are_refused_with_their_value(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_loss_options(name, options)


def test_an_option_that_a_loss_of_ones_own_cannot_compute_with_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def capped(  # checks nothing
        log_probs: Any, old_log_probs: Any, advantages: Any, response_mask: Any, *,
        cap: float = 2.0, loss_agg_mode: str = "token-mean", max_response_length: int | None = None,
    ) -> Any:  # fmt: skip
        return read_tokens(log_probs, old_log_probs, advantages, response_mask).ratio.clamp_max(cap)

    monkeypatch.setitem(LOSSES, "capped", capped)
    with pytest.raises(ConfigError, match="capped cannot compute with cap='high'"):
        check_loss_options("capped", {"cap": "high"})


def test_which_losses_look_at_distributions() -> None:
    assert looks_at_distributions("trm", {})
    assert not looks_at_distributions("trm", {"kl_estimate": "k3"})
    assert not looks_at_distributions("ppo_clip", {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": "cispo"}, "loss_type='cispo'"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ({"epsilon": 0.1}, "epsilon=0.1"),
        ({"epsilon_high": 0.28}, "clip_ratio_high"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile=0.5"),
        ({"off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold=0.1"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(
    make_trainer: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(PolicyLossTrainer, GRPOConfig, **rival("ppo_clip"), **changes)


def test_one_sequence_has_no_covariances(make_trainer: Callable[..., Any]) -> None:
    alone = {"per_device_train_batch_size": 1, "steps_per_generation": 16, "gradient_accumulation_steps": 4}
    with pytest.warns(TetherWarning, match="kl_cov compares the tokens of a micro-batch"):
        make_trainer(PolicyLossTrainer, GRPOConfig, **rival("kl_cov"), **alone)


def test_a_loss_that_asks_how_old_its_data_is_needs_updates_of_one_batch(
    make_trainer: Callable[..., Any],
) -> None:
    """Over two batches nobody could say, and a lag of 0 would make it PPO's clip."""
    spanning = {"per_device_train_batch_size": 4, "steps_per_generation": 3, "gradient_accumulation_steps": 2}
    with pytest.raises(ConfigError, match=r"num_iterations = 3 micro-batches, .* two batches"):
        make_trainer(PolicyLossTrainer, GRPOConfig, **rival("decoupled_clip"), **spanning)
    make_trainer(PolicyLossTrainer, GRPOConfig, **rival("ppo_clip"), **spanning)


def test_troll_is_sent_to_its_own_trainer(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="TROLLTrainer"):
        make_trainer(PolicyLossTrainer, GRPOConfig, **rival("troll"))


def test_the_update_is_the_losses_gradient(make_trainer: Callable[..., Any]) -> None:
    """One step of gradient descent on the second update of a batch, recomputed from logits in float64."""
    trainer = make_trainer(
        PolicyLossTrainer,
        GRPOConfig,
        **rival("cispo", clip_ratio_high=0.1),
        **{**PLAIN_DESCENT, "max_steps": 2},
    )
    seen: list[tuple[dict[str, Any], dict[str, torch.Tensor]]] = []

    def keep(trainer: Any, inputs: dict[str, Any], tokens: Any) -> None:
        seen.append((inputs, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}))

    trainer.on_tokens = keep
    trainer.train()
    inputs, before = seen[1]
    model = make_tiny_model().double()
    model.load_state_dict({name: value.double() for name, value in before.items()})
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    length = inputs["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=attention_mask).logits[:, -length - 1 : -1]
    log_probs = logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None]).squeeze(-1)
    mask = inputs["completion_mask"]
    tokens = read_tokens(
        log_probs, inputs["old_per_token_logps"].double(), inputs["advantages"].double(), mask
    )
    per_token = weighted_log_likelihood(tokens, tokens.ratio.detach().clamp(max=1.1))
    scale = mask.sum() / (inputs["num_items_in_batch"] / trainer.args.steps_per_generation)
    (aggregate(per_token, mask) * scale).backward()
    rate = PLAIN_DESCENT["learning_rate"]
    after = dict(trainer.model.named_parameters())
    for name, parameter in model.named_parameters():
        moved = (before[name].double() - after[name].detach().double()) / rate
        assert parameter.grad is not None
        torch.testing.assert_close(moved, parameter.grad, atol=2e-4, rtol=2e-3)
