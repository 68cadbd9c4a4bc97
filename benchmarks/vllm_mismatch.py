"""How far vLLM's log-probabilities are from the trainer's, the same weights, in float32 and in bfloat16.

    .venv-vllm/bin/python -m benchmarks.vllm_mismatch                      # the embedded model (3 minutes)
    .venv-vllm/bin/python -m benchmarks.vllm_mismatch --model models/smollm2-135m-instruct \\
        --task word_problems --prompts 4

vLLM samples responses on the CPU and reports the 64 likeliest ids of each token; Transformers, in float32,
scores the same tokens. Told are |log mu - log pi| of the drawn tokens and KL(pi || mu) on the reported ids,
in nats: what an engine's arithmetic takes up of a trust region around it. Each engine has a process of its
own. "seconds" are of the clock for all of it, and with no more than the drawn token's log-probability asked.

Adds to benchmarks/results/vllm_mismatch/mismatch.csv, in the place of rows of the same model.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tether.integrations.sampler_reports import collect, report_sequence
from tether.llm.generate import encode_prompt
from tether.llm.models import load_model_and_tokenizer
from tether.llm.tasks import make_task
from tether.losses import project_tokens

RESULTS = Path(__file__).parent / "results" / "vllm_mismatch" / "mismatch.csv"
TOP_K = 64
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def sampled(folder: str, dtype: str, prompts: list[list[int]], responses: int, longest: int) -> list[Any]:
    """What vLLM says to each prompt, and the seconds with and without reports of the likeliest ids."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=folder, dtype=dtype, enforce_eager=True, max_logprobs=TOP_K, logprobs_mode="processed_logprobs",
        max_model_len=max(map(len, prompts)) + longest, seed=0,
    )  # fmt: skip
    asked = [{"prompt_token_ids": ids} for ids in prompts for _ in range(responses)]
    seconds = []
    for top_k in (0, 0, TOP_K):  # the first warms up
        began = time.perf_counter()
        settings = SamplingParams(temperature=1.0, max_tokens=longest, logprobs=top_k, seed=None)
        said = engine.generate(asked, settings, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
    return [said, *seconds[1:]]


@torch.no_grad()
def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """One engine against Transformers in float32."""
    model, tokenizer = load_model_and_tokenizer(arguments.model, dtype="float32", device=torch.device("cpu"))
    task = make_task(arguments.task)
    problems = task.problems("train", limit=arguments.prompts)
    prompts = [encode_prompt(tokenizer, problem.prompt) for problem in problems]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        said, plain, reported = sampled(
            folder, arguments.dtype, prompts, arguments.responses, task.max_response_tokens
        )
    apart, divergences = [], []
    for place, request in enumerate(said):
        [response] = request.outputs
        drawn, prompt = list(response.token_ids), prompts[place // arguments.responses]
        records = report_sequence(
            drawn, [[*row] for row in response.logprobs],
            [[one.logprob for one in row.values()] for row in response.logprobs], place,
        )  # fmt: skip
        ids, mask = torch.tensor([drawn]), torch.ones(1, len(drawn))
        old = collect([[*records]], ids, mask, truncated=False, vocabulary_size=model.config.vocab_size)
        logits = model(torch.tensor([[*prompt, *drawn]])).logits[:, len(prompt) - 1 : -1]
        new = logits.log_softmax(-1)
        own = new.gather(-1, ids[..., None])[..., 0]
        apart.append((own - old.log_probs).abs()[0])
        divergences.append(project_tokens(new, old, ids, mask, kl_bound=1e9).kl[0])
    difference, kl = torch.cat(apart), torch.cat(divergences)
    return {
        "model": Path(arguments.model).name, "engine": arguments.dtype, "tokens": len(difference),
        "difference_mean": f"{difference.mean():.3g}", "difference_max": f"{difference.max():.3g}",
        "kl_mean": f"{kl.mean():.3g}", "kl_max": f"{kl.max():.3g}",
        "seconds_drawn_only": f"{plain:.2f}", "seconds": f"{reported:.2f}",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--task", default="chained")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--responses", type=int, default=4)
    parser.add_argument("--dtype", help="one engine, in this process; printed as JSON and not written down")
    arguments = parser.parse_args()
    if arguments.dtype:
        print(json.dumps(compare(arguments)))
        return
    rows = []
    for dtype in ("float32", "bfloat16"):
        finished = subprocess.run(
            [sys.executable, "-m", "benchmarks.vllm_mismatch", *sys.argv[1:], "--dtype", dtype],
            env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        rows.append(json.loads(finished.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    if RESULTS.is_file():
        with RESULTS.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["model"] != rows[0]["model"]] + rows
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
