"""What was published of each robot task beside what its preset has: docs/episodic_published.md.

    python docs/published_settings.py

prints the page. Its published columns are facts read from the authors' configuration files and code; ours
come from the presets themselves, so that the page cannot claim a setting no preset has.
"""

from __future__ import annotations

import sys
from typing import Any

from tether.episodic.presets import PRESETS, preset

CONFIGURATION = "configuration"
ENVIRONMENT = "environment"
CODE = "code"

SETTINGS = {
    "env_id": "environment",
    "env_options": "options of the environment",
    "iterations": "iterations",
    "episodes": "episodes an iteration",
    "precision": "precision",
    "motion.num_basis": "basis functions",
    "motion.tau": "tau (s)",
    "motion.delay": "delay (s)",
    "motion.alpha": "alpha",
    "motion.alpha_phase": "alpha of the phase",
    "motion.bandwidth_factor": "bandwidth factor",
    "motion.weights_scale": "scale of the weights",
    "motion.goal_scale": "scale of the goal",
    "motion.relative_goal": "goal relative to the start",
    "policy_input": "the policy sees",
    "policy.hidden_sizes": "policy network",
    "policy.activation": "its activation",
    "policy.covariance": "covariance",
    "policy.contextual_covariance": "covariance depends on the context",
    "policy.min_std": "least standard deviation",
    "policy.mean_gain": "gain of the last layer",
    "critic.hidden_sizes": "critic network",
    "critic.activation": "its activation",
    "critic.learning_rate": "critic's learning rate",
    "critic.epochs": "critic's epochs",
    "critic.weight_decay": "critic's weight decay",
    "critic.normalise_inputs": "critic's inputs normalised",
    "critic.normalise_targets": "critic's targets normalised",
    "critic.time_input": "critic told the time",
    "critic.state_stride": "critic fitted on every n-th state",
    "trust_region.method": "projection",
    "trust_region.mean_bound": "bound of the mean",
    "trust_region.cov_bound": "bound of the covariance",
    "trust_region.regression_weight": "weight of the pull",
    "trust_region.pull_covariance": "the covariance is pulled, too",
    "trust_region.target_entropy": "entropy bound falls to, a weight",
    "update.learning_rate": "learning rate",
    "update.final_learning_rate_fraction": "learning rates fall to",
    "update.learning_rates_fall_from": "they fall from this part of training on",
    "update.epochs": "epochs",
    "update.weight_decay": "weight decay",
    "update.gamma": "discount",
    "update.gae_lambda": "GAE lambda",
    "update.segment_points": "points of a motion",
    "update.shift_rewards": "rewards counted at the event",
    "update.include_last_reward": "last reward in a segment",
}
"""Setting -> in words; the rows of every table, as far as the algorithm has them."""

OF_TCE_ALONE = (
    "critic.time_input", "critic.state_stride", "update.gae_lambda", "update.segment_points",
    "update.shift_rewards", "update.include_last_reward",
)  # fmt: skip

BY_CODE = ("policy_input", "critic.time_input", "critic.state_stride", "critic.normalise_targets",
           "update.shift_rewards", "update.include_last_reward",
           "update.final_learning_rate_fraction", "update.learning_rates_fall_from", "env_options",
           "trust_region.pull_covariance")  # fmt: skip

