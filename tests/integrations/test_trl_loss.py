"""The trainer's loss on a batch of real rollouts, against the dense loss of `tether.losses`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_language_model import make_tiny_model
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from rounding import SUMMED_ANOTHER_WAY, unit_of
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer
from tether.integrations.trl_evaluation import Evaluation
from tether.integrations.trl_trainer import loss_mask
from tether.losses import ProjectedTokens, aggregate, troll
from tether.projection import kl_categorical, project_categorical

TEMPERATURE = 0.9
WHOLE_VOCABULARY = {"troll_top_k": 64, "troll_mass": 1.0}

#: TRL's loss types in the field's words.
AGGREGATION = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}


def _rollouts(trainer: Any) -> dict[str, Any]:
    """One batch, as TRL hands it to the loss: 8 completions, sampled and scored by the model as it is."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = [trainer.train_dataset[i] for i in (3, 17) for _ in range(4)]
    return trainer._generate_and_score_completions(rows)


def _move(model: torch.nn.Module) -> None:
    """To a policy some KL away from the one that sampled."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.04)


def _dense_log_probs(model: Any, inputs: dict[str, Any]) -> Tensor:
    """log-softmax over the whole vocabulary at the completion's positions, by the model's own forward."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    length = inputs["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)


class _DenseOracle:
    """The same batch seen by untouched copies of the old and the moved model."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.model = make_tiny_model()
        with torch.no_grad():
            self.old = _dense_log_probs(self.model, inputs)
        _move(self.model)
        self.new = _dense_log_probs(self.model, inputs)
        self.ids = inputs["completion_ids"]
        self.mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)

    def sampled(self, log_probs: Tensor) -> Tensor:
        return log_probs.gather(-1, self.ids[..., None]).squeeze(-1)


def _gradients(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _assert_same_loss(trainer: Any, loss: Tensor, oracle: _DenseOracle, expected: Tensor) -> None:
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5, rel=1e-5)
    loss.backward()
    expected.backward()
    ours, theirs = _gradients(trainer.model), _gradients(oracle.model)
    assert theirs.abs().max() > 1e-2
    torch.testing.assert_close(ours, theirs, atol=1e-5 * theirs.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize(
    ("loss_type", "ratio_level", "region"),
    [
        ("dapo", "token", "token"),
        ("bnpo", "token", "token"),
        ("grpo", "token", "token"),
        ("dr_grpo", "token", "token"),
        ("luspo", "token", "token"),
        ("grpo", "sequence", "token"),
        ("luspo", "sequence", "token"),
        ("dapo", "token", "sequence"),
        ("grpo", "sequence", "sequence"),
    ],
)
def test_with_every_id_kept_the_loss_is_the_dense_one(
    make_trainer: Callable[..., Any], loss_type: str, ratio_level: str, region: str, with_tools: bool
) -> None:
    trainer = make_trainer(
        TROLLTrainer,
        TROLLConfig,
        steps_per_generation=1,
        num_iterations=2,
        temperature=TEMPERATURE,
        loss_type=loss_type,
        importance_sampling_level=ratio_level,
        troll_region=region,
        **WHOLE_VOCABULARY,
    )
    inputs = _rollouts(trainer)
    if with_tools:
        tool_mask = (torch.rand(inputs["completion_ids"].shape) < 0.7).long()
        tool_mask[2] = 0  # a completion none of whose tokens count
        inputs["tool_mask"] = tool_mask
        inputs["num_items_in_batch"] = (inputs["completion_mask"] * tool_mask).sum()
    _move(trainer.model)
    loss = trainer._compute_loss(trainer.model, inputs)

    oracle = _DenseOracle(inputs)
    expected = troll(
        oracle.sampled(oracle.new),
        oracle.sampled(oracle.old),
        inputs["advantages"],
        oracle.mask,
        response_ids=oracle.ids,
        new=oracle.new,
        old=oracle.old,
        region=region,  # type: ignore[arg-type]
        ratio_level=ratio_level,  # type: ignore[arg-type]
        loss_agg_mode=AGGREGATION[loss_type],  # type: ignore[arg-type]
        max_response_length=8,
    )
    assert expected.metrics["projected"] > 0.2
    _assert_same_loss(trainer, loss, oracle, expected.loss)


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
def test_reference_penalty_sees_the_network_not_the_projection(
    make_trainer: Callable[..., Any], corrected: bool, ratio_level: str
) -> None:
    beta = 0.3
    trainer = make_trainer(
        TROLLTrainer,
        TROLLConfig,
        steps_per_generation=1,
        num_iterations=2,
        temperature=TEMPERATURE,
        loss_type="grpo",
        importance_sampling_level=ratio_level,
        use_bias_correction_kl=corrected,
        **WHOLE_VOCABULARY,
    )
    inputs = _rollouts(trainer)
    inputs["ref_per_token_logps"] = inputs["old_per_token_logps"] - 0.3 * torch.rand(8, 1)
    trainer.beta = beta
    _move(trainer.model)
    loss = trainer._compute_loss(trainer.model, inputs)
    assert trainer.beta == beta

    oracle = _DenseOracle(inputs)
    new, old = oracle.sampled(oracle.new), oracle.sampled(oracle.old)
    policy = troll(
        new, old, inputs["advantages"], oracle.mask, response_ids=oracle.ids, new=oracle.new, old=oracle.old,
        ratio_level=ratio_level, loss_agg_mode="seq-mean-token-mean",  # type: ignore[arg-type]
    )  # fmt: skip
    ahead = inputs["ref_per_token_logps"] - new
    penalty = ahead.exp() - ahead - 1
    if corrected:
        log_ratio = new - old
        if ratio_level == "sequence":
            log_ratio = ((log_ratio * oracle.mask).sum(-1) / oracle.mask.sum(-1))[:, None]
        penalty = penalty * log_ratio.exp()
    expected = policy.loss + beta * aggregate(penalty, oracle.mask, "seq-mean-token-mean")
    _assert_same_loss(trainer, loss, oracle, expected)
    logged = trainer._metrics["train"]["kl"]
    assert logged == [pytest.approx(aggregate(penalty, oracle.mask).item(), rel=1e-4)]


def test_logged_divergences_are_those_of_the_whole_distributions(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(TROLLTrainer, TROLLConfig, temperature=TEMPERATURE, **WHOLE_VOCABULARY)
    inputs = _rollouts(trainer)
    _move(trainer.model)
    trainer._compute_loss(trainer.model, inputs)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}

    oracle = _DenseOracle(inputs)
    counted = oracle.mask > 0
    kl = kl_categorical(oracle.new, oracle.old).detach()[counted]
    step = project_categorical(oracle.new, oracle.old, 0.05).step[counted]
    assert logged["trust_region/kl_mean"] == pytest.approx(kl.mean().item(), rel=1e-4)
    assert logged["trust_region/kl_max"] == pytest.approx(kl.max().item(), rel=1e-4)
    assert logged["trust_region/projected"] == pytest.approx((kl > 0.05).float().mean().item())
    assert logged["trust_region/mean_step"] == pytest.approx(step[kl > 0.05].mean().item(), rel=1e-4)
    assert logged["trust_region/tail_mass"] == 0.0
    assert logged["clip_ratio/region_mean"] == 0.0


def test_the_baseline_measures_what_troll_measures(make_trainer: Callable[..., Any]) -> None:
    logged = []
    for trainer_class, config_class in ((TROLLTrainer, TROLLConfig), (OldPolicyTrainer, GRPOConfig)):
        trainer = make_trainer(trainer_class, config_class)
        inputs = _rollouts(trainer)
        _move(trainer.model)
        trainer._compute_loss(trainer.model, inputs)
        logged.append([trainer._metrics["train"][f"trust_region/{name}"] for name in ("kl_mean", "kl_max")])
    assert logged[0] == [pytest.approx(values, rel=1e-4) for values in logged[1]]
    assert logged[0][1][0] > 0.05


def test_metrics_of_a_batch_worked_out_by_hand(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(TROLLTrainer, TROLLConfig)
    trainer.model.train()
    tokens = ProjectedTokens(
        new_log_probs=torch.zeros(2, 3),
        old_log_probs=torch.zeros(2, 3),
        projected_log_probs=torch.zeros(2, 3),
        regression=torch.tensor([[0.0, 0.3, 9.0], [0.6, 9.0, 9.0]]),
        kl=torch.tensor([[0.01, 0.10, 9.0], [0.25, 9.0, 9.0]]),
        step=torch.tensor([[1.0, 0.8, 9.0], [0.4, 9.0, 9.0]]),
        projected=torch.tensor([[False, True, False], [True, False, False]]),
        tail_mass=torch.tensor([[0.0, 0.1, 9.0], [0.2, 9.0, 9.0]]),
    )
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    trainer._log_tokens(tokens, {}, {"completion_mask": mask})
    logged = {name.split("/")[1]: values for name, values in trainer._metrics["train"].items()}
    assert logged == {
        "kl_mean": [pytest.approx(0.12)],
        "kl_max": [pytest.approx(0.25)],
        "projected": [pytest.approx(2 / 3)],
        "mean_step": [pytest.approx(0.6)],
        "regression": [pytest.approx(0.3)],
        "tail_mass": [pytest.approx(0.1)],
    }


def test_tokens_weigh_the_same_whichever_process_held_them(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process, played by a stub, reports 3 tokens of KL 0.4, two projected with step 0.5."""
    trainer = make_trainer(TROLLTrainer, TROLLConfig)
    trainer.model.train()
    second = torch.tensor([[3.0, 2.0, 0.4, 0.9, 2 / 3, 0.5, 0.0, 0.0]])
    monkeypatch.setattr(trainer.accelerator, "gather", lambda rows: torch.cat([rows, second]))
    zeros = torch.zeros(1, 1)
    tokens = ProjectedTokens(
        new_log_probs=zeros, old_log_probs=zeros, projected_log_probs=zeros, regression=zeros,
        kl=torch.tensor([[0.0]]), step=torch.ones(1, 1), projected=torch.tensor([[False]]), tail_mass=zeros,
    )  # fmt: skip
    trainer._log_tokens(tokens, {}, {"completion_mask": torch.ones(1, 1)})
    logged = {name.split("/")[1]: values[0] for name, values in trainer._metrics["train"].items()}
    assert logged["kl_mean"] == pytest.approx(3 * 0.4 / 4)
    assert logged["kl_max"] == pytest.approx(0.9)
    assert logged["projected"] == pytest.approx(2 / 4)
    assert logged["mean_step"] == pytest.approx(0.5)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo", "luspo"])
