"""Checkpoints anywhere: one inside a batch of rollouts holds what is left of that batch.

TRL writes none of its rollouts down and counts micro-batches from zero after a resume. A run resumed
between two updates on one batch then makes new completions from prompts it has already used, and is out of
step with its data ever after. Here each process writes its part of the batch, the old policy with it, as
plain tensors beside the checkpoint, and a resumed run goes on with it.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tether.errors import CheckpointError, ConfigError, warn
from tether.integrations.exact_head import HeadSnapshot
from tether.integrations.trl_data import FittedTrainer
from tether.integrations.trl_old_policy import pack, packed_from_tensors, packed_to_tensors

# isort: split
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import TrainerState

# Files of a reference policy that follows the network.
_REFERENCE = "reference"
# Names rows of the data set that are not written down.
_ROW = "rollout_row"


@dataclass(frozen=True)
class RolloutBatch:
    """What is kept of a batch of rollouts between its updates, by one process."""

    micro_batches: list[dict[str, Any]]
    head: HeadSnapshot | None
    """The old LM head where it is trained and compared with."""
    done: int
    """Micro-batches of the whole run so far, TRL's own count."""


class ResumableTrainer(FittedTrainer):
    """`GRPOTrainer` whose checkpoints can be resumed at any step to the course of an unbroken run.

    A checkpoint between two batches of rollouts is TRL's. One inside a batch has a file more for each
    process, `rollouts-<process>.safetensors`, about as large as the rollouts are in memory. Epochs after the
    first draw the prompts in the order in which the unbroken run would have, not in the first one's again.
    With `sync_ref_model` each has the reference policy, too (`reference-<process>.safetensors`).

    Raises:
        CheckpointError: on resuming inside a batch whose rollouts are missing or belong to other settings.

    Warns:
        TetherWarning: a checkpoint without the reference policy, as those under DeepSpeed are.
    """

    _step: int  # GRPOTrainer's count of micro-batches
    _buffered_inputs: list[dict[str, Any]] | None  # GRPOTrainer's: the micro-batches of a batch of rollouts
    _old_head: HeadSnapshot | None
    _train_sampler: Any = None
    #: The checkpoint that training went on from, if any.
    resumed_from: Path | None = None

    @property
    def _micro_batches_a_rollout(self) -> int:
        """Of a batch of rollouts, over all its uses."""
        return int(self.args.steps_per_generation * self.num_iterations)

    @property
    def _updates_a_rollout(self) -> int:
        """Optimizer steps on a batch of rollouts; at least one."""
        return max(1, self._micro_batches_a_rollout // int(self.args.gradient_accumulation_steps))

    def _check_whole_updates(self) -> None:
        """Refuse updates that learn from two batches of rollouts, where something stands on each batch's own.

        Raises:
            ConfigError: they do.
        """
        together, size = self.args.gradient_accumulation_steps, self._micro_batches_a_rollout
        if size % together:
            raise ConfigError(
                f"A batch of rollouts has steps_per_generation x num_iterations = {size} micro-batches, no "
                f"multiple of gradient_accumulation_steps={together}: an update would learn from two "
                "batches, of two policies. Make it a multiple."
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; what is left of a batch of rollouts from an earlier call is not learned from."""
        self._step, self._buffered_inputs = 0, None
        return super().train(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if not self.args.save_only_model:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            self._save_beside(folder)  # first, so that a checkpoint that TRL has finished is whole
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self.resumed_from = None if checkpoint is None else Path(checkpoint)
        if self.resumed_from is not None:
            self._load_beside(self.resumed_from)

    def _save_beside(self, folder: Path) -> None:
        """Add to a checkpoint what a resumed run needs and TRL does not write; each class its own."""
        inside = self._step % self._micro_batches_a_rollout
        if inside and self._buffered_inputs is not None:
            batch = RolloutBatch([pack(b) for b in self._buffered_inputs], self._old_head, self._step)
            save_rollouts(_file(folder, self), batch, self._settings_of_rollouts())
        if self._follows and not self.is_deepspeed_enabled:
            write_tensors(_file(folder, self, _REFERENCE), self._reference_weights())

    def _load_beside(self, folder: Path) -> None:
        """Go on with what `_save_beside` wrote."""
        self._skip_drawn_epochs(folder)
        if self._follows:
            self._take_up_reference(folder)
        file = _file(folder, self)
        if not file.is_file():
            self._refuse_inside_a_batch(folder)
            return
        batch = load_rollouts(
            file, self._settings_of_rollouts(), self.accelerator.device, self._head_parameters()
        )
        self._step, self._buffered_inputs, self._old_head = batch.done, batch.micro_batches, batch.head

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _skip_drawn_epochs(self, folder: Path) -> None:
        """TRL draws an order of the prompts each epoch, and a new sampler begins with the first again."""
        sampler, step = self._train_sampler, _steps_of(folder)
        if sampler is None or not sampler.shuffle or step is None:
            return
        micro_batches = len(sampler) // self.args.generation_batch_size
        updates = max(math.ceil(micro_batches / self.args.gradient_accumulation_steps), 1)
        for _ in range(step // updates):
            torch.randperm(sampler.num_samples, generator=sampler.generator)

    @property
    def _follows(self) -> bool:
        """Whether a reference policy follows the network, which TRL makes anew at each start."""
        return bool(self.args.sync_ref_model)

    def _reference_weights(self) -> dict[str, Tensor]:
        """This process's part of them, in place."""
        parameters = self.accelerator.unwrap_model(self.ref_model).named_parameters()
        return {name: _local(parameter.detach()) for name, parameter in parameters}

    def _take_up_reference(self, folder: Path) -> None:
        file, step = _file(folder, self, _REFERENCE), _steps_of(folder)
        if step is None or step < self.args.ref_model_sync_steps:
            return  # it is still the starting model
        if not file.is_file():
            warn(
                f"sync_ref_model=True had moved the reference policy, and the checkpoint {folder} has no "
                f"{file.name} with it: the resumed run has the starting model as its reference, until it is "
                "next moved. Only checkpoints of trainers here hold it, and none under DeepSpeed."
            )
            return
        kept = load_file(file, device=str(self.accelerator.device))
        for name, weights in self._reference_weights().items():
            weights.copy_(kept[name])

    def _settings_of_rollouts(self) -> dict[str, int]:
        """Under other ones the rest of a batch is of no use."""
        return {
            "per_device_train_batch_size": self.args.per_device_train_batch_size,
            "steps_per_generation": self.args.steps_per_generation,
            "num_iterations": self.num_iterations,
            "gradient_accumulation_steps": self.args.gradient_accumulation_steps,
            "processes": self.accelerator.num_processes,
        }

    def _head_parameters(self) -> tuple[Tensor, Tensor | None]:
        head = self.accelerator.unwrap_model(self.model).get_output_embeddings()
        return head.weight, getattr(head, "bias", None)

    def _refuse_inside_a_batch(self, folder: Path) -> None:
        together, accumulation = self._micro_batches_a_rollout, self.args.gradient_accumulation_steps
        step = _steps_of(folder)
        if together % accumulation or step is None:
            return  # updates that span batches do not tell where these end
        updates = together // accumulation
        if step % updates:
            before = step - step % updates
            raise CheckpointError(
                f"The checkpoint {folder} was written after {step} updates, inside a batch of rollouts (of "
                f"{updates} updates each), and has no {_file(folder, self).name} with the rest of it: "
                "another trainer wrote it, or other settings. Continue from a checkpoint at a multiple of "
                f"{updates}, such as {before} or {before + updates}, or begin a new run with it as the model."
            )


def save_rollouts(file: Path, batch: RolloutBatch, settings: dict[str, int]) -> None:
    """Write a batch of rollouts as plain tensors; warn, and write nothing, if it holds what no file can."""
    tensors: dict[str, Tensor] = {}
    others: list[dict[str, Any]] = []
    for index, micro_batch in enumerate(batch.micro_batches):
        entries = {name: value for name, value in packed_to_tensors(micro_batch).items() if name != _ROW}
        tensors |= {f"{index}/{name}": v for name, v in entries.items() if isinstance(v, Tensor)}
        others.append({name: v for name, v in entries.items() if not isinstance(v, Tensor)})
    if batch.head is not None:
        tensors["head/weight"] = _local(batch.head.weight)
        if batch.head.bias is not None:
            tensors["head/bias"] = _local(batch.head.bias)
    try:
        notes = json.dumps({"settings": settings, "done": batch.done, "others": others})
    except TypeError as error:
        warn(
            f"The rollouts in use cannot be written down ({error}), so a run cannot be resumed from this "
            "checkpoint. Let save_steps be a multiple of the updates on each batch of rollouts."
        )
        return
    # Clones, because micro-batches are slices that share memory.
    whole = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    write_tensors(file, whole, {"rollouts": notes})


def write_tensors(file: Path, tensors: dict[str, Tensor], notes: dict[str, str] | None = None) -> None:
    """A file of tensors under its name once it is whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".tmp")
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, unfinished, metadata=notes)
    os.replace(unfinished, file)


def load_rollouts(
    file: Path, settings: dict[str, int], device: torch.device, head: tuple[Tensor, Tensor | None]
) -> RolloutBatch:
    """The batch that `save_rollouts` wrote.

    Args:
        file: written by the process of the same number.
        settings: of the run that goes on; the same as then.
        device: where rollouts live.
        head: the LM head's weight and bias now, which tell how the old one is sharded.

    Raises:
        CheckpointError: other settings than then.
    """
    with safe_open(file, framework="pt", device=str(device)) as opened:
        notes = json.loads(opened.metadata()["rollouts"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    if notes["settings"] != settings:
        changed = ", ".join(
            f"{name}={value} (now {settings.get(name)})"
            for name, value in notes["settings"].items()
            if settings.get(name) != value
        )
        raise CheckpointError(
            f"{file} holds the rest of a batch of rollouts that was made with {changed}. Resume with the "
            "same settings, or from a checkpoint at the end of a batch."
        )
    micro_batches = []
    for index, others in enumerate(notes["others"]):
        prefix = f"{index}/"
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        micro_batches.append(packed_from_tensors({**own, **others}))
    old_head = None
    if "head/weight" in tensors:
        bias = None if head[1] is None else as_sharded(tensors["head/bias"], head[1])
        old_head = HeadSnapshot(as_sharded(tensors["head/weight"], head[0]), bias)
    return RolloutBatch(micro_batches, old_head, int(notes["done"]))


def _file(folder: Path, trainer: Any, what: str = "rollouts") -> Path:
    return folder / f"{what}-{trainer.accelerator.process_index}.safetensors"


def _steps_of(folder: Path) -> int | None:
    """After how many updates a checkpoint was written, if it says so."""
    state = folder / "trainer_state.json"
    return int(TrainerState.load_from_json(str(state)).global_step) if state.is_file() else None


def _local(tensor: Tensor) -> Tensor:
    """This process's shard, where a tensor is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_sharded(local: Tensor, parameter: Tensor) -> Tensor:
    """A shard as part of a tensor that is sharded as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
