"""Exact support: hidden states in the logits' place, and the old policy where it was recorded."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cpu_platform
import pytest
import torch
from actor import (
    FLOAT64,
    LORA,
    Rollouts,
    acting,
    gradients,
    jagged,
    largest_difference,
    loss_afterwards,
    make_actor,
    parameters,
    save_tiny_model,
)
from dense import KL_BOUND, worst_gradient
from largest_tensor import largest_tensor
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3ForCausalLM
from verl.utils import activation_offload

from tether.errors import ConfigError, InvalidInputError, TetherError
from tether.integrations.verl.head import HiddenStatesHead
from tether.integrations.verl.store import HANDLE
from tether.ops import memory


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("store", ["local", "queue"])
@pytest.mark.parametrize(
    ("tied", "packed", "lora"),
    [(False, True, {}), (False, False, {}), (False, True, LORA), (True, True, {}), (True, False, LORA)],
    ids=["packed", "padded", "LoRA", "tied", "tied, padded, LoRA"],
)
def test_the_gradient_is_the_dense_one(
    model: Path, tied_model: Path, tied: bool, packed: bool, lora: dict[str, Any], store: str
) -> None:
    """At a temperature of its own, two updates away from the old policy, in two micro-batches."""
    folder, rollouts = tied_model if tied else model, Rollouts.scripted()
    rollouts.temperature = 1.4
    settings = acting(troll_kl_bound=KL_BOUND, troll_top_k=6, troll_old_store=store)
    actor = make_actor(
        folder, settings, packed=packed, model_settings=lora, engine_settings=FLOAT64,
        learning_rate=1e-2 if lora else 1e-3,
    )  # fmt: skip
    worst, projected = worst_gradient(folder, actor, rollouts, rollouts, lora)
    assert worst < 1e-6
    assert projected > 0.2


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_no_tensor_of_an_update_is_an_eighth_of_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """Whenever the loss is computed; the bucket, which needs logits, shows that they would be seen."""
    vocabulary, positions = 2**13, 512
    folder = save_tiny_model(tmp_path, vocabulary=vocabulary)
    monkeypatch.setattr(memory, "WORKSPACE_ELEMENTS", vocabulary * positions // 32)
    rollouts = Rollouts.long(positions // 32, prompt=8, response=24)
    shares: dict[str, list[float]] = {}
    for support, ways in (("exact", (nullcontext(), loss_afterwards())), ("bucket", (nullcontext(),))):
        actor = make_actor(
            folder, acting(troll_support=support), packed=packed, micro_batch=16, learning_rate=0.03
        )
        old = rollouts.score(actor)
        rollouts.update(actor, old)
        for way in ways:
            with largest_tensor() as found, way:
                metrics = rollouts.update(actor, old)
            assert metrics["actor/troll/projected"] > 0
            shares.setdefault(support, []).append(found.elements / (positions * vocabulary))
    assert max(shares["exact"]) < 1 / 8 < 1 <= min(shares["bucket"])


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_the_head_is_gathered_once_a_pass(
    model: Path, tied_model: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    """However many micro-batches; verl alone gathers it twice for each."""
    actor, rollouts = make_actor(tied_model if tied else model, acting(), micro_batch=1), Rollouts.scripted()
    shown, original = [], FSDPParamGroup._to_unsharded
    unit = actor.engine._head._unit

    def counting(group: Any) -> None:
        shown.extend([group] if unit in group.modules and not group.is_unsharded else [])
        original(group)

    monkeypatch.setattr(FSDPParamGroup, "_to_unsharded", counting)
    old = rollouts.score(actor)
    assert len(shown) == 1
    for _ in range(2):
        rollouts.update(actor, old)
    assert len(shown) == 3
    other = rollouts.batch(old, calculate_entropy=False, compute_loss=False)
    actor.infer_batch(other)  # not TROLL's: as verl has it again
    assert len(shown) == 7


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_in_half_precision_the_first_ratios_are_one(model: Path, micro_batch: int) -> None:
    """Old pass and update multiply the same bfloat16 hidden states with the same head, summed in float32."""
    half = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}
    actor = make_actor(model, acting(), engine_settings=half, micro_batch=micro_batch)
    rollouts = Rollouts.scripted()
    old = rollouts.score(actor)
    metrics = rollouts.update(actor, old)
    assert metrics["actor/troll/ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["actor/troll/kl_max"] < 1e-6
    assert metrics["actor/troll/certified"] == pytest.approx(1.0)
    assert rollouts.update(actor, old)["actor/troll/projected"] > 0


def test_certificates_spare_the_old_logits(model: Path) -> None:
    """All tokens in the first update, when nothing has moved; fewer afterwards."""
    actor, rollouts = make_actor(model, acting(troll_kl_bound=0.05)), Rollouts.scripted()
    old = rollouts.score(actor)
    shares = [rollouts.update(actor, old)["actor/troll/certified"] for _ in range(6)]
    assert shares[0] == pytest.approx(1.0)
    assert 0 < shares[-1] < 1


def test_the_costs_are_logged(model: Path) -> None:
    rollouts = Rollouts.scripted()
    sizes = {}
    for store in ("local", "queue"):
        actor = make_actor(model, acting(troll_old_store=store))
        metrics = rollouts.update(actor, rollouts.score(actor))
        sizes[store] = metrics["actor/troll/store_bytes"]
        assert metrics["actor/troll/record_seconds"] > 0
        assert metrics["actor/troll/projection_seconds"] > 0
        assert metrics["actor/troll/kl_projected_max"] <= 0.002 * (1 + 1e-3)
    head, tokens = 61 * 32 * 4, sum(int(mask.sum()) for mask in rollouts.masks)
    assert sizes["queue"] == head
    assert head + tokens * 32 * 4 < sizes["local"] < head + tokens * (32 * 4 + 65 * 8 + 16)


def test_a_frozen_head_is_not_copied(model: Path) -> None:
    actor, rollouts = (
        make_actor(model, acting(troll_old_store="queue"), model_settings=LORA),
        Rollouts.scripted(),
    )
    old = rollouts.score(actor)
    assert HANDLE not in old
    assert rollouts.update(actor, old)["actor/troll/store_bytes"] == 0


def test_parameters_and_optimiser_may_be_offloaded(model: Path) -> None:
    rollouts, results = Rollouts.scripted(), []
    for offload in (False, True):
        engine = {"param_offload": offload, "optimizer_offload": offload}
        actor = make_actor(model, acting(), engine_settings=engine)
        old = rollouts.score(actor)
        rollouts.update(actor, old)
        results.append((rollouts.update(actor, old)["loss"], gradients(actor)))
    assert results[0][0] == results[1][0]
    assert largest_difference(results[0][1], results[1][1]) == 0


class _Stream:
    def wait_stream(self, other: Any) -> None:
        pass


@pytest.fixture
def _streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl offloads activations on streams of their own, to page-locked memory; a CPU has neither."""
    device, handler = cpu_platform._DEVICE, activation_offload.SynchronizedGroupOffloadHandler
    offload = handler.offload
    for name, value in {
        "Stream": _Stream,
        "current_stream": lambda *_: _Stream(),
        "stream": lambda _: nullcontext(),
    }.items():
        monkeypatch.setattr(device, name, value, raising=False)
    monkeypatch.setattr(handler, "offload", staticmethod(lambda tensor: offload(tensor, pin_memory=False)))


