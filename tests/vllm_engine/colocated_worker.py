"""One training of the embedded model with vLLM colocated: `colocated_worker.py CASE SETTINGS FOLDER OUT`.

Cases: "plain"; "bfloat16", where the engine rounds as TRL lets it; "never" and "head", where new weights do
not arrive, or all but those of the LM head.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from trl.generation import vllm_generation

from tether.errors import StaleSamplerError
from tether.integrations.trl import TROLLConfig, TROLLTrainer
from tether.llm.models import load_model_and_tokenizer
from tether.llm.tasks import make_task, reward_function, to_dataset


class Watched(TROLLTrainer):
    """Adds up what the region does, and counts scoring passes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.scored, self.truncated, self.tokens, self.kl_projected = 0, 0, 0, 0.0
        super().__init__(*args, **kwargs)

    def _answers_scoring(self, model: Any) -> bool:
        answered = super()._answers_scoring(model)
        self.scored += not answered and model is self.model
        return answered

    def _project(self, evaluation: Any, inputs: dict[str, Any]) -> Any:
        tokens = super()._project(evaluation, inputs)
        mask = inputs["completion_mask"] > 0
        self.tokens += int(mask.sum())
        self.truncated += int(torch.isneginf(inputs["old_support_log_tail"][mask]).sum())
        self.kl_projected = max(self.kl_projected, float(tokens.projected_kl[mask].max()))
        return tokens


def _break(trainer: Any, case: str) -> None:
    """Weights that do not arrive, from the second transfer on."""
    generation, arrive = trainer.vllm_generation, trainer.vllm_generation.sync_weights
    transfers = []

    def sync_weights() -> None:
        transfers.append(case)
        head = generation.llm.llm_engine.model_executor.driver_worker.model_runner.model.lm_head
        before = {name: value.detach().clone() for name, value in head.named_parameters()}
        linear = head.cpu_linear if hasattr(head, "cpu_linear") else None
        if case == "head" or len(transfers) == 1:
            arrive()
        if case == "head" and len(transfers) > 1:  # the packed head as it was
            for name, value in head.named_parameters():
                value.data.copy_(before[name])
            head.cpu_linear = linear

    generation.sync_weights = sync_weights


def main(case: str, settings: dict[str, Any], folder: Path, out: Path) -> None:
    """Train, and write down what happened."""
    # TRL has no setting for either: vLLM would compile for minutes, and round float32 models.
    options = {"enforce_eager": True} if case == "bfloat16" else {"enforce_eager": True, "dtype": "float32"}
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, **options)
    model, tokenizer = load_model_and_tokenizer("embedded", dtype="float32", device=torch.device("cpu"))
    saved = str(folder / "model")
    model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    model.name_or_path = saved
    task = make_task("chained")
    defaults = {
        "output_dir": str(folder / "out"), "use_cpu": True, "bf16": False, "report_to": "none",
        "logging_steps": 1, "disable_tqdm": True, "gradient_checkpointing": False, "seed": 0,
        "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 128,
        "troll_anchor": "sampler", "per_device_train_batch_size": 32,
        "num_generations": 8, "steps_per_generation": 2, "max_steps": 6, "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "max_completion_length": task.max_response_tokens,
    }  # fmt: skip
    trainer = Watched(
        model, reward_function(task), TROLLConfig(**{**defaults, **settings}),
        train_dataset=to_dataset(task, "train", 64, 0), processing_class=tokenizer,
    )  # fmt: skip
    if case in ("never", "head"):
        _break(trainer, case)
    error = None
    try:
        trainer.train()
    except StaleSamplerError as stale:
        error = str(stale)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    said = {
        "error": error, "rows": rows, "steps": trainer.state.global_step, "scored": trainer.scored,
        "tokens": trainer.tokens, "truncated": trainer.truncated, "kl_projected": trainer.kl_projected,
    }  # fmt: skip
    out.write_text(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
