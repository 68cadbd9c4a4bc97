"""What parallel engines hand to the losses, without a model: sequences or the vocabulary in pieces.

First verl's own treatment of a model's output under Ulysses sequence parallelism.

Attention over a cut sequence needs flash attention, which no CPU has. What comes after the model does not:
each rank has the logits of its slice of the packed sequence, and verl calls the loss function with them.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from actor import NO_CLIP, VOCABULARY, Rollouts, acting, jagged, unclipped
from verl.utils.ulysses import set_ulysses_sequence_parallel_group, ulysses_pad_and_slice_inputs
from verl.workers.config import FSDPActorConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested

from tether.integrations.verl.engines import _ulysses_shard
from tether.integrations.verl.layout import Partition
from tether.integrations.verl.losses import RecordOldPolicy, TROLLLoss
from tether.integrations.verl.store import OldPolicyStore
from tether.integrations.verl.views import _OPEN_SEAM, HiddenView, LogitsView
from tether.integrations.verl.vocabulary import vocabulary_partition

PARTITION = Partition(sequence=_ulysses_shard, vocabulary=lambda columns: None)


class Head:
    """Stands in for an engine whose model has just run; this rank has the logits of its slice."""

    def __init__(self, group: Any) -> None:
        self.size = 1 if group is None else torch.distributed.get_world_size(group)
        self.engine = SimpleNamespace(
            use_ulysses_sp=group is not None,
            engine_config=SimpleNamespace(entropy_checkpointing=False),
        )
        self.engine._gather_and_unpad_packed = partial(
            FSDPEngineWithLMHead._gather_and_unpad_packed, self.engine
        )
        set_ulysses_sequence_parallel_group(group)

    def run(self, logits: torch.Tensor, data: Any, loss_function: Any) -> tuple[Any, Any]:
        """verl's outputs and the loss; `loss_function` as its engine would call it."""
        ids = data["input_ids"].values()[None]
        rolled, pad = torch.roll(ids, -1, 1), 0
        if self.size > 1:
            rolled, _, pad = ulysses_pad_and_slice_inputs(rolled, None, self.size)
            rank, _ = _ulysses_shard()
            padded = torch.nn.functional.pad(logits, (0, 0, 0, pad))
            logits = padded.chunk(self.size)[rank]
        arguments = {
            "input_ids_rmpad_rolled": rolled[0],
            "temperature_rmpad": torch.ones(rolled.shape[1]),
            "pad_size": pad,
            "temperature_is_one": True,
        }
        output = SimpleNamespace(logits=logits[None])
        model_output = FSDPEngineWithLMHead.prepare_model_outputs(
            self.engine, output, arguments, data, loss_function
        )
        return model_output, loss_function(model_output=model_output, data=data, dp_group=None)


def _config(policy_loss: Any, **settings: Any) -> FSDPActorConfig:
    return FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, use_dynamic_bsz=False, ppo_micro_batch_size_per_gpu=4,
        policy_loss=policy_loss, **settings,
    )  # fmt: skip


def split_vocabulary(group: Any, rank: int) -> tuple[float, torch.Tensor, torch.Tensor]:
    """TROLL's loss, its gradient in this rank's columns and the old ids, as Megatron's engine would call it.

    The packed layout is Megatron's, each sequence padded to a multiple of the group's size; a group of None
    has one rank and no padding.
    """
    size = 1 if group is None else torch.distributed.get_world_size(group)
    rollouts, partition = Rollouts.scripted(), vocabulary_partition(group, rank, size)
    lengths = [len(p) + len(r) for p, r in zip(rollouts.prompts, rollouts.responses, strict=True)]
    generator = torch.Generator().manual_seed(7)
    columns = VOCABULARY + 1  # even
    logits = [torch.randn(2, length, columns, generator=generator) for length in lengths]
    widths = [length + -length % size for length in lengths]
    packed = torch.cat(
        [torch.nn.functional.pad(x, (0, 0, 0, w - x.shape[1])) for x, w in zip(logits, widths, strict=True)],
        1,
    )
    mine = packed.chunk(size, -1)[rank]
    old, new = mine[0], (mine[0] + 0.2 * mine[1]).requires_grad_()

    def outputs(values: dict[str, torch.Tensor]) -> dict[str, Any]:
        """From the padded layout to the jagged tensors of verl's outputs."""
        rows = {name: value[0].split(widths) for name, value in values.items()}
        return {n: jagged([part[:k] for part, k in zip(r, lengths, strict=True)]) for n, r in rows.items()}

    settings = acting(troll_top_k=8, troll_support="bucket")
    view, store = LogitsView(settings, partition), OldPolicyStore(False, 0, keeps_head=False)
    record = RecordOldPolicy(view, partition, store)
    scored = outputs(record(student_logits=old[None], data=rollouts.batch(), data_format="thd"))
    record(model_output=scored, data=rollouts.batch())
    fields = _fields(scored, rollouts)
    data = rollouts.batch(fields, dp_size=1, batch_num_tokens=21, global_batch_size=4)
    ppo = partial(ppo_loss, config=_config(settings))
    loss_function = TROLLLoss(ppo, settings, view, partition, store, tokens=21)
    seen = outputs(loss_function(student_logits=new[None], data=data, data_format="thd"))
    loss, _ = loss_function(model_output=seen, data=data)
    (gradient,) = torch.autograd.grad(loss, new)
    parts = [part[:length] for part, length in zip(gradient.split(widths), lengths, strict=True)]
    return loss.item(), torch.cat(parts), fields["troll_old_ids"].values()