def test_a_micro_batch_of_nothing_but_tool_output_has_no_gradient(
    make_trainer: Callable[..., Any], loss_type: str
) -> None:
    trainer = make_trainer(TROLLTrainer, TROLLConfig, loss_type=loss_type)
    inputs = _rollouts(trainer)
    inputs["tool_mask"] = torch.zeros_like(inputs["completion_mask"])
    _move(trainer.model)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    assert loss.item() == 0.0
    assert (_gradients(trainer.model) == 0).all()


@pytest.mark.parametrize("support", ["exact", "bucket", "paper"])
@pytest.mark.parametrize("region", ["token", "sequence"])
def test_every_support_and_region_trains_and_acts(
    train: Callable[..., Any], support: str, region: str
) -> None:
    trainer = train(
        TROLLTrainer,
        TROLLConfig,
        troll_support=support,
        troll_region=region,
        troll_top_k=8,
        troll_kl_bound=0.005,
    )
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 6
    assert all(torch.tensor([row["loss"], row["grad_norm"]]).isfinite().all() for row in rows)
    assert max(row["trust_region/projected"] for row in rows) > 0.1
    assert all(0 < row["trust_region/mean_step"] <= 1 for row in rows)
    # The first update of each batch of rollouts is on-policy: nothing is projected.
    assert [rows[i]["trust_region/projected"] for i in (0, 4)] == [0.0, 0.0]


