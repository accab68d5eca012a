"""Which memory the operations on their way read and write."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# Entries of operations that have ended, from which on they are looked for.
_MOST_ENDED = 64


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
    start: int = array.__array_interface__["data"][0]
    return Extent(start, start + array.nbytes, writer)


class Overlaps:
    """Finds memory that two operations use at the same time, and one of them writes.

    Entries of operations that have ended stay until they are in the way, so that the end costs
    nothing.

    Args:
        is_pending: whether an operation has not ended.
    """

    def __init__(self, is_pending: Callable[[Any], bool]) -> None:
        self._is_pending = is_pending
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
        self._room = _MOST_ENDED

    def add(self, operation: Any, extents: Sequence[Extent]) -> Any:
        """Take note of an operation's memory, unless it clashes with another's.

        Returns:
            None, or the operation (it may be the same one) that the memory is used by.
        """
        starts, stops = self._starts, self._stops
        for number, each in enumerate(extents):
            start, stop, _ = each
            place = bisect_left(starts, stop)
            if place and (stops[place - 1] > start or not self._are_apart):
                clashing = self._find(each, operation)
                if clashing is not None:
                    for added in extents[:number]:
                        self._remove(added, operation)
                    return clashing
                place = bisect_left(starts, start)
            starts.insert(place, start)
            stops.insert(place, stop)
            self._entries.insert(place, (each, operation))
            if stop - start > self._longest:
                self._longest = stop - start
        if len(starts) > self._room:
            self._tidy(operation)
        return None

    def _find(self, new: Extent, operation: Any) -> Any:
        """The operation whose use of memory does not go together with a new one's."""
        for each, user in self._overlapping(new):
            if (each == new) if user is operation else not self._is_pending(user):
                self._remove(each, user)  # it has ended, and may be submitted again
            elif each.writer != new.writer:
                return user
            else:
                self._are_apart = False
        return None

    def _overlapping(self, new: Extent) -> list[tuple[Extent, Any]]:
        place = bisect_left(self._starts, new.stop)
        found = []
        # Who begins before the longest would reach as far as this one ends too early.
        while place and self._starts[place - 1] + self._longest > new.start:
            place -= 1
            if self._stops[place] > new.start:
                found.append(self._entries[place])
        return found

    def _remove(self, extent: Extent, operation: Any) -> None:
        for place in range(bisect_left(self._starts, extent.start), len(self._starts)):
            found, its = self._entries[place]
            if its is operation and found == extent:
                del self._starts[place], self._stops[place], self._entries[place]
                return

    def _tidy(self, new: Any) -> None:
        left = [one for one in self._entries if one[1] is new or self._is_pending(one[1])]
        self._starts = [each.start for each, _ in left]
        self._stops = [each.stop for each, _ in left]
        self._entries = left
        self._room = 2 * len(left) + _MOST_ENDED
