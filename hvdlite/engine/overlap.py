"""Which memory the operations on their way read and write."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

from hvdlite.arrays import address


class Extent(NamedTuple):
    """A range of host memory that an operation uses.

    Attributes:
        start: address of the first byte.
        stop: address after the last.
        writer: None: it is only read. Else it is written, and equal writers do not clash: they
            write the same there, as broadcasts of a weight do that a model has twice.
    """

    start: int
    stop: int
    writer: Any


def extent(array: Any, writer: Any = None) -> Extent:
    """Return the range of a contiguous array."""
    start = address(array)
    return Extent(start, start + array.nbytes, writer)


class Overlaps:
    """Finds memory that two operations use at the same time, and one of them writes."""

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget all."""
        # By ascending start.
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._entries: list[tuple[Extent, Any]] = []
        self._longest = 0
        self._are_apart = True  # none overlaps another, so that a new one's neighbour tells all

    def add(self, operation: Any, extents: Sequence[Extent]) -> Any:
        """Take note of an operation's memory, unless it clashes with another's.

        Returns:
            None, or the operation (it may be the same one) that the memory is used by.
        """
        starts, stops = self._starts, self._stops
        for number, each in enumerate(extents):
            start, stop, _ = each
            if start == stop:
                continue
            place = bisect_left(starts, stop)
            if place and (stops[place - 1] > start or not self._are_apart):
                clashing = self._find(each)
                if clashing is not None:
                    self.remove(operation, extents[:number])
                    return clashing
                place = bisect_left(starts, start)
            starts.insert(place, start)
            stops.insert(place, stop)
            self._entries.insert(place, (each, operation))
            if stop - start > self._longest:
                self._longest = stop - start
        return None

    def remove(self, operation: Any, extents: Sequence[Extent]) -> None:
        """Forget an operation's memory, if that has been added."""
        for each in extents:
            place = bisect_left(self._starts, each.start)
            while place < len(self) and self._starts[place] == each.start:
                found, user = self._entries[place]
                if user is operation and found == each:
                    del self._starts[place], self._stops[place], self._entries[place]
                    break
                place += 1

    def _find(self, new: Extent) -> Any:
        """The operation whose use of memory does not go together with a new one."""
        place = bisect_left(self._starts, new.stop)
        # Who begins before the longest would reach as far as this one ends too early.
        while place and self._starts[place - 1] + self._longest > new.start:
            place -= 1
            if self._stops[place] > new.start:
                each, user = self._entries[place]
                if each.writer != new.writer:
                    return user
                self._are_apart = False
        return None
