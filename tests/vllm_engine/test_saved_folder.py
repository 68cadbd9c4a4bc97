"""The trained model's folder in vLLM, on a CPU: the same greedy tokens as in transformers, as likely."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from tether.llm.answers import score_tokens
from tether.llm.config import TrainConfig
from tether.llm.generate import answer
from tether.llm.models import load_model_and_tokenizer
from tether.llm.train import train

PROMPTS = ["37+58=", "123+456=", "9+4="]


def test_vllm_loads_the_trained_model_and_says_what_transformers_says(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    run = train(
        TrainConfig(
            output=tmp_path / "run", task="arithmetic", steps=2, updates_per_rollout=2,
            prompts_per_rollout=4, responses_per_prompt=4, eval_every=0, eval_problems=4, save_every=0,
            learning_rate=1e-3, threads=1, device="cpu", preflight="off",
        )
    )  # fmt: skip
    folder, out = run.path / "model", tmp_path / "said.json"
    model, tokenizer = load_model_and_tokenizer(folder)
    prompts = [list(tokenizer(prompt).input_ids) for prompt in PROMPTS]
    finished = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("saved_folder_worker.py")), str(folder), str(out)],
        input=json.dumps(prompts), env=environment, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert out.is_file(), finished.stdout[-3000:] + finished.stderr[-3000:]
    theirs = json.loads(out.read_text())
    ours = answer(model, tokenizer, PROMPTS, max_response_tokens=8, temperature=None, batch_size=3, seed=0)
    assert [[token for token, _ in response] for response in theirs] == [response.ids for response in ours]
    scores = score_tokens(model, prompts, [response.ids for response in ours])
    for response, score in zip(theirs, scores, strict=True):
        found = torch.tensor([log_prob for _, log_prob in response])
        torch.testing.assert_close(found, torch.tensor(score.log_probs), atol=1e-4, rtol=0)
