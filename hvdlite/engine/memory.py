"""Detection of memory that two operations in flight use at the same time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from hvdlite.base.arrays import address


class MemoryInUseError(ValueError):
    """An operation uses memory that one in flight writes, or the other way round."""


class Extent(NamedTuple):
    """A range of host memory that an operation uses.

    Attributes:
        start, stop: Addresses of the first byte, and after the last.
        writer: None for memory that is only read. Equal writers do not conflict, because they
            write the same values, as broadcasts of tied weights do.
    """

    start: int
    stop: int
    writer: Any


def extent(array: Any, writer: Any = None) -> Extent:
    """Return the range of a contiguous array."""
    start = address(array)
    return Extent(start, start + array.nbytes, writer)


def extents_of(writer: Hashable, array: Any, out: Any = None) -> list[Extent]:
    """Return the memory of an array that is read, and of one that is written.

    Args:
        out: The array that is written, of which the first may be a part; None: a new one.
    """
    if out is None:
        return [extent(array)]
    own = extent(out, writer)
    other = extent(array)
    is_within = own.start <= other.start and other.stop <= own.stop
    return [own] if is_within else [other, own]


class MemoryInUse:
    """The memory of the operations in flight, to find what two use and one of them writes."""

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Remove all entries."""
        # By ascending start.
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._entries: list[tuple[Extent, Any]] = []
        self._longest = 0
        self._disjoint = True  # no two overlap, so it is enough to look at a new one's neighbour

    def add(self, operation: Any, extents: Sequence[Extent]) -> Any:
        """Add an operation's memory, unless it conflicts with another's.

        Returns:
            None, or the operation (it may be the same one) that uses the memory.
        """
        starts, stops = self._starts, self._stops
        for number, each in enumerate(extents):
            start, stop, _ = each
            if start == stop:
                continue
            place = bisect_left(starts, stop)
            if place and (stops[place - 1] > start or not self._disjoint):
                conflict = self._find(each)
                if conflict is not None:
                    self.remove(operation, extents[:number])
                    return conflict
                place = bisect_left(starts, start)
            starts.insert(place, start)
            stops.insert(place, stop)
            self._entries.insert(place, (each, operation))
            if stop - start > self._longest:
                self._longest = stop - start
        return None

    def remove(self, operation: Any, extents: Sequence[Extent]) -> None:
        """Remove an operation's memory, if it has been added."""
        for each in extents:
            place = bisect_left(self._starts, each.start)
            while place < len(self) and self._starts[place] == each.start:
                found, user = self._entries[place]
                if user is operation and found == each:
                    del self._starts[place], self._stops[place], self._entries[place]
                    break
                place += 1

    def _find(self, new: Extent) -> Any:
        place = bisect_left(self._starts, new.stop)
        # Extents that start lower by more than the size of the longest one end before this one.
        while place and self._starts[place - 1] + self._longest > new.start:
            place -= 1
            if self._stops[place] > new.start:
                each, user = self._entries[place]
                if each.writer != new.writer:
                    return user
                self._disjoint = False
        return None
