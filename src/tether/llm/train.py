"""Train a language model on a task: one run, one folder, resumable."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.experiments import RunFolder, TrainingProgress, seed_everything
from tether.llm.config import TrainConfig
from tether.llm.process import prepare_process
from tether.llm.tasks import make_task
from tether.llm.tasks.training import closing

if TYPE_CHECKING:
    from tether.integrations.trl import OldPolicyTrainer

# Settings of a run that may be different when it is continued.
_MAY_CHANGE = ("steps", "keep_checkpoints", "device")


def train(config: TrainConfig) -> RunFolder:
    """Train as the config says; what comes out is in the run's folder.

    Everything that can be refused is refused before the folder is made: a missing model, an
    unknown task, data without answers, settings that do not go together.

    Returns:
        The closed run folder: `metrics.jsonl`, `eval.jsonl`, `samples/`, `checkpoints/`, `model/`
        (the trained model, to load with Transformers) and `tensorboard/`.

    Raises:
        ConfigError, DataError, CheckpointError: naming what is wrong and what to do.
    """
    from tether.llm.models import load_model_and_tokenizer

    prepare_process(config.threads)
    seed_everything(config.seed)
    task = make_task(config.task, **config.task_options)
    problems = task.problems("validation", config.eval_problems, 0)
    model, tokenizer = load_model_and_tokenizer(config.model, dtype=config.dtype)
    trainer = _build(config, model, tokenizer, task)
    run = RunFolder.create(
        config.output,
        kind="llm",
        label=config.label,
        seed=config.seed,
        settings=config.settings(),
        resume=config.resume,
        may_change=_MAY_CHANGE,
        tensorboard=True,
    )
    with run, closing(task):
        _run(config, run, trainer, tokenizer, task, problems)
    return run


def _build(config: TrainConfig, model: Any, tokenizer: Any, task: Any) -> OldPolicyTrainer:
    """The trainer, built before the run's folder so that a refusal leaves nothing behind."""
    from tether.llm.trainers import make_trainer

    # TRL makes its output folder at once; checkpoints go elsewhere (`_save_checkpoint`).
    with tempfile.TemporaryDirectory() as folder:
        return make_trainer(config, model, tokenizer, task, Path(folder))


def _run(
    config: TrainConfig, run: RunFolder, trainer: OldPolicyTrainer, tokenizer: Any, task: Any, problems: Any
) -> None:
    from transformers import PrinterCallback

    from tether.llm.callbacks import (
        CheckpointCallback,
        EvaluationCallback,
        MetricsCallback,
        SamplesCallback,
        stopping_on_interrupt,
    )
    from tether.llm.evaluate import evaluate_model

    start = run.latest_checkpoint() if config.resume else None
    run.truncate_after(start.step if start else -1)
    done = start.step if start else 0
    if done >= config.steps:
        return
    evaluate = functools.partial(
        evaluate_model, trainer.model, tokenizer, task, problems,
        samples=config.eval_samples, temperature=config.temperature,
        max_response_tokens=config.max_response_tokens,
    )  # fmt: skip
    with TrainingProgress(config.steps, f"{config.label}, seed {config.seed}", done=done) as progress:
        samples = SamplesCallback(run, task, tokenizer, config)
        samples.watch(trainer)
        checkpoints = CheckpointCallback(run, config)
        trainer.args.output_dir = str(run.path / ".unfinished-checkpoint")
        trainer.remove_callback(PrinterCallback)
        for callback in (
            MetricsCallback(run, progress),
            EvaluationCallback(run, progress, evaluate, config),
            samples,
            checkpoints,
        ):
            trainer.add_callback(callback)
        with stopping_on_interrupt(checkpoints.request_stop, progress.message):
            trainer.train(resume_from_checkpoint=str(start.path) if start else None)
    if trainer.state.global_step < config.steps:
        progress.message(
            f"Stopped at step {trainer.state.global_step} of {config.steps}. Continue with --resume."
        )
        return
    _save_model(trainer, tokenizer, run.path / "model")
    run.mark_finished()


def _save_model(trainer: OldPolicyTrainer, tokenizer: Any, folder: Path) -> None:
    """The trained model, whole (adapters merged), next to its tokenizer; the old one stays until then."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    unfinished = folder.with_name(f".{folder.name}.tmp")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    os.replace(unfinished, folder)
