"""Arrays that travel chunk by chunk, small ones together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any


@dataclass(frozen=True)
class Chunk:
    """Parts of consecutive arrays of a list; all are whole but for the first and the last.

    Attributes:
        arrays: which ones.
        begin: the first element of the first one.
        end: behind the last element of the last one.
        bounds: where each part begins within the chunk, and where the last one ends.
    """

    arrays: slice
    begin: int
    end: int
    bounds: tuple[int, ...]

    @cached_property
    def size(self) -> int:
        """Elements."""
        return self.bounds[-1]

    @cached_property
    def is_fused(self) -> bool:
        """Whether there is more than one part."""
        return len(self.bounds) > 2

    def parts(self, arrays: Sequence[Any]) -> list[Any]:
        """The parts, of a list of flat arrays."""
        if not self.is_fused:  # nearly all, where there are many
            return [arrays[self.arrays.start][self.begin : self.end]]
        parts = list(arrays[self.arrays])
        parts[-1] = parts[-1][: self.end]
        parts[0] = parts[0][self.begin :]
        return parts


@lru_cache(32)  # a program exchanges the same step after step
def cut(sizes: tuple[int, ...], room: int) -> tuple[Chunk, ...]:
    """Cut arrays of so many elements into chunks of ``room`` elements; the last may have fewer."""
    chunks = []
    first, begin, bounds = 0, 0, [0]
    for index, size in enumerate(sizes):
        taken = 0
        while size - taken >= room - bounds[-1]:
            taken += room - bounds[-1]
            chunks.append(Chunk(slice(first, index + 1), begin, taken, (*bounds, room)))
            first, begin, bounds = index, taken, [0]
        if taken and taken == size:
            first, begin = index + 1, 0
        else:
            bounds.append(bounds[-1] + size - taken)
    if bounds[-1]:
        chunks.append(Chunk(slice(first, len(sizes)), begin, sizes[-1], tuple(bounds)))
    return tuple(chunks)


def split(array: Any, bounds: Sequence[int]) -> list[Any]:
    """The parts of an array between bounds."""
    return [array[start:stop] for start, stop in itertools.pairwise(bounds)]