def _fields(scored: dict[str, torch.Tensor], rollouts: Rollouts) -> dict[str, torch.Tensor]:
    """What an update needs of the old pass."""
    fields = {name: value for name, value in scored.items() if name.startswith("troll_old_")}
    fields["old_log_probs"] = response_from_nested(scored["log_probs"], jagged(rollouts.masks))
    fields["advantages"] = jagged(rollouts.advantages)
    return fields


class Weights:
    """Stands in for the engine's LM head: the weights and no FSDP."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.requires_grad_()

    def weights(self, *_: Any) -> tuple[torch.Tensor, None]:
        return self.weight, None

    def gathered(self, *_: Any) -> tuple[None, None]:
        return None, None


def losses_and_gradients(group: Any) -> dict[str, tuple[float, torch.Tensor]]:
    """Losses of scripted rollouts, and their gradients in what the engine hands over, [nnz, V or D].

    verl's unclipped one and TROLL's of logits; TROLL's of hidden states, whose record stays local or travels.
    """
    rollouts, head = Rollouts.scripted(), Head(group)
    later = rollouts.part(slice(1, 4))  # so that slices of the update are others than those of the old pass
    generator = torch.Generator().manual_seed(7)
    lengths = [len(p) + len(r) for p, r in zip(rollouts.prompts, rollouts.responses, strict=True)]
    hidden = torch.randn(sum(lengths), 16, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, 16, generator=generator, dtype=torch.float64)
    old = torch.randn(sum(lengths), VOCABULARY, generator=generator, dtype=torch.float64)
    noise = torch.randn(sum(lengths), VOCABULARY, generator=generator, dtype=torch.float64)
    counts = {"calculate_entropy": False, "dp_size": 1, "batch_num_tokens": 15, "global_batch_size": 3}
    results = {}
    for name, settings in (
        ("troll", acting(troll_top_k=8, troll_support="bucket")),
        ("exact local", acting(troll_top_k=8)),
        ("exact queue", acting(troll_top_k=8, troll_old_store="queue")),
        ("verl", unclipped()),
    ):
        store = OldPolicyStore(name != "exact queue", 0, keeps_head=False)
        view: Any = LogitsView(acting(troll_top_k=8, troll_support="bucket"), PARTITION)
        before, after = old, old + 0.2 * noise
        if name.startswith("exact"):
            view = HiddenView(settings, PARTITION, Weights(weight), 1.0, store)  # type: ignore[arg-type]
            before, after = hidden, hidden + 0.05 * noise[:, :16]
        with torch.no_grad(), store.recording():
            data = rollouts.batch(**counts, **_OPEN_SEAM)
            scored, _ = head.run(before, data, RecordOldPolicy(view, PARTITION, store))
        fields = {
            name: jagged(list(value.unbind()[1:4])) for name, value in _fields(scored, rollouts).items()
        }
        if name == "verl":
            data = later.batch(fields, **counts)
            loss_function: Any = partial(ppo_loss, config=_config(settings, **NO_CLIP))
        else:
            data = later.batch(fields, **counts, **_OPEN_SEAM)
            ppo = partial(ppo_loss, config=_config(settings))
            loss_function = TROLLLoss(ppo, settings, view, PARTITION, store, tokens=15)
        leaf = after[lengths[0] :].clone().requires_grad_()
        _, (loss, _) = head.run(leaf, data, loss_function)
        loss.backward()
        results[name] = (loss.item(), leaf.grad)
    set_ulysses_sequence_parallel_group(None)
    return results
