"""How true each way of comparing distributions is, on a real small model at temperature 1.

    python recipes/smollm2.py --out models/smollm2-135m-instruct
    python benchmarks/fidelity.py --model models/smollm2-135m-instruct

SmolLM2-135M-Instruct answers eight prompts with 64 sampled tokens each; three AdamW steps of policy gradient
on random advantages follow. For each of the 512 tokens the new policy is then projected onto the ball around
the old one in every mode of `troll_support`, and in float64 over all 49,152 ids:

- true KL: KL(projected || old) of the distribution the loss works with;
- gradient: of TROLL's loss with respect to the last hidden states and the LM head, against that of the dense
  float64 projection, as relative error of its norm and cosine.

Also printed: the memory of what is kept of the old policy (hidden states in bfloat16). Time is measured by
`make bench`. The bars are checked: exact, every true KL <= bound (1 + 1e-2) and gradient error <= 1e-3;
bucket with 256 ids, gradient error <= 15 %. Writes benchmarks/results/fidelity/smollm2-135m.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether.llm.models import load_model_and_tokenizer
from tether.losses import ProjectedTokens, project_tokens
from tether.ops import linear_log_probs, linear_trust_region
from tether.projection import (
    CompactLogProbs,
    SparseLogProbs,
    kl_categorical,
    project_categorical,
    project_sparse,
)
from tether.projection.sparse import EMPTY

RESULTS = Path(__file__).resolve().parent / "results" / "fidelity"
BOUND, TOKENS_EACH, STEPS, MASS = 0.05, 64, 3, 1 - 1e-5
SUPPORT_SIZES = (64, 256, 1024)
CHUNK = 64  # rows that are dense in float64 at a time
QUESTIONS = (
    "What is 17 + 26?",
    "Tell me a story about a lighthouse.",
    "Why is the sky blue?",
    "Write a haiku about autumn.",
    "A train travels 60 km in 45 minutes. What is its speed?",
    "Explain photosynthesis to a child.",
    "Name three European capitals.",
    "What makes a good friend?",
)


@dataclass(frozen=True)
class Rows:
    """512 tokens under two policies: last hidden states [N, D] and LM heads [V, D]."""

    hidden: Tensor
    weight: Tensor
    old_hidden: Tensor
    old_weight: Tensor
    ids: Tensor
    advantages: Tensor

    def dense(self, rows: slice) -> tuple[Tensor, Tensor]:
        """float64 log-probabilities of both policies, [n, V], the new one's with a graph."""
        new = (self.hidden[rows].double() @ self.weight.double().T).log_softmax(-1)
        old = (self.old_hidden[rows].double() @ self.old_weight.double().T).log_softmax(-1)
        return new, old.detach()

    def chunks(self) -> Iterator[slice]:
        return (slice(start, start + CHUNK) for start in range(0, self.ids.numel(), CHUNK))

    def leaves(self) -> Rows:
        """The same with fresh leaves, in the model's precision."""
        return Rows(
            self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_(), self.old_hidden,
            self.old_weight, self.ids, self.advantages,
        )  # fmt: skip


