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


class LineSearch:
    """The largest t in [0, 1) at which a divergence that is 0 at 0 and too large at 1 is within a budget.

    Only measured points count. Between two of them, one within the budget and one not, sqrt(divergence) is
    taken to be linear, which it is to first order in t. While none but 0 is within, the two nearest that
    are not tell whether it rises more slowly than t, as a divergence does that saturates; half of that is
    believed, because nearer to 0 it saturates less.

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
        self._goal = math.sqrt(budget * (1 + CONTENT) / 2)
        #: Outside the budget, from the first to the nearest: (t, sqrt(divergence)).
        self._outside = [(1.0, math.sqrt(before))]
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
        far, far_root = self._outside[-1]
        near, near_root = self.kept, math.sqrt(self.divergence)
        if near == 0.0:
            t = far * self._share_of(far_root)
            return t / 2 if last else t
        share = (self._goal - near_root) / (far_root - near_root) if math.isfinite(far_root) else 0.0
        return near + (far - near) * min(max(share, 0.1), 0.9)

    def _share_of(self, far_root: float) -> float:
        """How much of the way from 0 to the nearest point outside."""
        if not math.isfinite(far_root):
            return 0.1
        power = 1.0
        if len(self._outside) > 1:
            (t, root), (closer, closer_root) = self._outside[-2:]
            if math.isfinite(root) and closer_root < root:
                power = math.log(root / closer_root) / math.log(t / closer)
            elif math.isfinite(root):
                power = 0.0  # no nearer to the budget for having gone back
        # No further in a pass than to a thousandth: 0 itself is not to be measured.
        exponent = (1 + 1 / min(max(power, 0.25), 1.0)) / 2
        return max((self._goal / far_root) ** exponent, 1e-3)

    def note(self, t: float, divergence: float) -> None:
        """Take in what was measured at the point proposed."""
        if divergence <= self._budget:
            self.kept, self.divergence = t, divergence
        else:
            self._outside.append((t, math.sqrt(divergence)))


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
