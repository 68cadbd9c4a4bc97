"""A comparison's grid: which runs it is made of, how they are called, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tether.errors import ConfigError, InvalidInputError
from tether.llm.compare_config import CompareConfig
from tether.llm.config import TrainConfig
from tether.llm.estimators import ESTIMATORS
from tether.llm.grid import cells, parse_method
from tether.llm.methods import TROLL, find_method, method_names
from tether.losses import LOSSES

SMALL = TrainConfig(prompts_per_rollout=4, responses_per_prompt=4, updates_per_rollout=4, steps=4)


def grid(**changes: Any) -> list[Any]:
    return cells(CompareConfig(**{"output": Path("out"), "train": SMALL, **changes}))


def test_a_plain_comparison_is_named_as_ever() -> None:
    made = grid()
    assert [cell.train.output for cell in made] == [Path("out/troll-seed0"), Path("out/clip-seed0")]
    assert [cell.train.label for cell in made] == ["TROLL", "clip"]
    assert all(cell.train.name is None for cell in made)


def test_every_method_meets_every_point_and_seed_and_no_folder_twice() -> None:
    made = grid(
        methods=("troll", "troll:kl_bound=0.2,alpha=5", "dppo:divergence=top-k-kl"),
        estimators=("grpo", "rloo"),
        updates_per_rollout=(1, 8),
        learning_rates=(1e-4, 3e-4),
        axes=("temperature=0.7,1.0",),
        seeds=(0, 1),
        batches=4,
    )
    assert len(made) == len({cell.train.output for cell in made}) == 3 * 2 * 2 * 2 * 2 * 2
    assert len({cell.train.label for cell in made}) == len(made) / 2  # seeds of one cell share a label
    one = next(cell.train for cell in made if cell.train.output.name
               == "troll-kl_bound0.2-alpha5-rloo-u8-lr0.0003-temperature0.7-seed1")  # fmt: skip
    assert one.method == TROLL(kl_bound=0.2, alpha=5)
    assert (one.estimator.name, one.updates_per_rollout) == ("rloo", 8)
    assert (one.learning_rate, one.temperature, one.seed, one.resume) == (3e-4, 0.7, 1, True)
    assert one.label == "TROLL kl_bound=0.2, alpha=5, rloo, 8 updates, lr 0.0003, temperature=0.7"


def test_a_models_owner_is_no_folder_of_its_own() -> None:
    """Kept copies of runs are told apart by the name of the run's folder alone."""
    made = grid(axes=("model=some/one,other/one",))
    assert [cell.train.output for cell in made][:2] == [
        Path("out/troll-modelsome-one-seed0"), Path("out/clip-modelsome-one-seed0"),
    ]  # fmt: skip
    assert len({cell.train.output.name for cell in made}) == len(made) == 4
    assert made[0].train.model == "some/one"


def test_the_first_seed_of_everything_comes_before_any_second() -> None:
    seeds = [cell.seed for cell in grid(seeds=(3, 1), learning_rates=(1e-4, 3e-4))]
    assert seeds == [3] * 4 + [1] * 4


def test_batches_give_every_staleness_the_same_number_of_responses() -> None:
    made = grid(methods=("clip",), updates_per_rollout=(1, 4, 16), batches=8, evaluations=2)
    assert [cell.train.steps for cell in made] == [8, 32, 128]
    assert [cell.train.eval_every for cell in made] == [4, 16, 64]
    assert len({cell.train.steps * cell.train.responses_per_update for cell in made}) == 1


def test_an_axis_may_be_an_option_of_every_method_or_of_the_estimator() -> None:
    axes = ("method.kl_bound=0.1,0.2", "estimator.gamma=0.9")
    made = grid(methods=("troll", "trm"), axes=axes, estimators=("reinforce_plus_plus",))
    found = [(cell.train.method.name, cell.train.method.kl_bound) for cell in made]
    assert found == [("troll", 0.1), ("trm", 0.1), ("troll", 0.2), ("trm", 0.2)]
    assert {cell.train.estimator.gamma for cell in made} == {0.9}
    with pytest.raises(ConfigError, match=r"'clip' sets 'method\.kl_bound'"):
        grid(axes=axes[:1])