def sample(model: Any, tokenizer: Any) -> tuple[Tensor, Tensor, int]:
    """Prompts padded on the left with 64 sampled tokens each, their mask, and where responses start."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt",
            return_dict=True,
        )["input_ids"][0]
        for question in QUESTIONS
    ]  # fmt: skip
    length = max(map(len, texts))
    ids = torch.full((len(texts), length), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, length - len(text) :], mask[row, length - len(text) :] = text, 1
    whole = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=TOKENS_EACH, min_new_tokens=TOKENS_EACH,
    )  # fmt: skip
    return whole, torch.cat([mask, torch.ones(len(texts), TOKENS_EACH, dtype=mask.dtype)], 1), length


def make_rows(folder: str, learning_rate: float) -> Rows:
    """Sample, take three steps away, and keep what both policies computed."""
    torch.manual_seed(0)
    model, tokenizer = load_model_and_tokenizer(folder)
    model = model.float().eval()
    ids, mask, start = sample(model, tokenizer)
    labels = ids[:, start:]
    advantages = torch.randn(len(QUESTIONS), 1).expand_as(labels)

    def hidden() -> Tensor:
        states = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return states[:, start - 1 : -1].reshape(labels.numel(), -1)

    head = model.get_output_embeddings()
    with torch.no_grad():
        old_hidden, old_weight = hidden(), head.weight.detach().clone()
        old = linear_log_probs(old_hidden, old_weight, labels.reshape(-1, 1)).log_probs[:, 0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    for _ in range(STEPS):
        log_probs = linear_log_probs(hidden(), head.weight, labels.reshape(-1, 1)).log_probs[:, 0]
        optimizer.zero_grad()
        (-(log_probs - old).exp() * advantages.reshape(-1)).mean().backward()
        optimizer.step()
    with torch.no_grad():
        new_hidden = hidden()
    return Rows(
        new_hidden, head.weight.detach().clone(), old_hidden, old_weight, labels.reshape(-1),
        torch.randn(labels.numel()),
    )  # fmt: skip


def loss(projected: Tensor, old: Tensor, regression: Tensor, advantages: Tensor) -> Tensor:
    """TROLL's, summed over tokens."""
    return (-(projected - old).exp() * advantages + regression).sum()


def regression(new: Tensor, projected: Tensor, acted: Tensor) -> Tensor:
    return torch.where(acted, (new.exp() * (new - projected.detach())).sum(-1), 0.0)


def true_kl(projected: Tensor, old: Tensor) -> Tensor:
    return kl_categorical(projected.detach(), old)


def by_dense(rows: Rows) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """What every other way is measured against: true KL, gradients, and who is projected."""
    rows = rows.leaves()
    divergences, acted = [], []
    for chunk in rows.chunks():
        new, old = rows.dense(chunk)
        result = project_categorical(new, old, BOUND)
        index = rows.ids[chunk, None]
        sampled = (result.log_probs.gather(-1, index)[:, 0], old.gather(-1, index)[:, 0])
        pull = regression(new, result.log_probs, result.projected)
        loss(*sampled, pull, rows.advantages[chunk].double()).backward()
        divergences.append(true_kl(result.log_probs, old))
        acted.append(result.projected)
    assert rows.hidden.grad is not None
    assert rows.weight.grad is not None
    return torch.cat(divergences), (rows.hidden.grad, rows.weight.grad), torch.cat(acted)


def old_support(rows: Rows, top_k: int) -> tuple[SparseLogProbs, Tensor]:
    """As the trainer records it, and the sampled tokens' log-probabilities."""
    found = linear_log_probs(rows.old_hidden, rows.old_weight, rows.ids[:, None], top_k=top_k, with_min=True)
    assert found.top_ids is not None
    assert found.top_log_probs is not None
    sampled = found.log_probs[:, 0]
    support = SparseLogProbs.from_top_k(
        found.top_ids, found.top_log_probs, rows.ids, sampled, mass=MASS,
        vocabulary_size=rows.weight.shape[0], log_tail_min=found.log_prob_min,
    )  # fmt: skip
    return support, sampled


Support = tuple[SparseLogProbs, Tensor]


def exact_loss(rows: Rows, old: Support) -> ProjectedTokens:
    """Forward and backward over the whole vocabulary."""
    result = linear_trust_region(
        rows.hidden, rows.weight, rows.ids, rows.old_hidden, kl_bound=BOUND, old_weight=rows.old_weight,
        old_support=old[0],
    )  # fmt: skip
    loss(result.projected_log_probs, old[1], result.regression, rows.advantages).backward()
    return result


