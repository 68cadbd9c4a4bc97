"""What can be chosen when a language model is trained, evaluated or compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from tether.errors import ConfigError, InvalidInputError, check_at_least_one
from tether.experiments.settings_file import OptionValue, as_truth
from tether.experiments.trackers import TrackerName
from tether.llm.async_settings import check_async
from tether.llm.choices import chosen, refuse_former, split_choices
from tether.llm.estimators import Estimator, find_estimator
from tether.llm.methods import TROLL, LossMethod, Method, find_method
from tether.llm.saved_settings import MOVED
from tether.settings import Anchor, check_kl_stop, check_step_scale
from tether.step_back_search import PASSES, Statistic, check_step_back

# What does not change what a run learns: where it is, how it is watched, continued and handed on.
_NOT_OF_THE_RUN = (
    "output", "resume", "seed", "threads", "damaged_checkpoint", "preflight", "report_to", "push_to_hub",
    "vllm_port", "start_evaluations",
)  # fmt: skip

#: Losses that look at a micro-batch as a whole, whose size is then more than what memory takes.
_OF_MICRO_BATCHES = frozenset({"clip_cov", "kl_cov", "m2po"})

#: Settings of a run that may be different when it is continued: how much, and what memory takes.
MAY_CHANGE = (
    "steps", "keep_checkpoints", "device", "micro_batch_size", "gradient_checkpointing", "pack_sequences",
    "vllm_server", "share_prefixes",
)  # fmt: skip

#: Settings that are one of several things, each with options of its own.
CHOICES: dict[str, Callable[[str], Any]] = {"method": find_method, "estimator": find_estimator}


@dataclass(frozen=True)
class TrainConfig:
    """One training run of one model on one task."""

    output: Path = Path("runs/llm")
    """Folder of the run; it must not hold another one."""
    model: str = "embedded"
    """"embedded" or "embedded-llama" (ship with Tether), a folder, or a name on the Hugging Face hub."""
    task: str = "chained"
    """What to learn: a name of tether.llm.tasks.TASKS, such as chained, gsm8k, math or code."""
    task_options: dict[str, OptionValue] = field(default_factory=dict)
    """Options of the task, such as path for a JSONL file with gsm8k's fields."""

    method: Method = field(default_factory=TROLL)
    """How an update is kept close to the policy that gathered the data: --method NAME, of which --help then
    lists the options. In Python TROLL(), Clip(), a name, or a mapping with the name and options."""
    estimator: Estimator = field(default_factory=find_estimator("grpo"))
    """How advantages are estimated and the loss is averaged: --estimator NAME. gspo has one ratio a sequence,
    ppo a critic; most others are functions of the rewards."""
    kl_stop: float | None = None
    """Skip the rest of a batch's updates once the network's mean KL(new || old) exceeds this; a critic makes
    its own all the same."""
    step_back: float | None = None
    """After a batch's updates, take the network back along the line to the weights that sampled, until its
    measured KL(new || old) on the batch is within this many nats."""
    step_back_statistic: Statistic = "mean"
    """step_back: what is held to the budget: the tokens' mean, their largest, or a quantile such as 0.99."""
    step_back_every: int | None = None
    """step_back: also measure after every so many updates of a batch; by default after the last alone."""
    step_scale: float | None = None
    """Scale an update's learning rate by the root of its responses' effective share (VCPO), none of their
    weights being more than this, such as 2."""
    name: str | None = None
    """What the run is called in tables and legends; by default its method."""

    seed: int = 0
    """Seed of everything random."""
    steps: int = 160
    """Optimizer steps in all."""
    updates_per_rollout: int = 8
    """Optimizer steps on each batch of responses; more of them make the data staler."""
    prompts_per_rollout: int = 64
    """Problems in a batch."""
    responses_per_prompt: int = 8
    """Responses to each problem; their mean reward is the baseline."""
    micro_batch_size: int | None = None
    """Responses in memory at a time; by default those of a whole update."""
    learning_rate: float = 1e-4
    """Peak learning rate."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW, whose steps are as large as the learning rate says however small the gradient; or SGD with
    momentum 0.9, whose steps shrink with it: half the memory, and other learning rates (0.003 suits the
    embedded model)."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm; one such as 1e9 clips none."""
    reference_penalty: float = 0.0
    """Weight of the KL penalty towards the starting model (TRL's beta); needs LoRA or a model on disk."""
    temperature: float = 1.0
    """Sampling temperature, in training and held-out sampling."""
    top_p: float = 1.0
    """While training, sample from the likeliest tokens that hold this much probability together."""
    sampling_top_k: int | None = None
    """While training, sample from this many likeliest tokens. With vLLM and anchor sampler, top_p needs it
    too, at most the method's top_k (64), which vLLM reports: the set that is sampled from must be known."""
    max_response_tokens: int | None = None
    """Longest response; by default what suits the task."""
    mask_truncated: bool = False
    """Leave responses cut off at the longest length out of the loss (they are counted either way)."""
    chat_template_options: dict[str, OptionValue] = field(default_factory=dict)
    """Variables of the model's chat template, such as enable_thinking for Qwen3."""

    rollouts: Literal["transformers", "compact", "vllm", "vllm-async"] = "transformers"
    """What writes the responses while training. compact: Transformers too, but each prompt is read once for
    all of its responses and rows that have ended leave the batch; fastest without vLLM, and used for
    evaluations as well. vllm: in turns with updates; vllm-async: all the time, on a server of its own, with
    TROLL or the clip around the policy that sampled; evaluations are compact where the model allows it."""
    max_lag: int = 4
    """vllm-async: the most updates a response may be behind when it is used; older ones are dropped."""
    vllm_mode: Literal["colocate", "server"] = "colocate"
    """vLLM: on the training GPUs, or a server of its own (trl vllm-serve, vllm serve)."""
    vllm_server: str | None = None
    """vLLM: address of the server, such as http://localhost:8000; vllm-async starts its own without one."""
    vllm_port: int | None = None
    """vllm-async: port of the server that it starts; by default a free one."""
    vllm_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """vLLM started here: type of its weights, by default that of the trainer's (colocated: on a CPU)."""
    vllm_memory: float = 0.3
    """vLLM: share of each GPU's memory it may take when colocated."""
    anchor: Anchor = "trainer"
    """Which policy an update is kept close to: the trainer's own when the rollouts began, which its network
    scores; or the one that sampled (vllm-async: always), from the log-probabilities that its engine
    reports."""
    sampler_weight: float | None = None
    """anchor trainer: weigh the policy gradient by min(trainer / sampler, this), the decoupled form."""
    lag: int = 0
    """Sample from the policy of so many updates ago, in one process: stale data on purpose, for studies."""
    sampler_dtype: Literal["as_trained", "bfloat16"] = "as_trained"
    """What the sampling model computes in: an engine's arithmetic on purpose, for studies."""

    lora_rank: int | None = None
    """Train low-rank adapters of this rank instead of all weights."""
    quantization: Literal["none", "nf4"] = "none"
    """Weights under the adapters: as they are, or in 4 bits (QLoRA; needs CUDA and bitsandbytes)."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Type of the weights."""
    mixed_precision: bool = False
    """Compute in bfloat16 while the weights keep their type; on an accelerator implied by other types. A
    processor that is slower in bfloat16 computes in float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    pack_sequences: bool = False
    """Run the model on a micro-batch's tokens without their padding; pays where lengths differ."""
    share_prefixes: bool = False
    """Compute once what the sequences of a micro-batch begin with alike, such as the prompt of a group, and
    leave out padding; pays where prompts are long."""
    device: Literal["auto", "cpu"] = "auto"
    """"auto" uses an accelerator where there is one."""
    threads: int | None = None
    """Torch threads; by default one a core."""

    eval_every: int = 16
    """Steps between evaluations on held-out problems; 0 for only before and after."""
    eval_problems: int = 200
    """Held-out problems; of a split that has fewer, all."""
    eval_split: Literal["validation", "test"] = "validation"
    """Which held-out problems; choose settings on validation, report them on test."""
    eval_samples: int = 1
    """Sampled responses to each of them."""
    start_evaluations: Path | None = None
    """A folder where runs that begin alike share their evaluation before the first update, in one process
    each: whatever their seeds and methods, it asks the same questions with the same random numbers. A
    comparison shares it among its runs."""
    save_every: int = 32
    """Steps between checkpoints; a multiple of updates_per_rollout."""
    keep_checkpoints: int = 2
    """Checkpoints to keep."""
    resume: bool = False
    """Continue the run in the output folder from its last checkpoint; begin it where there is none."""
    damaged_checkpoint: Literal["refuse", "skip"] = "refuse"
    """On resume, what to do with a checkpoint whose files are not those that were written."""
    preflight: Literal["warn", "refuse", "off"] = "warn"
    """Checks before training: stop at what cannot work and warn of the rest, stop at both, or no checks."""
    report_to: tuple[TrackerName, ...] = ()
    """Trackers that get the run's numbers, and TRL's own; the run's folder holds TensorBoard files in any
    case."""
    push_to_hub: str | None = None
    """Upload the trained model, with its card, to this repository of the Hugging Face hub."""

    former_names: ClassVar[Mapping[str, str]] = MOVED

    def __post_init__(self) -> None:
        """Refuse what cannot work before any time is spent on it."""
        for name, find in CHOICES.items():
            object.__setattr__(self, name, chosen(getattr(self, name), find))
        template = {name: as_truth(value) for name, value in self.chat_template_options.items()}
        object.__setattr__(self, "chat_template_options", template)
        for name in ("steps", "updates_per_rollout", "prompts_per_rollout", "eval_problems", "eval_samples",
                     "keep_checkpoints", "micro_batch_size", "max_response_tokens", "lora_rank",
                     "threads"):  # fmt: skip
            check_at_least_one(name, getattr(self, name))
        if self.responses_per_prompt < 2:
            raise ConfigError(
                f"responses_per_prompt must be at least 2, got {self.responses_per_prompt}: "
                "advantages compare the responses to one prompt."
            )
        self._check_numbers()
        self._check_method()
        self._check_batches()
        self._check_hardware()
        check_async(self)

    def _check_numbers(self) -> None:
        for name in ("temperature", "learning_rate", "max_grad_norm"):
            value = getattr(self, name)
            if not value > 0 or not math.isfinite(value):
                raise ConfigError(f"{name} must be positive and finite, got {value}.")
        for name in ("warmup_steps", "reference_penalty"):
            value = getattr(self, name)
            if not value >= 0 or not math.isfinite(value):
                raise ConfigError(f"{name} must be 0 or more, and finite; got {value}.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must lie in (0, 1], got {self.top_p}.")
        if self.sampling_top_k is not None and self.sampling_top_k < 1:
            raise ConfigError(f"sampling_top_k counts tokens, from 1; got {self.sampling_top_k}.")

    def _check_method(self) -> None:
        if isinstance(self.method, LossMethod) and self.estimator.name == "gspo":
            raise ConfigError(
                "estimator='gspo' sets the level of the ratio in troll, clip and none; "
                f"{self.method.name} has one of its own. Use method='gspo' with estimator='grpo', or another "
                "estimator."
            )
        check_kl_stop(self.kl_stop)
        check_step_scale(self.step_scale)
        _check_step_back(self)
        if self.estimator.spec.critic and self.quantization != "none":
            raise ConfigError(
                f"estimator={self.estimator.name!r} trains a copy of the backbone as its critic, which "
                f"quantization={self.quantization!r} makes impossible. Use another estimator, such as rloo."
            )

    def _check_hardware(self) -> None:
        if self.quantization != "none" and self.lora_rank is None:
            raise ConfigError(
                f"quantization={self.quantization!r} keeps the weights fixed and needs adapters to train: "
                "set lora_rank, such as 16."
            )
        if not 0 < self.vllm_memory < 1:
            raise ConfigError(f"vllm_memory is a share of a GPU's memory, in (0, 1); got {self.vllm_memory}.")
        uses_server = self.rollouts == "vllm-async" or (self.rollouts, self.vllm_mode) == ("vllm", "server")
        if self.vllm_server is not None and not uses_server:
            raise ConfigError(
                f"vllm_server={self.vllm_server!r} is used by rollouts='vllm' with vllm_mode='server' and by "
                f"rollouts='vllm-async'; got rollouts={self.rollouts!r}, vllm_mode={self.vllm_mode!r}."
            )
        if self.push_to_hub is not None and self.push_to_hub.count("/") > 1:
            raise ConfigError(f"push_to_hub takes 'owner/name' or 'name', got {self.push_to_hub!r}.")

    def _check_batches(self) -> None:
        responses = self.prompts_per_rollout * self.responses_per_prompt
        if responses % self.updates_per_rollout:
            raise ConfigError(
                f"{self.prompts_per_rollout} prompts x {self.responses_per_prompt} responses = {responses} "
                f"cannot be split into {self.updates_per_rollout} equal updates. Change one of the three."
            )
        if self.responses_per_update % self.responses_per_micro_batch:
            raise ConfigError(
                f"micro_batch_size={self.micro_batch_size} does not divide the {self.responses_per_update} "
                "responses of an update."
            )
        for name in ("save_every", "eval_every"):
            value = getattr(self, name)
            if value < 0 or value % self.updates_per_rollout:
                raise ConfigError(
                    f"{name}={value} must be a multiple of updates_per_rollout={self.updates_per_rollout}: "
                    "between two updates on one batch the run is not at a place it can return to."
                )

    @classmethod
    def from_options(cls, arguments: Sequence[str], prefix: str = "") -> tuple[TrainConfig, list[str]]:
        """Defaults with the method and the estimator that the options name, and the options without them.

        Raises:
            ConfigError: an unknown name, or an option of before, with what it is called now.
        """
        refuse_former(arguments, cls.former_names, prefix)
        names, left = split_choices(arguments, CHOICES, prefix)
        return cls(**{name: CHOICES[name](value)() for name, value in names.items()}), left

    @property
    def responses_per_update(self) -> int:
        """Responses an optimizer step learns from."""
        return self.prompts_per_rollout * self.responses_per_prompt // self.updates_per_rollout

    @property
    def responses_per_micro_batch(self) -> int:
        """Responses in memory at a time."""
        return self.micro_batch_size or self.responses_per_update

    @property
    def label(self) -> str:
        """The method's name in tables and legends."""
        return self.name or self.method.label

    def may_change(self) -> tuple[str, ...]:
        """Settings that may be different when the run is continued."""
        if self.method.name in _OF_MICRO_BATCHES:
            return tuple(name for name in MAY_CHANGE if name != "micro_batch_size")
        return MAY_CHANGE

    def settings(self) -> dict[str, Any]:
        """What defines the run, for its folder; where it is and how it is continued do not."""
        settings = asdict(self)
        for name in _NOT_OF_THE_RUN:
            settings.pop(name)
        return settings


def _check_step_back(config: TrainConfig) -> None:
    if config.step_back is None:
        if config.step_back_every is not None or config.step_back_statistic != "mean":
            raise ConfigError(
                "step_back_statistic and step_back_every say how a budget is kept, and there is none: set "
                "step_back, such as 0.02."
            )
        return
    try:
        check_step_back(config.step_back, config.step_back_statistic, PASSES)
    except InvalidInputError as error:
        raise ConfigError(f"step_back: {error}") from error
    if config.updates_per_rollout == 1:
        raise ConfigError(
            "step_back goes back to the policy that wrote a batch, which TRL does not record where each "
            "serves one update. Set updates_per_rollout to 2 or more, or leave step_back out."
        )
    if config.anchor == "sampler":
        raise ConfigError(
            "step_back measures the network against the trainer's own policy of a batch's beginning, which "
            "anchor=sampler does not score. Set anchor to trainer, or leave step_back out."
        )
    if config.step_back_every is not None and not 1 <= config.step_back_every <= config.updates_per_rollout:
        raise ConfigError(
            f"step_back_every={config.step_back_every} must lie between 1 and the "
            f"{config.updates_per_rollout} updates on a batch."
        )
