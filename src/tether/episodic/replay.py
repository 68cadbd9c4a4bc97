"""A memory of past episodes, of fixed size, that checkpoints hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tether.errors import InvalidInputError


class Replay:
    """Rows of several named tensors; when it is full the oldest rows are replaced.

    Args:
        capacity: rows that are kept.

    Example:
        >>> replay = Replay(2)
        >>> for number in (1.0, 2.0, 3.0):
        ...     replay.add({"x": torch.tensor([number])})
        >>> sorted(replay["x"].tolist()), len(replay)
        ([2.0, 3.0], 2)
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._columns: dict[str, Tensor] = {}
        self._size = self._next = 0

    def __len__(self) -> int:
        """Rows held."""
        return self._size

    def __getitem__(self, name: str) -> Tensor:
        """A column of all rows held."""
        return self._columns[name][: self._size]

    def add(self, columns: Mapping[str, Tensor]) -> None:
        """Remember rows: a tensor [n, ...] for each name, always the same names and sizes.

        Raises:
            InvalidInputError: more rows than there is place for.
        """
        count = len(next(iter(columns.values())))
        if count > self.capacity:
            raise InvalidInputError(f"{count} rows do not fit into a replay of {self.capacity}.")
        if not self._columns:
            self._allocate(columns)
        places = (self._next + torch.arange(count)) % self.capacity
        for name, values in columns.items():
            self._columns[name][places] = values
        self._next = (self._next + count) % self.capacity
        self._size = min(self._size + count, self.capacity)

    def draw(self, count: int, generator: torch.Generator, among: Tensor | None = None) -> dict[str, Tensor]:
        """Rows chosen uniformly, with replacement: of all, or of those with these numbers.

        Raises:
            InvalidInputError: nothing is held yet.
        """
        if not self._size:
            raise InvalidInputError("The replay is empty; it is filled by observe. Call that first.")
        rows = torch.randint(self._size if among is None else len(among), (count,), generator=generator)
        rows = rows if among is None else among[rows]
        return {name: column[rows] for name, column in self._columns.items()}

    def state_dict(self) -> dict[str, Any]:
        """The rows held, and where the next goes."""
        return {"next": self._next, "columns": {name: self[name].clone() for name in self._columns}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._columns, self._size, self._next = {}, 0, 0
        if state_dict["columns"]:
            self.add(state_dict["columns"])
        self._next = state_dict["next"]

    def _allocate(self, columns: Mapping[str, Tensor]) -> None:
        self._columns = {
            name: values.new_zeros(self.capacity, *values.shape[1:]) for name, values in columns.items()
        }
