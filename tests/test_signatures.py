"""What is read from a function's signature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tether.errors import ConfigError
from tether.signatures import options_of

if TYPE_CHECKING:
    from decimal import Decimal


def _known_to_type_checkers(values: Decimal, *, low: float = 0.2) -> Decimal:
    return values


def _keyword_known_to_type_checkers(values: Any, *, low: Decimal | None = None) -> Any:
    return values


def test_only_the_annotations_of_settings_are_read() -> None:
    assert options_of(_known_to_type_checkers, "mine")["low"].type is float


def test_a_setting_whose_annotation_cannot_be_read_is_named_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"mine's annotations .*Decimal.*outside of TYPE_CHECKING"):
        options_of(_keyword_known_to_type_checkers, "mine")
