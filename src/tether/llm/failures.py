"""Stopping with a reason: what ran out, at which step and batch, and where to go on from."""

from __future__ import annotations

import errno
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from tether.errors import EngineError, TrainingStoppedError
from tether.experiments import RunFolder, atomic_write_json
from tether.llm.config import TrainConfig
from tether.llm.saving import UNFINISHED

if TYPE_CHECKING:
    from tether.integrations.trl import OldPolicyTrainer

Cause = Literal["memory", "disk", "numbers", "engine"]

FAILURE_FILE = "failure.json"
"""Written into the run folder: step, batch and its problems, cause, last good checkpoint."""

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Libraries written in other languages report these as RuntimeErrors, by their text alone.
_DISK_TEXTS = ("No space left", "os error 28", "os error 27", "unexpected pos", "PytorchStreamWriter failed")
# Of what samples: torch's, and `tether.integrations.decoding.draw`.
_NUMBER_TEXTS = ("probability tensor contains either `inf`, `nan`", "Weights to draw by must be finite")
_WHAT = {
    "memory": "Memory ran out",
    "disk": "The disk refused to take more (full, or a limit on the size of files)",
    "numbers": "Numbers are no longer finite",
    "engine": "What writes the responses has stopped",
}
_REMEDY = {
    "memory": (
        "Lower micro_batch_size (now {micro_batch}), turn on gradient_checkpointing, or lower "
        "max_response_tokens in a new run; lora_rank and mixed_precision need less too."
    ),
    "disk": "Free space, or move the run's folder to a larger disk.",
    "numbers": (
        "Going on with the same settings leads here again. Begin a new run with a lower learning_rate or "
        "max_grad_norm, in float32, from the starting model or from the checkpoint (--model CHECKPOINT)."
    ),
    "engine": "See vllm.log in the run's folder, and the system's log for processes that it ended.",
}
_CONTINUE = " Then continue with --resume."
_GO_ON = {"memory": _CONTINUE, "disk": _CONTINUE, "numbers": "", "engine": _CONTINUE}


class NotFiniteError(ArithmeticError):
    """A gradient holds NaN or infinity; raised before the optimizer would write it into the weights."""


