"""Problems answered, judged and scored token by token; kept a line a problem, so a kill costs one batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tether.errors import CheckpointError
from tether.experiments.files import (
    atomic_write_text,
    dump_json_lines,
    read_json_lines,
    write_all,
)
from tether.llm.eval_config import EvalConfig
from tether.llm.generate import Response, answer_and_judge, encode_prompt
from tether.llm.tasks import Problem, Task, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Row = dict[str, Any]


@dataclass(frozen=True)
class LoadedModel:
    """A model that answers problems, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def collect_answers(
    config: EvalConfig,
    load: Callable[[], LoadedModel],
    task: Task,
    name: str,
    problems: Sequence[Problem],
    file: Path | None,
    done: Callable[[int], None] = lambda count: None,
) -> list[Row]:
    """Have a model answer problems, each batch of them with random numbers of its own.

    A row is ``{"problem": index, "prompt", "reference", "samples": [response, ...], "greedy": response or
    None}``, a response ``{"text", "correct", "reward", "parts", "truncated", "length"}`` and, for one of each
    problem, ``"tokens": [[text, log-probability, entropy], ...]``.

    Args:
        config: how to ask.
        load: gives the model; not called when everything is answered already.
        task: judges.
        name: the task's name in the command; part of the seed.
        problems: what to ask.
        file: JSON lines to append every batch to; what is there is not asked again, and the rows are those
            of a run nobody interrupted. None keeps nothing.
        done: told how many problems are answered so far.
    """
    size = max(1, config.batch_size // max(1, config.samples))
    rows = _answered(file, problems, size)
    done(len(rows))
    if len(rows) == len(problems):
        return rows
    loaded = load()
    for start in range(len(rows), len(problems), size):
        batch = problems[start : start + size]
        fresh = _answer_batch(config, loaded, task, batch, start, _seed(config.seed, name, start))
        if file is not None:
            with file.open("ab", buffering=0) as lines:
                write_all(lines, dump_json_lines(fresh).encode())
        rows += fresh
        done(len(rows))
    return rows


def _answered(file: Path | None, problems: Sequence[Problem], size: int) -> list[Row]:
    """The whole batches of an earlier attempt; the file is cut back to them."""
    if file is None:
        return []
    file.parent.mkdir(parents=True, exist_ok=True)
    found = read_json_lines(file)
    for row, problem in zip(found, problems, strict=False):
        if row.get("prompt") != problem.prompt or row.get("reference") != problem.answer:
            raise CheckpointError(
                f"{file} holds answers to other problems (line {row.get('problem')}): the task's data "
                "changed. Choose another output folder."
            )
    whole = found[: len(problems)] if len(found) >= len(problems) else found[: len(found) // size * size]
    if file.exists():
        atomic_write_text(file, dump_json_lines(whole))
    return whole


def _answer_batch(
    config: EvalConfig, loaded: LoadedModel, task: Task, batch: Sequence[Problem], start: int, seed: int
) -> list[Row]:
    sampled = _ask(config, loaded, task, [p for p in batch for _ in range(config.samples)], seed, True)
    greedy = _ask(config, loaded, task, list(batch), seed, False) if config.greedy else []
    rows: list[Row] = []
    for place, problem in enumerate(batch):
        samples = sampled[place * config.samples : (place + 1) * config.samples]
        rows.append({
            "problem": start + place, "prompt": problem.prompt, "reference": problem.answer,
            "samples": [row for _, row in samples], "greedy": greedy[place][1] if greedy else None,
        })  # fmt: skip
    if config.token_scores:
        shown = greedy or sampled[:: config.samples]
        _add_scores(config, loaded, batch, shown)
    return rows


def _ask(
    config: EvalConfig, loaded: LoadedModel, task: Task, problems: Sequence[Problem], seed: int, sample: bool
) -> list[tuple[Response, Row]]:
    answered = answer_and_judge(
        loaded.model, loaded.tokenizer, task, problems,
        max_response_tokens=config.max_response_tokens, batch_size=config.batch_size, seed=seed,
        temperature=config.temperature if sample else None,
        chat_template_options=config.chat_template_options, compact=config.rollouts == "compact",
    )  # fmt: skip
    return [(response, _judged(response, verdict)) for response, verdict in answered]


def _judged(response: Response, verdict: Verdict) -> Row:
    return {
        "text": response.text,
        "correct": verdict.correct,
        "reward": verdict.reward,
        "parts": dict(verdict.parts),
        "truncated": response.truncated,
        "length": len(response.ids),
    }


def _add_scores(
    config: EvalConfig,
    loaded: LoadedModel,
    batch: Sequence[Problem],
    shown: Sequence[tuple[Response, Row]],
) -> None:
    """Score the response the page shows first; each token with its text."""
    tokenizer = loaded.tokenizer
    prompts = [encode_prompt(tokenizer, problem.prompt, config.chat_template_options) for problem in batch]
    scores = score_tokens(loaded.model, prompts, [response.ids for response, _ in shown])
    for (response, row), score in zip(shown, scores, strict=True):
        row["tokens"] = [
            [tokenizer.decode([token]), round(log_prob, 4), round(entropy, 4)]
            for token, log_prob, entropy in zip(response.ids, score.log_probs, score.entropies, strict=True)
        ]


def _seed(seed: int, name: str, start: int) -> int:
    """The seed of a batch, which depends on nothing that was asked before it."""
    digest = hashlib.blake2b(f"{seed}/{name}/{start}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


_LOGITS_BYTES = 2**28
"""Most memory for logits at a time; one sequence may need more."""


@dataclass(frozen=True)
class TokenScores:
    """Of one response, a number a token."""

    log_probs: list[float]
    """Log-probability of the token that was said, in nats, at temperature 1."""
    entropies: list[float]
    """Entropy of the distribution it was drawn from, in nats."""


@torch.no_grad()
def score_tokens(
    model: PreTrainedModel, prompts: Sequence[list[int]], responses: Sequence[list[int]]
) -> list[TokenScores]:
    """Log-probability and entropy of every token of the responses, given prompt and earlier tokens.

    >>> from tether.llm.models import load_model_and_tokenizer
    >>> model, tokenizer = load_model_and_tokenizer("embedded")
    >>> scores = score_tokens(model, [tokenizer("37+58=").input_ids], [tokenizer("95").input_ids])
    >>> len(scores[0].log_probs), max(scores[0].log_probs) <= 0
    (2, True)
    """
    scores: list[TokenScores] = []
    vocabulary = model.config.get_text_config().vocab_size
    start = 0
    while start < len(prompts):
        stop, longest = start, 0
        while stop < len(prompts):
            longest = max(longest, len(prompts[stop]) + len(responses[stop]))
            if stop > start and (stop + 1 - start) * longest * vocabulary * 4 > _LOGITS_BYTES:
                break
            stop += 1
        scores += _score_batch(model, prompts[start:stop], responses[start:stop])
        start = stop
    return scores


def _score_batch(
    model: PreTrainedModel, prompts: Sequence[list[int]], responses: Sequence[list[int]]
) -> list[TokenScores]:
    """Padded on the right, where a causal model does not look."""
    sequences = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits
    found = []
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        places = slice(len(prompt) - 1, len(prompt) - 1 + len(response))
        log_probs = torch.log_softmax(logits[row, places].float(), dim=-1)
        said = torch.tensor(response, dtype=torch.long, device=log_probs.device)
        entropies = torch.special.entr(log_probs.exp()).sum(-1)
        found.append(TokenScores(log_probs.gather(-1, said[:, None])[:, 0].tolist(), entropies.tolist()))
    return found