def support_loss(rows: Rows, old: Support, tail: str, top_k: int) -> tuple[SparseLogProbs, ProjectedTokens]:
    """The same on a support."""
    support, old_sampled = old
    if tail == "bucket":
        at_ids = linear_log_probs(rows.hidden, rows.weight, torch.cat((rows.ids[:, None], support.ids), -1))
        log_probs = at_ids.log_probs[:, 0]
        new = SparseLogProbs.from_log_probs(support.ids, at_ids.log_probs[:, 1:])
    else:
        own = linear_log_probs(rows.hidden, rows.weight, rows.ids[:, None], top_k=top_k)
        log_probs = own.log_probs[:, 0]
        assert own.top_ids is not None
        assert own.top_log_probs is not None
        new = SparseLogProbs.from_top_k(own.top_ids, own.top_log_probs, rows.ids, log_probs, mass=MASS)
    tokens = project_tokens(
        new[None], support[None], rows.ids[None], torch.ones(1, rows.ids.numel()),
        log_probs=log_probs[None], old_log_probs=old_sampled[None], kl_bound=BOUND,
        support=tail,  # type: ignore[arg-type]
    )  # fmt: skip
    loss(
        tokens.projected_log_probs[0], tokens.old_log_probs[0], tokens.regression[0], rows.advantages
    ).backward()
    return new, tokens


def by_exact(rows: Rows, top_k: int) -> dict[str, Any]:
    old = old_support(rows, top_k)
    rows = rows.leaves()
    result = exact_loss(rows, old)
    divergences = []
    with torch.no_grad():
        for chunk in rows.chunks():
            new, old_dense = rows.dense(chunk)
            step = result.step[chunk, None].double()
            divergences.append(true_kl(((1 - step) * old_dense + step * new).log_softmax(-1), old_dense))
    kept = CompactLogProbs.pack(old[0]).nbytes + rows.old_hidden.to(torch.bfloat16).nbytes
    proofs = {name: getattr(result, name) for name in ("certified", "projected", "uncertain")}
    return {"rows": rows, "kl": torch.cat(divergences), "bytes": kept, **proofs}


def by_support(rows: Rows, top_k: int, tail: str) -> dict[str, Any]:
    support, old_sampled = old_support(rows, top_k)
    rows = rows.leaves()
    new, tokens = support_loss(rows, (support, old_sampled), tail, top_k)
    result = project_sparse(new.detach(), support, BOUND, support=tail)  # type: ignore[arg-type]
    divergences = []
    with torch.no_grad():
        for chunk in rows.chunks():
            dense_new, old = rows.dense(chunk)
            divergences.append(true_kl(spread(result.log_probs[chunk], dense_new, tail), old))
    none = torch.zeros_like(tokens.projected)
    proofs = {"projected": tokens.projected, "certified": tokens.certified, "uncertain": tokens.uncertain}
    return {
        "rows": rows,
        "kl": torch.cat(divergences),
        "bytes": CompactLogProbs.pack(support).nbytes,
        **{name: none if proof is None else proof for name, proof in proofs.items()},
    }


def spread(few: SparseLogProbs, new: Tensor, tail: str) -> Tensor:
    """A projected support as a distribution over the vocabulary, [n, V] float64.

    Inside the tail of a bucket the new policy's proportions hold; the paper's code knows no other ids.
    """
    held = few.ids != EMPTY
    slots = torch.where(held, few.ids.long(), new.shape[-1])
    wide = torch.cat((new, new[:, :1]), -1)
    rest = wide.scatter(-1, slots, -torch.inf)
    rest[:, -1] = -torch.inf
    if tail == "paper":
        rest.fill_(-torch.inf)
    else:
        log_mass = rest.logsumexp(-1)
        rest += torch.where(log_mass.isfinite(), few.log_tail.double() - log_mass, 0.0)[:, None]
    values = torch.where(held, few.log_probs.double(), -torch.inf)
    return rest.scatter(-1, slots, values)[:, :-1].log_softmax(-1)