def test_papers_support_takes_the_ratio_of_renormalised_supports(make_trainer: Callable[..., Any]) -> None:
    """Inside the bound: log-softmax over the union of both top-K, 1e-12 where one side has nothing."""
    trainer = make_trainer(
        TROLLTrainer,
        TROLLConfig,
        temperature=TEMPERATURE,
        troll_support="paper",
        troll_top_k=6,
        troll_mass=1.0,
        troll_kl_bound=1e3,
        troll_alpha=0.0,
    )
    inputs = _rollouts(trainer)
    _move(trainer.model)
    seen = []
    trainer.on_tokens = lambda _, __, tokens: seen.append(tokens)
    trainer._compute_loss(trainer.model, inputs)
    (tokens,) = seen
    oracle = _DenseOracle(inputs)
    for row, position in ((0, 0), (3, 1), (7, 0)):
        sampled = int(oracle.ids[row, position])
        new, old = oracle.new[row, position].detach(), oracle.old[row, position]
        own = [set(side.topk(6).indices.tolist()) | {sampled} for side in (new, old)]
        union = sorted(own[0] | own[1])
        for side, mine, actual in (
            (new, own[0], tokens.projected_log_probs),
            (old, own[1], tokens.old_log_probs),
        ):
            weights = {i: side[i].exp().item() if i in mine else 1e-12 for i in union}
            expected = torch.tensor(weights[sampled] / sum(weights.values())).log().item()
            assert actual[row, position].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("steps_per_generation", "accumulation"), [(4, 1), (4, 2), (2, 2)])
