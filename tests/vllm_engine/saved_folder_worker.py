"""What vLLM makes of a model folder: `saved_folder_worker.py MODEL OUT`, prompts as token ids on stdin."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main(model: str, out: Path) -> None:
    """Greedy responses, the log-probability of each token beside it."""
    prompts = json.load(sys.stdin)
    engine = LLM(model=model, dtype="float32", enforce_eager=True, max_model_len=128)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
    said = []
    for result in engine.generate([{"prompt_token_ids": ids} for ids in prompts], greedy):
        [response] = result.outputs
        scored = zip(response.token_ids, response.logprobs, strict=True)
        said.append([(token, found[token].logprob) for token, found in scored])
    out.write_text(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
