"""The whole training step of the embedded model, TROLL against the clip, through the real trainers.

Both train the model that ships with Tether on its own task with the quickstart's settings: 512 responses,
then 8 updates of 64 responses each. The clip is TRL's own `GRPOTrainer`, which keeps nothing but the
sampled tokens' log-probabilities; the clip as `tether llm compare` runs it also measures divergences, so it
is listed beside. Every run of a turn starts from the same weights and the same seed: all of them generate the
same responses.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from benchmarks.bench.timing import Times, accelerator_clock, processor_clock
from transformers import PrinterCallback, TrainerCallback

from tether.experiments import seed_everything
from tether.llm.config import TrainConfig
from tether.llm.methods import find_method
from tether.llm.models import load_model_and_tokenizer

NAMES = ("clip", "clip measured by Tether", "TROLL", "clip again")


def run_in_turns(turns: int, rollouts: int, device: torch.device) -> Times:
    """Seconds of an optimiser step, generation included, a value a turn."""
    trainers = {name: _trainer(name, rollouts) for name in NAMES}
    for trainer in trainers.values():
        _seconds_a_step(trainer, device)
    times: Times = {name: [] for name in NAMES}
    for _ in range(turns):
        for name in (*NAMES, *reversed(NAMES)):
            times[name].append(_seconds_a_step(trainers[name], device))
    # Two runs a turn.
    return {name: [(a + b) / 2 for a, b in zip(t[::2], t[1::2], strict=True)] for name, t in times.items()}


def _trainer(name: str, rollouts: int) -> Any:
    from trl import GRPOTrainer

    from tether.llm.tasks import make_task, reward_function
    from tether.llm.trainers import make_trainer

    method = find_method("troll" if name == "TROLL" else "clip")()
    config = TrainConfig(method=method, steps=8 * rollouts, save_every=8, eval_every=8)
    task = make_task(config.task)
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = load_model_and_tokenizer(config.model)
        trainer: Any = make_trainer(config, model, tokenizer, task, Path(folder))
        if name not in ("TROLL", "clip measured by Tether"):
            trainer = GRPOTrainer(
                args=trainer.args,
                model=load_model_and_tokenizer(config.model)[0],
                reward_funcs=reward_function(task),
                train_dataset=trainer.train_dataset,
                processing_class=tokenizer,
            )
    trainer.remove_callback(PrinterCallback)
    trainer.initial_weights = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    return trainer


def _seconds_a_step(trainer: Any, device: torch.device) -> float:
    """Train from the start; the trainer's own set-up before the first step and after the last is left out."""
    clock = processor_clock if device.type == "cpu" else accelerator_clock
    stamps: list[float] = []

    class Stamps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            stamps.append(clock())

        on_step_end = on_train_begin

    trainer.model.load_state_dict(trainer.initial_weights)
    trainer.optimizer = trainer.lr_scheduler = None
    trainer._step, trainer._buffered_inputs = 0, None
    seed_everything(0)
    callback = Stamps()
    trainer.add_callback(callback)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        trainer.args.output_dir = folder
        trainer.train()
    trainer.remove_callback(callback)
    return (stamps[-1] - stamps[0]) / (len(stamps) - 1)