@pytest.mark.parametrize("loss_type", AGGREGATION)
def test_the_objective_is_averaged_as_trl_averages_its_own_loss(
    make_trainer: Callable[..., Any],
    loss_type: str,
    steps_per_generation: int,
    accumulation: int,
    training: bool,
) -> None:
    """On-policy every ratio is 1, so TRL's loss of advantages [B, T] is minus their aggregate."""
    trainer = make_trainer(
        TROLLTrainer,
        TROLLConfig,
        loss_type=loss_type,
        steps_per_generation=steps_per_generation,
        num_iterations=2,
        gradient_accumulation_steps=accumulation,
    )
    inputs = _rollouts(trainer)
    trainer.max_completion_length = 11  # longer than any completion of the batch
    trainer.current_gradient_accumulation_steps = accumulation
    trainer.model.train(training)
    values = torch.rand(inputs["completion_ids"].shape)
    on_policy = {k: v for k, v in inputs.items() if not k.startswith("old_")}
    expected = -GRPOTrainer._compute_loss(trainer, trainer.model, {**on_policy, "advantages": values})
    ours = aggregate(values, loss_mask(inputs), **trainer._averaging()) * trainer._share(inputs)
    assert abs(float(ours) - expected.item()) <= SUMMED_ANOTHER_WAY * unit_of(expected.abs())


def test_scoring_in_chunks_keeps_each_row_with_its_support(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(TROLLTrainer, TROLLConfig)
    inputs = _rollouts(trainer)
    _move(trainer.model)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    divergences = []
    for rows_at_once in (8, 3):
        evaluation = Evaluation(trainer.model, trainer._evaluation_keywords(inputs))
        trainer._get_per_token_logps_and_entropies(
            evaluation, ids, mask, inputs["completion_ids"].shape[1], batch_size=rows_at_once
        )
        divergences.append(trainer._project(evaluation, inputs).kl)
    torch.testing.assert_close(divergences[0], divergences[1], atol=1e-5, rtol=1e-4)
    assert divergences[0].max() > 0.05


def test_papers_support_leaves_the_buffered_batch_as_it_was(make_trainer: Callable[..., Any]) -> None:
    """Its old log-probabilities are renormalised for one loss; the batch serves other updates too."""
    trainer = make_trainer(TROLLTrainer, TROLLConfig, troll_support="paper", troll_top_k=4)
    inputs = _rollouts(trainer)
    before = {key: value.clone() for key, value in inputs.items()}
    trainer._compute_loss(trainer.model, inputs)
    assert inputs.keys() == before.keys()
    assert all(torch.equal(inputs[key], before[key]) for key in before)
