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
        far, far_curve = self._outside[-1]
        if self.kept == 0.0:
            # 0 itself is not to be measured.
            return max(self._nearer(_AIM / 2 if last else _AIM), far / 1000)
        near = self.kept
        # A divergence that rounding made 0 says no more than that it is small.
        near_curve = near**2 / max(self.divergence / self._budget, _SMALLEST)
        slope = (far_curve - near_curve) / (far - near)
        t = _crossing(near_curve - slope * near, slope, _AIM)
        return min(max(t, near + 0.01 * (far - near)), near + 0.9 * (far - near))

    def _nearer(self, aim: float) -> float:
        """Where this part of the budget is used, on the way from the nearest point outside to 0."""
        far, far_curve = self._outside[-1]
        if far_curve == 0.0:  # infinite there
            return far / 10
        at_zero = far_curve
        if len(self._outside) > 1:
            beyond, beyond_curve = self._outside[-2]
            line = far_curve - (beyond_curve - far_curve) / (beyond - far) * far
            # Believed so far: a line that meets 0 sooner would leave next to nothing of the update.
            at_zero = min(max(line, far_curve / 5), far_curve)
        return _crossing(at_zero, (far_curve - at_zero) / far, aim)

    def note(self, t: float, divergence: float) -> None:
        """Take in what was measured at the point proposed."""
        if divergence <= self._budget:
            self.kept, self.divergence = t, divergence
        else:
            self._outside.append((t, t**2 * self._budget / divergence))


def _crossing(at_zero: float, slope: float, aim: float) -> float:
    """Where t**2 / divergence = at_zero + slope * t and the divergence is this part of the budget."""
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