@pytest.mark.usefixtures("_streams")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("way", [nullcontext, loss_afterwards])
def test_activations_may_be_offloaded(model: Path, checkpointing: bool, way: Any) -> None:
    """verl wraps the forward of each unit of FSDP2 for it, that of the head too, and counts their calls."""
    rollouts, found = Rollouts.scripted(), []
    for offload in (False, True):
        settings = {"enable_activation_offload": offload, "enable_gradient_checkpointing": checkpointing}
        actor = make_actor(model, acting(), model_settings=settings)
        before = actor.engine.module.lm_head.__dict__.get("forward")
        assert (before is not None) == offload
        with way():
            rollouts.update(actor, rollouts.score(actor))
        assert actor.engine.module.lm_head.__dict__.get("forward") is before
        # Without checkpoints verl 0.9.1 makes wrong gradients of these itself, whatever the loss.
        own = {name for name in gradients(actor) if "o_proj" in name and not checkpointing}
        found.append({name: value for name, value in gradients(actor).items() if name not in own})
    assert max(float(value.abs().max()) for value in found[0].values()) > 1e-3
    assert largest_difference(*found) < 1e-6


def test_a_head_whose_forward_was_replaced_otherwise_is_refused(model: Path) -> None:
    module = make_actor(model, acting()).engine.module
    module.lm_head.forward = lambda hidden: hidden
    with pytest.raises(ConfigError, match=r"replaced the forward of the LM head.*troll_support=bucket"):
        HiddenStatesHead(module, True)


