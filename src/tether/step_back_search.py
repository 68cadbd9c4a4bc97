"""Where on the line to the old weights to measure next, and which settings of a step back make sense."""

from __future__ import annotations

import math
from typing import Any, Literal

from tether.errors import InvalidInputError
from tether.settings import is_number

Statistic = Literal["mean", "max"] | float

#: Measurements a step back may take unless it is told.
PASSES = 4

#: The least share of the budget that a search is content with, while it has passes left.
CONTENT = 0.8

#: The part of the budget that a point aims to use, and the least that one within is taken to use.
_AIM, _SMALLEST = (1 + CONTENT) / 2, 1e-6


class LineSearch:
    """The largest t in [0, 1) at which a divergence that is 0 at 0 and too large at 1 is within a budget.

    Only measured points count. Through two of them t**2 / divergence is taken to be linear in t: it is
    constant while the divergence is quadratic, as every KL is near 0, and rises where it saturates. The
    two are those nearest to the budget on its sides; while none but 0 is within, the two nearest outside.

    Args:
        budget: what must not be exceeded.
        before: the divergence at 1.

    Example:
        >>> search = LineSearch(budget=0.05, before=2.0)
        >>> while not search.content:
        ...     t = search.propose()
        ...     search.note(t, 2.0 * t**3)
        >>> round(search.kept, 3), search.divergence <= 0.05
        (0.281, True)
    """

    def __init__(self, budget: float, before: float) -> None:
        self._budget = budget
        #: Outside the budget, from the first to the nearest: (t, t**2 / divergence in budgets).
        self._outside = [(1.0, budget / before)]
        self.kept = 0.0
        """The largest point found within the budget."""
        self.divergence = 0.0
        """What was measured there."""

    @property
    def content(self) -> bool:
        """Whether the point found uses the budget well enough."""
        return self.divergence >= CONTENT * self._budget

    def propose(self, *, last: bool = False) -> float:
        """Where to measure next; more cautiously if nothing is found and there will be no other chance."""
        outside, near = self._outside[-1], self.kept
        far, _ = outside
        if near == 0.0:
            # 0 itself is not to be measured.
            return max(self._nearer(_AIM / 2 if last else _AIM), far / 1000)
        # A divergence that rounding made 0 says no more than that it is small.
        inside = near, near**2 / max(self.divergence / self._budget, _SMALLEST)
        t = _crossing(outside, _at_zero(inside, outside), _AIM)
        return min(max(t, near + 0.01 * (far - near)), near + 0.9 * (far - near))

    def _nearer(self, aim: float) -> float:
        """Where this part of the budget is used, on the way from the nearest point outside to 0."""
        far, curve = self._outside[-1]
        if curve == 0.0:  # infinite there
            return far / 10
        at_zero = curve
        if len(self._outside) > 1:
            # Believed so far: a line that meets 0 sooner would leave next to nothing of the update.
            at_zero = min(max(_at_zero(*self._outside[-2:]), curve / 5), curve)
        return _crossing((far, curve), at_zero, aim)

    def note(self, t: float, divergence: float) -> None:
        """Take in what was measured at the point proposed."""
        if divergence <= self._budget:
            self.kept, self.divergence = t, divergence
        else:
            self._outside.append((t, t**2 * self._budget / divergence))


def _at_zero(first: tuple[float, float], second: tuple[float, float]) -> float:
    """Where a line through two points meets t = 0."""
    (t, curve), (other, other_curve) = first, second
    return curve - (other_curve - curve) / (other - t) * t


def _crossing(point: tuple[float, float], at_zero: float, aim: float) -> float:
    """Where the divergence is this part of the budget, on the line from its value at 0 through a point."""
    t, curve = point
    slope = (curve - at_zero) / t
    return (aim * slope + math.sqrt(max((aim * slope) ** 2 + 4 * aim * at_zero, 0.0))) / 2


def check_step_back(budget: Any, statistic: Any, passes: Any) -> None:
    """Refuse settings out of range.

    Raises:
        InvalidInputError: naming the setting and its value.
    """
    if not (is_number(budget) and 0 < budget < math.inf):
        raise InvalidInputError(
            f"The budget of a step back must be positive and finite, in nats, such as 0.05; got {budget!r}."
        )
    quantile = isinstance(statistic, float) and 0 < statistic < 1
    if not quantile and statistic not in ("mean", "max"):
        raise InvalidInputError(
            "The statistic of a step back is 'mean', 'max' or a quantile between 0 and 1, such as 0.99; "
            f"got {statistic!r}."
        )
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 2:
        raise InvalidInputError(
            "A step back takes at least 2 passes, one at the new weights and one on the way back; got "
            f"{passes!r}."
        )
