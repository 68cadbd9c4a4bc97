"""Dropout, which makes two passes of one policy differ: noise that a trust region takes for divergence."""

from __future__ import annotations

from torch import nn

from tether.errors import warn


def warn_of_dropout(model: nn.Module, layers_remedy: str, rates_remedy: str) -> None:
    """Warn of a model that drops something while it trains.

    Args:
        model: what is trained, as it is built.
        layers_remedy: how dropout layers are switched off.
        rates_remedy: how a rate is that a module hands to a function, called "{setting}".
    """
    problem = (
        "Each pass then draws another policy, so that old and new differ by noise, which the trust region "
        "would project away."
    )
    layers = [name for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
    if layers:
        warn(f"{len(layers)} dropout layers are active ({layers[0]}, ...). {problem} {layers_remedy}")
    if rates := _functional_rates(model):
        name, rate = next(iter(rates.items()))
        remedy = rates_remedy.format(setting=name.rpartition(".")[2])
        warn(
            f"{len(rates)} modules drop activations at a rate of their own ({name}={rate}, ...). {problem} "
            f"{remedy}"
        )


def _functional_rates(model: nn.Module) -> dict[str, float]:
    """Rates above 0 that modules hand to a function when they are run, as most families' attention does."""
    return {
        f"{name}.{attribute}": value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if "drop" in attribute and isinstance(value, float) and value > 0
    }
