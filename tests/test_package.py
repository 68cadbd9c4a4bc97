"""What holds for the package as a whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tether


def test_importing_tethers_core_loads_torch_and_nothing_heavy():
    code = (
        "import sys, tether; tether.troll, tether.project_categorical, tether.linear_log_probs;"
        "heavy = {'transformers', 'trl', 'verl', 'ray', 'datasets', 'matplotlib', 'scipy', 'gymnasium'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_every_public_name_exists_and_is_documented():
    for name in tether.__all__:
        assert (getattr(tether, name).__doc__ or "").strip(), name


@pytest.mark.parametrize("name", ["TROLLConfig", "TROLLTrainer"])
def test_integrations_are_found_from_the_top(name):
    assert getattr(tether, name).__module__.startswith("tether.integrations.trl")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        tether.no_such_name  # noqa: B018
