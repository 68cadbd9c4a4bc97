"""How Megatron's tensor parallelism splits what the losses see; nothing here needs Megatron."""

from __future__ import annotations

from typing import Any

from tether.errors import ConfigError
from tether.integrations.verl.layout import Partition
from tether.integrations.verl.settings import LOSS_MODE
from tether.ops.shards import VocabularyShard


def vocabulary_partition(group: Any, rank: int, size: int) -> Partition:
    """Columns in the order of the ranks, equally many on each; sequences padded to multiples of `size`."""

    def shard(columns: int) -> VocabularyShard | None:
        return VocabularyShard(group, rank * columns, size * columns) if size > 1 else None

    return Partition(sequence=lambda: (0, 1), vocabulary=shard, alignment=size)


def refuse_megatron_settings(engine_config: Any) -> None:
    """Refuse layouts of the packed sequence that nobody has written the positions down for."""
    refused = {
        "context_parallel_size": engine_config.context_parallel_size > 1,
        "dynamic_context_parallel": engine_config.dynamic_context_parallel,
        "override_transformer_config.fp8": bool((engine_config.override_transformer_config or {}).get("fp8")),
    }
    for key, found in refused.items():
        if found:
            raise ConfigError(
                f"policy_loss.loss_mode={LOSS_MODE} does not support actor_rollout_ref.actor.megatron.{key}, "
                "which moves positions of the packed sequence. Leave it at its default, or use "
                "actor_rollout_ref.actor.strategy=fsdp2."
            )
