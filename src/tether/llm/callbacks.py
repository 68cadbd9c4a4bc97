"""What happens around the optimizer steps: logging, evaluation, samples, checkpoints, Ctrl-C."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from tether.experiments import RunFolder, TrainingProgress
from tether.experiments.peak_memory import StepMeter
from tether.experiments.report.words import prompt_text
from tether.integrations.lag_metrics import lag_names
from tether.llm.config import TrainConfig
from tether.llm.evaluate import Evaluation
from tether.llm.failures import Activity
from tether.llm.moved_tokens import moved_tokens
from tether.llm.tasks import Task
from tether.llm.tasks.training import PARTS

if TYPE_CHECKING:
    from accelerate import Accelerator

    from tether.integrations.trl import OldPolicyTrainer
    from tether.losses import ProjectedTokens

# TRL's and our own names of what is logged each step, and the run folder's.
_METRICS = {
    **{name: name for name in ("loss", "reward", "reward_std", "entropy", "grad_norm", "learning_rate")},
    "completions/mean_length": "completion_length",
    "completions/clipped_ratio": "truncated",
    "clip_ratio/region_mean": "clipped",
    "kl": "reference_kl",
    "step_time": "step_seconds",
    # TRL's asynchronous trainer.
    "perf/step_s": "step_seconds",
    "perf/rollout_wait_s": "rollout_wait_seconds",
    "perf/weight_sync_s": "transfer_seconds",
    "sample/dropped_stale_total": "dropped_stale",
    **{
        f"trust_region/{name}": name
        for name in (
            *("kl_mean", "kl_max", "kl_projected_mean", "kl_projected_max", "projected", "mean_step"),
            *("regression", "tail_mass", "certified", "uncertain", "old_policy_bytes", "stopped", "lag"),
            # What a rival's loss measures; its clip replaces TRL's, which never acts then.
            *("clipped", "ratio_mean", "ratio_max", "weight_mean", "covariance_mean"),
            *("divergence_mean", "divergence_max", "sampler_mismatch", "effective_share"),
        )
    },
    "step_back/fraction": "network_kept",
    "step_back/kl_before": "network_kl_before",
    "step_back/kl": "network_kl",
    "step_back/passes": "network_passes",
    **{f"trust_region/{theirs}": ours for theirs, ours in lag_names().items()},
    "critic/value_loss": "critic_loss",
    "critic/explained_variance": "explained_variance",
    "critic/clipped": "critic_clipped",
    "critic/grad_norm": "critic_grad_norm",
    "num_tokens": "tokens",
}
# Responses kept for the report at each evaluation.
_SAMPLED_RESPONSES = 12


class MetricsCallback(TrainerCallback):
    """Write each step's numbers to the run folder and the progress display.

    Add it before what evaluates, so that a step's cost is that of writing responses and of the update.
    """

    def __init__(
        self,
        run: RunFolder,
        progress: TrainingProgress,
        config: TrainConfig,
        meter: StepMeter,
    ) -> None:
        self._run = run
        self._progress = progress
        self._asynchronous = config.rollouts == "vllm-async"
        #: Responses that a logged share is of.
        of_batch = config.prompts_per_rollout * config.responses_per_prompt
        self._responses = config.responses_per_update if self._asynchronous else of_batch
        self._meter = meter
        self._taken: dict[str, float] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure this step alone."""
        self._meter.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take what the step took before an evaluation can add to it."""
        self._taken = self._meter.end()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Rename what TRL logged and write it down."""
        if not logs or "loss" not in logs:  # the summary at the end of training
            return
        logs = {name: value for name, value in logs.items() if value is not None}  # TRL's for NaN alone
        numbers = {ours: float(logs[theirs]) for theirs, ours in _METRICS.items() if theirs in logs}
        if self._asynchronous:  # which estimates KL(new || sampler) under that name
            numbers.pop("reference_kl", None)
        numbers |= {name: float(value) for name, value in logs.items() if name.startswith(PARTS)}
        if "truncated" in numbers:  # logged where responses were written: a share, and how many that is
            numbers["truncated_responses"] = round(numbers["truncated"] * self._responses)
        numbers |= self._taken
        self._run.log(state.global_step, **numbers)
        self._progress.update(state.global_step, **numbers)


