"""Train a language model on a task: one run, one folder, resumable."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tether.errors import CheckpointError
from tether.experiments import Checkpoint, RunFolder, TrainingProgress, seed_everything
from tether.experiments.interrupts import Interrupts
from tether.experiments.peak_memory import StepMeter
from tether.experiments.run_config import CONFIG_FILE
from tether.experiments.trackers import check_trackers
from tether.llm.async_training import make_async_trainer, server_at_hand
from tether.llm.config import TrainConfig
from tether.llm.preflight import check_before_loading, check_rewards
from tether.llm.process import is_main_process, local_rank, prepare_process, sharding
from tether.llm.rollouts import able_to_generate, check_vllm, writes_compactly
from tether.llm.run_kind import LLM_RUNS
from tether.llm.saving import UNFINISHED, check_hub_access, finish_from_checkpoint, save_trained_model, upload
from tether.llm.tasks import make_task
from tether.llm.tasks.training import closing
from tether.llm.trainers import make_trainer

if TYPE_CHECKING:
    from tether.integrations.trl import OldPolicyTrainer
    from tether.llm.callbacks import CheckpointCallback
    from tether.llm.evaluate import Evaluation
    from tether.llm.failures import Activity


def train(config: TrainConfig) -> RunFolder:
    """Train as the config says; what comes out is in the run's folder.

    Everything that can be refused is refused before the folder is made: a missing model, an
    unknown task, data without answers, settings that do not go together, more memory or disk than there is.

    Under ``accelerate launch`` every process calls this; the first writes the folder.

    Returns:
        The closed run folder: `metrics.jsonl`, `eval.jsonl`, `samples/`, `checkpoints/`, `model/`
        (the trained model and its card, to load with Transformers) and `tensorboard/`.

    Raises:
        ConfigError, DataError, CheckpointError: naming what is wrong and what to do.
        TrainingStoppedError: memory, disk or finite numbers ran out; where, and what is left.
        KeyboardInterrupt: after Ctrl-C, once a checkpoint is saved; SIGTERM then ends the process likewise.
    """
    from tether.llm.models import load_model_and_tokenizer

    prepare_process(config.threads)
    seed_everything(config.seed)
    _refuse_fewer_steps(config)
    task = make_task(config.task, **config.task_options)
    with closing(task):
        problems = task.problems(config.eval_split, config.eval_problems, 0)
        check_vllm(config, on_cpu=_device(config).type == "cpu" and sharding() != "everything")
        check_before_loading(config, task)
        check_trackers(config.report_to)
        if config.push_to_hub is not None:
            check_hub_access(config.push_to_hub)
        model, tokenizer = load_model_and_tokenizer(
            config.model,
            dtype=config.dtype,
            device=_device(config),
            quantization=config.quantization,
        )
        if _looks_at_rewards(config):
            check_rewards(config, model, tokenizer, task)
        trainer = _build(config, model, tokenizer, task)
        with _run_folder(config) as run:
            stopped_by = _run(config, run, trainer, tokenizer, task, problems)
    trainer.accelerator.wait_for_everyone()
    if stopped_by is not None:
        stopped_by.pass_on()
    return RunFolder.open(config.output) if run is None else run


def _device(config: TrainConfig) -> torch.device:
    """Where this process's model goes at once; one that is to be spread over processes waits on the CPU."""
    if config.device == "cpu" or not torch.accelerator.is_available() or sharding() == "everything":
        return torch.device("cpu")
    current = torch.accelerator.current_accelerator()
    assert current is not None
    return torch.device(current.type, local_rank())


def _looks_at_rewards(config: TrainConfig) -> bool:
    """Whether this process is to look at rewards: once a run, and not with a model too large for one process
    (the evaluation before the first step shows them too)."""
    return is_main_process() and not _goes_on(config) and sharding() != "everything"


def _goes_on(config: TrainConfig) -> bool:
    """Whether there is a run to continue."""
    return config.resume and (config.output / CONFIG_FILE).is_file()


def _refuse_fewer_steps(config: TrainConfig) -> None:
    """A run that is past the steps asked for would be called one of so many, with the model of more."""
    checkpoints = RunFolder.open(config.output).checkpoints() if _goes_on(config) else []
    if checkpoints and checkpoints[-1].step > config.steps:
        raise CheckpointError(
            f"{config.output} holds a run of {checkpoints[-1].step} steps, and steps={config.steps} asks for "
            "fewer; what it has learned since cannot be taken back. Set steps to that many or more, or train "
            "in another output folder."
        )


@contextmanager
def _run_folder(config: TrainConfig) -> Iterator[RunFolder | None]:
    """The run's folder, for the process that writes it; nothing for the others."""
    if not is_main_process():
        yield None
        return
    with RunFolder.create(
        config.output,
        kind="llm",
        label=config.label,
        seed=config.seed,
        settings=config.settings(),
        resume=config.resume,
        may_change=config.may_change(),
        length="steps",
        # A setting that is newer than the run: it did then what the default does now.
        current_settings=lambda kept: TrainConfig().settings() | LLM_RUNS.current_settings(kept),
        trackers=("tensorboard", *config.report_to),
    ) as run:
        yield run


def _build(config: TrainConfig, model: Any, tokenizer: Any, task: Any) -> OldPolicyTrainer:
    """The trainer, built before the run's folder so that a refusal leaves nothing behind."""
    make = make_async_trainer if config.rollouts == "vllm-async" else make_trainer
    # TRL makes its output folder at once; checkpoints go elsewhere (`_save_checkpoint`).
    with tempfile.TemporaryDirectory() as folder:
        return make(config, model, tokenizer, task, Path(folder))


