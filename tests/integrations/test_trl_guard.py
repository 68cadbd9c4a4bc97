"""An upgrade of TRL that touches what the integration builds on must be looked at, not slipped in."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import trl
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import utils

# Pinned in constraints.txt. Others are asked for what is relied on (tether.integrations.trl_seam).
WRITTEN_AGAINST = "1.16.0"

# What each piece is for, and the fingerprint of its source.
TOUCHED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "_compute_loss": (
        GRPOTrainer._compute_loss,
        "765e782ef258696a",
        "ObjectiveTrainer mirrors its five averages (AVERAGES, _share) and relies on advantages of zero "
        "making its surrogate vanish; it must hand the model it is given to the scoring helper, once.",
    ),
    "_get_per_token_logps_and_entropies": (
        GRPOTrainer._get_per_token_logps_and_entropies,
        "ddcb878f6df4bae5",
        "an Evaluation stands in for its model: it must call model(**inputs) once for each chunk of rows, "
        "in order, with labels, and read log_probs, entropy and aux_loss.",
    ),
    "_generate_and_score_completions": (
        GRPOTrainer._generate_and_score_completions,
        "8ad618f3882bc520",
        "it must score the old policy with self.model through the helper, before any reference policy, and "
        "put the result into old_per_token_logps; trl_warnings mirrors when it does.",
    ),
    "_generate": (
        GRPOTrainer._generate,
        "428bb9b5cd77ca6a",
        "it must return the lists of log-probabilities as the fifth of its values, elements untouched: they "
        "carry the sampler's records.",
    ),
    "_tool_call_loop": (
        GRPOTrainer._tool_call_loop,
        "1bbe47a3572bfa06",
        "it must cut and append the lists of log-probabilities as those of the tokens, elements untouched.",
    ),
    "_generate_single_turn": (
        GRPOTrainer._generate_single_turn,
        "e36de950c8303b0b",
        "it must take from vllm_generation.generate the first of each token's log-probabilities, and call "
        "the model's generate once where Transformers writes the completions.",
    ),
    "VLLMGeneration.generate": (
        VLLMGeneration.generate,
        "48a5f77c578cacf4",
        "it must ask vLLM for `logprobs` of each token and return ids and log-probabilities of all of them.",
    ),
    "_prepare_inputs": (
        GRPOTrainer._prepare_inputs,
        "d8617f874014c408",
        "it must shuffle and split every entry of the batch alike, old supports included, and go on with "
        "_buffered_inputs where _step is inside a batch of rollouts, as trl_resume leaves them.",
    ),
    "add_fused_lm_head": (
        getattr(utils, "add_fused_lm_head", utils.maybe_gather_lm_head_ctx),  # since 1.15
        "5f4aa2119cf10d11",
        "sparse_head.add_sparse_head mirrors its backbone call, soft cap, logit scale and auxiliary loss.",
    ),
    "maybe_gather_lm_head_ctx": (
        utils.maybe_gather_lm_head_ctx,
        "b52489747ec7b42b",
        "the sparse head enters it around every use of the head, forward and backward.",
    ),
    "GRPOConfig.__post_init__": (
        GRPOConfig.__post_init__,
        "aee78ba2191fa4d6",
        "TROLLConfig chooses steps_per_generation before it and relies on the check of both sizes.",
    ),
}


def _fingerprint(function: Callable[..., Any]) -> str:
    source = inspect.getsource(inspect.unwrap(function))
    code = [line.strip() for line in source.splitlines()]
    return hashlib.sha256("\n".join(line for line in code if line and line[0] != "#").encode()).hexdigest()[
        :16
    ]


@pytest.mark.skipif(trl.__version__ != WRITTEN_AGAINST, reason=f"fingerprints are of TRL {WRITTEN_AGAINST}")
@pytest.mark.parametrize("name", TOUCHED)
def test_trl_is_what_the_integration_was_written_against(name: str) -> None:
    function, expected, relied_on = TOUCHED[name]
    actual = _fingerprint(function)
    assert actual == expected, (
        f"TRL {trl.__version__} changed {name} (fingerprint {actual}). Compare it with {WRITTEN_AGAINST} and "
        f"check that this still holds: {relied_on} Then run tests/integrations and store the new fingerprint."
    )


def test_a_fingerprint_sees_code_and_not_comments() -> None:
    def first(x: int) -> int:
        # as it was
        return x + 1

    def second(x: int) -> int:
        return x + 1

    def third(x: int) -> int:
        return x + 2

    prints = [_fingerprint(f).replace(f.__name__, "") for f in (first, second, third)]
    assert len(set(prints)) == 3  # names differ
    second.__wrapped__ = first  # type: ignore[attr-defined]
    assert _fingerprint(second) == prints[0]  # decorators are looked through
