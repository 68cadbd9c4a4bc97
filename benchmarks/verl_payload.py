"""What the old policy weighs on its way through verl's TransferQueue, in bytes a response token.

    .venv-verl/bin/python benchmarks/verl_payload.py --model models/smollm2-135m-instruct

The four ragged fields are made as in training, from distributions of several kinds: a real model's, read on
its own samples at temperature 1 (many plausible ids) and at 0.5 (few); and two extremes, rows with a handful
of possible ids and rows that are uniform over 151,936. Beside them the size of what the fields replace, K + 1
pairs of int32 id and float32 log-probability for every token, and of the whole distribution in float32.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether.integrations.logits_hooks import record_old_policy
from tether.integrations.verl.carrier import pack, payload_bytes, unpack

RESULTS = Path(__file__).parent / "results" / "verl_payload"
MASS = 1 - 1e-5
VOCABULARY = 151_936
PROMPT = "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many in all?"


def sample_logits(folder: Path, temperature: float, tokens: int) -> tuple[Tensor, Tensor]:
    """Logits [N, V] of a model on what it samples itself, divided by the temperature, and the samples [N]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    prompt = chat["input_ids"].expand(4, -1)
    with torch.no_grad():
        whole = model.generate(
            prompt, do_sample=True, temperature=temperature, top_k=0, max_new_tokens=tokens // 4,
            min_new_tokens=tokens // 4, pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        start = prompt.shape[1]
        logits = model(whole).logits[:, start - 1 : -1] / temperature
    return logits.flatten(0, 1), whole[:, start:].flatten()


def few_ids(tokens: int) -> tuple[Tensor, Tensor]:
    """Between 2 and 10 ids hold everything, as the TROLL paper reports of large models."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.full((tokens, VOCABULARY), -40.0)
    for row in logits:
        count = int(torch.randint(2, 11, (), generator=generator))
        ids = torch.randperm(VOCABULARY, generator=generator)[:count]
        row[ids] = torch.randn(count, generator=generator)
    return logits, torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def uniform(tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.zeros(tokens, VOCABULARY), torch.randint(0, VOCABULARY, (tokens,), generator=generator)


def measure(name: str, logits: Tensor, sampled: Tensor, top_k: int) -> dict[str, Any]:
    old = record_old_policy(logits, sampled, top_k=top_k, mass=MASS)
    mask = torch.nested.as_nested_tensor(list(torch.ones_like(sampled).chunk(4)), layout=torch.jagged)
    start = time.perf_counter()
    fields = pack(old, mask)
    back = unpack(fields, mask)
    seconds = time.perf_counter() - start
    assert torch.equal(back.log_prob_of(sampled), old.log_prob_of(sampled))
    tokens, vocabulary = logits.shape
    kept = (old.ids >= 0).sum(-1).float()
    return {
        "distributions": name,
        "tokens": tokens,
        "vocabulary": vocabulary,
        "top_k": top_k,
        "kept_mean": kept.mean().item(),
        "kept_max": int(kept.max()),
        "tail_mass_mean": old.log_tail.exp().mean().item(),
        "bytes_a_token": payload_bytes(fields) / tokens,
        "bytes_fixed": 8 * (min(top_k, vocabulary) + 1) + 4,
        "bytes_dense": 4 * vocabulary,
        "pack_and_unpack_us_a_token": 1e6 * seconds / tokens,
    }


def table(rows: list[dict[str, Any]]) -> str:
    head = "| distributions | V | K | ids kept, mean (max) | bytes a token | fixed K | dense |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['distributions']} | {row['vocabulary']:,} | {row['top_k']} "
            f"| {row['kept_mean']:.1f} ({row['kept_max']}) | {row['bytes_a_token']:.0f} "
            f"| {row['bytes_fixed']:,} | {row['bytes_dense']:,} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    real = [
        (
            f"SmolLM2-135M-Instruct's samples, temperature {t}",
            *sample_logits(arguments.model, t, arguments.tokens),
        )
        for t in (1.0, 0.5)
    ]
    kinds = [("2 to 10 possible ids", *few_ids(64)), *real[::-1], ("uniform", *uniform(64))]
    rows = [measure(*kind, top_k) for kind in kinds for top_k in (64, 256)]
    arguments.output.mkdir(parents=True, exist_ok=True)
    record = {
        "command": "python benchmarks/verl_payload.py",
        "mass": MASS,
        "machine": platform.machine(),
        "rows": rows,
    }
    (arguments.output / "payload.json").write_text(json.dumps(record, indent=1) + "\n")
    (arguments.output / "payload.md").write_text(table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
