"""A policy loss of which the tokens become known block by block: its slopes at those that are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tether.errors import InvalidInputError
from tether.losses.base import PolicyLoss
from tether.ops.token_state import DIFFERENTIABLE
from tether.projection.solve import may_ask
from tether.projection.tokens import ProjectedTokens

Objective = Callable[[ProjectedTokens], PolicyLoss]


class Course:
    """The tokens as far as they are known, and the slopes of the loss at them.

    Args:
        objective, in_blocks: as in `linear_policy_loss`.
        at: where in the batch the rows of tokens are.
        shape: of the batch, [B, T].
        old_log_probs: of all rows, if somebody recorded them.
    """

    def __init__(
        self,
        objective: Objective,
        in_blocks: Objective,
        at: tuple[Tensor, ...],
        shape: Sequence[int],
        old_log_probs: Tensor | None,
    ) -> None:
        self._objective, self._in_blocks = objective, in_blocks
        self._at, self._shape, self._old_log_probs = at, shape, old_log_probs
        self._tokens = _Batch({}, shape)
        self._slopes = _Batch({}, shape)
        self._result: PolicyLoss | None = None

    def tokens(self) -> ProjectedTokens:
        """All of them, [B, T]: placeholders where they have not been evaluated, zero where none counts."""
        return ProjectedTokens(**self._tokens.by_name())

    def differentiate(self, block: slice, tokens: ProjectedTokens) -> dict[str, Tensor]:
        """The slope of the loss at the tokens of some rows, by the names of what carries a gradient."""
        values = tokens.each(torch.detach).known()
        if not self._tokens.groups:
            self._start(values)
        at = tuple(index[block] for index in self._at)
        self._tokens.put(at, values)
        every = block.stop - block.start == len(self._at[0])
        result, slopes = self._evaluate(self._objective if every else self._in_blocks, keep=every)
        self._result = result if every else None
        found = {name: slope[at] for name, slope in slopes.items()}
        self._slopes.put(at, found)
        return found

    def finish(self) -> PolicyLoss:
        """The loss of all tokens, with the graph of what else it was made of, such as a learned weight.

        Raises:
            InvalidInputError: now that all are known, the slopes are not those that were used.
        """
        if self._result is not None:
            return self._result
        result, slopes = self._evaluate(self._objective, keep=True)
        for names, used in self._slopes.groups:
            self._check(names, torch.stack([slopes[name] for name in names]), used)
        return result

    def _start(self, values: dict[str, Tensor]) -> None:
        """Placeholders: nothing has moved."""
        self._tokens = _Batch(values, self._shape)
        self._slopes = _Batch({name: values[name] for name in DIFFERENTIABLE if name in values}, self._shape)
        if self._old_log_probs is not None:
            known = self._tokens.by_name()
            for name in ("new_log_probs", "projected_log_probs", "old_log_probs"):
                known[name][self._at] = self._old_log_probs.to(known[name].dtype)

    def _evaluate(self, objective: Objective, *, keep: bool) -> tuple[PolicyLoss, dict[str, Tensor]]:
        """The loss of what is known, and its slopes, [B, T]; `keep` its graph."""
        known = self._tokens.by_name()
        leaves = {name: known[name].detach().requires_grad_() for name in DIFFERENTIABLE if name in known}
        with torch.enable_grad():
            result = objective(ProjectedTokens(**{**known, **leaves}))
        if not result.loss.requires_grad:  # of an objective that none of them moves
            return result, {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        slopes = torch.autograd.grad(
            result.loss, [*leaves.values()], retain_graph=keep, allow_unused=True, materialize_grads=True
        )
        return result, dict(zip(leaves, slopes, strict=True))

    def _check(self, names: Sequence[str], slopes: Tensor, used: Tensor) -> None:
        # Rounding may differ where sums are taken in another order, also of terms that nearly cancel; what
        # depends on other tokens, or is another loss, is off by far more.
        either = slopes.abs() + used.abs()
        allowed = 1e3 * either + 1e2 * either.amax((1, 2), keepdim=True)
        wrong = (slopes - used).abs() > torch.finfo(slopes.dtype).eps * allowed
        if not may_ask(wrong):
            torch._assert_async(
                ~wrong.any(), f"linear_policy_loss: a slope at {', '.join(names)} was another"
            )
        elif bool(wrong.any()):
            other = "" if self._in_blocks is self._objective else ", or is not what in_blocks said"
            name, at = next((name, at) for name, at in zip(names, wrong, strict=True) if bool(at.any()))
            raise InvalidInputError(
                f"the loss's slope at {name} of {int(at.sum())} of {len(self._at[0])} tokens depends on "
                f'other tokens{other}. Say so: depends_on="sequence" for ratios of sequences, "batch" for '
                "all else."
            )


class _Batch:
    """Values of tokens by name, [B, T], zero until they are put there.

    Those of one type are one tensor: an accelerator's host takes longer to ask for each than the accelerator
    to write them.
    """

    def __init__(self, rows: Mapping[str, Tensor], shape: Sequence[int]) -> None:
        self.groups: list[tuple[list[str], Tensor]] = []
        for dtype in dict.fromkeys(values.dtype for values in rows.values()):
            names = [name for name, values in rows.items() if values.dtype == dtype]
            self.groups.append((names, rows[names[0]].new_zeros((len(names), *shape))))

    def put(self, at: tuple[Tensor, ...], rows: Mapping[str, Tensor]) -> None:
        """Rows [n] by name, at their places."""
        for names, group in self.groups:
            group[:, at[0], at[1]] = torch.stack([rows[name] for name in names])

    def by_name(self) -> dict[str, Tensor]:
        """Views of all of them."""
        return {
            name: values for names, group in self.groups for name, values in zip(names, group, strict=True)
        }
