"""What the host waits for in the projection, the losses and their metrics on a GPU, place by place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from device_steps import Put, Step, Waits, assert_step
from pretend_gpu import (
    BEHIND_WORK,
    FROM_HOST,
    NEEDS_INTERPRETER,
    ROWS,
    TO_HOST,
    VALUE,
    PretendGPU,
    values_of,
)
from tether import advantages
from tether.losses import (
    LOSSES,
    PolicyLoss,
    ProjectedTokens,
    aggregate,
    linear_policy_loss,
    ppo_clip,
    troll,
    troll_objective,
    value_clip,
)
from tether.ops import memory
from tether.ops.backlog import Backlog
from tether.ops.hidden_states import HiddenStates
from tether.projection import CompactLogProbs, SparseLogProbs, project_categorical

B, T, V, D, K = 4, 6, 40, 8, 12
KL_BOUND = 0.05


def _policies() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of the new and the old policy [B, T, V], sampled ids and mask [B, T]."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(B, T, V, generator=generator, dtype=torch.float64)
    moved = torch.randn(B, T, V, generator=generator, dtype=torch.float64)
    new = old + moved * torch.tensor([0.0, 0.1, 1.0]).repeat(T // 3)[:, None]
    mask = torch.ones(B, T)
    mask[1, 4:] = 0
    mask[3] = 0
    ids = torch.randint(V, (B, T), generator=generator)
    return new.log_softmax(-1), old.log_softmax(-1), torch.where(mask > 0, ids, -100), mask


def _sampled(log_probs: Tensor, ids: Tensor) -> Tensor:
    return log_probs.gather(-1, ids.clamp_min(0)[..., None]).squeeze(-1)


def _advantages(shape: Any) -> Tensor:
    return torch.linspace(-1.0, 1.0, shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("region", "backend"),
    [
        ("token", "torch"),
        ("sequence", "torch"),
        pytest.param("token", "triton", marks=NEEDS_INTERPRETER),
    ],
)
def test_the_dense_projection_never_waits(region: Any, backend: Any) -> None:
    new, old, _, mask = _policies()

    def step(put: Put) -> list[Tensor]:
        leaf = put(new.requires_grad_())
        counted = put(mask) if region == "sequence" else None
        found = project_categorical(leaf, put(old), KL_BOUND, region=region, mask=counted, backend=backend)
        return [found.log_probs, found.step, *torch.autograd.grad(found.log_probs[..., :3].sum(), leaf)]

    assert_step(step, {}, terms=100 * V)  # either device's solver stops where its own rounding lets it


def _old_support(put: Put) -> SparseLogProbs:
    _, old, ids, _ = _policies()
    few = SparseLogProbs.from_logits(old, K, keep_ids=ids.clamp_min(0))
    least = None if few.log_tail_min is None else put(few.log_tail_min)
    return SparseLogProbs(put(few.ids), put(few.log_probs), put(few.log_tail), least)


def _new_on(support: SparseLogProbs, leaf: Tensor) -> SparseLogProbs:
    held = support.ids >= 0
    log_probs = leaf.gather(-1, torch.where(held, support.ids, 0))
    log_probs = torch.where(held, log_probs, -torch.inf)
    return SparseLogProbs.from_log_probs(support.ids, log_probs, vocabulary_size=V)


def _troll(form: str, settings: dict[str, Any]) -> Step:
    new, old, ids, mask = _policies()
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(*s, D, generator=generator, dtype=torch.float64) for s in ((B, T), (V,)))

    def step(put: Put) -> list[Tensor]:
        leaves = [put(new.requires_grad_())]
        sides: tuple[Any, Any] = leaves[0], put(old)
        if form == "sparse":
            sides = _new_on(_old_support(put), leaves[0]), _old_support(put)
        if form == "hidden states":
            leaves = [put(hidden.requires_grad_()), put(weight.requires_grad_())]
            sides = HiddenStates(*leaves), HiddenStates(put(hidden.detach() * 1.3))
        log_probs = put(_sampled(new, ids).detach())
        result = troll(
            log_probs, put(_sampled(old, ids)), put(_advantages(B)), put(mask), response_ids=put(ids),
            new=sides[0], old=sides[1], kl_bound=KL_BOUND, **settings,
        )  # fmt: skip
        metrics = [value.detach() for value in result.metrics.values()]
        return [result.loss, *metrics, *torch.autograd.grad(result.loss, leaves)]

    return step


# Which tokens need work, each time once.
NEED_WORK: Waits = {
    ("ops/trust_region.py:evaluate_block", ROWS): 1,
    ("ops/dense_rows.py:by_reference", ROWS): 1,
    ("ops/dense_rows.py:to_gradient", ROWS): 1,
    ("ops/dense_rows.py:_part_gradient", VALUE): 1,
}


# And which count; and, where the backward pass forms logits again, for which rows.
HIDDEN_STATES: Waits = {
    ("losses/project.py:_project_hidden_states", ROWS): 1,
    ("ops/trust_region.py:Arrived.rows", ROWS): 1,
    ("ops/policy_pair.py:PolicyPair.old_logits_of", ROWS): 1,
    **NEED_WORK,
}


@pytest.mark.parametrize(
    ("form", "settings", "waits"),
    [
        ("dense", {}, {}),
        ("dense", {"region": "sequence", "ratio_level": "sequence"}, {}),
        ("sparse", {}, {}),
        ("sparse", {"region": "sequence"}, {}),
        ("sparse", {"support": "paper"}, {}),
        ("hidden states", {}, HIDDEN_STATES),
    ],
)
def test_troll_and_its_metrics(form: str, settings: dict[str, Any], waits: Waits) -> None:
    assert_step(_troll(form, settings), waits, terms=100 * V)


IN_ONE_PASS: Waits = {("losses/linear.py:_Rows.__init__", ROWS): 1}


@pytest.mark.parametrize(
    ("old_form", "depends_on", "waits"),
    [
        (None, "token", IN_ONE_PASS),
        # How many tokens each sequence has.
        (None, "sequence", {**IN_ONE_PASS, ("losses/linear.py:linear_policy_loss", TO_HOST): 1}),
        ("sparse", "token", IN_ONE_PASS),
        ("hidden states", "token", {**IN_ONE_PASS, **NEED_WORK}),
    ],
)
def test_a_loss_in_one_pass(old_form: str | None, depends_on: Any, waits: Waits) -> None:
    assert_step(_one_pass(old_form, depends_on), waits, terms=100 * V)


def _one_pass(
    old_form: str | None, depends_on: Any = "token", apart: float = 1.3, dtype: torch.dtype = torch.float64
) -> Step:
    _, _, ids, mask = _policies()
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(*s, D, generator=generator, dtype=dtype) for s in ((B, T), (V,)))
    logits = (hidden * apart @ weight.T).double()
    few = SparseLogProbs.from_logits(logits, K, keep_ids=ids.clamp_min(0))

    def step(put: Put) -> list[Tensor]:
        leaves = [put(hidden.requires_grad_()), put(weight.requires_grad_())]
        support = SparseLogProbs(put(few.ids), put(few.log_probs), put(few.log_tail))
        old = {
            "hidden states": HiddenStates(put(hidden.detach() * apart)),
            "hidden states and support": HiddenStates(put(hidden.detach() * apart), support=support),
            "sparse": support,
        }.get(old_form or "")
        old_log_probs, advantages, counted = (
            put(values) for values in (_sampled(logits.log_softmax(-1), ids), _advantages(B), mask)
        )

        def objective(tokens: ProjectedTokens) -> PolicyLoss:
            if old is None:
                return ppo_clip(tokens.new_log_probs, old_log_probs, advantages, counted)
            found = troll_objective(tokens, advantages, counted)
            return PolicyLoss(aggregate(found.token_loss, counted), found.metrics)

        result = linear_policy_loss(
            objective, HiddenStates(*leaves), put(ids), counted, old=old, old_log_probs=old_log_probs,
            kl_bound=KL_BOUND, depends_on=depends_on,
        )  # fmt: skip
        return [result.loss, *torch.autograd.grad(result.loss, leaves)]

    return step


@NEEDS_INTERPRETER
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize(
    ("old_form", "most"),
    [(None, 125), ("sparse", 260), ("hidden states", 190), ("hidden states and support", 190)],
)
def test_what_a_block_of_tokens_asks_of_a_gpu(
    old_form: str | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its products take milliseconds, and each operation its host some microseconds: no more than these."""
    asked, waits = [], []
    monkeypatch.setattr(memory, "WORKSPACE_ELEMENTS", 1)
    for rows in (8, 4):  # two blocks and four
        monkeypatch.setattr(memory, "_accelerator_rows", lambda *_, rows=rows: rows)
        with PretendGPU(kernels=True) as gpu:
            _one_pass(old_form, apart=1.2)(gpu.put)
        asked.append(sum(gpu.launches.values()))
        waits.append(gpu.ours())
    assert asked[1] - asked[0] <= 2 * most
    exact = old_form is not None and old_form.startswith("hidden")
    # Which rows no certificate clears, and how many of them are outside.
    each = {("ops/trust_region.py:evaluate_block", ROWS), ("ops/backlog.py:Backlog.read", TO_HOST)}
    for blocks, found in zip((2, 4), waits, strict=True):
        assert found == IN_ONE_PASS | (dict.fromkeys(each, blocks) if exact else {})