_COMMON: dict[str, Any] = {
    "env_options": {},
    "motion.delay": 0.0,
    "motion.alpha": 10.0,
    "motion.alpha_phase": 3.0,
    "policy.covariance": "full",
    "policy.contextual_covariance": False,
    "policy.mean_gain": 0.01,
    "critic.normalise_targets": False,
    "trust_region.method": "kl",
    "trust_region.target_entropy": None,
    "update.learning_rates_fall_from": 0.0,
    "update.gamma": 1.0,
}
_TCE: dict[str, Any] = _COMMON | {
    "policy_input": "observation",
    "critic.epochs": 50,
    "critic.normalise_inputs": True,
    "critic.time_input": True,
    "critic.state_stride": 1,
    "trust_region.regression_weight": 1.0,
    "trust_region.pull_covariance": True,
    "update.final_learning_rate_fraction": 0.01,
    "update.epochs": 50,
    "update.gae_lambda": 0.95,
    "update.segment_points": 25,
    "update.shift_rewards": True,
    "update.include_last_reward": False,
}
_BBRL: dict[str, Any] = _COMMON | {
    "policy_input": "context",
    "precision": "float32",
    "critic.learning_rate": 3e-4,
    "critic.normalise_inputs": False,
    "trust_region.regression_weight": 10.0,
    "trust_region.pull_covariance": False,
    "update.learning_rate": 3e-4,
    "update.final_learning_rate_fraction": 1.0,
}
_METAWORLD: dict[str, Any] = {
    "env_id": "tether/MetaWorld-button-press-v3",
    "episodes": 16,
    "motion.tau": 5.0,
    "motion.bandwidth_factor": 5.0,
    "motion.weights_scale": 0.1,
    "motion.goal_scale": 0.1,
    "motion.relative_goal": True,
    "policy.activation": "relu",
    "policy.min_std": 1e-5,
    "critic.activation": "relu",
    "critic.weight_decay": 0.0,
    "trust_region.mean_bound": 0.005,
    "trust_region.cov_bound": 0.0005,
    "update.weight_decay": 0.0,
}
_BOX: dict[str, Any] = {
    "iterations": 7500,
    "motion.num_basis": 8,
    "motion.bandwidth_factor": 3.0,
    "motion.weights_scale": 0.3,
    "motion.goal_scale": 0.3,
    "motion.relative_goal": False,
    "policy.hidden_sizes": (128, 128),
    "policy.activation": "leaky_relu",
    "policy.min_std": 1e-4,
    "critic.hidden_sizes": (256, 256),
    "critic.activation": "leaky_relu",
    "critic.weight_decay": 5e-5,
    "trust_region.mean_bound": 0.05,
    "update.weight_decay": 5e-5,
}
_DENSE: dict[str, Any] = {"env_id": "tether/BoxPushingRandomInitDense-v0", "episodes": 152}
_SPARSE: dict[str, Any] = {"env_id": "tether/BoxPushingRandomInitSparse-v0", "episodes": 76}
_BOX_TCE: dict[str, Any] = {
    "update.final_learning_rate_fraction": 0.2575,
    "precision": "float64",
    "motion.tau": 2.0,
    "critic.learning_rate": 1e-3,
    "trust_region.cov_bound": 0.0005,
    "trust_region.target_entropy": 0.0,
}
_BOX_BBRL: dict[str, Any] = {
    "motion.tau": 1.5,
    "critic.epochs": 10,
    "trust_region.cov_bound": 0.001,
    "update.epochs": 20,
}
_TENNIS: dict[str, Any] = {
    "env_id": "tether/TableTennisRandomInit-v0",
    "iterations": 12000,
    "episodes": 76,
    "precision": "float32",
    "motion.num_basis": 3,
    "motion.tau": 0.75,
    "motion.delay": 0.3,
    "motion.alpha": 25.0,
    "motion.bandwidth_factor": 3.0,
    "motion.weights_scale": 0.7,
    "motion.goal_scale": 0.1,
    "motion.relative_goal": True,
    "policy.hidden_sizes": (256,),
    "policy.activation": "tanh",
    "policy.min_std": 1e-5,
    "critic.learning_rate": 3e-4,
    "critic.weight_decay": 1e-5,
    "trust_region.mean_bound": 0.005,
    "update.learning_rate": 3e-4,
    "update.weight_decay": 1e-5,
}

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "metaworld-paper": ("metaworld/tcp/entire", _TCE | _METAWORLD | {
        "iterations": 7600, "precision": "float32", "motion.num_basis": 8, "policy.hidden_sizes": (128, 128),
        "critic.hidden_sizes": (128, 128), "critic.learning_rate": 3e-4, "update.learning_rate": 3e-4,
        "trust_region.target_entropy": 0.0,
    }),
    "metaworld-bbrl": ("metaworld/bbrl/entire", _BBRL | _METAWORLD | {
        "iterations": 7500, "motion.num_basis": 4, "policy.hidden_sizes": (32, 32),
        "policy.covariance": "diagonal", "critic.hidden_sizes": (32, 32), "critic.epochs": 100,
        "update.epochs": 100,
    }),
    "box-pushing-dense-paper": (
        "box_push_random_init/tcp/entire", _TCE | _BOX | _BOX_TCE | _DENSE | {"update.learning_rate": 3e-4},
    ),
    "box-pushing-sparse-paper": (
        "box_push_random_init/tcp/entire", _TCE | _BOX | _BOX_TCE | _SPARSE | {"update.learning_rate": 1e-4},
    ),
    "box-pushing-dense-bbrl": ("box_push_random_init/bbrl/entire", _BBRL | _BOX | _BOX_BBRL | _DENSE),
    "box-pushing-sparse-bbrl": ("box_push_random_init/bbrl/entire", _BBRL | _BOX | _BOX_BBRL | _SPARSE),
    "hopper-jump-sparse-paper": ("hopper_jump/tcp/entire", _TCE | {
        "env_id": "tether/HopperJumpSparse-v0", "iterations": 3000, "episodes": 64, "precision": "float64",
        "motion.num_basis": 3, "motion.tau": 0.8, "motion.bandwidth_factor": 3.0, "motion.weights_scale": 1.0,
        "motion.goal_scale": 1.0, "motion.relative_goal": False, "policy.hidden_sizes": (128, 128),
        "policy.activation": "leaky_relu", "policy.min_std": 1e-4, "critic.hidden_sizes": (128, 128),
        "critic.activation": "leaky_relu", "critic.learning_rate": 1e-4, "critic.weight_decay": 5e-5,
        "trust_region.mean_bound": 0.1, "trust_region.cov_bound": 0.02, "update.learning_rate": 1e-4,
        "update.weight_decay": 5e-5, "update.final_learning_rate_fraction": 0.703,
    }),
    "table-tennis-paper": ("table_tennis_4d/tcp/entire", _TCE | _TENNIS | {
        "critic.hidden_sizes": (256, 256), "critic.activation": "leaky_relu",
        "trust_region.cov_bound": 0.00025,
    }),
    "table-tennis-bbrl": ("table_tennis_4d/bbrl/entire", _BBRL | _TENNIS | {
        "env_options": {"violations": "refused"}, "critic.hidden_sizes": (256,), "critic.activation": "tanh",
        "critic.epochs": 100, "trust_region.cov_bound": 0.001, "trust_region.regression_weight": 25.0,
        "update.epochs": 100,
    }),
}  # fmt: skip
"""Preset -> where its settings stand in the authors' repository, and every setting there."""

