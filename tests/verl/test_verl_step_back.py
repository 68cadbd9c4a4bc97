"""A bound on the network: after a call of update_actor it is near the policy that scored the batch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from actor import FLOAT64, LORA, Rollouts, acting, largest_difference, make_actor, parameters
from dense import Dense
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker

from tether import kl_categorical
from tether.errors import ConfigError

BUDGET, RATE = 1e-3, 1e-2
FOUND = ("kl_before", "kl", "fraction", "passes")


def update_actor(actor: TrainingWorker, rollouts: Rollouts) -> dict[str, float]:
    """The old pass, and verl's loop over two shuffled epochs of two mini-batches; what the step back says."""
    batch = rollouts.batch(
        rollouts.score(actor),
        calculate_entropy=False, global_batch_size=2, mini_batch_size=2, epochs=2,
        dataloader_kwargs={"shuffle": True},
    )  # fmt: skip
    metrics = tu.get(actor.train_mini_batch(batch), "metrics")
    named = {name: metrics[f"actor/troll/step_back/{name}"] for name in FOUND}
    assert all(len(values) == 1 for values in named.values())  # once a call
    return {name: float(values[0]) for name, values in named.items()}


def divergences(old: Tensor, new: Tensor, rollouts: Rollouts) -> Tensor:
    """KL(new || old) of the tokens that count."""
    return kl_categorical(new, old)[pad_sequence(rollouts.masks, batch_first=True) > 0]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("store", ["local", "queue"])
@pytest.mark.parametrize(
    ("tied", "packed", "lora"),
    [(False, True, {}), (False, False, {}), (True, True, LORA), (True, True, {})],
    ids=["packed", "padded", "LoRA", "tied"],
)
@pytest.mark.parametrize("statistic", ["mean", "max"])
def test_the_network_is_within_the_budget_by_whole_distributions(
    model: Path, tied_model: Path, tied: bool, packed: bool, lora: dict[str, Any], store: str, statistic: str
) -> None:
    folder, rollouts = tied_model if tied else model, Rollouts.scripted()
    rollouts.temperature = 1.4
    settings = acting(
        troll_old_store=store,
        troll_step_back=BUDGET,
        troll_step_back_statistic=statistic,
        troll_kl_bound=math.inf,
    )
    actor = make_actor(
        folder, settings, packed=packed, model_settings=lora, engine_settings=FLOAT64, learning_rate=RATE
    )
    with torch.no_grad():
        start = Dense(folder, parameters(actor), lora).log_probs(rollouts)
    found = update_actor(actor, rollouts)
    with torch.no_grad():
        now = Dense(folder, parameters(actor), lora).log_probs(rollouts)
    kl = divergences(start, now, rollouts)
    measured = float(kl.mean() if statistic == "mean" else kl.max())
    assert found["kl"] == pytest.approx(measured, rel=1e-6)
    assert 0.3 * BUDGET < measured <= BUDGET < found["kl_before"]
    assert 0 < found["fraction"] < 1
    assert 2 <= found["passes"] <= 4


def test_the_weights_are_on_the_line_to_where_the_updates_had_come(model: Path) -> None:
    rollouts, ends = Rollouts.scripted(), []
    for budget in (1e9, BUDGET):
        actor = make_actor(model, acting(troll_step_back=budget), learning_rate=RATE)
        start = parameters(actor)
        found = update_actor(actor, rollouts)
        ends.append(parameters(actor))
        assert actor.engine.module.training
    far, near = ends
    expected = {name: torch.lerp(start[name], far[name], found["fraction"]) for name in start}
    assert largest_difference(near, expected) < 1e-6
    assert largest_difference(far, start) > 10 * largest_difference(near, start)


def test_a_pass_measures_each_sequence_once_however_many_epochs(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, measured = make_actor(model, acting(troll_step_back=BUDGET), learning_rate=RATE), []
    measure = actor.engine._network._measure

    def counting(data: Any) -> Any:
        measured.append(data.shape[0])
        return measure(data)

    monkeypatch.setattr(actor.engine._network, "_measure", counting)
    found = update_actor(actor, Rollouts.scripted())
    assert measured == [2, 2] * int(found["passes"])


def test_what_is_within_the_budget_stays_where_it_is(model: Path) -> None:
    rollouts, ends = Rollouts.scripted(), []
    for budget in (None, 1e9):
        actor = make_actor(model, acting(troll_step_back=budget))
        old = rollouts.score(actor)
        rollouts.update(actor, old)
        metrics = rollouts.update(actor, old, update_lr_scheduler=True)
        ends.append(parameters(actor))
        assert ("actor/troll/step_back/kl" in metrics) == (budget is not None)
    assert largest_difference(*ends) == 0.0
    assert metrics["actor/troll/step_back/fraction"] == metrics["actor/troll/step_back/passes"] == 1
    assert metrics["actor/troll/step_back/kl"] > 0


def test_updates_before_the_last_of_a_call_are_left_alone(model: Path) -> None:
    actor, rollouts = (
        make_actor(model, acting(troll_step_back=BUDGET), learning_rate=RATE),
        Rollouts.scripted(),
    )
    old = rollouts.score(actor)
    metrics = rollouts.update(actor, old)
    assert not [name for name in metrics if "step_back" in name]


def test_each_batch_has_its_own_policy_to_go_back_to(model: Path) -> None:
    """The second batch moves on from where the first one ended."""
    actor = make_actor(model, acting(troll_step_back=BUDGET), learning_rate=RATE)
    first = parameters(actor)
    update_actor(actor, Rollouts.scripted())
    second = parameters(actor)
    found = update_actor(actor, Rollouts.scripted(seed=2))
    assert found["kl"] <= BUDGET
    assert largest_difference(parameters(actor), second) > 0
    old = Dense(model, second).log_probs(Rollouts.scripted(seed=2))
    new = Dense(model, parameters(actor)).log_probs(Rollouts.scripted(seed=2))
    assert float(divergences(old, new, Rollouts.scripted(seed=2)).mean()) == pytest.approx(
        found["kl"], rel=1e-3
    )
    assert largest_difference(first, second) > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"troll_step_back": 0.0}, r"troll_step_back: .* positive and finite, .* got 0\.0"),
        ({"troll_step_back": 0.02, "troll_step_back_statistic": "median"}, "quantile between 0 and 1"),
        ({"troll_step_back": 0.02, "troll_step_back_passes": 1}, "at least 2 passes"),
        ({"troll_step_back": 0.02, "troll_support": "bucket"}, "troll_support=exact"),
        ({"troll_step_back": 0.02, "troll_anchor": "sampler"}, "troll_anchor=trainer"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        acting(**settings)