def test_a_losss_option_goes_before_a_field_of_the_same_name() -> None:
    [troll, trm] = grid(methods=("troll:kl_bound=0.2", "trm:kl_bound=0.2"))
    assert troll.train.method == TROLL(kl_bound=0.2)
    assert trm.train.method == find_method("trm")(kl_bound=0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("troll:bound=0.2",)}, "sets 'bound', which is no setting of a training run"),
        ({"methods": ("sapo:tau=1",)}, r"option of sapo \(top_k, mass, tau_pos, tau_neg\)"),
        ({"methods": ("sapo:tau_pos=-1",)}, "tau_pos must be greater than 0"),
        ({"methods": ("troll:kl_bound",)}, "'kl_bound' is not"),
        ({"methods": ("trpo",)}, "Unknown method 'trpo'"),
        ({"methods": ("troll", "troll")}, "must not repeat"),
        ({"methods": ("cispo",), "estimators": ("gspo",)}, "run cispo-gspo-seed0: estimator='gspo'"),
        ({"learning_rates": (1e-4, -1.0)}, "run troll-lr-1.0-seed0: learning_rate must be positive"),
        ({"methods": ("troll:kl_bond=0.2",)}, r"Did you mean 'kl_bound'\?"),
        ({"axes": ("seed=1,2",)}, "names no setting"),
        ({"axes": ("lora_rnk=1,2",)}, r"Did you mean 'lora_rank'\?"),
        ({"axes": ("alpha",)}, "written as setting=value,value"),
        ({"axes": ("top_p=0.5,0.9", "top_p=1.0")}, "has the axis top_p twice"),
        ({"axes": ("learning_rate=1e-4",), "learning_rates": (3e-4,)}, "has the axis learning_rate twice"),
        ({"axes": ("estimator=rloo",), "estimators": ("grpo",)}, "has the axis estimator twice"),
        (
            {"axes": ("updates_per_rollout=2",), "updates_per_rollout": (4,), "batches": 4},
            "has the axis updates_per_rollout twice",
        ),
        ({"axes": ("steps=8,16",), "batches": 4}, "has the axis steps, which batches=4 decides"),
        ({"axes": ("temperature=1,1",)}, "'temperature=1,1' has a value twice"),
        ({"axes": ("temperature=1,1.0",)}, "has a value twice"),
        ({"methods": ("troll:kl_bound=0.1,kl_bound=0.2",)}, "sets kl_bound twice"),
        (
            {"methods": ("troll:kl_bound=0.1,method.kl_bound=0.2",)},
            r"sets method\.kl_bound twice, once as method\.kl_bound",
        ),
        ({"methods": ("troll:steps=8", "clip"), "batches": 4}, "sets steps, which batches=4 decides"),
        ({"methods": ("clip:save_every=8",), "batches": 4}, "sets save_every, which batches=4 decides"),
        (
            {"methods": ("troll:learning_rate=0.1", "clip"), "learning_rates": (0.2,)},
            "'troll:learning_rate=0.1' sets learning_rate, which an axis of the grid decides",
        ),
        (
            {"methods": ("troll:kl_bound=0.1",), "axes": ("method.kl_bound=0.2",)},
            r"sets method\.kl_bound, which an axis of the grid decides",
        ),
        ({"axes": ("steps=abc",)}, "run troll-stepsabc-seed0: steps takes int, got 'abc'"),
        ({"methods": ("troll:steps=8.5",)}, "steps takes int, got 8.5"),
        ({"methods": ("troll:kl_bound=small",)}, "kl_bound takes float, got 'small'"),
        ({"methods": ("troll:steps=true",)}, "steps takes int, got True"),
        ({"axes": ("lora_rank=none,high",)}, r"lora_rank takes int \| None, got 'high'"),
        ({"axes": ("optimizer=adamw,adam",)}, r"optimizer takes Literal\['adamw', 'sgd'\], got 'adam'"),
        ({"axes": ("report_to=wandb",)}, r"report_to takes tuple\[.*, got 'wandb'"),
        ({"methods": ("clip:estimator=8",)}, "Unknown estimator '8'"),
        (
            {"axes": ("model=a/b,a-b",)},
            "'TROLL, model=a/b' and 'TROLL, model=a-b' would be in one folder, troll-modela-b-seed0",
        ),
        ({"updates_per_rollout": (1, 8)}, "Set batches"),
        ({"batches": 3, "evaluations": 2}, "evaluations=2 must divide batches=3"),
        ({"baseline": "none"}, "baseline='none' is none of"),
        ({"minutes": 0.0}, "minutes must be positive"),
        ({"seeds": ()}, "at least one"),
    ],
)
def test_what_cannot_work_is_refused_before_any_run(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grid(**changes)


def test_a_methods_own_settings_are_those_of_its_run() -> None:
    methods = ("troll:estimator=rloo,steps=8,quantization=none", "clip:learning_rate=1")
    [troll, clip] = grid(methods=methods)
    assert (troll.train.estimator.name, troll.train.steps, troll.train.quantization) == ("rloo", 8, "none")
    assert (clip.train.estimator.name, clip.train.steps, clip.train.learning_rate) == ("grpo", 4, 1)


@pytest.mark.parametrize("methods", [("troll:kl_bound=1e-1", "troll:kl_bound=0.1"), ("troll:", "troll")])
def test_one_method_spelt_twice_is_refused_before_anything_is_trained(methods: tuple[str, ...]) -> None:
    """In a table they would be two runs of one method with one seed."""
    first, second = methods
    with pytest.raises(ConfigError, match=rf"{first!r} and {second!r} are both TROLL.* Leave one out"):
        grid(methods=methods)


def test_methods_are_parsed_with_types() -> None:
    assert parse_method("x:a=1,b=2.5,c=true,d=none,e=top-k") == (
        "x", {"a": 1, "b": 2.5, "c": True, "d": None, "e": "top-k"},
    )  # fmt: skip


def test_every_loss_is_a_method_and_every_estimator_is_spelt_out() -> None:
    from tether.advantages import ADVANTAGES

    assert set(method_names()) == set(LOSSES) | {"clip", "none"}
    assert set(ADVANTAGES) - {"gae"} <= set(ESTIMATORS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": {"name": "clip", "clip_ratio_low": 0.1}}, "clip has no option 'clip_ratio_low'"),
        ({"method": {"name": "cispo", "alpha": 1}}, "cispo has no option 'alpha'"),
        ({"method": {"name": "troll", "kl_bound": -0.1}}, "kl_bound must be a positive number"),
        ({"method": {"name": "clip", "clip_low": -0.2}}, "clip_low must be at least 0.*got -0.2"),
        ({"method": {"name": "clip", "clip_high": math.nan}}, "clip_high must be at least 0.*got nan"),
        ({"method": {"name": "clip", "top_k": 0}}, "top_k must be an integer of at least 1"),
        ({"estimator": "gae"}, "Unknown estimator 'gae'"),
        ({"estimator": {"name": "ppo", "gae_lambda": 1.1}}, r"gae_lambda must lie in \[0, 1\]"),
        ({"estimator": {"name": "rloo", "gamma": 0.9}}, "rloo has no option 'gamma'"),
        (
            {"estimator": {"name": "ppo", "learning_rate": 0.0}},
            "learning_rate of the critic must be positive",
        ),
        (
            {"estimator": "ppo", "quantization": "nf4", "lora_rank": 4},
            "as its critic, which quantization='nf4'",
        ),
        ({"kl_stop": -0.1}, "kl_stop must be a positive number"),
        ({"step_back": -0.1}, "step_back: The budget .* must be positive.*got -0.1"),
        ({"step_back": 0.1, "step_back_statistic": "median"}, "got 'median'"),
        ({"step_back": 0.1, "step_back_every": 9}, "between 1 and the 8 updates"),
        ({"step_back": 0.1, "updates_per_rollout": 1}, "does not record where each serves one update"),
        ({"step_back_every": 4}, "there is none: set step_back"),
    ],
)
def test_settings_of_a_method_name_themselves(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, InvalidInputError), match=message):
        TrainConfig(**changes)