_OPENING = """# What was published, and what the presets have

Printed by `python docs/published_settings.py`, from the presets themselves; a test holds the two columns
together. The published settings are those of the authors' repository, BruceGeLi/TCE_RL, at commit 7b2438b:
"configuration" is the file under `mprl/config/` named below, with what the cluster's file beside it
overrides, "environment" the task's definition in the fork of fancy_gym it is run with, "code" what its
samplers and agents do. Facts were read, no code was taken.

What a table of settings does not say:

| | published | here |
|---|---|---|
"""

BESIDES = (
    ("time", "appended to every observation, for policy and critic",
     "the critic is told; the policy decides at time 0, where an input of 0 changes nothing"),
    ("success", "read at the last step", "the same, as `success`; at any step as `success_any`"),
    ("normalisation of states", "running, over the T + 1 states of an episode, unlimited",
     "over the T states before a step, limited to 10 standard deviations"),
    ("schedule of learning rates",
     "over 10,000 iterations where the configuration names no number (Box Pushing, Hopper Jump)",
     "over the training, to where that schedule stands at its end"),
    ("weight decay of the covariance (Box Pushing, Hopper Jump, Table Tennis)",
     "draws standard deviations towards softplus(0) = 0.69", "towards their initial 1"),
    ("evaluation",
     "the mean motion on as many new starts as an iteration has (Box Pushing: 152), every 25 iterations",
     "on the same 16 starts, every 25 iterations"),
    ("Table Tennis, simulation gives up", "-25 a step",
     "-25 once, if the ball's fate is open; arm and ball then stand still"),
    ("Meta-World", "tasks of version 2, MuJoCo 2", "version 3, MuJoCo 3.3"),
    ("BBRL on Meta-World", "the context leaves out what is the same at every start",
     "the whole first observation"),
    ("BBRL's pull to the projection",
     "the covariance is set to its projection after an iteration, and the pull is told so. That it is of the "
     "mean alone then stands in boschresearch/trust-region-layers; the authors' fork of it could not be read",
     "of the mean alone (`trust_region.pull_covariance`); of both in runs made before, which resume as they "
     "were"),
    ("BBRL on Hopper Jump", "no settings published",
     "`hopper-jump-sparse-bbrl`: TCE's with the baseline's epochs, learning rate and weight of the pull from "
     "Meta-World; mean and covariance are pulled"),
)  # fmt: skip
"""What differs, or cannot be told by a setting: in words, published, here."""


