"""Whether this environment can run the plug-in, asked on import, and what to do if not."""

from __future__ import annotations

import importlib.util

from tether.errors import MissingDependencyError
from tether.integrations.seams import Tested, require

#: The versions of verl it is tested with.
TESTED = Tested("verl", "0.9.0", "0.9.1")

_INSTALL = "pip install 'tether-rl[verl]'"


def check_environment() -> None:
    """Refuse a missing verl, one that lacks what the plug-in stands on, and a TRL verl cannot live with.

    Raises:
        MissingDependencyError: with the command that repairs it.
    """
    try:
        # A mere folder of that name can be imported, but has no version.
        from verl import __version__ as version
    except ImportError as error:
        raise MissingDependencyError(
            f"tether.integrations.verl needs {TESTED} ({error}). Install it, in an environment of "
            f"its own without TRL, with: {_INSTALL}"
        ) from error
    check_version(version)
    if importlib.util.find_spec("trl") is not None:
        _check_trl()


def check_version(version: str) -> None:
    """Ask a verl nobody tested for every part of it that the plug-in stands on.

    Raises:
        MissingDependencyError: with what has moved, and the command that installs the right one.
    """
    if TESTED.covers(version):
        return
    from tether.integrations.verl.seam import moved

    require("tether.integrations.verl", TESTED, version, moved())


def _check_trl() -> None:
    """Fail where verl's engine would fail later: it patches a class that TRL has removed."""
    try:
        from trl.experimental.ppo import AutoModelForCausalLMWithValueHead
    except ImportError:
        try:
            from trl import AutoModelForCausalLMWithValueHead  # noqa: F401
        except ImportError as error:
            import trl

            raise MissingDependencyError(
                f"TRL {trl.__version__} is installed beside verl, whose engines import "
                "AutoModelForCausalLMWithValueHead from any TRL they find; this one no longer has it. Remove "
                "it from this environment (pip uninstall trl), or give verl an environment of its own."
            ) from error


check_environment()
