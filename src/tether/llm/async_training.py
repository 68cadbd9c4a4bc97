"""A run with ``rollouts="vllm-async"``: TRL's asynchronous trainer, and the server that it samples from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tether.errors import ConfigError
from tether.llm.config import TrainConfig
from tether.llm.methods import TROLL, Clip
from tether.llm.process import process_count
from tether.llm.serving import LOG_FILE, check_port, free_port, serving, vllm_server
from tether.llm.tasks import Task, make_task, reward_function
from tether.llm.trainers import lora, problems_in_training_order, training_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tether.integrations.trl_async_base import RecordedTrainer

#: Seconds without a sign of life of the process that writes rollouts.
_SILENCE = 60.0
#: Seconds for a server's first answer.
_FIRST = 600.0
#: Seconds for a response: as good as no limit. One that is asked for again begins again, and on a server with
#: hundreds under way long ones would never end; whether it answers at all is looked at besides.
_RESPONSE = 7 * 24 * 3600
#: Sequences a server has room for besides those under way: the ones a check asks about.
_SPARE = 16
#: Groups of responses that wait to be judged while another one is.
_GROUPS_TO_JUDGE = 1
SERVED = "served"
"""In the run's folder: the model as the server reads it."""


class TaskReward:
    """A task's rewards for another process, which makes the task anew.

    >>> reward = TaskReward("arithmetic", {})
    >>> reward(["374+258="], ["632"], answer=["632"]), reward.__name__
    ([1.0], 'arithmetic_reward')
    """

    def __init__(self, task: str, options: dict[str, Any]) -> None:
        self._task, self._options = task, options
        self.__name__ = f"{task.rpartition(':')[2]}_reward"

    @functools.cached_property
    def _judge(self) -> Callable[..., list[float]]:
        return reward_function(make_task(self._task, **self._options))

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        """As `reward_function`."""
        return self._judge(prompts, completions, **columns)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_judge"}


def make_async_trainer(
    config: TrainConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    folder: Path,
) -> RecordedTrainer:
    """The trainer of an asynchronous run.

    Raises:
        ConfigError: several processes, or a port that is taken.
        EngineError: a server of the user's that does not answer.
    """
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig

    from tether.integrations.trl_async import AsyncClipTrainer, AsyncTROLLConfig, AsyncTROLLTrainer
    from tether.integrations.trl_folder import FolderWeightTransfer, VLLMServer

    if process_count() > 1:
        raise ConfigError(
            f"rollouts='vllm-async' trains in one process, and there are {process_count()}. Start it without "
            "accelerate launch, or use AsyncTROLLTrainer with a server of your own."
        )
    if config.vllm_port is not None:
        check_port(config.vllm_port)
    if config.vllm_server is not None:
        VLLMServer(config.vllm_server, silence=10.0).check()
    url = config.vllm_server or f"http://127.0.0.1:{config.vllm_port or free_port()}"
    server = VLLMServer(url)
    arguments: dict[str, Any] = {
        "model": model, "reward_funcs": TaskReward(config.task, config.task_options),
        "train_dataset": problems_in_training_order(config, task), "processing_class": tokenizer,
        "peft_config": lora(config),
        "weight_transfer": FolderWeightTransfer(
            config.output.absolute() / SERVED, server.reload, pause=server.pause, resume=server.resume,
            untie=True, make=False, dtype=None if config.vllm_server else _engine_dtype(config, model),
        ),
    }  # fmt: skip
    settings = _settings(config, task, folder) | {"vllm_server_base_url": url}
    if isinstance(config.method, TROLL):
        method = config.method
        own = {f"troll_{name}": getattr(method, name) for name in (
            "kl_bound", "alpha", "top_k", "region", "lag_growth", "lag_rate", "kl_bound_largest",
        )}  # fmt: skip
        trainer = AsyncTROLLTrainer(args=AsyncTROLLConfig(**settings, **own), **arguments)
    else:
        assert isinstance(config.method, Clip)  # the config refuses others
        low, high = config.method.widths({})
        args = AsyncGRPOConfig(**settings, epsilon=low, epsilon_high=high)
        trainer = AsyncClipTrainer(args=args, support_top_k=config.method.top_k, **arguments)
    trainer.rollout_worker._loop_kwargs["score_queue_maxsize"] = _GROUPS_TO_JUDGE
    return trainer


