"""What is read from a function's signature."""

from __future__ import annotations

import functools
from dataclasses import dataclass
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


def _documented(values: Any, *, low: float = 0.2, high: float | None = None) -> Any:
    """Cut.

    Args:
        low: how far down.
        high: how far up.
    """
    return values


@dataclass(frozen=True)
class _Object:
    high: str = "a field, and no option"

    def __call__(self, values: Any, *, high: float | None = None) -> Any:
        """Cut.

        Args:
            high: how far up.
        """
        return values


@pytest.mark.parametrize("function", [functools.partial(_documented, low=0.5), _Object()])
def test_what_stands_before_a_function_hides_neither_types_nor_texts(function: Any) -> None:
    high = options_of(function, "mine")["high"]
    assert high.type == float | None
    assert high.help == "how far up."
