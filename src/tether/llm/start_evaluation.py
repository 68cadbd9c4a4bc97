"""What runs of one comparison measure alike before their first update, measured once."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from tether.experiments.files import atomic_write_json, dump_json, load_json
from tether.llm.config import TrainConfig
from tether.llm.evaluate import Evaluation
from tether.llm.models import model_fingerprint
from tether.llm.tasks import Problem

# Settings of what comes after the first evaluation. One that is not named here tells starts apart.
_OF_TRAINING = (
    "method", "estimator", "kl_stop", "step_back", "step_back_statistic", "step_back_every", "step_scale",
    "name", "steps", "updates_per_rollout", "prompts_per_rollout", "responses_per_prompt", "micro_batch_size",
    "learning_rate", "optimizer", "warmup_steps", "max_grad_norm", "reference_penalty", "eval_every",
    "save_every", "keep_checkpoints", "max_lag", "anchor", "sampler_weight", "lag", "mask_truncated",
)  # fmt: skip


def evaluate_start(
    config: TrainConfig,
    problems: Sequence[Problem],
    evaluate: Callable[[], Evaluation],
    count: Callable[[float], None],
) -> Evaluation:
    """The evaluation before the first update: from `config.start_evaluations` if a run that begins like this
    one left it there, else measured and left there; without such a folder, measured.

    Alike are runs of the same model (its files, where it is a folder), problems, sampling and arithmetic:
    their questions are asked with the same random numbers, whatever the seed of the run.

    `count` is told the seconds that a run is spared: its time is compared with that of the run that measured.
    """
    folder = config.start_evaluations
    if folder is None:
        return evaluate()
    alike = {name: value for name, value in config.settings().items() if name not in _OF_TRAINING}
    alike |= {
        "model_files": model_fingerprint(config.model),
        "problems": [(one.prompt, one.answer) for one in problems],
    }
    file = folder / f"{hashlib.sha256(dump_json(alike).encode()).hexdigest()[:16]}.json"
    if file.is_file():
        left = load_json(file.read_bytes())
        count(left.pop("seconds"))
        return Evaluation(**left)
    began = time.monotonic()
    measured = evaluate()
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_json(file, {**asdict(measured), "seconds": time.monotonic() - began})
    return measured