def _settings(config: TrainConfig, task: Task, folder: Path) -> dict[str, Any]:
    """TRL's, of either method."""
    return {
        **training_settings(config, task, folder),
        "token_budget": 0,  # as many responses in an update as were asked for
        # TRL looks at a batch's age when it is fetched, and that is while the one before it trains.
        "max_staleness": config.max_lag - 1,
        **_written_ahead(config),
        "heartbeat_stale_after_s": _SILENCE,
        "request_timeout": _RESPONSE,
        "chat_template_kwargs": dict(config.chat_template_options) or None,
    }


def _written_ahead(config: TrainConfig) -> dict[str, int]:
    """How many responses may be under way and wait to be fetched.

    With those that wait to be judged no more than training can take until they are too old: a server that is
    faster would write the others for nothing.
    """
    update, group = config.responses_per_update, config.responses_per_prompt
    in_time = (config.max_lag - 1) * update - update - (_GROUPS_TO_JUDGE + 1) * group
    return {"queue_maxsize": update, "max_inflight_tasks": max(in_time, update, group)}


@contextmanager
def served(
    config: TrainConfig, trainer: RecordedTrainer, tokenizer: Any, say: Callable[[str], None]
) -> Iterator[None]:
    """The server that an asynchronous trainer samples from, unless it has one of its own.

    Raises:
        EngineError: it does not come up.
    """
    from tether.integrations.trl_folder import VLLMServer, write_for_vllm

    folder = config.output.absolute() / SERVED
    write_for_vllm(trainer.base_model, tokenizer, folder)
    if config.vllm_server is not None:
        called = VLLMServer(config.vllm_server).model_name()
        trainer.rollout_worker._loop_kwargs["model_name"] = called
        yield
        return
    args, on_cpu = trainer.args, trainer.accelerator.device.type == "cpu"
    url = str(args.vllm_server_base_url)
    trainer.engine_dtype = _engine_dtype(config, trainer.base_model)
    name = str(trainer.rollout_worker._loop_kwargs["model_name"])
    plan = vllm_server(
        folder, name=name, port=int(url.rpartition(":")[2]),
        log=config.output.absolute() / LOG_FILE, on_cpu=on_cpu,
        options={
            "dtype": str(trainer.engine_dtype).removeprefix("torch."),
            "max-model-len": _longest(trainer, tokenizer),
            "max-num-seqs": args.max_inflight_tasks + _SPARE,
            "gpu-memory-utilization": None if on_cpu else config.vllm_memory,
            "seed": config.seed,
        },
    )  # fmt: skip
    with serving(plan, say):
        # The first answer takes what a server leaves until then, which is no silence yet.
        VLLMServer(url).complete({"model": name, "prompt": [0], "max_tokens": 1, "logprobs": 1}, _FIRST)
        yield


def _longest(trainer: RecordedTrainer, tokenizer: Any) -> int:
    """Tokens of the longest prompt and response."""
    from tether.integrations.trl_async_worker import prompt_ids

    options = trainer.args.chat_template_kwargs or {}
    dataset: Any = trainer.train_dataset
    prompts = (prompt_ids(tokenizer, prompt, **options) for prompt in dataset["prompt"])
    return max(map(len, prompts)) + int(trainer.args.max_completion_length)


def _engine_dtype(config: TrainConfig, model: Any) -> torch.dtype:
    """Of the weights of a server that is started here."""
    dtype: torch.dtype = model.dtype if config.vllm_dtype == "auto" else getattr(torch, config.vllm_dtype)
    return dtype


def server_at_hand(
    config: TrainConfig, trainer: Any, tokenizer: Any, say: Callable[[str], None]
) -> AbstractContextManager[None]:
    """The server that a run starts for itself, if it does."""
    if config.rollouts != "vllm-async":
        return nullcontext()
    return served(config, trainer, tokenizer, say)
