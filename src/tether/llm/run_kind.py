"""How training runs of language models are judged, plotted and described."""

from __future__ import annotations

from tether.experiments.run_kind import PanelSpec, RunKind, Settings, plain_metric_text
from tether.llm.saved_settings import current_settings


def metric_text(name: str) -> str:
    """A metric in words.

    >>> metric_text("success_greedy")
    'greedy success'
    """
    return "greedy success" if name == "success_greedy" else plain_metric_text(name)


def bound_applies(settings: Settings) -> bool:
    """Whether the run has TROLL's bound: others carry it as an unused setting."""
    return settings.get("method.name", "troll") == "troll"


PANELS = (
    PanelSpec(
        "success", "Success on held-out problems", "sampled responses that are right",
        "Share of sampled responses to problems never trained on that are right. The measure that counts.",
        source="eval", percent=True,
    ),
    PanelSpec(
        "success_greedy", "Greedy success on held-out problems", "most likely responses that are right",
        "Share of held-out problems that are right with the most likely token at each place.",
        source="eval", percent=True,
    ),
    PanelSpec("reward", "Training reward", "mean reward", "Mean reward of the responses trained on."),
    PanelSpec(
        "entropy", "Entropy", "entropy (nats per token)",
        "How undecided the policy is. A fast fall means it stops trying other answers.",
    ),
    PanelSpec(
        "kl_mean", "Mean KL before projection", "KL (nats)",
        "How far the network has moved from the policy that gathered the data, on an average token.",
        log=True, bound="kl_bound",
    ),
    PanelSpec(
        "kl_max", "Largest KL before projection", "KL (nats)",
        "The distance on the token that moved most. Tokens above the dashed bound are projected back to it.",
        log=True, bound="kl_bound", maximum=True,
    ),
    PanelSpec(
        "projected", "Projected tokens", "share of tokens",
        "Share of tokens on which the trust region acted.", percent=True,
    ),
    PanelSpec("step_seconds", "Time a step", "seconds", "Duration of an optimiser step.", from_zero=True),
)  # fmt: skip

LLM_RUNS = RunKind(
    "llm",
    headlines=("success", "success_greedy", "reward"),
    headline_suffixes=("", "_greedy"),
    metric_text=metric_text,
    displayed={
        "success": ("success", "{:.1%}"),
        "success_greedy": ("greedy", "{:.1%}"),
        "reward": ("reward", "{:.3f}"),
        "kl_mean": ("KL", "{:.2g}"),
        "projected": ("projected", "{:.1%}"),
        "entropy": ("entropy", "{:.3g}"),
    },
    panels=PANELS,
    cycle_setting="updates_per_rollout",
    token_bound_setting="kl_bound",
    bound_applies=bound_applies,
    subject_settings=("task",),
    reading_of_several=(
        "Each method trains the same model on the same problems and differs only in what is listed below "
        "under settings, such as how it keeps an update close to the policy that gathered the data; the one "
        "whose success ends higher{clear} learned more."
    ),
    reading_of_one=(
        "A model is trained on some problems and measured on others that it never trains on. Success is the "
        "share of its sampled responses that are right."
    ),
    reading_of_kl=(
        "KL (in nats) says how far the model has moved on a token: with TROLL, what the loss sees stays "
        "within the bound and the model is pulled back to it. Large values or a collapsing entropy announce "
        "unstable training."
    ),
    columns=("model", "task", "method.name", "estimator.name", "updates_per_rollout", "learning_rate"),
    current_settings=current_settings,
)
