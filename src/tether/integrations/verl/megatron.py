"""verl's Megatron engine with TROLL: experimental, as it never ran; what it stands on is tested on CPU."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron import MegatronEngineWithLMHead

from tether.integrations.verl.engines import TROLLEngineMixin
from tether.integrations.verl.layout import Partition
from tether.integrations.verl.settings import MODEL_TYPE
from tether.integrations.verl.vocabulary import refuse_megatron_settings, vocabulary_partition


@EngineRegistry.register(model_type=MODEL_TYPE, backend="megatron")
class TROLLMegatronEngine(TROLLEngineMixin, MegatronEngineWithLMHead):
    """The logits of a position lie in columns on the processes of a tensor-parallel group, and stay there."""

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_config, engine_config, *args, **kwargs)
        if self._settings is not None:
            refuse_megatron_settings(engine_config)

    def _partition(self) -> Partition:
        return vocabulary_partition(
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )

    def _calls(self) -> int:
        return int(self.lr_scheduler.num_steps)
