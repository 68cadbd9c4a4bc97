"""Whether this environment can run the plug-in, asked on import, and what to do if not."""

from __future__ import annotations

import importlib.util

from tether.errors import MissingDependencyError

#: The verl whose seams the plug-in uses; `tests/verl/test_verl_contract.py` lists them.
VERL_VERSION = "0.9.1"

_INSTALL = "pip install 'tether-rl[verl]'"


def check_environment() -> None:
    """Refuse a missing verl, one nobody tested, and a TRL that verl cannot live with.

    Raises:
        MissingDependencyError: with the command that repairs it.
    """
    try:
        # A mere folder of that name can be imported, but has no version.
        from verl import __version__ as version
    except ImportError as error:
        raise MissingDependencyError(
            f"tether.integrations.verl needs verl {VERL_VERSION} ({error}). Install it, in an environment of "
            f"its own without TRL, with: {_INSTALL}"
        ) from error
    check_version(version)
    if importlib.util.find_spec("trl") is not None:
        _check_trl()


def check_version(version: str) -> None:
    """Refuse another verl: the plug-in stands on parts of it that verl does not promise to keep.

    Raises:
        MissingDependencyError: with the command that installs the right one.
    """
    if version != VERL_VERSION:
        raise MissingDependencyError(
            f"tether.integrations.verl works with verl {VERL_VERSION}, found {version}, whose engine may "
            f"call losses differently. Install the tested one with: pip install 'verl=={VERL_VERSION}'"
        )


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
                f"TRL {trl.__version__} is installed beside verl {VERL_VERSION}, whose engines import "
                "AutoModelForCausalLMWithValueHead from any TRL they find; this one no longer has it. Remove "
                "it from this environment (pip uninstall trl), or give verl an environment of its own."
            ) from error


check_environment()
