"""A bound on the network itself: as far back towards the weights that sampled as a budget of divergence asks.

What a loss sees can be projected into a trust region exactly; the network that is trained on it moves as its
optimizer moves it. Here the network is measured after the updates on a batch and, where it has left the
budget, taken back along the straight line to the weights that wrote the batch, as little as the budget
allows. Only a point that has been measured is ever kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tether.errors import InvalidInputError, TetherError, warn
from tether.step_back_search import PASSES, LineSearch, Statistic, check_step_back

__all__ = ["Statistic", "StepBack", "StepBackResult"]

#: Elements of a parameter that are moved at a time: what is on the accelerator besides the weights.
_BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class StepBackResult:
    """What became of a batch's updates."""

    fraction: float
    """Share of the way from the old to the new weights that was kept: 1 all of it, 0 none."""
    divergence_before: float
    """The statistic at the new weights, in nats: infinity if it was no number, NaN if some weights were."""
    divergence: float
    """The statistic at the weights that were kept, as measured there; 0 at the old ones, by definition."""
    passes: int
    """How often it was measured."""


class StepBack:
    """Keep a network's measured divergence from the policy that sampled within a budget.

    Call `record` when a batch is sampled, and `enforce` after its updates (or every so many of them). If
    the divergence of the batch's tokens exceeds the budget, the trained parameters become

        old + t (new - old),    0 <= t < 1,

    with the largest t found in a few measurements: sqrt(KL) is close to linear in t near the old weights,
    so that it is interpolated, from both sides once there are two. It need not rise monotonically, so no
    point counts that was not itself measured; if none of them is within the budget, t is 0. The parameters
    that are kept are bit for bit those that were measured. The optimizer is left alone, as after any other
    change of the weights: its moments are averages of gradients, which the step does not change.

    The old weights wait in the CPU's memory (page-locked beside an accelerator), and while a search lasts
    the new ones do too; the accelerator holds a block of 2^24 elements of each more. With LoRA those are
    the adapters. Buffers are not moved. A parameter that occurs twice (tied weights) is moved once.

    Of several processes each calls `record` and `enforce` with its own tokens, and all decide alike; a
    sharded parameter (FSDP2's DTensor) moves shard by shard.

    Args:
        network: the module, or those of its parameters that the optimizer moves; what needs no gradient is
            ignored. A sharded one has to be the module, whose gathered weights are then let go of. An
            optimizer that works on copies of its own (DeepSpeed's) would undo the step.
        budget: in nats; what KL(new || old) of the batch's tokens must not exceed.
        statistic: of the tokens: their "mean", their "max", or a quantile in (0, 1): 0.99 asks that at
            least 99 % of them are within the budget.
        passes: measurements an `enforce` may take; the first is at the new weights.
        group: the processes that train together, by default all.

    Raises:
        InvalidInputError: no trained parameter, sharded ones without their module, or a setting out of range.

    Source: ours; the backtracking line search of TRPO (arXiv 1502.05477, appendix C) is its ancestor.

    Example:
        >>> import torch
        >>> from tether import kl_categorical
        >>> logits = torch.zeros(2, 3, requires_grad=True)        # two tokens, their policy
        >>> step_back = StepBack([logits], budget=0.05)
        >>> step_back.record()
        >>> old = logits.detach().log_softmax(-1)
        >>> with torch.no_grad():
        ...     logits[0, 0] += 2.0                               # a batch's updates
        >>> result = step_back.enforce(lambda: kl_categorical(logits, old))
        >>> 0.04 <= result.divergence <= 0.05 < result.divergence_before
        True
        >>> bool(logits[0, 0] == 2.0 * result.fraction)
        True
    """

    def __init__(
        self,
        network: nn.Module | Iterable[Tensor],
        budget: float,
        *,
        statistic: Statistic = "mean",
        passes: int = PASSES,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_step_back(budget, statistic, passes)
        self.budget, self.statistic, self.passes = float(budget), statistic, passes
        self._module = network if isinstance(network, nn.Module) else None
        self._let_go()
        parameters = network.parameters() if isinstance(network, nn.Module) else network
        trained = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}
        self._parameters = list(trained.values())
        _check_parameters(self._parameters, self._module)
        self._group = group
        self._old: list[Tensor] = []

    def record(self) -> None:
        """The weights are now those that sample: `enforce` goes back to them."""
        if not self._old:
            self._old = [_beside(parameter) for parameter in self._parameters]
        self._copy_to(self._old)

    def enforce(self, measure: Callable[[], Tensor]) -> StepBackResult:
        """Bring the network within the budget, and leave it there.

        Args:
            measure: returns KL(new || old) in nats of this process's tokens, of any shape, under the weights
                as they are when it is called; only tokens that count. Exact divergences bound the policy,
                lower bounds (of a support's certificate) do not. NaN counts as infinite.

        Returns:
            What was kept. Without any token there is nothing to measure, so nothing is kept.

        Raises:
            TetherError: nothing has been recorded.
            Exception: what `measure` raises; the weights are then what they were.
        """
        if not self._old:
            raise TetherError("enforce() was called before record(), which notes the weights to go back to.")
        if not self._all_finite():
            self._move(0.0, self._old)
            warn(
                "Some weights were NaN or infinite after these updates, and are the old ones again. The "
                "optimizer's state is likely to be spoiled too: look at the gradients and the learning rate."
            )
            return StepBackResult(0.0, math.nan, 0.0, 0)
        before = self._measured(measure)
        if before <= self.budget:
            return StepBackResult(1.0, before, before, 1)
        return self._search(measure, before)

    def _search(self, measure: Callable[[], Tensor], before: float) -> StepBackResult:
        new = [_beside(parameter) for parameter in self._parameters]
        self._copy_to(new)
        search = LineSearch(self.budget, before)
        at = wanted = 1.0
        passes = 1
        try:
            while passes < self.passes and not search.content:
                at = search.propose(last=passes == self.passes - 1)
                self._move(at, new)
                search.note(at, self._measured(measure))
                passes += 1
            wanted = search.kept
        finally:  # whatever `measure` raises finds the weights as they were
            if at != wanted:
                self._move(wanted, new)
        return StepBackResult(search.kept, before, search.divergence, passes)

    def _copy_to(self, ends: list[Tensor]) -> None:
        for kept, parameter in zip(ends, self._parameters, strict=True):
            place = _local(parameter)
            kept.copy_(place, non_blocking=_copies_in_order(place))

    @torch.no_grad()
    def _move(self, fraction: float, new: list[Tensor]) -> None:
        """Set the weights to a point of the line, a block at a time; the ends are the very weights."""
        for parameter, *ends in zip(self._parameters, self._old, new, strict=True):
            place = _local(parameter)
            in_order = _copies_in_order(place)
            for block, old_block, new_block in _blocks(place, *ends):
                if fraction == 0.0:
                    block.copy_(old_block, non_blocking=in_order)
                    continue
                wide = torch.promote_types(place.dtype, torch.float32)
                start, end = (
                    part.to(place.device, non_blocking=in_order).to(wide) for part in (old_block, new_block)
                )
                block.copy_(torch.lerp(start, end, fraction))  # exact at 1
        self._let_go()

    def _let_go(self) -> None:
        """FSDP2 keeps what it gathered in a forward pass until a backward pass, and would go on with it."""
        for module in () if self._module is None else self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _all_finite(self) -> bool:
        finite = all(bool(_local(parameter).isfinite().all()) for parameter in self._parameters)
        return self._sum([0.0 if finite else 1.0], self._parameters[0].device) == [0.0]

    @torch.no_grad()
    def _measured(self, measure: Callable[[], Tensor]) -> float:
        """The statistic of all processes' tokens; the same number in each of them."""
        kl = measure().detach().flatten()
        # As doubles on the CPU: a mean over 10^6 tokens keeps its digits, and NaN does not reach a maximum.
        values = kl.cpu().double().nan_to_num(nan=math.inf, posinf=math.inf)
        if self.statistic == "mean":
            total, count = self._sum([float(values.sum()), float(values.numel())], kl.device)
            return max(0.0, total / count) if count else math.inf  # rounding takes a zero below zero
        values = self._of_all(values, kl.device)
        if not values.numel():
            return math.inf
        share = 1.0 if self.statistic == "max" else float(self.statistic)
        # As the decimal that was written: in binary, 0.07 of 100 tokens is a little more than 7.
        rank = max(1, math.ceil(Fraction(repr(share)) * values.numel()))
        return max(0.0, float(values.kthvalue(rank).values))

    def _sum(self, values: list[float], device: torch.device) -> list[float]:
        if not _several():
            return values
        total = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=self._group)
        return total.tolist()

    def _of_all(self, values: Tensor, device: torch.device) -> Tensor:
        """The values of every process, in the same order in each."""
        if not _several():
            return values
        size = dist.get_world_size(self._group)
        counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
        dist.all_gather(counts, torch.tensor([values.numel()], device=device), group=self._group)
        most = int(torch.cat(counts).max())
        own = torch.zeros(most, dtype=torch.float64, device=device)
        own[: values.numel()] = values.to(device)
        gathered = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(gathered, own, group=self._group)
        return torch.cat([part[: int(count)] for part, count in zip(gathered, counts, strict=True)]).cpu()

    def recorded(self, parameter: Tensor) -> Tensor | None:
        """This process's part of a parameter as it was recorded, in the CPU's memory; None if it is not one
        of those that move, or nothing is recorded."""
        if self._old:
            for kept, own in zip(self._old, self._parameters, strict=True):
                if own is parameter:
                    return kept
        return None

    def state_dict(self) -> dict[str, Tensor]:
        """The old weights, for a checkpoint between `record` and `enforce`; empty if nothing is recorded."""
        if self._old and any(_copies_in_order(parameter) for parameter in self._parameters):
            torch.accelerator.synchronize()  # copies may still be under way
        return {str(index): kept for index, kept in enumerate(self._old)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up the old weights that `state_dict` gave.

        Raises:
            InvalidInputError: they belong to other parameters.
        """
        expected = {str(index): tuple(_local(p).shape) for index, p in enumerate(self._parameters)}
        found = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if found and found != expected:
            raise InvalidInputError(
                f"The old weights do not fit: {len(found)} parameters, here {len(expected)}, or their shapes "
                "differ. Resume with the same model, adapters and number of processes."
            )
        self._old = [_beside(parameter) for parameter in self._parameters] if found else []
        for index, kept in enumerate(self._old):
            kept.copy_(state[str(index)])


def _check_parameters(parameters: list[Tensor], module: nn.Module | None) -> None:
    if not parameters:
        raise InvalidInputError("StepBack was given no parameter that needs a gradient: nothing would move.")
    if module is None and any(isinstance(parameter, DTensor) for parameter in parameters):
        raise InvalidInputError(
            "StepBack was given sharded parameters without their module, which may have gathered them and "
            "would go on with the gathered ones. Give it the module."
        )


def _several() -> bool:
    return dist.is_available() and dist.is_initialized()


def _local(parameter: Tensor) -> Tensor:
    """What this process holds of a parameter, sharing its memory; never without a dimension."""
    parameter = parameter.detach()
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return torch.atleast_1d(local)


def _copies_in_order(place: Tensor) -> bool:
    """Whether copies to and from page-locked memory wait for one another, and nobody for them."""
    return place.device.type == "cuda"


def _beside(parameter: Tensor) -> Tensor:
    """Room for this process's part of a parameter in the CPU's memory."""
    local = _local(parameter)
    return torch.empty(local.shape, dtype=local.dtype, pin_memory=_copies_in_order(local))


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of tensors of one shape, as many at a time as are moved at once."""
    first = tensors[0]
    rows = max(1, _BLOCK_ELEMENTS // max(1, first[:1].numel()))
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