class FiniteGradients(TrainerCallback):
    """Look at the gradients before each optimizer step, so that no NaN reaches weights or checkpoints."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Raise where a gradient is not finite; one number a step travels to the CPU."""
        named = [(name, weight) for name, weight in model.named_parameters() if weight.grad is not None]
        if not named:  # DeepSpeed keeps them elsewhere; `on_log` sees the loss
            return
        norm = torch.nn.utils.get_total_norm([weight.grad for _, weight in named])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if torch.isfinite(norm):
            return
        broken = [name for name, weight in named if not bool(torch.isfinite(_local(weight.grad)).all())]
        raise NotFiniteError(
            f"the gradient of {len(broken)} of {len(named)} parameters is NaN or infinite ({broken[0]}, ...)"
            if broken
            else "the gradient's norm overflows"
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Raise where loss or gradient norm as logged are not finite, before anything is saved."""
        for name in ("loss", "grad_norm"):
            value = (logs or {}).get(name)
            if value is not None and not torch.isfinite(torch.tensor(float(value))):
                raise NotFiniteError(f"{name} is {value}")


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """This process's share of a sharded gradient."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


@dataclass
class Activity:
    """What a run is busy with, for the message if it has to stop there."""

    doing: str = "training"

    @contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Say what the block does; after an exception it stays said."""
        before, self.doing = self.doing, doing
        yield
        self.doing = before


def cause_of(error: Exception) -> Cause | None:
    """What ran out, if that is why training stopped; None for every other error.

    >>> import errno
    >>> cause_of(OSError(errno.ENOSPC, "No space left on device")), cause_of(KeyError("prompt"))
    ('disk', None)
    """
    text = str(error)
    if isinstance(error, NotFiniteError | TrainingStoppedError):  # policy, critic
        return "numbers"
    if any(known in text for known in _NUMBER_TEXTS):
        return "numbers"
    if isinstance(error, EngineError):
        return "engine"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or should_reduce_batch_size(error):
        return "memory"
    if isinstance(error, OSError) and error.errno in _FULL_DISK:
        return "disk"
    return "disk" if any(known in text for known in _DISK_TEXTS) else None


@contextmanager
def stopping_with_a_reason(
    run: RunFolder | None, trainer: OldPolicyTrainer, config: TrainConfig, activity: Activity
) -> Iterator[None]:
    """Turn running out of memory, disk or finite numbers into one message that says where and what to do.

    What was left half-written is removed, and `failure.json` in the run folder keeps the particulars, the
    problems of the batch among them. Other errors pass through. `run` is None in the processes of a
    distributed run that do not write.
    """
    try:
        yield
    except Exception as error:
        cause = cause_of(error)
        if cause is None:
            raise
        raise _stopped(error, cause, run, trainer, config, activity) from error


def _stopped(
    error: Exception,
    cause: Cause,
    run: RunFolder | None,
    trainer: OldPolicyTrainer,
    config: TrainConfig,
    activity: Activity,
) -> TrainingStoppedError:
    step = trainer.state.global_step + (activity.doing == "training")
    where, particulars = _batch(step, trainer, config)
    checkpoints = run.checkpoints() if run is not None else []
    kept = f"step {checkpoints[-1].step}, in {checkpoints[-1].path}" if checkpoints else "none yet"
    reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    message = (
        f"{_WHAT[cause]} at step {step} while {activity.doing}{where}: "
        f"{reason}. Last good checkpoint: {kept}. "
        + _REMEDY[cause].format(micro_batch=config.responses_per_micro_batch)
        + (_GO_ON[cause] if checkpoints else "")
    )
    if run is not None:
        message += _leave_note(run.path, {
            "cause": cause, "doing": activity.doing, "step": step, "reason": reason, **particulars,
            "last_good_checkpoint": checkpoints[-1].path if checkpoints else None,
        })  # fmt: skip
    return TrainingStoppedError(message)


def _batch(step: int, trainer: OldPolicyTrainer, config: TrainConfig) -> tuple[str, dict[str, Any]]:
    """Which batch of problems an update was of, in words and for the note."""
    if config.rollouts == "vllm-async":  # learned from as they come: nobody knows of what problems
        return "", {}
    batch, update = divmod(max(step - 1, 0), config.updates_per_rollout)
    prompts = _prompts(trainer, batch * config.prompts_per_rollout, config.prompts_per_rollout)
    words = (
        f" (update {update + 1} of {config.updates_per_rollout} on batch {batch + 1}, whose first problem is "
        f"{_short(prompts)!r})"
    )
    return words, {"batch": batch + 1, "update": update + 1, "problems": prompts}


def _leave_note(folder: Path, record: dict[str, Any]) -> str:
    """Free what was half-written and write the note; a disk without room for it is said, not hidden."""
    unfinished = folder / UNFINISHED
    if unfinished.exists():
        shutil.rmtree(unfinished)
    try:
        atomic_write_json(folder / FAILURE_FILE, record)
    except OSError as error:
        return f" ({FAILURE_FILE} could not be written: {error}.)"
    what = "The batch's problems are" if "problems" in record else "This is"
    return f" {what} in {folder / FAILURE_FILE}."


def _prompts(trainer: OldPolicyTrainer, first: int, count: int) -> list[Any]:
    """The problems of a batch: the trainer takes them in the order of its dataset."""
    dataset: Any = trainer.train_dataset
    return list(dataset[first : first + count]["prompt"])


def _short(prompts: list[Any]) -> str:
    prompt = prompts[0] if prompts else ""
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
    return textwrap.shorten(text, 60, placeholder="...")
