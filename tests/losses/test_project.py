"""One projection of tokens, whatever is known of the policies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tether.errors import InvalidInputError
from tether.losses import project_tokens, troll
from tether.ops import HiddenStates
from tether.settings import Region

B, T, D, V = 3, 5, 7, 23


class _Model:
    """Hidden states and heads of two policies, in float64, some tokens masked."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        self.old_hidden, self.old_weight = draw(B, T, D), draw(V, D)
        self.hidden = (self.old_hidden + 0.3 * draw(B, T, D)).requires_grad_()
        self.weight = (self.old_weight + 0.02 * draw(V, D)).requires_grad_()
        self.mask = torch.tensor([[1] * T, [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
        self.ids = torch.where(self.mask > 0, torch.randint(0, V, (B, T), generator=generator), -100)
        self.advantages = draw(B)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        new = (self.hidden @ self.weight.t()).log_softmax(-1)
        return new, (self.old_hidden @ self.old_weight.t()).log_softmax(-1)

    def sampled(self, log_probs: torch.Tensor) -> torch.Tensor:
        return log_probs.gather(-1, self.ids.clamp_min(0)[..., None]).squeeze(-1)


@pytest.mark.parametrize("region", ["token", "sequence"])
def test_hidden_states_give_the_loss_and_gradient_of_the_distributions_they_make(region: Region) -> None:
    model = _Model()
    new, old = model.dense()
    forms = {
        "dense": (new, old),
        "hidden": (
            HiddenStates(model.hidden, model.weight),
            HiddenStates(model.old_hidden, model.old_weight),
        ),
    }
    found = {}
    for form, (new_policy, old_policy) in forms.items():
        result = troll(
            model.sampled(new), model.sampled(old), model.advantages, model.mask,
            response_ids=model.ids, new=new_policy, old=old_policy, region=region,
        )  # fmt: skip
        gradients = torch.autograd.grad(result.loss, (model.hidden, model.weight), retain_graph=True)
        found[form] = (result.loss, *gradients)
        assert 0 < result.metrics["projected"] <= 1
    for dense, hidden in zip(found["dense"], found["hidden"], strict=True):
        torch.testing.assert_close(hidden, dense, rtol=1e-8, atol=1e-10)


def test_what_is_read_off_hidden_states_is_what_the_distributions_say() -> None:
    model = _Model()
    new, old = model.dense()
    policies = HiddenStates(model.hidden, model.weight), HiddenStates(model.old_hidden, model.old_weight)
    hidden = project_tokens(*policies, model.ids, model.mask, old_log_probs=model.sampled(old))
    dense = project_tokens(new, old, model.ids, model.mask)
    counted = model.mask > 0
    outside = dense.projected & counted
    assert torch.equal(hidden.projected[counted], dense.projected[counted])
    for name in ("new_log_probs", "old_log_probs", "projected_log_probs", "regression", "step"):
        torch.testing.assert_close(
            getattr(hidden, name)[counted], getattr(dense, name)[counted], rtol=1e-8, atol=1e-10
        )
    torch.testing.assert_close(hidden.kl[outside], dense.kl[outside], rtol=1e-8, atol=1e-10)


def test_a_new_policy_without_its_head_is_refused() -> None:
    model = _Model()
    without = HiddenStates(model.hidden)
    with pytest.raises(InvalidInputError, match="need the weight of their LM head"):
        project_tokens(without, without, model.ids, model.mask)


@pytest.mark.parametrize("name", ["log_probs", "old_log_probs"])
@pytest.mark.parametrize("form", ["dense", "hidden"])
def test_log_probabilities_of_other_tokens_are_refused(form: str, name: str) -> None:
    """One a position, which would be spread over the sequences."""
    model = _Model()
    new, old = model.dense()
    sides: Any = (new, old)
    if form == "hidden":
        sides = HiddenStates(model.hidden, model.weight), HiddenStates(model.old_hidden, model.old_weight)
    with pytest.raises(InvalidInputError, match=rf"{name} must be \[B, T\] = \(3, 5\).*got \(5,\)"):
        project_tokens(*sides, model.ids, model.mask, **{name: model.sampled(new)[0].detach()})