def _run(
    config: TrainConfig,
    run: RunFolder | None,
    trainer: OldPolicyTrainer,
    tokenizer: Any,
    task: Any,
    problems: Any,
) -> Interrupts | None:
    """Train to the end; or what has stopped it before."""
    from rich.console import Console
    from transformers import PrinterCallback

    from tether.llm.callbacks import stop_after_batch
    from tether.llm.evaluate import evaluate_model
    from tether.llm.failures import Activity, stopping_with_a_reason

    start = _starting_point(config, run, trainer)
    done = start.step if start else 0
    if start is not None and done >= config.steps:
        if run is not None and not run.finished:  # killed after its last checkpoint
            finish_from_checkpoint(config, run, start.path, tokenizer)
            _finish(config, run, print)
        return None
    # One display a run: the first process's.
    console = None if run is not None else Console(quiet=True)
    label = f"{config.label}, seed {config.seed}"
    activity = Activity()
    with (
        TrainingProgress(
            config.steps, label, done=done, displayed=LLM_RUNS.displayed, console=console
        ) as progress,
        stopping_with_a_reason(run, trainer, config, activity),
    ):
        if config.resume and start is None:  # who misspelt the folder is to know before hours pass
            progress.message(f"Nothing to resume in {config.output}: training begins.")
        trainer.args.output_dir = str(config.output / UNFINISHED)
        trainer.remove_callback(PrinterCallback)
        evaluate = functools.partial(
            _in_the_precision_of_rollouts, trainer, evaluate_model, trainer.model, tokenizer, task,
            problems,
            samples=config.eval_samples, temperature=config.temperature,
            max_response_tokens=config.max_response_tokens,
            chat_template_options=config.chat_template_options,
            compact=writes_compactly(config, trainer.model),
        )  # fmt: skip
        checkpoints = _add_callbacks(
            config, run, trainer, tokenizer, task, problems, progress, evaluate, activity
        )
        with (
            Interrupts(functools.partial(stop_after_batch, checkpoints, progress.message)) as interrupts,
            server_at_hand(config, trainer, tokenizer, progress.message),
        ):
            trainer.train(resume_from_checkpoint=str(start.path) if start else None)
        if trainer.state.global_step < config.steps:
            progress.message(
                f"Stopped at step {trainer.state.global_step} of {config.steps}. Continue with --resume."
            )
            return interrupts
        with activity.during("saving the model"):
            save_trained_model(config, run, trainer, tokenizer)
    if run is not None:
        _finish(config, run, progress.message)
    return None


def _finish(config: TrainConfig, run: RunFolder, say: Callable[[str], None]) -> None:
    run.mark_finished()
    if config.push_to_hub is not None:
        upload(run.path / "model", config.push_to_hub, say)


def _in_the_precision_of_rollouts(
    trainer: OldPolicyTrainer, evaluate: Callable[..., Evaluation], *args: Any, compact: bool, **kw: Any
) -> Evaluation:
    """Evaluate as the responses of training are written."""
    with trainer.accelerator.autocast() if compact else nullcontext():
        return evaluate(*args, compact=compact, **kw)


def _starting_point(
    config: TrainConfig, run: RunFolder | None, trainer: OldPolicyTrainer
) -> Checkpoint | None:
    """Where to go on from; every process sees what the first one left."""
    start = None
    if run is not None:
        start = run.latest_checkpoint(config.damaged_checkpoint) if config.resume else None
        if not run.finished or start is None or start.step < config.steps:
            run.truncate_after(start.step if start else -1)
    trainer.accelerator.wait_for_everyone()
    if trainer.args.device.type == "cpu":
        # Of several processes on CPUs accelerate names each device cpu:0, cpu:1, which torch.load refuses.
        trainer.args.__dict__["_setup_devices"] = torch.device("cpu")
    if run is None and config.resume:
        start = RunFolder.open(config.output).latest_checkpoint()
    return start


def _add_callbacks(
    config: TrainConfig,
    run: RunFolder | None,
    trainer: OldPolicyTrainer,
    tokenizer: Any,
    task: Any,
    problems: Any,
    progress: TrainingProgress,
    evaluate: Callable[[], Evaluation],
    activity: Activity,
) -> CheckpointCallback:
    """What happens around the steps, in this order; returns the last one, which can be asked for a stop."""
    from tether.llm.callbacks import (
        CheckpointCallback,
        EvaluationCallback,
        MetricsCallback,
        SamplesCallback,
        TrackerCallback,
    )
    from tether.llm.failures import FiniteGradients
    from tether.llm.start_evaluation import evaluate_start

    trainer.add_callback(FiniteGradients())
    if run is not None:
        # From here on memory counts: the model is loaded, the checkpoint to continue from is not.
        meter = StepMeter(trainer.accelerator.device)
        trainer.add_callback(MetricsCallback(run, progress, config, meter))
        if config.report_to:
            trainer.add_callback(TrackerCallback(run))
    evaluate = able_to_generate(config, trainer, evaluate)
    first = evaluate
    # Several processes would have to agree on whether there is one to read.
    if run is not None and trainer.accelerator.num_processes == 1:
        first = functools.partial(evaluate_start, config, problems, evaluate, run.add_seconds)
    trainer.add_callback(EvaluationCallback(run, progress, evaluate, first, config, activity))
    if run is not None:
        samples = SamplesCallback(run, task, tokenizer, config)
        samples.watch(trainer)
        trainer.add_callback(samples)
    checkpoints = CheckpointCallback(run, config, activity, trainer.accelerator)
    trainer.add_callback(checkpoints)
    return checkpoints
