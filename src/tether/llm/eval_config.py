"""What can be chosen when models are measured on held-out problems."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tether.errors import ConfigError, check_at_least_one
from tether.experiments.settings_file import OptionValue, as_truth

PAGE_FILE = "report.html"
"""The page in an evaluation's output folder."""

# What does not change what is measured.
_NOT_MEASURED = ("output", "threads", "page_problems")


@dataclass(frozen=True)
class EvalConfig:
    """Success of a model, or of two side by side, on held-out problems of one or several tasks."""

    model: str = "embedded"
    """"embedded", "embedded-llama", a folder (a run's model, say), or a name on the hub."""
    baseline: str | None = None
    """A second model to measure on the same problems, such as the one training started from."""
    task: tuple[str, ...] = ("chained",)
    """Which problems: one or several names of tether.llm.tasks.TASKS."""
    task_options: dict[str, OptionValue] = field(default_factory=dict)
    """Options of the task; of several tasks with the name before, as in gsm8k.path."""
    split: Literal["validation", "test"] = "test"
    """Which held-out problems; keep test for the end."""
    problems: int = 500
    """How many of each task; of a split that has fewer, all."""
    samples: int = 4
    """Sampled responses to each, n of avg@n and pass@k; 0 for greedy responses alone."""
    pass_at: tuple[int, ...] = ()
    """The k of pass@k; by default the powers of two up to samples."""
    greedy: bool = True
    """Whether the most likely response is measured too."""
    temperature: float = 1.0
    """Sampling temperature."""
    max_response_tokens: int | None = None
    """Longest response; by default what suits the task."""
    batch_size: int = 256
    """Responses generated at a time."""
    rollouts: Literal["transformers", "compact"] = "transformers"
    """What writes the responses, as in training. compact reads each prompt once for all of its samples and is
    faster on a CPU; its samples are others of the same distribution."""
    chat_template_options: dict[str, OptionValue] = field(default_factory=dict)
    """Variables of the model's chat template, such as enable_thinking for Qwen3."""
    token_scores: bool = True
    """Keep each token's log-probability and entropy of one response a problem, for the page's tints."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Type of the weights."""
    device: Literal["auto", "cpu"] = "auto"
    """"auto" uses an accelerator where there is one."""
    seed: int = 0
    """Seed of problems and samples."""
    output: Path | None = None
    """Folder for responses, results and the page; the same command goes on there after a kill."""
    page_problems: int = 200
    """How many problems of each task the page shows."""
    threads: int | None = None
    """Torch threads; by default one a core."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        template = {name: as_truth(value) for name, value in self.chat_template_options.items()}
        object.__setattr__(self, "chat_template_options", template)
        if not isinstance(self.task, tuple) or not self.task or len(set(self.task)) < len(self.task):
            raise ConfigError(f"task takes one or several different names, as ('gsm8k',); got {self.task!r}.")
        for name in ("problems", "batch_size", "page_problems", "max_response_tokens"):
            check_at_least_one(name, getattr(self, name))
        check_at_least_one("threads", self.threads or None)  # 0 is one a core, too
        if self.samples < 0 or not (self.samples or self.greedy):
            raise ConfigError(
                f"samples={self.samples} with greedy={self.greedy} measures nothing: give at least 1 sample."
            )
        wrong = [k for k in self.pass_at if not 1 <= k <= self.samples]
        if wrong:
            raise ConfigError(
                f"pass_at={wrong[0]} needs as many samples, and there are {self.samples}. Raise samples."
            )
        if not self.temperature > 0 or not math.isfinite(self.temperature):
            raise ConfigError(f"temperature must be positive, got {self.temperature}.")
        if self.baseline == self.model:
            raise ConfigError(f"baseline and model are both {self.model!r}; give two models.")
        for name in self.task:
            self.options_of(name)

    @property
    def models(self) -> dict[str, str]:
        """What is measured, by side: ``"model"`` first, then ``"baseline"``."""
        return {"model": self.model} | ({} if self.baseline is None else {"baseline": self.baseline})

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k.

        >>> EvalConfig(samples=6).ks
        (1, 2, 4)
        """
        return self.pass_at or tuple(1 << power for power in range(self.samples.bit_length()))

    def options_of(self, task: str) -> dict[str, Any]:
        """The options of one task, without the name before them.

        >>> EvalConfig(task=("gsm8k", "math"), task_options={"gsm8k.path": "data"}).options_of("gsm8k")
        {'path': 'data'}
        """
        options = {}
        for name, value in self.task_options.items():
            owner, dot, option = name.rpartition(".")
            if (dot and owner not in self.task) or (not dot and len(self.task) > 1):
                raise ConfigError(
                    f"task_options has {name!r}, which belongs to none of {', '.join(self.task)}. With "
                    f"several tasks, write {self.task[0]}.{option}."
                )
            if not dot or owner == task:
                options[option] = value
        return options

    def settings(self) -> dict[str, Any]:
        """What defines the measurement, for its folder."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_MEASURED}