@NEEDS_INTERPRETER
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_a_gpu_multiplies_with_the_head_while_its_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision the gradient of a block of logits has a place of its own, and can wait."""
    step = _one_pass("hidden states and support", apart=1.2, dtype=torch.bfloat16)
    monkeypatch.setattr(memory, "WORKSPACE_ELEMENTS", 1)
    monkeypatch.setattr(memory, "_accelerator_rows", lambda *_: 4)
    with PretendGPU(kernels=True) as gpu:
        found = step(gpu.put)
    asked = {("ops/trust_region.py:evaluate_block", ROWS): 4, ("ops/backlog.py:Backlog.read", TO_HOST): 1}
    assert gpu.ours() == IN_ONE_PASS | asked | {("ops/backlog.py:Backlog.read", BEHIND_WORK): 3}

    def at_once(self: Backlog, work: Callable[[], None]) -> None:
        work()

    monkeypatch.setattr(Backlog, "keep", at_once)
    with PretendGPU(kernels=True) as gpu:
        expected = step(gpu.put)
    assert gpu.ours() == IN_ONE_PASS | dict.fromkeys(asked, 4)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(values_of(one), values_of(other))


RIVALS: dict[str, Waits] = {
    # Which tokens it may take out, and in which order: the random numbers are the host's.
    "clip_cov": {
        ("losses/covariance.py:number_of_tokens", VALUE): 1,
        ("losses/clip_cov.py:_draw", ROWS): 1,
        ("losses/clip_cov.py:_draw", FROM_HOST): 1,
    },
    # Whether no lag is negative.
    "decoupled_clip": {("losses/decoupled_clip.py:_towards_new", VALUE): 1},
    "kl_cov": {("losses/covariance.py:number_of_tokens", VALUE): 1},
}
# How many prompts there are, and whether each has two responses.
GROUPS: Waits = {("advantages.py:_Groups.__init__", ROWS): 2, ("advantages.py:_Groups.__init__", VALUE): 2}


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"troll"}))
def test_rivals(name: str) -> None:
    new, old, ids, mask = _policies()

    def step(put: Put) -> list[Tensor]:
        leaf = put(_sampled(new, ids).requires_grad_())
        options: dict[str, Any] = {}
        if name == "trm":
            options = {"new": put(new), "old": put(old)}
        if name == "clip_cov":
            options = {"generator": torch.Generator().manual_seed(0)}
        if name == "decoupled_clip":
            options = {"lag": put(torch.full((B,), 2))}
        result = LOSSES[name](leaf, put(_sampled(old, ids)), put(_advantages(B)), put(mask), **options)
        return [
            result.loss,
            *(v.detach() for v in result.metrics.values()),
            *torch.autograd.grad(result.loss, leaf),
        ]

    assert_step(step, RIVALS.get(name, {}), terms=100)


def test_the_critics_loss_and_the_advantages() -> None:
    generator = torch.Generator().manual_seed(0)
    values, rewards = (torch.randn(B, T, generator=generator, dtype=torch.float64) for _ in range(2))
    mask, groups = _policies()[3], torch.tensor([0, 0, 1, 1])

    def step(put: Put) -> list[Tensor]:
        found = advantages.gae(put(rewards), put(values), put(mask), gamma=0.99, gae_lambda=0.95)
        return [
            *(found if isinstance(found, tuple) else (found,)),
            advantages.grpo(put(rewards.sum(-1)), put(groups)),
            advantages.rloo(put(rewards.sum(-1)), put(groups)),
            value_clip(put(values), put(rewards), put(rewards), put(mask)).loss,
        ]

    assert_step(step, GROUPS, terms=100)


def test_packing_an_old_policy_picks_the_slots_that_are_filled() -> None:
    def step(put: Put) -> list[Tensor]:
        packed = CompactLogProbs.pack(_old_support(put))
        return [packed.ids, packed.log_probs, packed.unpack().log_probs[..., 0]]

    pack = "projection/compact.py:CompactLogProbs.pack"
    assert_step(step, {(pack, ROWS): 1, (pack, VALUE): 1}, terms=1)
