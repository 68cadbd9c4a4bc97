"""What the operations on LM heads and logits refuse, each in one wording."""

from __future__ import annotations

from torch import Tensor

from tether.errors import InvalidInputError
from tether.settings import check_support_size


def check_gather(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, top_k: int | None) -> None:
    """Refuse shapes `linear_log_probs` cannot work with, of a whole head or of a shard of it."""
    if hidden.dim() != 2 or ids.dim() != 2 or hidden.shape[0] != ids.shape[0]:
        raise InvalidInputError(
            f"linear_log_probs needs hidden [N, D] and ids [N, K], got {tuple(hidden.shape)} and "
            f"{tuple(ids.shape)}. Flatten batch and time, and keep the tokens that count."
        )
    check_weight(hidden, weight)
    check_bias("bias", bias, weight)
    if top_k is not None:
        check_support_size(top_k, 1.0)


def check_weight(hidden: Tensor, weight: Tensor) -> None:
    """Refuse a head that does not fit the hidden states, [N, D]."""
    # A ZeRO-3 head is empty at rest, so its shape can be judged only where it is whole.
    if weight.numel() and (weight.dim() != 2 or weight.shape[1] != hidden.shape[1]):
        raise InvalidInputError(
            f"weight must be [V, {hidden.shape[1]}] to fit hidden {tuple(hidden.shape)}, "
            f"got {tuple(weight.shape)}."
        )


def check_bias(name: str, bias: Tensor | None, weight: Tensor) -> None:
    """Refuse a bias that does not fit its head."""
    if bias is not None and weight.numel() and bias.shape != weight.shape[:1]:
        raise InvalidInputError(f"{name} must be [{weight.shape[0]}], got {tuple(bias.shape)}.")


def check_vocabulary_size(vocabulary_size: int | None, rows: int, whose: str = "weight") -> None:
    """Refuse to cut off more rows than a head has; 0 rows where it is empty at rest."""
    if vocabulary_size is not None and not 1 <= vocabulary_size <= (rows or vocabulary_size):
        raise InvalidInputError(
            f"vocabulary_size must lie in [1, {rows}], the rows of {whose}, got {vocabulary_size!r}."
        )


def signed(ids: Tensor) -> Tensor:
    """The ids in a type that has the empty slot's -1: in a byte, that is 255."""
    return ids if ids.dtype.is_signed else ids.long()
