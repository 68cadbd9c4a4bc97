"""Peak memory of a training step where the vocabulary is large: TROLL, exact, beside TRL's own GRPO.

    python recipes/gemma3.py                                   # once: Gemma 3 270M, 262,144 words
    python benchmarks/step_memory.py --tokens 128 256 512      # a process for each trainer and size
    python benchmarks/step_memory.py --device cuda --drawn qwen3-0.6b --tokens 8192   # on a GPU

Every process trains with a real trainer, two updates on each batch of rollouts (one batch on a CPU, six on a
GPU, in bfloat16 autocast), and reports the most memory the steps and the scoring before them took beyond the
loaded model: gradients, activations, logits, and whatever a method keeps of the old policy. Responses are
drawn instead of generated (`rollout_func`), so that every contestant has the same number of tokens and
generation is no part of it. Weights are float32; plain SGD has no moments: AdamW's would add the same 8 bytes
a weight to every line. On a GPU the seconds of an update are measured too, scoring included: the median of
all batches but the first two.

The contestants: TRL's GRPOTrainer, whose LM head works in tiles; the same with Liger's loss,
which holds the logits of one sequence at a time; the clip in Tether's trainer, whose LM head builds no logits
either; and TROLL with exact support in the same, which keeps a copy of the old head.

`--limit` is in GB: a process whose resident set grows beyond it is stopped and listed as such. Sizes measured
before are kept: the command goes on after a kill. Writes benchmarks/results/step_memory/MODEL.json, or
MODEL-cuda.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import multiprocessing
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tether.experiments.cost import format_bytes
from tether.experiments.files import atomic_write_json
from tether.experiments.peak_memory import peak_memory
from tether.integrations.trl import OldPolicyTrainer, TROLLConfig, TROLLTrainer
from tether.llm.models import embedded_model_path, load_model_and_tokenizer

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "gemma-3-270m"
RESULTS = Path(__file__).parent / "results" / "step_memory"
SEQUENCES = 4
PROMPT = 16
BATCHES = {"cpu": 1, "cuda": 6}
_WARMING_UP = 2
_UPDATES = 2

# Shapes of published models, for machines that reach no model hub.
DRAWN: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
}  # fmt: skip


# ---------------------------------------------------------------------- contestants


def _trl(*arguments: Any, settings: dict[str, Any], **keywords: Any) -> Any:
    return GRPOTrainer(*arguments, args=GRPOConfig(**settings), **keywords)


def _liger(*arguments: Any, settings: dict[str, Any], **keywords: Any) -> Any:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    class LigerTrainer(GRPOTrainer):
        """TRL's trainer with Liger's loss on the last hidden states, compiled on accelerators."""

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
            length = inputs["completion_ids"].shape[1]
            loss = LigerFusedLinearGRPOLoss(
                beta=0.0, compiled=hidden.is_cuda, use_ref_model=False, chunk_size=1
            )
            value, _ = loss(
                hidden[:, -length - 1 : -1], model.lm_head.weight, inputs["completion_ids"],
                inputs["completion_mask"], inputs["advantages"],
                old_per_token_logps=inputs["old_per_token_logps"],
            )  # fmt: skip
            return value

    return LigerTrainer(*arguments, args=GRPOConfig(**settings), **keywords)


def _clip(*arguments: Any, settings: dict[str, Any], **keywords: Any) -> Any:
    return OldPolicyTrainer(*arguments, args=GRPOConfig(**settings), **keywords)


def _troll(*arguments: Any, settings: dict[str, Any], **keywords: Any) -> Any:
    return TROLLTrainer(*arguments, args=TROLLConfig(**settings, troll_support="exact"), **keywords)


TRL, LIGER = "TRL's GRPOTrainer", "TRL with Liger's loss"
CONTESTANTS: dict[str, Callable[..., Any]] = {
    TRL: _trl,
    LIGER: _liger,
    "clip, Tether": _clip,
    "TROLL, exact": _troll,
}


# ---------------------------------------------------------------------- one measurement, in its own process


def measure(model: Path, contestant: str, tokens: int, folder: str, device: str = "cpu") -> dict[str, Any]:
    """Updates on drawn responses, and the most memory they took."""
    loaded, tokenizer = load_model_and_tokenizer(model)
    rows = Dataset.from_list([{"prompt": f"{row}"} for row in range(2 * SEQUENCES)])
    trainer = CONTESTANTS[contestant](
        loaded, reward_of_rows, train_dataset=rows, processing_class=tokenizer,
        settings=trainer_settings(tokens // SEQUENCES, folder, device),
        rollout_func=drawn_responses(loaded.config.get_text_config().vocab_size, tokens // SEQUENCES),
    )  # fmt: skip
    memory = peak_memory(device)
    if memory is None:
        raise SystemExit("This system keeps no mark of a process's largest resident set that can be reset.")

    class Steps(TrainerCallback):
        """The mark is not reset between them: the first begins with the scoring of the rollouts."""

        peaks: tuple[int, ...] = ()
        ends: tuple[float, ...] = ()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.peaks += (memory.peak(),)
            if device == "cuda":
                torch.cuda.synchronize()
            self.ends += (time.perf_counter(),)

    steps = Steps()
    trainer.add_callback(steps)
    memory.restart()
    before = time.process_time()
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    found = {
        "contestant": contestant, "tokens": tokens, "peak_bytes": max(steps.peaks),
        "processor_seconds": round(time.process_time() - before, 1), "losses": losses,
    }  # fmt: skip
    if device == "cuda":
        batches = itertools.pairwise(steps.ends[_UPDATES * _WARMING_UP - 1 :: _UPDATES])
        seconds = [(end - begin) / _UPDATES for begin, end in batches]
        found |= {"seconds_an_update": statistics.median(seconds), "device": torch.cuda.get_device_name()}
    return found


def trainer_settings(length: int, folder: str, device: str) -> dict[str, Any]:
    """Two updates on what a rollout gives; nothing else that would take memory."""
    return {
        "output_dir": folder, "use_cpu": device == "cpu", "bf16": device != "cpu", "report_to": "none",
        "logging_steps": 1, "disable_tqdm": True, "gradient_checkpointing": False, "seed": 0,
        "save_strategy": "no", "per_device_train_batch_size": SEQUENCES, "steps_per_generation": _UPDATES,
        "num_generations": SEQUENCES, "max_steps": _UPDATES * BATCHES[device],
        "max_completion_length": length, "optim": "sgd", "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "beta": 0.0, "dataloader_pin_memory": False,
    }  # fmt: skip


def drawn_model(name: str, folder: Path) -> Path:
    """A folder with a model of that shape and the weights it starts from, beside the embedded tokenizer."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**DRAWN[name])).save_pretrained(folder / name)
    AutoTokenizer.from_pretrained(embedded_model_path()).save_pretrained(folder / name)
    return folder / name


