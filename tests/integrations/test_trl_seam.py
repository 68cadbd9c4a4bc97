"""What the TRL plug-in stands on is asked of the installed versions; what moved is named."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch
import trl
from tiny_language_model import make_tiny_model
from trl import GRPOTrainer

from tether.errors import MissingDependencyError, TetherWarning
from tether.integrations import seams, trl_seam
from tether.integrations.sparse_head import add_sparse_head
from tether.integrations.trl_evaluation import Evaluation


def test_nothing_has_moved() -> None:
    trl_seam.check()


def test_what_moved_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter more in front, a function gone, a line less, a field gone."""
    monkeypatch.setitem(trl_seam.SIGNATURES, "trl:GRPOTrainer._compute_loss", ["self", "batch", "..."])
    monkeypatch.setitem(trl_seam.SIGNATURES, "trl:GRPOTrainer.never", ["..."])
    fact, place, _ = trl_seam.SOURCES[0]
    monkeypatch.setattr(trl_seam, "SOURCES", [(fact, place, ["what was never there"])])
    monkeypatch.setitem(trl_seam.FIELDS, "trl:GRPOConfig", {"never_a_field"})
    with pytest.raises(MissingDependencyError) as caught:
        trl_seam.check()
    assert str(caught.value).count("\n  - ") == 4
    for words in (
        f"{trl_seam.TRL}, and this is {trl.__version__}",
        "takes (self, batch, ...); found (self, model",
        "GRPOTrainer.never takes (...); found nothing of that name",
        "gone: what was never there",
        "no field never_a_field",
        "pip install 'trl==",
    ):
        assert words in str(caught.value)


def test_a_method_that_moved_is_refused_where_a_trainer_is_first_imported() -> None:
    """Not later, inside a step; in a process of its own, as a user meets it."""
    code = (
        "from trl import GRPOTrainer\n"
        "def _prepare_inputs(self, batches): ...\n"
        "GRPOTrainer._prepare_inputs = _prepare_inputs\n"
        "import tether.integrations.trl\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "MissingDependencyError" in result.stderr
    assert "_prepare_inputs takes (self, generation_batch, ...); found (self, batches)" in result.stderr
    assert "_prepare_inputs: every entry of a batch of rollouts is shuffled" in result.stderr
    # Python 3.13 has the source of what was typed in.
    assert "whether it does cannot be read" in result.stderr or "gone: if self._step %" in result.stderr


@pytest.mark.parametrize(("package", "newer"), [("trl", "1.99.0"), ("transformers", "5.99.0.dev0")])
def test_a_newer_version_with_everything_in_place_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, package: str, newer: str
) -> None:
    monkeypatch.setattr(importlib.import_module(package), "__version__", newer)
    with pytest.warns(TetherWarning, match=rf"tested with {package} .* this is {newer}\. Everything"):
        trl_seam.check()


@pytest.mark.parametrize(
    ("version", "within"),
    [("1.13.9", False), ("1.14", True), ("1.16.0.dev1", True), ("1.16.1", False), ("main", False)],
)
def test_versions_are_ordered_as_versions(version: str, within: bool) -> None:
    assert seams.Tested("trl", "1.14.0", "1.16.0").covers(version) is within


class _OnlyAccelerator:
    class accelerator:
        autocast = torch.no_grad


def test_scoring_for_an_older_trl_is_that_of_the_logits() -> None:
    """Log-probabilities and entropies of counted tokens against a float64 softmax, whole and in chunks."""
    model = make_tiny_model().double()
    add_sparse_head(model, 0.7, _at_hand)
    ids = torch.randint(0, 29, (5, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[1, -2:] = 0
    with torch.no_grad():
        rows = (model(input_ids=ids, attention_mask=mask).logits[:, -5:-1] / 0.7).log_softmax(-1)
    counted = mask[:, -4:] > 0
    expected = rows.gather(-1, ids[:, -4:, None])[..., 0]
    for batch_size in (None, 2):
        evaluation = Evaluation(model, {"support_top_k": 3})
        log_probs, entropy, aux = trl_seam.score_with_labels(
            _OnlyAccelerator, evaluation, ids, mask, 4, batch_size=batch_size, compute_entropy=True
        )
        assert aux is None
        assert entropy is not None
        bound = 64 * torch.finfo(torch.float64).eps * rows.abs().max()
        assert (log_probs - expected)[counted].abs().max() <= bound
        assert (entropy + (rows.exp() * rows).sum(-1))[counted].abs().max() <= bound
        assert not log_probs[~counted].any()


def _at_hand(*_: Any) -> Any:
    return contextlib.nullcontext()


def test_scoring_goes_by_what_trl_does_and_not_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = object()
    trl_seam.asks_with_labels.cache_clear()
    monkeypatch.setattr(trl_seam, "_ASKS_WITH_LABELS", [("fact", "trl:GRPOTrainer._compute_loss", ["def"])])
    assert trl_seam.scoring_of(None, theirs) is theirs  # type: ignore[arg-type]
    trl_seam.asks_with_labels.cache_clear()
    monkeypatch.setattr(
        trl_seam, "_ASKS_WITH_LABELS", [("fact", "trl:GRPOTrainer._compute_loss", ["what was never there"])]
    )
    assert trl_seam.scoring_of(None, theirs) is not theirs  # type: ignore[arg-type]
    monkeypatch.undo()
    trl_seam.asks_with_labels.cache_clear()


def test_a_trl_that_scores_in_a_third_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def scored_otherwise(self: Any, model: Any, *args: Any) -> Any: ...

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", scored_otherwise)
    monkeypatch.delattr(GRPOTrainer, "_full_logits_logps", raising=False)
    with pytest.raises(MissingDependencyError, match="called with labels, once for each chunk"):
        trl_seam.check()


def test_the_asynchronous_trainer_names_what_its_trl_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And that the other one runs; where nothing is missing, nothing is said."""
    folded = "trl.experimental.async_grpo.packing:TreeRow"
    if not trl_seam.moved_async():
        trl_seam.check_async()
        monkeypatch.setitem(trl_seam.ASYNC_SIGNATURES, f"{folded}.never", ["..."])
    with pytest.raises(
        MissingDependencyError, match=rf"(?s)as of 1\.16.*{folded}.*TROLLTrainer runs"
    ) as caught:
        trl_seam.check_async()
    assert f"this is {trl.__version__}" in str(caught.value)
