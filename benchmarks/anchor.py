"""What a scoring pass costs: a step around the policy that sampled, against one around the trainer's own.

    python -m benchmarks.anchor                                            # the embedded model (5 minutes)
    python -m benchmarks.anchor --model models/smollm2-135m-instruct --task word_problems \\
        --prompts 2 --turns 3                                              # SmolLM2 (15 minutes, 6 GB)

A step is everything from prompts to new weights: generation, what it takes to have an old policy, updates.
With anchor "trainer" TRL scores the rollouts in a pass of its own, and the policies are compared over the
whole vocabulary (its default); with "sampler" the records of generation are the old policy. Both as TRL
generates ("transformers") and as `decoding` does ("compact", which reads a prompt once for its group).

All of them train side by side in one process, a batch of rollouts and its updates each, in turns forwards and
backwards, from the same weights with the same random numbers: they write the same responses as long as their
weights agree, which a small learning rate sees to. Times are of the processor. The table has the median ratio
of the turns, and of its parts: what a step of the trainer's anchor spends on scoring is the most that can be
saved. One contestant is there twice: what the two differ by is noise.

Writes benchmarks/results/anchor/<model>-<device>.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import TrainerCallback

from tether.llm.config import TrainConfig
from tether.llm.models import load_model_and_tokenizer
from tether.llm.tasks import make_task
from tether.llm.trainers import make_trainer

RESULTS = Path(__file__).parent / "results" / "anchor"

#: What each is called: its settings.
CONTESTANTS: dict[str, dict[str, Any]] = {
    f"{anchor}, {rollouts}": {"anchor": anchor, "rollouts": rollouts}
    for rollouts in ("transformers", "compact")
    for anchor in ("trainer", "sampler")
}
TWICE = "trainer, transformers"
AGAIN = f"{TWICE}, again"

PHASES = {"rollouts": "_generate_single_turn", "rollouts and scoring": "_generate_and_score_completions"}
Seconds = dict[str, float]


class Turns(TrainerCallback):
    """Lets one trainer at a time have the machine, for a batch of rollouts and its updates."""

    def __init__(self, order: list[str], updates: int) -> None:
        self.spent: list[tuple[str, Seconds]] = []
        self._order, self._updates = order, updates
        self._changed = threading.Condition()
        self._failed: BaseException | None = None
        self._seconds: Seconds = {}

    def begin(self, name: str, step: int) -> None:
        """Wait for the turn, where a batch begins."""
        if step % self._updates:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._order[len(self.spent)] == name)
        if self._failed:
            raise RuntimeError(f"{name} stops, as another did") from self._failed
        torch.manual_seed(step)  # of what is drawn, for all contestants the same
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._began = time.process_time()

    def end(self, name: str, step: int) -> None:
        """Hand over, where a batch has ended."""
        if step % self._updates:
            return
        self._seconds["all"] = time.process_time() - self._began
        with self._changed:
            self.spent.append((name, self._seconds))
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Nobody waits for one that has failed."""
        with self._changed:
            self._failed = self._failed or error
            self._changed.notify_all()

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, with its time on the account of a phase."""

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = time.process_time()
            result = call(*args, **kwargs)
            self._seconds[phase] += time.process_time() - before
            return result

        return run


class Contestant(TrainerCallback):
    """One trainer, in a thread of its own."""

    def __init__(self, name: str, turns: Turns) -> None:
        self._name, self._turns = name, turns

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self._turns.begin(self._name, state.global_step)

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self._turns.end(self._name, state.global_step)

    def train(self, trainer: Any) -> None:
        """Until its last batch; what goes wrong is raised where the turns are read."""
        torch.set_num_threads(1)
        try:
            trainer.train()
        except BaseException as error:  # noqa: BLE001 (raised by `race`, which waits for all of them)
            self._turns.fail(error)


def make(settings: dict[str, Any], batches: int, arguments: argparse.Namespace, folder: Path) -> Any:
    """A trainer of so many batches."""
    config = TrainConfig(
        output=folder, model=arguments.model, task=arguments.task, steps=batches * arguments.updates,
        updates_per_rollout=arguments.updates, prompts_per_rollout=arguments.prompts,
        responses_per_prompt=arguments.responses, micro_batch_size=arguments.micro_batch, threads=1,
        device="cpu", eval_every=0, save_every=0, learning_rate=1e-6, **settings,
    )  # fmt: skip
    model, tokenizer = load_model_and_tokenizer(config.model, dtype="float32", device=torch.device("cpu"))
    return make_trainer(config, model, tokenizer, make_task(config.task), folder)


def race(names: list[str], arguments: argparse.Namespace) -> dict[str, list[Seconds]]:
    """The parts of each batch of each contestant; the first, which warms up, is left out."""
    batches = 1 + 2 * arguments.turns
    order = names + (names + names[::-1]) * arguments.turns
    turns = Turns(order, arguments.updates)
    threads = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            trainer = make(CONTESTANTS[name.removesuffix(", again")], batches, arguments, Path(folder))
            for phase, method in PHASES.items():
                mock.patch.object(trainer, method, turns.timed(phase, getattr(trainer, method))).start()
            one = Contestant(name, turns)
            trainer.add_callback(one)
            threads.append(threading.Thread(target=one.train, args=(trainer,)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if turns._failed:
        raise turns._failed
    found: dict[str, list[Seconds]] = {name: [] for name in names}
    for name, seconds in turns.spent[len(names) :]:
        found[name].append({
            "rollouts": seconds["rollouts"], "scoring": seconds["rollouts and scoring"] - seconds["rollouts"],
            "updates": seconds["all"] - seconds["rollouts and scoring"], "all": seconds["all"],
        })  # fmt: skip
    return found


def versus(one: list[Seconds], other: list[Seconds]) -> dict[str, Any]:
    """Ratios of turns (two batches each, there and back), part by part over the whole of the other."""
    turns = [(one[i : i + 2], other[i : i + 2]) for i in range(0, len(one), 2)]

    def ratio(part: str, few: list[Seconds], all_of: list[Seconds]) -> float:
        return sum(seconds[part] for seconds in few) / sum(seconds["all"] for seconds in all_of)

    ratios = [round(ratio("all", *pair), 3) for pair in turns]
    return {
        "ratio": statistics.median(ratios), "ratios": ratios,
        **{
            f"{part}_{side}": round(statistics.median(ratio(part, pair[which], pair[1]) for pair in turns), 3)
            for part in ("rollouts", "scoring", "updates")
            for which, side in enumerate(("sampler", "trainer"))
        },
        "trainer_seconds": round(statistics.median(seconds["all"] for seconds in other), 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--task", default="chained")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rollouts", nargs="+", default=["transformers", "compact"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "settings": vars(arguments),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, one thread",
    }
    for rollouts in arguments.rollouts:
        names = [name for name, of in CONTESTANTS.items() if of["rollouts"] == rollouts]
        again = [AGAIN] if TWICE in names and arguments.model == "embedded" else []
        found = race([*names, *again], arguments)
        of_trainer, of_sampler = (found[f"{anchor}, {rollouts}"] for anchor in ("trainer", "sampler"))
        result[rollouts] = versus(of_sampler, of_trainer)
        if again:
            result["trainer to itself"] = versus(found[AGAIN], of_trainer)["ratios"]
        print(rollouts, json.dumps(result[rollouts]), flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / f"{Path(arguments.model).name}-cpu.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