TAKEN_OVER = {"hopper-jump-sparse-bbrl": "hopper-jump-sparse-paper"}
"""Presets of a method whose settings for the task were not published: from the other method's."""

_OTHERS = """\
Ours: each beside the preset that it is nearest to, with what differs, and in brackets what that one has. The
off-policy learner's (`-toperl`) have settings of its own:
`tether episodic train --preset NAME --help` shows them."""


def value_of(config: Any, path: str) -> Any:
    """A setting by its dotted name."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def rows(name: str) -> list[tuple[str, Any, Any, str]]:
    """The settings of a preset: name, published, ours, source."""
    config, (_, published) = preset(name), PUBLISHED[name]
    left_out = OF_TCE_ALONE if config.algo == "bbrl" else ()
    return [
        (
            path,
            published[path],
            value_of(config, path),
            CODE
            if path in BY_CODE
            else ENVIRONMENT
            if path == "env_id" or is_default(name, path)
            else CONFIGURATION,
        )
        for path in SETTINGS
        if path not in left_out
    ]


def is_default(name: str, path: str) -> bool:
    """Whether the configuration is silent and the environment's own movement primitive decides."""
    silent = {"metaworld-bbrl": ("motion.alpha", "motion.alpha_phase")}
    box = ("motion.alpha", "motion.tau")
    silent |= {"box-pushing-dense-bbrl": box, "box-pushing-sparse-bbrl": box}
    return path in silent.get(name, ())


def text(value: Any) -> str:
    """A value as the tables write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == {}:
        return "none"
    if isinstance(value, tuple):
        return " x ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}: {one}" for name, one in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def differences(name: str) -> tuple[str, dict[str, tuple[Any, Any]]]:
    """The preset that another one is nearest to, and its settings that differ: there and here."""
    config = preset(name)
    near = [one for one in (*PUBLISHED, *TAKEN_OVER) if one != name and preset(one).algo == config.algo]
    found = {}
    for one in [TAKEN_OVER[name]] if name in TAKEN_OVER else near:
        values = {path: (value_of(preset(one), path), value_of(config, path)) for path in SETTINGS}
        found[one] = {path: (there, here) for path, (there, here) in values.items() if there != here}
    nearest = min(found, key=lambda one: len(found[one]))
    return nearest, found[nearest]


def other_presets() -> str:
    """A table of what the presets change that nobody published."""
    lines = ["| preset | as | but |", "|---|---|---|"]
    for name in PRESETS:
        if name in PUBLISHED or preset(name).algo not in ("tce", "bbrl"):
            continue
        base, changed = differences(name)
        but = "; ".join(
            f"{SETTINGS[path]}: {text(here)} ({text(there)})" for path, (there, here) in changed.items()
        )
        lines.append(f"| `{name}` | `{base}` | {but or 'nothing'} |")
    return "\n".join(["## All other presets", "", _OTHERS, "", *lines, ""])


def page() -> str:
    """The whole page."""
    parts = [_OPENING + "".join(f"| {' | '.join(row)} |\n" for row in BESIDES)]
    for name, (file, _) in PUBLISHED.items():
        lines = ["| setting | published | ours | source |", "|---|---|---|---|"]
        lines += [
            f"| {SETTINGS[path]} (`{path}`) | {text(published)} | {text(ours)} | {source} |"
            for path, published, ours, source in rows(name)
        ]
        parts.append("\n".join([f"## `{name}`", "", f"From `{file}`.", "", *lines, ""]))
    return "\n".join([*parts, other_presets()])


if __name__ == "__main__":
    sys.stdout.write(page())
