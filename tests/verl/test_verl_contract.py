"""Every part of verl the plug-in stands on. After an upgrade, a failure here names what moved."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import verl.workers.engine_workers as engine_workers
from verl.trainer.distillation import distillation_ppo_loss
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import AggregationType
from verl.workers.utils.losses import ppo_loss

import verl
from tether.errors import MissingDependencyError
from tether.integrations.verl import environment, seam


def test_the_version_is_a_tested_one() -> None:
    assert environment.TESTED.covers(verl.__version__)


def test_nothing_has_moved() -> None:
    assert seam.moved() == []


def test_what_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter more, a line less, a field gone, a module that does not exist."""
    first = next(iter(seam.SIGNATURES))
    monkeypatch.setitem(seam.SIGNATURES, first, ["self", "batch"])
    monkeypatch.setitem(seam.SIGNATURES, "verl.gone:function", ["self"])
    fact, place, _ = seam.SOURCES[0]
    monkeypatch.setattr(seam, "SOURCES", [(fact, place, ["what was never there"])])
    monkeypatch.setitem(seam.FIELDS, "verl.workers.config:ActorConfig", {"never_a_field"})
    assert len(seam.moved()) == 4
    with pytest.raises(MissingDependencyError) as caught:
        environment.check_version("0.12.0")
    for words in (f"{environment.TESTED}, and this is 0.12.0", "takes (self, batch); found (self, data",
                  "found nothing of that name", "gone: what was never there", "no field never_a_field",
                  "pip install 'verl==0.9.1'"):  # fmt: skip
        assert words in str(caught.value)


def test_another_version_with_everything_in_place_is_warned_of() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        environment.check_version("0.9.7")
        environment.check_version(environment.TESTED.oldest)
    assert len(caught) == 1
    assert "this is 0.9.7. Everything the plug-in stands on is where it was" in str(caught[0].message)


def test_what_is_compared_by_identity_is_one_object() -> None:
    assert engine_workers.ppo_loss is ppo_loss
    assert engine_workers.distillation_ppo_loss is distillation_ppo_loss
    assert callable(omega_conf_to_dataclass)
    assert POLICY_LOSS_REGISTRY["vanilla"].__name__ == "compute_policy_loss_vanilla"
    assert {kind.value for kind in AggregationType} >= {"sum", "max"}


MEGATRON_FACTS = {
    "workers/engine/megatron/transformer_impl.py": [
        "logits_processor_func(student_logits=logits_bak, data=batch, data_format=data_format)",
        'if not distillation_only:\n            ret["log_probs"]',
        'data_format = "thd" if self.engine_config.use_remove_padding else "bshd"',
        "class MegatronEngineWithLMHead(MegatronEngine)",
    ],
    "models/mcore/util.py": [
        "align_size = tp_size * cp_size * cp_layout_factor",
        "pad_size = (align_size - seqlens_in_batch % align_size) % align_size",
    ],
}


@pytest.mark.parametrize("file", MEGATRON_FACTS)
def test_megatron_source(file: str) -> None:
    """Read, not imported: Megatron is not installed here."""
    source = (Path(verl.__file__).parent / file).read_text()
    missing = [line for line in MEGATRON_FACTS[file] if line not in source]
    assert not missing, f"{file}; gone: {missing}"
