"""What every environment here asks of an action before it simulates anything."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from tether.episodic.episodes import FloatArray
from tether.errors import InvalidInputError


def checked_action(env: gymnasium.Env[Any, Any], action: Any) -> FloatArray:
    """An action as float64, refused if its shape is wrong, it is not finite or it leaves the action space.

    Raises:
        InvalidInputError: saying which entry is off and what the bounds are.
    """
    space = env.action_space
    assert isinstance(space, gymnasium.spaces.Box)
    array = np.asarray(action, dtype=np.float64)
    if array.shape != space.shape:
        raise InvalidInputError(
            f"The action has shape {array.shape}; {type(env).__name__} takes {space.shape}."
        )
    inside = (array >= space.low) & (array <= space.high)  # False for NaN as well
    if not inside.all():
        worst = int(np.argmin(inside))
        raise InvalidInputError(
            f"Action entry {worst} is {array[worst]}, outside of "
            f"[{space.low[worst]}, {space.high[worst]}] of {type(env).__name__}. "
            "Clip actions to env.action_space before stepping."
        )
    return array
