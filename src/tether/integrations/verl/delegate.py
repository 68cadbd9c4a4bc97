"""What stands before an object of another library, and is that object but for a method or two."""

from __future__ import annotations

from typing import Any


class Delegate:
    """Has every attribute of what it wraps that it does not have itself."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        """The wrapped object's, but for Python's own protocols: a copy of this is none of that one."""
        # Copies and pickles also ask before there is anything wrapped, which would be asked for without end.
        if name == "_inner" or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._inner, name)
