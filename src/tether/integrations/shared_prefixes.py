"""What sequences begin with alike is computed once: the layout that packs a batch as trees of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, starmap, takewhile
from operator import eq

import torch
from torch import Tensor

from tether.errors import InvalidInputError

# Attention forms a square of a packed row's tokens and masks it: longer rows share more and mask more. In a
# row of so many tokens it takes as long as all else (a layer of width 576, on a processor, both passes).
_AS_LONG = 2048


@dataclass(frozen=True)
class RowLayout:
    """Where the tokens of padded rows [B, W] stand in packed rows [R, L]."""

    padded: tuple[Tensor, Tensor]
    """Row and column of each token in padded rows, [N] each."""
    packed: tuple[Tensor, Tensor]
    """The same in packed rows."""
    position_ids: Tensor
    """[R, L]: of a token, how many come before it in its sequence."""
    padded_shape: tuple[int, int]

    def pack(self, values: Tensor) -> Tensor:
        """Padded values [B, W, ...] as packed ones [R, L, ...]; zero where there is no token.

        Where sequences share a token, their values there must be alike, as ids are.
        """
        return _move(values, self.padded, self.packed, tuple(self.position_ids.shape))

    def unpack(self, values: Tensor) -> Tensor:
        """Packed values [R, L, ...] as padded ones [B, W, ...]; zero where there is padding."""
        return _move(values, self.packed, self.padded, self.padded_shape)

    @property
    def cost(self) -> float:
        """What a backbone computes for it, to compare layouts by."""
        rows, length = self.position_ids.shape
        return _cost(rows, length, self.padded_shape[0])


@dataclass(frozen=True)
class SharedLayout(RowLayout):
    """Where the tokens of padded rows [B, W] stand in packed rows [R, L] of distinct beginnings.

    Two sequences with the same first tokens, as all responses to one prompt and whatever a chat template
    puts before every prompt, have the same hidden states there in a causal model. A packed row holds each
    beginning once: the tokens are the nodes of a tree, and attend to those on their way from its root.

    Example:
        >>> ids = torch.tensor([[0, 5, 6, 7], [0, 5, 6, 8], [9, 5, 0, 0]])
        >>> mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0, 0]])
        >>> layout = SharedLayout.of(ids, mask)
        >>> layout.pack(ids)
        tensor([[5, 6, 7, 8, 9, 5]])
        >>> layout.position_ids
        tensor([[0, 1, 2, 2, 0, 1]])
        >>> layout.attention_mask[0, 0, 3].int()  # the 8 sees 5, 6 and itself
        tensor([1, 1, 0, 1, 0, 0], dtype=torch.int32)
        >>> layout.unpack(layout.pack(ids))
        tensor([[0, 5, 6, 7],
                [0, 5, 6, 8],
                [9, 5, 0, 0]])
    """

    attention_mask: Tensor
    """[R, 1, L, L] bool: which tokens are on the way to each, itself among them."""

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor) -> SharedLayout:
        """The layout of rows whose tokens are marked in `attention_mask`, both [B, W].

        Raises:
            InvalidInputError: the two differ in shape.
        """
        if input_ids.shape != attention_mask.shape or input_ids.dim() != 2:
            raise InvalidInputError(
                "Ids and attention mask to share by must be matrices [B, W] of one shape, got "
                f"{tuple(input_ids.shape)} and {tuple(attention_mask.shape)}."
            )
        mask = attention_mask.detach().cpu() != 0  # the layout is planned on the host
        ids = input_ids.detach().cpu()
        rows, columns = mask.nonzero(as_tuple=True)
        # Sequences that begin alike are neighbours, and so in the same tree.
        order = sorted((ids[row][mask[row]].tolist(), row) for row in range(mask.shape[0]))
        begun, lengths = _planted([tokens for tokens, _ in order])
        length = max(1, *lengths)
        place = torch.zeros((2, *mask.shape), dtype=torch.long)
        positions = torch.zeros((len(lengths), length), dtype=torch.long)
        seen = torch.eye(length, dtype=torch.bool).repeat(len(lengths), 1, 1)
        path = torch.zeros(0, dtype=torch.long)  # nodes of the sequence before, from the root on
        for (tokens, row), (tree, start, shared) in zip(order, begun, strict=True):
            new = slice(start, start + len(tokens) - shared)
            if shared:  # what their last common node sees, the new nodes see
                seen[tree, new] = seen[tree, path[shared - 1]]
            path = torch.cat((path[:shared], torch.arange(new.start, new.stop)))
            seen[tree, new, new] = torch.ones(2 * (len(path) - shared,), dtype=torch.bool).tril()
            positions[tree, new] = torch.arange(shared, len(path))
            place[0, row], place[1, row, mask[row]] = tree, path
        device = input_ids.device
        return cls(
            (rows.to(device), columns.to(device)),
            (place[0, rows, columns].to(device), place[1, rows, columns].to(device)),
            positions.to(device),
            (mask.shape[0], mask.shape[1]),
            seen[:, None].to(device),
        )


_Begun = list[tuple[int, int, int]]
"""Of each sequence its tree, its first node there, and how many before that it has in common."""


def _planted(sequences: list[list[int]]) -> tuple[_Begun, list[int]]:
    """Sorted sequences in the trees for which the least is computed, and how many nodes these have."""
    pairs = (zip(*pair, strict=False) for pair in pairwise(sequences))
    alike = [0, *(sum(takewhile(bool, starmap(eq, pair))) for pair in pairs)]
    lengths = [len(tokens) for tokens in sequences]
    longest, doublings = max(lengths, default=0), len(lengths).bit_length()
    # From room for the longest up to one tree for all, by steps of a tenth.
    capacities = (longest * 2 ** (step / 8) for step in range(8 * doublings + 1))
    plans = (_in_turn(lengths, alike, capacity) for capacity in capacities)
    return min(plans, key=lambda plan: _cost(len(plan[1]), max(plan[1]), len(lengths)))


def _in_turn(lengths: list[int], alike: list[int], capacity: float) -> tuple[_Begun, list[int]]:
    """Trees filled one after another, up to so many nodes.

    Args:
        lengths: of sorted sequences.
        alike: with how many tokens each begins as the one before it does.
        capacity: at least the longest.
    """
    begun, sizes = [], [0]
    for length, shared in zip(lengths, alike, strict=True):
        if sizes[-1] + length - shared > capacity:
            sizes.append(0)
        kept = shared if sizes[-1] else 0
        begun.append((len(sizes) - 1, sizes[-1], kept))
        sizes[-1] += length - kept
    return begun, sizes


def _cost(rows: int, length: int, sequences: int) -> float:
    """Of packed rows; half of the square is skipped if each row holds a single sequence, without a mask."""
    square = length if rows < sequences else length / 2
    return rows * length * (square + _AS_LONG)


def _move(
    values: Tensor, source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor], shape: tuple[int, ...]
) -> Tensor:
    """Values [.., ..., *] at places `source`, put to places `target` of zeros of a shape."""
    moved = values.new_zeros((*shape, *values.shape[2:]))
    return moved.index_put(target, values[source])
