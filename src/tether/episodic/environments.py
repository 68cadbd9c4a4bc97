"""Environments by name: Tether's own, and yours as "package.module:id"."""

from __future__ import annotations

import re
from typing import Any

import gymnasium

from tether.episodic.adapters import ADAPTERS, PositionControlledEnv
from tether.episodic.envs import BUILT_IN_ADAPTERS
from tether.errors import ConfigError, MissingDependencyError
from tether.names import import_module, look_up, unknown

# How Python words a call that does not fit the function; another TypeError is the environment's own.
_OF_ARGUMENTS = re.compile(r"unexpected keyword argument|missing \d+ required")


def known_env_ids() -> list[str]:
    """The environments trajectories can be run in, sorted."""
    return sorted({**BUILT_IN_ADAPTERS, **ADAPTERS})


def make_position_controlled(env_id: str, **options: Any) -> PositionControlledEnv:
    """Build an environment that follows desired trajectories, by name.

    Args:
        env_id: a registered id; "package.module:id" imports that module first, so that an environment of
            your own reaches the sampler's worker processes too.
        options: for ``gymnasium.make``.

    Raises:
        ConfigError: an unknown id; the message names the nearest known ones. Or one without an adapter, a
            module that cannot be imported, options that the environment does not have, or an adapter that
            contradicts itself.
        MissingDependencyError: what the environment needs is not installed.

    >>> import numpy as np
    >>> with make_position_controlled("tether/PointReach-v0") as env:
    ...     start = env.reset(seed=1)
    ...     still = np.tile(start.position, (env.horizon, 1))
    ...     episode = env.execute(seed=1, desired_positions=still, desired_velocities=0 * still)
    >>> env.spec.num_dof, env.spec.horizon, episode.observations.shape
    (2, 50, (51, 6))
    """
    module, _, name = env_id.rpartition(":")
    if module:
        import_module(module, env_id)
    known = {**BUILT_IN_ADAPTERS, **ADAPTERS}
    if name not in known:
        if name in gymnasium.registry:
            raise ConfigError(
                f"gymnasium knows {name}, but nothing says how its robot follows positions: write an adapter "
                "of a few lines, and call register_adapter in a module that you name (docs/episodic_envs.md)."
            )
        raise unknown(env_id, known, "environment")
    try:
        adapter = look_up(name, known, "environment")
    except ConfigError as error:
        if name not in BUILT_IN_ADAPTERS:
            raise
        raise MissingDependencyError(f"{error} pip install 'tether-rl[episodic]' brings it.") from error
    if not (isinstance(adapter, type) and issubclass(adapter, PositionControlledEnv)):
        raise ConfigError(
            f"{env_id} is registered with {adapter!r}, which is no PositionControlledEnv class."
        )
    if "success_rule" in options:
        raise ConfigError(
            "The option success_rule is gone: every run measures success at the last step (success) and at "
            "any step (success_any). Leave it out."
        )
    try:
        env = gymnasium.make(name, disable_env_checker=True, **options)
    except TypeError as error:
        if not _OF_ARGUMENTS.search(str(error)):
            raise
        raise ConfigError(
            f"{env_id} cannot be made with the options {options}: {error}. Give it those that it has."
        ) from error
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingDependencyError(f"{env_id}: {error}") from error
    except gymnasium.error.UnregisteredEnv as error:
        raise ConfigError(
            f"{env_id} has an adapter, but gymnasium does not know it: {error} Call gymnasium.register in "
            "the module that registers the adapter."
        ) from error
    return adapter(env, env_id)