def summary(name: str, found: dict[str, Any], reference: tuple[Tensor, Tensor]) -> dict[str, Any]:
    rows: Rows = found["rows"]
    grads = (rows.hidden.grad, rows.weight.grad)
    ours, theirs = (torch.cat([g.double().flatten() for g in side]) for side in (grads, reference))
    return {
        "mode": name,
        "gradient_cosine": float(ours @ theirs / ours.norm() / theirs.norm()),
        "gradient_relative_error": float((ours - theirs).norm() / theirs.norm()),
        "max_true_kl": float(found["kl"].max()),
        "above_1.01_bound": float((found["kl"] > 1.01 * BOUND).double().mean()),
        "bytes_a_token": found["bytes"] / rows.ids.numel(),
        **{key: float(found[key].double().mean()) for key in ("projected", "certified", "uncertain")},
    }


def measure(folder: str, learning_rate: float) -> dict[str, Any]:
    rows = make_rows(folder, learning_rate)
    dense_kl, reference, acted = by_dense(rows)
    table = []
    for top_k in SUPPORT_SIZES:
        table.append(summary(f"exact, K={top_k}", by_exact(rows, top_k), reference))
        for tail in ("bucket", "paper"):
            table.append(summary(f"{tail}, K={top_k}", by_support(rows, top_k, tail), reference))
            print(table[-1], flush=True)
    return {
        "learning_rate": learning_rate,
        "dense": {"max_true_kl": float(dense_kl.max()), "projected": float(acted.double().mean())},
        "modes": table,
    }


def markdown(records: list[dict[str, Any]]) -> str:
    lines = []
    for record in records:
        lines += [
            f"After {STEPS} AdamW steps at {record['learning_rate']:g}; dense float64 projects "
            f"{record['dense']['projected']:.1%} of 512 tokens.",
            "",
            "| mode | gradient cosine | gradient relative error | max true KL | tokens above 1.01 bound "
            "| projected | certified | uncertain | bytes a token |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in sorted(record["modes"], key=lambda r: r["mode"].split(",")[0]):
            lines.append(
                f"| {row['mode']} | {row['gradient_cosine']:.4f} | {row['gradient_relative_error']:.3%} "
                f"| {row['max_true_kl']:.4f} | {row['above_1.01_bound']:.1%} | {row['projected']:.1%} "
                f"| {row['certified']:.1%} | {row['uncertain']:.1%} | {row['bytes_a_token']:.0f} |"
            )
        lines.append("")
    return "\n".join(lines)


def missed(records: list[dict[str, Any]]) -> list[str]:
    """The bars that do not hold."""
    failures = []
    for record in records:
        for row in record["modes"]:
            exact = row["mode"].startswith("exact")
            error = 1e-3 if exact else 0.15 if row["mode"] == "bucket, K=256" else float("inf")
            if row["gradient_relative_error"] > error:
                failures.append(f"{row['mode']}: gradient error {row['gradient_relative_error']:.2%}")
            if exact and row["max_true_kl"] > BOUND * (1 + 1e-2):
                failures.append(f"{row['mode']}: true KL {row['max_true_kl']:.5f}")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="models/smollm2-135m-instruct", help="folder of recipes/smollm2.py"
    )
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[2e-5, 1e-6])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    records = [measure(arguments.model, rate) for rate in arguments.learning_rates]
    RESULTS.mkdir(parents=True, exist_ok=True)
    record = {
        "command": "python benchmarks/fidelity.py",
        "torch": torch.__version__,
        "machine": f"{platform.machine()} {platform.system()}, {torch.get_num_threads()} threads, float32",
        "kl_bound": BOUND,
        "records": records,
    }
    for suffix, text in (("json", json.dumps(record, indent=2) + "\n"), ("md", markdown(records))):
        target = RESULTS / f"smollm2-135m.{suffix}"
        temporary = target.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.rename(target)
    print(markdown(records))
    failures = missed(records)
    if failures:
        raise SystemExit("Missed: " + "; ".join(failures))


if __name__ == "__main__":
    main()