def test_a_network_that_is_not_a_number_any_more_is_named_as_such(model: Path) -> None:
    """Not as a soft cap: NaN is not equal to itself."""
    actor, rollouts = make_actor(model, acting()), Rollouts.scripted()
    old = rollouts.score(actor)
    with torch.no_grad():
        actor.engine.module.model.layers[1].mlp.down_proj.weight.to_local()[0, 0] = torch.nan
    with pytest.raises(InvalidInputError, match=r"\d+ of \d+ rows of hidden states hold NaN.*learning rate"):
        rollouts.update(actor, old)


def test_a_run_killed_between_the_passes_scores_its_batch_again(model: Path, tmp_path: Path) -> None:
    """What the killed process recorded is gone, whatever a restored batch says."""
    rollouts = Rollouts.scripted()
    killed = make_actor(model, acting())
    old = rollouts.score(killed)
    rollouts.update(killed, old)
    killed.save_checkpoint(str(tmp_path / "checkpoint"), global_step=1)
    lost = rollouts.score(killed)
    for _ in range(2):
        rollouts.update(killed, lost)

    resumed = make_actor(model, acting())
    resumed.load_checkpoint(str(tmp_path / "checkpoint"))
    with pytest.raises(TetherError, match=r"scored before this worker started.*bypass_mode=False"):
        rollouts.update(resumed, lost)
    restored = rollouts.batch({HANDLE: lost[HANDLE]}, calculate_entropy=True, compute_loss=False)
    scored = resumed.infer_batch(restored)
    assert not torch.equal(scored[HANDLE].values(), lost[HANDLE].values())
    for _ in range(2):
        rollouts.update(resumed, {**lost, HANDLE: scored[HANDLE]})
    assert largest_difference(parameters(resumed), parameters(killed)) == 0


def test_a_handle_that_leads_nowhere_says_why(model: Path) -> None:
    actor, rollouts = make_actor(model, acting()), Rollouts.scripted()
    old = rollouts.score(actor)
    elsewhere = jagged([row + torch.tensor([0, 1, 0]) for row in old[HANDLE].unbind()])
    with pytest.raises(TetherError, match=r"worker 1 scored it, and it came to worker 0.*old_store=queue"):
        rollouts.update(actor, {**old, HANDLE: elsewhere})
    Rollouts.scripted(seed=2).score(actor)
    with pytest.raises(TetherError, match="a later batch was scored since"):
        rollouts.update(actor, old)


def test_fsdp1_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor\.strategy=fsdp2, or .*troll_support=bucket"):
        make_actor(model, acting(), engine_settings={"strategy": "fsdp"})


def test_a_soft_cap_is_refused(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=30.0,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"soft-caps its logits at 30\.0.*troll_support=bucket"):
        make_actor(tmp_path, acting())


def test_an_adapter_on_the_head_is_refused(model: Path) -> None:
    plain = Qwen3ForCausalLM.from_pretrained(model)
    adapted = get_peft_model(plain, LoraConfig(target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ConfigError, match=r"Leave lm_head out of .*target_modules, or .*bucket"):
        HiddenStatesHead(adapted, True)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_what_a_model_does_to_its_logits_is_noticed(model: Path, packed: bool) -> None:
    """Whatever its configuration says: it would be done to hidden states."""
    actor, rollouts = make_actor(model, acting(), packed=packed), Rollouts.scripted()
    hook = lambda module, arguments, output: setattr(output, "logits", output.logits * 2)  # noqa: E731
    actor.engine.module.register_forward_hook(hook)
    with pytest.raises(ConfigError, match=r"changes logits .*troll_support=bucket"):
        rollouts.score(actor)


def test_a_model_that_goes_round_its_head_is_noticed(model: Path) -> None:
    actor, rollouts = make_actor(model, acting()), Rollouts.scripted()
    actor.engine._head._head = SimpleNamespace()  # another than the model calls
    with pytest.raises(ConfigError, match="never called its LM head"):
        rollouts.score(actor)


def test_one_temperature_a_batch(model: Path) -> None:
    actor, rollouts = make_actor(model, acting()), Rollouts.scripted()
    rollouts.temperature = torch.full((4,), 1.3)  # type: ignore[assignment]
    scored = rollouts.score(actor)["old_log_probs"]
    rollouts.temperature = 1.3
    assert torch.equal(scored.values(), rollouts.score(actor)["old_log_probs"].values())
    rollouts.temperature = torch.tensor([1.0, 1.0, 1.0, 0.5])  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"one sampling temperature a batch, found 2 from 0\.5 to 1\."):
        rollouts.score(actor)
