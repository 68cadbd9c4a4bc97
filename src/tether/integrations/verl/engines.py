"""verl's training engines with TROLL in them: found by `model.model_type`, otherwise what they were."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.ulysses import (
    get_ulysses_sequence_parallel_rank,
    get_ulysses_sequence_parallel_world_size,
)
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss

from tether.errors import ConfigError
from tether.integrations.dropout import warn_of_dropout
from tether.integrations.exact_head import HeadSnapshot
from tether.integrations.one_pass_head import say_once
from tether.integrations.verl.head import HiddenStatesHead
from tether.integrations.verl.layout import Partition, refuse_padded_batch
from tether.integrations.verl.losses import RecordOldPolicy, ScorePolicy, TROLLLoss, refuse_missing_old_policy
from tether.integrations.verl.one_pass import obstacle
from tether.integrations.verl.sampler_clock import Lags
from tether.integrations.verl.sampler_views import (
    SamplerHiddenView,
    SamplerKept,
    SamplerLogitsView,
    refuse_scoring,
)
from tether.integrations.verl.settings import (
    LOSS_MODE,
    MODEL_TYPE,
    USE_BUCKET,
    TROLLPolicyLossConfig,
    same_settings,
    take_pending_settings,
)
from tether.integrations.verl.step_back import MeasureKL, NetworkBound
from tether.integrations.verl.store import OldPolicyStore
from tether.integrations.verl.views import HiddenView, LogitsView, View

_log = logging.getLogger(__name__)

_NO_LAYERS = "Use a model or an adapter without them (lora_dropout 0 where it was made)."
_NO_RATES = "Set +actor_rollout_ref.model.override_config.{setting}=0.0."


class TROLLEngineMixin:
    """Put before one of verl's language-model engines: records the old policy and projects on it.

    Two methods of the engine are overridden, each around a call of the original. Anything that is not
    TROLL's (another loss mode, the reference policy, scoring with a loss) passes through.
    """

    engine_config: Any
    module: Any

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        # verl found this class by the name; what it builds is an ordinary language model.
        model_config.model_type = "language_model"
        super().__init__(model_config, engine_config, *args, **kwargs)  # type: ignore[call-arg]
        self._reference_pass = False
        self._updates = 0  # that moved the weights, since the trainer's last call of update_actor ended
        self._made: dict[int, int] = {}  # in each of its calls, by how many came before it
        self._settings: TROLLPolicyLossConfig | None = None
        self._network: NetworkBound | None = None
        if not engine_config.forward_only:
            settings = take_pending_settings()
            if settings is not None and settings.loss_mode == LOSS_MODE:
                self._settings = settings
                _refuse_settings(engine_config)
                self._refuse_support(settings.troll_support)

    def initialize(self) -> None:
        """Build the model, and what TROLL needs of it."""
        super().initialize()  # type: ignore[misc]
        if self._settings is not None:
            warn_of_dropout(self.module, _NO_LAYERS, _NO_RATES)
            self._store = self._make_store(self._settings.troll_old_store == "local")

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        """One optimiser step; with TROLL's loss on the projected policy."""
        projects = _asks_for_troll(loss_function)
        if projects:
            loss_function = self._projecting(data, loss_function)
        stepped = super().train_batch(data, loss_function)  # type: ignore[misc]
        if projects and self._network is not None:
            self._network.add(data)
            if tu.get_non_tensor_data(data, "update_lr_scheduler", default=False):  # the call's last
                stepped["metrics"].update(self._network.enforce())
        return stepped

    def optimizer_step(self) -> float:
        """One step; verl leaves the weights alone where the gradient is not finite, and they get no older."""
        norm: float = super().optimizer_step()  # type: ignore[misc]
        self._updates += math.isfinite(norm)
        return norm

    def lr_scheduler_step(self) -> Any:
        """The end of a call of update_actor: verl steps the schedule once in each, and saves it."""
        self._made[self._calls()], self._updates = self._updates, 0
        return super().lr_scheduler_step()  # type: ignore[misc]

    def infer_batch(self, data: TensorDict, loss_function: Callable[..., Any] | None = None) -> Any:
        """Score a batch; if it is fresh, keep the policy's distributions beside the log-probabilities."""
        if loss_function is not None and _asks_for_troll(loss_function):
            loss_function = self._projecting(data, loss_function)
        elif loss_function is None and self._records(data):
            assert self._settings is not None
            refuse_padded_batch(data)
            if self._settings.around_sampler:
                refuse_scoring()
            with self._store.recording():
                recording = RecordOldPolicy(self._view(data), self._partition(), self._store)
                scored = super().infer_batch(data, recording)  # type: ignore[misc]
                self._store.head = self._snapshot()
                if self._network is not None:
                    self._network.record()
            return scored
        elif self._reference_pass and loss_function is None:
            loss_function = self._scoring(data)
        return super().infer_batch(data, loss_function)  # type: ignore[misc]

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """All micro-batches of a batch; where TROLL asked for them, with what its view needs to see."""
        watched: AbstractContextManager[Any] = nullcontext()
        if isinstance(loss_function, ScorePolicy | TROLLLoss):
            data = data.copy()  # so that what the seam says is not said of the batch afterwards
            tu.assign_non_tensor(data, **loss_function.view.seam)
            watched = loss_function.view.watching()
        with watched:
            return super().forward_backward_batch(data, loss_function, forward_only)  # type: ignore[misc]

    @contextmanager
    def _reference(self) -> Iterator[None]:
        with super().disable_adapter():  # type: ignore[misc]
            self._reference_pass = True
            try:
                yield
            finally:
                self._reference_pass = False

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Without its LoRA adapter the actor is the reference policy, of which nothing is recorded."""
        return self._reference()

    def _records(self, data: TensorDict) -> bool:
        """Whether this is the pass that scores fresh rollouts with the policy that made them."""
        return self._settings is not None and not self._reference_pass and not self._store.knows(data)

    def _projecting(self, data: TensorDict, loss_function: Callable[..., Any]) -> TROLLLoss:
        settings = loss_function.keywords["config"].policy_loss  # type: ignore[attr-defined]
        if self._settings is None or not same_settings(settings, self._settings):
            raise ConfigError(
                "The loss asks for TROLL with other settings than this engine was built with. Set "
                "actor_rollout_ref.actor.policy_loss._target_="
                "tether.integrations.verl.TROLLPolicyLossConfig, and make the actor's configuration before "
                "the actor."
            )
        kept = SamplerKept() if settings.around_sampler else self._store
        refuse_missing_old_policy(data, kept)
        lags = self._lags(data) if settings.around_sampler else None
        reason = self._obstacle()
        say_once(self, _log, reason)
        return TROLLLoss(
            loss_function, settings, self._view(data, lags), self._partition(), kept, lags,
            tokens=self._counted(data), in_one_pass=reason is None,
        )  # fmt: skip

    def _counted(self, data: TensorDict) -> int:
        """Response tokens of a mini-batch on all workers; verl also counts those it has rejected since."""
        counted = (data["response_mask"].values() > 0).sum().to(get_device_id())
        torch.distributed.all_reduce(counted, group=self.get_data_parallel_group())  # type: ignore[attr-defined]
        return int(counted)

    def _scoring(self, data: TensorDict) -> ScorePolicy | None:
        """What scores without logits, if this engine can."""
        return None

    def _obstacle(self) -> str | None:
        """Why the loss is not computed in one pass over the head, if it is not."""
        assert self._settings is not None
        _, size = self._partition().sequence()
        scales_loss = getattr(self, "scaler", None) is not None
        return obstacle(self._settings, sequence_parallel=size, scales_loss=scales_loss)

    def _lags(self, data: TensorDict) -> Lags:
        by_sequence = self._settings is not None and self._settings.troll_region == "sequence"
        group = self.get_data_parallel_group()  # type: ignore[attr-defined]
        return Lags(data, self._calls(), self._updates, self._made, by_sequence=by_sequence, group=group)

    def _calls(self) -> int:
        """How often the trainer has called update_actor, in all of a training that was resumed."""
        return int(self.lr_scheduler.last_epoch)  # type: ignore[attr-defined]

    def _view(self, data: TensorDict, lags: Lags | None = None) -> View:
        assert self._settings is not None
        if lags is not None:
            return SamplerLogitsView(self._settings, self._partition(), lags=lags)
        return LogitsView(self._settings, self._partition())

    def _make_store(self, local: bool, *, keeps_head: bool = False) -> OldPolicyStore:
        worker = self.get_data_parallel_rank()  # type: ignore[attr-defined]
        return OldPolicyStore(local, worker, keeps_head=keeps_head)

    def _snapshot(self) -> HeadSnapshot | None:
        """What is kept of the LM head of the policy that was recorded."""
        return None

    def _refuse_support(self, support: str) -> None:
        """Refuse a support this engine does not give."""
        if support == "exact":
            raise ConfigError(
                "policy_loss.troll_support=exact reads hidden states and the LM head of verl's FSDP2 engine. "
                f"Set actor_rollout_ref.actor.strategy=fsdp2, or {USE_BUCKET}."
            )

    def _partition(self) -> Partition:
        raise NotImplementedError


@EngineRegistry.register(model_type=MODEL_TYPE, backend=["fsdp", "fsdp2"], device=["cuda", "npu"])
class TROLLFSDPEngine(TROLLEngineMixin, FSDPEngineWithLMHead):
    """verl's FSDP engine (both versions) with TROLL, exact support on FSDP2 alone."""

    _head: HiddenStatesHead | None = None

    def initialize(self) -> None:
        """Build the model, and what TROLL needs of it."""
        super().initialize()
        if self._settings is not None and self._settings.troll_step_back is not None:
            self._network = NetworkBound(self.module, self._settings, self._measure)

    def _make_store(self, local: bool, *, keeps_head: bool = False) -> OldPolicyStore:
        if self._settings is not None and self._settings.troll_support == "exact":
            self._head = HiddenStatesHead(self.module, self.engine_config.reshard_after_forward)
            # Handles also say which of an update's sequences a step back has measured.
            keeps_head = self._head.trained or self._settings.troll_step_back is not None
        return super()._make_store(local, keeps_head=keeps_head)

    def _view(self, data: TensorDict, lags: Lags | None = None) -> View:
        if self._head is None:
            return super()._view(data, lags)
        assert self._settings is not None
        _refuse_squares(data)
        with_entropy = tu.get_non_tensor_data(data, "calculate_entropy", default=False)
        temperature = one_temperature(data["temperature"])
        known = (self._settings, self._partition(), self._head, temperature, self._store)
        if lags is not None:
            return SamplerHiddenView(*known, with_entropy=with_entropy, lags=lags)
        return HiddenView(*known, with_entropy=with_entropy)

    def _scoring(self, data: TensorDict) -> ScorePolicy | None:
        return None if self._head is None else ScorePolicy(self._view(data), self._partition())

    def _snapshot(self) -> HeadSnapshot | None:
        return None if self._head is None else self._head.snapshot()

    def _measure(self, data: TensorDict) -> list[Tensor]:
        """KL(new || old) of a mini-batch's tokens here; as in the old pass, without dropout."""
        view = self._view(data)
        assert isinstance(view, HiddenView)
        measuring = MeasureKL(view, self._partition(), self._store)
        self.module.eval()
        try:
            self.forward_backward_batch(data, measuring, forward_only=True)
        finally:
            self.module.train()
        return measuring.kl

    def _refuse_support(self, support: str) -> None:
        if self.engine_config.strategy != "fsdp2":
            super()._refuse_support(support)

    def _partition(self) -> Partition:
        return Partition(sequence=_ulysses_shard, vocabulary=lambda columns: None)


