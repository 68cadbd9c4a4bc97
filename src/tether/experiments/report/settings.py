"""What the runs of a report have in common and in what they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tether.experiments.report.words import setting_text
from tether.experiments.run_config import flatten_settings
from tether.experiments.run_data import RunData, by_label


def compare_settings(runs: Sequence[RunData]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """(settings all runs share, settings that differ: name -> label -> its values), by dotted names.

    A run's ``name`` is its label, and no setting.
    """
    flat = [flatten_settings(run.config.settings) for run in runs]
    shared: dict[str, str] = {}
    differing: dict[str, dict[str, str]] = {}
    for name in sorted(set().union(*flat) - {"name"}):
        texts = [setting_text(settings.get(name)) for settings in flat]
        if len(set(texts)) == 1:
            shared[name] = texts[0]
            continue
        values: dict[str, dict[str, None]] = {}  # label -> its values, each once, in order
        for run, text in zip(runs, texts, strict=True):
            values.setdefault(run.config.label, {})[text] = None
        differing[name] = {label: " or ".join(found) for label, found in values.items()}
    return shared, differing


def mixed_labels(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """Labels whose runs are not seeds of one method: label -> the settings in which they differ."""
    mixed = {}
    for label, group in by_label(runs).items():
        flat = [flatten_settings(run.config.settings) for run in group]
        names = sorted(set().union(*flat))
        different = [name for name in names if len({setting_text(one.get(name)) for one in flat}) > 1]
        different = [name for name in different if name != "seed"]
        seeds = [run.config.seed for run in group]
        if different or len(set(seeds)) < len(seeds):
            mixed[label] = different or ["nothing but their folder: a seed appears twice"]
    return mixed


def by_difference(mixed: Mapping[str, Sequence[str]]) -> list[tuple[list[str], list[str]]]:
    """Mixed labels that differ in the same settings together: (labels, settings).

    >>> by_difference({"a": ["tail"], "b": ["tail"], "c": ["top_k"]})
    [(['a', 'b'], ['tail']), (['c'], ['top_k'])]
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for label, names in mixed.items():
        groups.setdefault(tuple(names), []).append(label)
    return [(labels, list(names)) for names, labels in groups.items()]