def drawn_responses(vocabulary: int, length: int) -> Callable[..., dict[str, Any]]:
    """A `rollout_func` whose responses all have one length, the same for every contestant."""

    def draw(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(
            vocabulary // 10, vocabulary, (len(prompts), PROMPT + length), generator=generator
        )
        return {
            "prompt_ids": ids[:, :PROMPT].tolist(), "completion_ids": ids[:, PROMPT:].tolist(),
            "logprobs": None,
        }  # fmt: skip

    return draw


def reward_of_rows(completions: Sequence[Any], **_: Any) -> list[float]:
    """Rewards that differ within a group, so that every token has a gradient."""
    return [float(place % 2) for place in range(len(completions))]


# ---------------------------------------------------------------------- the table


def run(model: Path, contestant: str, tokens: int, limit: float, device: str = "cpu") -> dict[str, Any]:
    """`measure` in a process of its own, stopped where it takes more memory than the machine should give."""
    # Forked: libraries are loaded once, before, and no thread has been started. A GPU's runtime forbids it.
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        process = context.Process(target=_measure_into, args=(out, model, contestant, tokens, folder, device))
        process.start()
        assert process.pid is not None
        most = 0
        while process.is_alive():
            most = max(most, resident(process.pid))
            if most > limit * 1e9:
                process.kill()
                process.join()
                return {"contestant": contestant, "tokens": tokens, "stopped_at_bytes": most}
            process.join(0.2)
        if process.exitcode != 0:
            raise SystemExit(f"{contestant} with {tokens} tokens ended with code {process.exitcode}.")
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def _measure_into(out: Path, model: Path, contestant: str, tokens: int, folder: str, device: str) -> None:
    torch.set_num_threads(1)
    try:
        found = measure(model, contestant, tokens, folder, device)
    except torch.OutOfMemoryError:
        most = torch.cuda.max_memory_allocated()
        found = {"contestant": contestant, "tokens": tokens, "stopped_at_bytes": most}
    out.write_text(json.dumps(found))


def resident(pid: int) -> int:
    """Bytes in memory of a process; 0 for one that has just ended."""
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return 0 if found is None else int(found[1]) * 1024


def table(runs: Sequence[dict[str, Any]]) -> str:
    """A line a contestant, a column a number of tokens."""
    sizes = sorted({run["tokens"] for run in runs})
    cells = {(run["contestant"], run["tokens"]): run for run in runs}
    lines = [
        "| peak beyond the loaded model | " + " | ".join(f"{size} tokens" for size in sizes) + " |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    lines += [
        f"| {name} | " + " | ".join(_cell(cells.get((name, size)), cells, size) for size in sizes) + " |"
        for name in CONTESTANTS
    ]
    return "\n".join(lines)


def _cell(run: dict[str, Any] | None, cells: dict[tuple[str, int], dict[str, Any]], size: int) -> str:
    if run is None:
        return "not run"
    if "stopped_at_bytes" in run:
        return f"stopped: the process took over {format_bytes(run['stopped_at_bytes'])}"
    base = cells.get((TRL, size), {}).get("peak_bytes")
    ratio = f" (x {run['peak_bytes'] / base:.2f})" if base else ""
    seconds = f", {run['seconds_an_update']:.3f} s" if "seconds_an_update" in run else ""
    return format_bytes(run["peak_bytes"]) + ratio + seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, default=MODEL, help="model folder (default: %(default)s)")
    which.add_argument("--drawn", choices=DRAWN, help="a model of this shape, with drawn weights")
    parser.add_argument("--device", choices=BATCHES, default="cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512], help="of an update")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument(
        "--limit", type=float, default=8.0, help="most GB of main memory a process may take, on a CPU"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.drawn is None and not given.model.is_dir():
        raise SystemExit(f"There is no model in {given.model}. Get it with: python recipes/gemma3.py")
    if wrong := [size for size in given.tokens if size % SEQUENCES or size < SEQUENCES]:
        raise SystemExit(f"--tokens {wrong[0]}: give multiples of {SEQUENCES}, the responses of an update.")
    if LIGER in given.only and importlib.util.find_spec("liger_kernel") is None:
        raise SystemExit(
            f"{LIGER!r} needs liger-kernel: pip install liger-kernel, or leave it out of --only."
        )
    with tempfile.TemporaryDirectory() as folder:
        model = given.model if given.drawn is None else drawn_model(given.drawn, Path(folder))
        print(table(_run_all(model, given)))


def _run_all(model: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """What was measured before and the rest, kept after each."""
    on_cpu = given.device == "cpu"
    file = given.results / f"{model.name}{'' if on_cpu else '-' + given.device}.json"
    kept: list[dict[str, Any]] = json.loads(file.read_text())["runs"] if file.exists() else []
    done = {(run["contestant"], run["tokens"]) for run in kept}
    machine = f"{platform.machine()}, one thread, torch {torch.__version__}, "
    machine += "float32, SGD" if on_cpu else "bfloat16 autocast, SGD"
    limit = given.limit if on_cpu else math.inf
    for tokens in given.tokens:
        for contestant in given.only:
            if (contestant, tokens) in done:
                continue
            kept.append(run(model, contestant, tokens, limit, given.device))
            print(json.dumps(kept[-1]), flush=True)
            given.results.mkdir(parents=True, exist_ok=True)
            bound = {"limit_gb": limit} if on_cpu else {}
            atomic_write_json(file, {"machine": machine, **bound, "runs": kept})
    return kept


if __name__ == "__main__":
    main()
