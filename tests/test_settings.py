"""TROLL's settings: declared once, checked once, named by whoever holds them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from tether.errors import ConfigError, InvalidInputError
from tether.projection import TROLLSettings
from tether.settings import LagBound


def test_a_bound_of_infinity_and_no_regression_are_choices() -> None:
    settings = TROLLSettings(kl_bound=math.inf, alpha=0)
    assert (settings.kl_bound, settings.alpha) == (math.inf, 0)


@pytest.mark.parametrize("name", ["kl_bound", "alpha", "top_k", "mass", "support", "region"])
@pytest.mark.parametrize("value", ["0.05", None, True, [1], math.nan, -1])
def test_what_cannot_be_meant_is_refused_under_the_holders_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=rf"^{name} must .*got "):
        TROLLSettings(**{name: value})
    held = {f"troll_{field}": good for field, good in vars(TROLLSettings()).items()} | {
        f"troll_{name}": value
    }
    with pytest.raises(ConfigError, match=rf"^actor\.loss\.troll_{name} must .*got "):
        TROLLSettings.read(SimpleNamespace(**held), "actor.loss.troll_")


@pytest.mark.parametrize("text", ["inf", "Infinity", "+inf"])
def test_infinity_as_text_is_told_how_yaml_writes_it(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^kl_bound must .*write \.inf there"):
        TROLLSettings(kl_bound=text)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"^largest must .*write \.inf there"):
        LagBound(largest=text)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="without quotes"):
        TROLLSettings(top_k=text)  # type: ignore[arg-type]
