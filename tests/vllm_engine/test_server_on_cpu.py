"""The server that a run starts for itself, on a CPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tether.integrations.trl_folder import VLLMServer, write_for_vllm
from tether.llm.models import load_model_and_tokenizer
from tether.llm.serving import free_port, serving, vllm_server

#: Tokens the engine takes at a time, of which two prompts are more.
_AT_A_TIME = 64


def test_answers_seeded_requests_of_more_tokens_than_it_reads_at_a_time(tmp_path: Path) -> None:
    """As TRL sends them, a seed each: vLLM 0.28 died when a prompt was read in two parts."""
    write_for_vllm(*load_model_and_tokenizer("embedded"), tmp_path / "served")
    plan = vllm_server(
        tmp_path / "served", name="m", port=free_port(), log=tmp_path / "vllm.log", on_cpu=True,
        options={
            "dtype": "float32", "max-model-len": _AT_A_TIME, "max-num-batched-tokens": _AT_A_TIME,
            "max-num-seqs": 8,
        },
    )  # fmt: skip
    with serving(plan, print):
        server = VLLMServer(plan.url)

        def answered(seed: int) -> list[dict[str, Any]]:
            prompt = [10 + seed, *range(20, 20 + 2 * _AT_A_TIME // 3)]  # none begins as another
            request = {"model": "m", "prompt": prompt, "max_tokens": 2, "n": 2, "seed": seed}
            choices: list[dict[str, Any]] = server.complete(request, 120.0)["choices"]
            return choices

        with ThreadPoolExecutor(8) as pool:
            assert [len(choices) for choices in pool.map(answered, range(8))] == [2] * 8
        server.check()
