"""What sequences begin with alike is computed once: the layout that packs a batch as trees of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, starmap, takewhile
from operator import eq

import torch
from torch import Tensor

from tether.errors import InvalidInputError

# Attention forms a square of a packed row's tokens and masks it: longer rows share more and mask more. That
# length is taken with which the least is computed: a little more than one row holds makes two short ones.
_CAPACITIES = tuple(range(768, 255, -64))


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
        trees = _planted(order, _best_capacity([tokens for tokens, _ in order]))
        place = torch.zeros((2, *mask.shape), dtype=torch.long)
        for index, tree in enumerate(trees):
            for row, path in tree.paths.items():
                place[0, row], place[1, row, mask[row]] = index, torch.tensor(path, dtype=torch.long)
        length = max(1, *(len(tree.positions) for tree in trees))
        device = input_ids.device
        positions = torch.zeros((len(trees), length), dtype=torch.long)
        seen = torch.eye(length, dtype=torch.bool).repeat(len(trees), 1, 1)
        for index, tree in enumerate(trees):
            positions[index, : len(tree.positions)] = torch.tensor(tree.positions, dtype=torch.long)
            for path in tree.paths.values():
                nodes = torch.tensor(path, dtype=torch.long)
                seen[index, nodes[:, None], nodes] |= torch.ones(len(path), len(path)).tril().bool()
        return cls(
            (rows.to(device), columns.to(device)),
            (place[0, rows, columns].to(device), place[1, rows, columns].to(device)),
            positions.to(device),
            (mask.shape[0], mask.shape[1]),
            seen[:, None].to(device),
        )


class _Tree:
    """Sequences of tokens, their common beginnings once."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.paths: dict[int, list[int]] = {}
        """The nodes of each sequence, from the root on, by its row among the padded ones."""
        self._nodes: dict[tuple[int, int], int] = {}

    def add(self, row: int, tokens: list[int]) -> None:
        path: list[int] = []
        for position, token in enumerate(tokens):
            key = (path[-1] if path else -1, token)
            if key not in self._nodes:
                self._nodes[key] = len(self.positions)
                self.positions.append(position)
            path.append(self._nodes[key])
        self.paths[row] = path


def _planted(order: list[tuple[list[int], int]], capacity: int) -> list[_Tree]:
    """Sequences with their rows, put one after another into trees of at most so many tokens, if they fit."""
    trees = [_Tree()]
    for tokens, row in order:
        if trees[-1].paths and len(trees[-1].positions) + len(tokens) > capacity:
            trees.append(_Tree())
        trees[-1].add(row, tokens)
    return trees


def _best_capacity(order: list[list[int]]) -> int:
    """With which `_planted` computes the least tokens, told from what sorted neighbours begin with alike."""
    alike = [0, *(sum(takewhile(bool, starmap(eq, zip(*pair, strict=False)))) for pair in pairwise(order))]

    def tokens_computed(capacity: int) -> int:
        sizes = [0]
        for tokens, shared in zip(order, alike, strict=True):
            if sizes[-1] and sizes[-1] + len(tokens) > capacity:
                sizes.append(0)
            sizes[-1] += len(tokens) - (shared if sizes[-1] else 0)
        return len(sizes) * max(sizes)

    return min(_CAPACITIES, key=tokens_computed)


def _move(
    values: Tensor, source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor], shape: tuple[int, ...]
) -> Tensor:
    """Values [.., ..., *] at places `source`, put to places `target` of zeros of a shape."""
    moved = values.new_zeros((*shape, *values.shape[2:]))
    return moved.index_put(target, values[source])
