"""What has ended or gone, remembered for a while: a message about it may still be on its way."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")

#: More than can have ended while the slowest message is on its way.
REMEMBERED = 4096


class Latest(Generic[T]):
    """A set of the things added last, the oldest forgotten first. size: so many at most."""

    def __init__(self, size: int = REMEMBERED) -> None:
        self._size = size
        self._things: OrderedDict[T, None] = OrderedDict()

    def __contains__(self, thing: object) -> bool:
        return thing in self._things

    def __len__(self) -> int:
        return len(self._things)

    def add(self, thing: T) -> None:
        """The last one from now on, also if it is there already."""
        self._things[thing] = None
        self._things.move_to_end(thing)
        if len(self._things) > self._size:
            self._things.popitem(last=False)

    def discard(self, thing: T) -> None:
        self._things.pop(thing, None)