def one_temperature(temperature: Any) -> float:
    """The sampling temperature of a batch.

    Raises:
        ConfigError: sequences of one batch with temperatures of their own.
    """
    if not isinstance(temperature, Tensor):
        return float(temperature)
    values = temperature.flatten().unique().tolist()
    if len(values) != 1:
        raise ConfigError(
            "policy_loss.troll_support=exact needs one sampling temperature a batch, found "
            f"{len(values)} from {min(values):g} to {max(values):g}. Set {USE_BUCKET}."
        )
    return float(values[0])


def _refuse_squares(data: TensorDict) -> None:
    """Refuse what verl's engine would compute of hidden states, taking them for logits."""
    if tu.get_non_tensor_data(data, "calculate_sum_pi_squared", default=False):
        raise ConfigError(
            "actor_rollout_ref.actor.calculate_sum_pi_squared=True asks verl for sums over logits, which "
            f"policy_loss.troll_support=exact never forms. Set it to False, or {USE_BUCKET}."
        )


def _ulysses_shard() -> tuple[int, int]:
    size = get_ulysses_sequence_parallel_world_size()
    return (get_ulysses_sequence_parallel_rank() if size > 1 else 0), size


def _asks_for_troll(loss_function: Callable[..., Any]) -> bool:
    """Whether this is verl's actor loss with TROLL's policy loss in it."""
    config = getattr(loss_function, "keywords", {}).get("config")
    policy_loss = getattr(config, "policy_loss", None)
    if policy_loss is None or policy_loss.get("loss_mode") != LOSS_MODE:
        return False
    assert isinstance(loss_function, partial)
    if loss_function.func is not ppo_loss:
        _refuse_distillation()
    return True


def _refuse_distillation() -> None:
    raise ConfigError(
        "TROLL and top-K distillation use the same hook of verl's engine, one at a time. Set "
        "distillation.enabled=False, or a policy_loss.loss_mode other than troll."
    )


def _refuse_settings(engine_config: Any) -> None:
    """Refuse what would keep logits, or hidden states in their place, from the projection."""
    if engine_config.use_fused_kernels:
        raise ConfigError(
            "actor_rollout_ref.model.use_fused_kernels=True computes the sampled tokens' log-probabilities "
            "inside the model, out of the projection's reach. Set it to False: under troll_support=exact no "
            "logits are formed either."
        )
    if engine_config.pad_to_length:
        raise ConfigError(
            "actor_rollout_ref.actor.pad_to_length=True pads the packed sequence, which verl's logits hook "
            "does not support. Set it to False."
        )
