"""Without verl in the environment, the plug-in says what to install."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

from tether.errors import MissingDependencyError


def test_the_error_says_what_to_install() -> None:
    assert "verl" not in {found.metadata["Name"] for found in importlib.metadata.distributions()}
    sys.modules.pop("tether.integrations.verl", None)
    said = r"needs verl 0\.9\.0 to 0\.9\.1 .*pip install 'tether-rl\[verl\]'"
    with pytest.raises(MissingDependencyError, match=said):
        import tether.integrations.verl  # noqa: F401
