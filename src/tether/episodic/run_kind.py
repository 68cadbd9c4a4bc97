"""How training runs of robot motions are judged, plotted and described."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tether.experiments.run_kind import PanelSpec, RunKind, Settings, plain_metric_text

_UNITS = {"max_height": "m"}


def metric_text(name: str) -> str:
    """A metric in words, with its unit where it has one.

    >>> metric_text("success_greedy"), metric_text("max_height_greedy")
    ('greedy success', 'max height of the mean motion (m)')
    """
    if name == "success_greedy":
        return "greedy success"
    if name.startswith("success_any"):
        return metric_text(name.replace("success_any", "success")) + " at any step"
    measure = name.removesuffix("_greedy")
    words = plain_metric_text(measure) + (" of the mean motion" if measure != name else "")
    return f"{words} ({_UNITS[measure]})" if measure in _UNITS else words


# A part of the settings, one of TCE's and BBRL's own in it, a later one, and what runs did before that one.
# Others that a run is too old to know have a default that is what was done.
_DONE_BEFORE = (
    ("trust_region", "regression_weight", "pull_covariance", True),
    ("update", "final_learning_rate_fraction", "shift_rewards", False),
)


def current_settings(saved: Settings) -> dict[str, Any]:
    """Those of a saved run, with what it did before there was a setting for it.

    >>> current_settings({"trust_region": {"regression_weight": 10.0}, "torch_threads": 1})
    {'trust_region': {'regression_weight': 10.0, 'pull_covariance': True}, 'learner_threads': 1}
    """
    current = dict(saved)
    for part, own, later, done in _DONE_BEFORE:
        if isinstance(settings := saved.get(part), Mapping) and own in settings:
            current[part] = {**settings, later: settings.get(later, done)}
    if "torch_threads" in current:  # what learner_threads was called
        current["learner_threads"] = current.pop("torch_threads")
    return current


PANELS = (
    PanelSpec(
        "success", "Success", "episodes that succeed",
        "Share of evaluation episodes that succeed at their last step.", source="eval", percent=True,
    ),
    PanelSpec(
        "success_greedy", "Success of the mean motion", "episodes that succeed",
        "Share of evaluation episodes that succeed at their last step with the mean motion, without "
        "exploration.", source="eval", percent=True,
    ),
    PanelSpec(
        "success_any_greedy", "Success of the mean motion at any step", "episodes that succeed",
        "Share of evaluation episodes that succeed at some step with the mean motion, the last or another.",
        source="eval", percent=True,
    ),
    PanelSpec(
        "return_mean", "Return in evaluation", "return of an episode",
        "Mean sum of rewards over evaluation episodes.", source="eval",
    ),
    PanelSpec(
        "return_greedy", "Return of the mean motion", "return of an episode",
        "Mean sum of rewards when the mean motion is executed, without exploration.", source="eval",
    ),
    PanelSpec("success", "Success while training", "episodes that succeed",
              "Share of training episodes, exploration included, that succeed at their last step.",
              percent=True),
    PanelSpec("return_mean", "Return while training", "return of an episode",
              "Mean sum of rewards over training episodes, exploration included."),
    PanelSpec("entropy", "Entropy", "entropy (nats)", "How widely the policy explores."),
    PanelSpec(
        "kl_mean_part", "KL of the mean before projection", "KL (nats)",
        "How far the mean motion has moved from the policy that gathered the data.",
        log=True, bound="mean_bound",
    ),
    PanelSpec(
        "kl_cov_part", "KL of the covariance before projection", "KL (nats)",
        "How far the shape of the exploration has moved.", log=True, bound="cov_bound",
    ),
    PanelSpec("projected", "Projected policies", "share of contexts",
              "Share of contexts on which the trust region acted.", percent=True),
    PanelSpec("jerk", "Smoothness of the motion", "root mean square jerk",
              "Jerk is the change of acceleration: lower is smoother.", source="eval"),
    PanelSpec("jerk_greedy", "Smoothness of the mean motion", "root mean square jerk",
              "Jerk is the change of acceleration (position units per second cubed): lower is smoother.",
              source="eval"),
    PanelSpec("smoothness", "Smoothness of the motion", "smoothness",
              "As the evaluation measures it.", source="eval"),
)  # fmt: skip

EPISODIC_RUNS = RunKind(
    "episodic",
    headlines=("success", "success_greedy", "return_mean", "return_greedy", "reward"),
    headline_suffixes=("", "_greedy"),
    metric_text=metric_text,
    displayed={
        "success": ("success", "{:.1%}"),
        "success_greedy": ("greedy", "{:.1%}"),
        "success_any_greedy": ("greedy, any step", "{:.1%}"),
        "return_mean": ("return", "{:.3g}"),
        "max_height_greedy": ("greedy height", "{:.2f} m"),
        "kl_mean_part": ("KL mean", "{:.2g}"),
        "kl_cov_part": ("KL cov", "{:.2g}"),
        "projected": ("projected", "{:.1%}"),
        "entropy": ("entropy", "{:.3g}"),
    },
    x_metric="env_steps",
    x_label="environment steps",
    step_word="an iteration",
    panels=PANELS,
    time_parts={"sampling_seconds": "sampling", "critic_seconds": "critic", "policy_seconds": "policy"},
    subject_settings=("env", "env_id"),
    problems_setting="evaluation_episodes",
    reading_of_several=(
        "Each method learns a whole motion by trying variations of it and moving towards the better ones; "
        "the one whose curve is higher for the same number of environment steps{clear} learned faster."
    ),
    reading_of_one=(
        "A whole motion is learned by trying variations of it and moving towards the better ones; the mean "
        "motion is what remains without them."
    ),
    reading_of_kl=(
        "KL (in nats) says how far an update moved the mean motion and the shape of the exploration: the "
        "trust region caps both."
    ),
    columns=("env_id", "algo"),
    current_settings=current_settings,
)
