"""What the tests of training share: one short run that nothing disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest
from short_run import config

from tether.llm.train import train


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(config(folder))
    return folder
