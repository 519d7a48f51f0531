"""The values that were used last, by key: the others are dropped, so that a long run keeps few of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Kept = TypeVar("Kept")

_MOST = 64


class LastUsed(Generic[Key, Kept]):
    """Keeps the last 64 values that were asked for."""

    def __init__(self) -> None:
        self._values = OrderedDict[Key, Kept]()

    def of(self, key: Key, make: Callable[[], Kept]) -> Kept:
        """The value of a key; `make` makes it if it is not there."""
        if key not in self._values:
            self._values[key] = make()
            if len(self._values) > _MOST:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return self._values[key]

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()