class TrackerCallback(TrainerCallback):
    """Every number TRL logs, under its own name, to the run's trackers."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """As ``trl/<name>``."""
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        self._run.track("trl", state.global_step, numbers)


class EvaluationCallback(TrainerCallback):
    """Measure success on held-out problems before, during and after training.

    Every process evaluates all problems with the same random numbers, since a sharded model needs all of them
    in each forward pass. The first one writes.
    """

    def __init__(
        self,
        run: RunFolder | None,
        progress: TrainingProgress,
        evaluate: Callable[[], Evaluation],
        evaluate_start: Callable[[], Evaluation],
        config: TrainConfig,
        activity: Activity,
    ) -> None:
        self._run = run
        self._progress = progress
        self._evaluate = evaluate
        self._evaluate_start = evaluate_start
        self._config = config
        self._activity = activity

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The starting point; a resumed run has it already."""
        if state.global_step == 0:
            self._measure(0, self._evaluate_start)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Evaluate when it is time, and at the end."""
        step, every = state.global_step, self._config.eval_every
        if step == self._config.steps or (every and step % every == 0):
            self._measure(step, self._evaluate)

    def _measure(self, step: int, evaluate: Callable[[], Evaluation]) -> None:
        with self._activity.during("evaluating"):
            result = evaluate()
        if self._run is None:
            return
        numbers = {
            "success": result.success,
            "success_greedy": result.success_greedy,
            "reward": result.reward,
            "problems": float(result.problems),
        }
        self._run.log_eval(step, **numbers)
        self._progress.update(step, success=result.success, success_greedy=result.success_greedy)


class SamplesCallback(TrainerCallback):
    """Keep a few responses, token by token, from the last update of a batch, when the data is stalest."""

    def __init__(self, run: RunFolder, task: Task, tokenizer: Any, config: TrainConfig) -> None:
        self._run = run
        self._task = task
        self._tokenizer = tokenizer
        self._every = config.eval_every or config.steps
        self._updates = config.updates_per_rollout
        self._rows: list[dict[str, Any]] = []

    def watch(self, trainer: OldPolicyTrainer) -> None:
        """Receive the tokens of each update of this trainer."""
        trainer.on_tokens = self._on_tokens

    def _on_tokens(self, trainer: Any, inputs: dict[str, Any], tokens: ProjectedTokens) -> None:
        step = trainer.state.global_step + 1
        if step % self._every or len(self._rows) >= _SAMPLED_RESPONSES:
            return
        if "rollout_row" not in inputs:  # resumed inside this batch, whose problems no checkpoint names
            return
        counted = inputs["completion_mask"].any(-1).nonzero().flatten().tolist()  # not cut off and masked
        for row in counted[: _SAMPLED_RESPONSES - len(self._rows)]:
            self._rows.append(self._describe(trainer, inputs, tokens, row))

    def _describe(
        self, trainer: Any, inputs: dict[str, Any], tokens: ProjectedTokens, row: int
    ) -> dict[str, Any]:
        length = int(inputs["completion_mask"][row].sum())
        ids = inputs["completion_ids"][row, :length].tolist()
        problem = trainer.rollout_rows[int(inputs["rollout_row"][row])]
        response = self._tokenizer.decode(ids, skip_special_tokens=True)
        verdict = self._task.verify(response, problem["answer"])
        columns = zip(
            ids,
            tokens.kl[row, :length].tolist(),
            tokens.projected[row, :length].tolist(),
            tokens.new_log_probs[row, :length].tolist(),
            tokens.projected_log_probs[row, :length].tolist(),
            tokens.old_log_probs[row, :length].tolist(),
            strict=True,
        )
        return {
            "prompt": prompt_text(problem["prompt"]),
            "reference": problem["answer"],
            "reward": verdict.reward,
            "correct": verdict.correct,
            "tokens": [
                {
                    "text": self._tokenizer.decode([token]),
                    "kl": kl,
                    "projected": projected,
                    "new_log_prob": new_log_prob,
                    "log_prob": log_prob,
                    "old_log_prob": old_log_prob,
                }
                for token, kl, projected, new_log_prob, log_prob, old_log_prob in columns
            ],
            "moved": moved_tokens(trainer, inputs, tokens, row, self._tokenizer),
        }

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write what was gathered in this step."""
        if self._rows:
            self._run.save_samples(state.global_step, self._rows)
            self._rows = []


class CheckpointCallback(TrainerCallback):
    """Save where the run can be continued exactly: after the last update on a batch of rollouts.

    Transformers writes the checkpoint after the step's numbers are logged; it then moves, complete, to
    the run's checkpoints. Whatever is killed in between leaves the previous checkpoint and nothing else.
    """

    def __init__(
        self, run: RunFolder | None, config: TrainConfig, activity: Activity, accelerator: Accelerator
    ) -> None:
        self._run = run
        self._config = config
        self._activity = activity
        self._accelerator = accelerator
        self._stop = False
        #: Whether the first batch is under way: what comes before, a stop need not wait for.
        self.begun = False

    def request_stop(self) -> None:
        """Save and stop at the next place the run can return to."""
        self._stop = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """All that is measured before the first batch has been: this is the last callback."""
        self.begun = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Ask for a checkpoint when it is time, at the end, and when asked to stop."""
        step, every = state.global_step, self._config.save_every
        at_boundary = step % self._config.updates_per_rollout == 0
        due = bool(every) and step % every == 0
        if at_boundary:
            self._stop = _any_of(self._accelerator, self._stop)
        control.should_save = step == self._config.steps or (at_boundary and (due or self._stop))
        if control.should_save:
            self._activity.doing = "saving a checkpoint"
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Move what was written to the run's checkpoints, and stop if asked to."""
        self._accelerator.wait_for_everyone()  # each has written its part
        if self._run is not None:
            written = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            target = self._run.checkpoint_folder(state.global_step)
            for item in written.iterdir():
                if item.name != "training_args.bin":  # a pickle, which nothing of ours reads
                    os.replace(item, target / item.name)
            self._run.mark_complete(state.global_step, keep=self._config.keep_checkpoints)
            shutil.rmtree(args.output_dir)
        self._accelerator.wait_for_everyone()  # nobody begins the next while this one is moved
        # Not before the save: the flag would be part of the checkpoint, and stop the resumed run.
        control.should_training_stop = self._stop or control.should_training_stop
        self._activity.doing = "training"
        return control


def _any_of(accelerator: Accelerator, mine: bool) -> bool:
    """Whether it holds in any process: a signal may reach only some, and all have to stop alike."""
    if accelerator.num_processes == 1:
        return mine
    flag = torch.tensor([float(mine)], device=accelerator.device)
    return bool(accelerator.reduce(flag, reduction="sum").item() > 0)


def stop_after_batch(checkpoints: CheckpointCallback, say: Callable[[str], None]) -> None:
    """What the first Ctrl-C or SIGTERM asks for; before the first batch, with nothing to save, at once."""
    if not checkpoints.begun:
        say("Stopped before the first batch, with nothing to save.")
        raise KeyboardInterrupt
    say("Stopping after this batch's updates, with a checkpoint. Again to stop at once without one.")
    checkpoints.request_stop()
