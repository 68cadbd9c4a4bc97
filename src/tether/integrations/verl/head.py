"""The engine's LM head, handing over hidden states in the logits' place, and a copy of it as it was."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tether.errors import ConfigError, InvalidInputError
from tether.integrations.exact_head import HeadSnapshot, head_transform, whole
from tether.integrations.verl.settings import USE_BUCKET


class HiddenStatesHead:
    """An LM head on FSDP2 that returns its input while `handing_over`, so that no logits are formed.

    verl's engine then takes hidden states for logits all the way to the loss function. Meanwhile the unit of
    FSDP2 that holds the head stays gathered, once for all micro-batches, so that the loss function can
    multiply with the very weights the forward pass would have used: in the engine's precision, and with
    FSDP2's own reduction of their gradient.
    """

    def __init__(self, module: Any, reshard_after_forward: bool) -> None:
        model = module.get_base_model() if hasattr(module, "get_base_model") else module
        head = model.get_output_embeddings()
        _refuse_model(model, head)
        if not isinstance(module, FSDPModule):
            raise ConfigError(
                "policy_loss.troll_support=exact reads the LM head from FSDP2, and this engine has a "
                f"{type(module).__name__}. Set actor_rollout_ref.actor.strategy=fsdp2, or {USE_BUCKET}."
            )
        self._head = head
        self._wrap = _wrapping(head)
        self._unit: FSDPModule = head if isinstance(head, FSDPModule) else module
        self._reshard_after_forward = bool(reshard_after_forward)
        self._handed: Tensor | None = None
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._dtype: torch.dtype | None = None
        self._old: tuple[Tensor | None, Tensor | None] | None = None

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """For the micro-batches of one pass."""
        wrapped = self._head.__dict__.get("forward")
        self._head.forward = self._hand_over
        self._wrap(self._head)
        self._unit.set_reshard_after_forward(False, recurse=False)
        self._unit.set_reshard_after_backward(False, recurse=False)
        try:
            yield
        finally:
            del self._head.forward
            if wrapped is not None:
                self._head.forward = wrapped
            self._handed = self._weight = self._bias = self._old = None
            self._unit.set_reshard_after_forward(self._reshard_after_forward, recurse=False)
            self._unit.set_reshard_after_backward(True, recurse=False)
            # Before the optimiser steps: it changes what every process holds, not what was gathered.
            self._unit.reshard()

    def _hand_over(self, hidden: Tensor) -> Tensor:
        self._weight, self._bias, self._handed = self._head.weight, self._head.bias, hidden
        self._dtype = self._weight.dtype
        return hidden.clone()  # FSDP2 hooks onto what comes out, and warns of views

    def weights(self, arrived: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weights the hidden states would have met, [V, D] and [V].

        Args:
            arrived: what the loss function got of a micro-batch, [positions, D].
            lengths: of its sequences, [B].

        Raises:
            ConfigError: the model went round its head, or changed what came out of it, as where it
                soft-caps logits: that would have been done to hidden states.
            InvalidInputError: hidden states that are NaN.
        """
        handed, weight = self._handed, self._weight
        self._handed = None
        if handed is None or weight is None:
            raise ConfigError(
                "The model's forward pass never called its LM head, whose input the exact trust region "
                f"needs. Set {USE_BUCKET}."
            )
        if handed.shape[0] > 1:
            width = torch.arange(handed.shape[1], device=handed.device)
            handed = handed[width < lengths.to(handed.device)[:, None]]
        handed = handed.reshape(-1, handed.shape[-1])
        if handed.shape != arrived.shape or not torch.equal(handed, arrived.to(handed.dtype)):
            _refuse_nan(handed)
            raise ConfigError(
                "Something between the model's LM head and the loss changes logits (a scale, a soft cap, a "
                f"mask), and would have changed hidden states instead. Set {USE_BUCKET}."
            )
        return weight, self._bias

    @property
    def trained(self) -> bool:
        """Whether updates change it, so that the old policy's has to be kept."""
        return any(parameter.requires_grad for parameter in self._head.parameters())

    def snapshot(self) -> HeadSnapshot | None:
        """The head as it is now, sharded as it is, in the last forward pass's precision; None if frozen."""
        if not self.trained:
            return None
        weight, bias = self._head.weight, self._head.bias
        assert self._dtype is not None
        return HeadSnapshot(
            weight.detach().to(self._dtype, copy=True),
            None if bias is None else bias.detach().to(self._dtype, copy=True),
        )

    def gathered(self, old: HeadSnapshot | None, device: Any) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias of a snapshot, gathered once a pass: every process asks in each micro-batch."""
        if old is None:
            return None, None
        if self._old is None:
            self._old = whole(old.weight.to(device)), None if old.bias is None else whole(old.bias.to(device))
        return self._old


def snapshot_bytes(snapshot: HeadSnapshot | None) -> int:
    """What this process holds of it."""
    if snapshot is None:
        return 0
    parts = (snapshot.weight, snapshot.bias)
    return sum(_local(part).nbytes for part in parts if part is not None)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _wrapping(head: Any) -> Callable[[Any], None]:
    """Does to a head's forward again what was done to it.

    verl's activation offload replaces the forward of each unit of FSDP2 and counts their calls.

    Raises:
        ConfigError: something else has replaced it.
    """
    wrapped = head.__dict__.get("forward")
    if wrapped is None:
        return lambda head: None
    handler = inspect.getclosurevars(wrapped).nonlocals.get("handler") if inspect.ismethod(wrapped) else None
    if handler is None:
        raise ConfigError(
            f"Something has replaced the forward of the LM head ({wrapped!r}), which "
            f"policy_loss.troll_support=exact replaces during its passes. Leave it out, or set {USE_BUCKET}."
        )
    wrap: Callable[[Any], None] = handler.wrap_module_forward_method
    return wrap


def _refuse_nan(hidden: Tensor) -> None:
    nan = hidden.isnan().any(-1)
    if bool(nan.any()):
        raise InvalidInputError(
            f"{int(nan.sum())} of {nan.numel()} rows of hidden states hold NaN. Look for overflow in the "
            "model (float16?) or a learning rate that destroyed it."
        )


def _refuse_model(model: Any, head: Any) -> None:
    """Refuse a head that is more than a matrix, and a model that does more with what comes out of it."""
    if head is None or type(head).forward is not torch.nn.Linear.forward:
        kind = "no LM head" if head is None else f"an LM head of type {type(head).__name__}"
        raise ConfigError(
            "policy_loss.troll_support=exact multiplies hidden states with the LM head itself, and the model "
            f"has {kind}. Leave lm_head out of actor_rollout_ref.model.target_modules, or set {USE_BUCKET}."
        )
    scale, softcap = head_transform(model.config.get_text_config())
    if scale != 1.0 or softcap is not None:
        found = f"scales its logits by {scale}" if softcap is None else f"soft-caps its logits at {softcap}"
        raise ConfigError(
            "policy_loss.troll_support=exact takes logits from the LM head alone, and "
            f"{type(model).__name__} {found} afterwards, inside its forward pass. Set {USE_BUCKET}."
        )
