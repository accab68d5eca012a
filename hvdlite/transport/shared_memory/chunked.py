"""Allreduce of arrays that lie anywhere, chunk by chunk through the slots of a node's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from hvdlite.base import arrays
from hvdlite.transport.reduce import Call, PreparedReduction, perform
from hvdlite.transport.shared_memory.barrier import COPIES, Barrier
from hvdlite.transport.transport import copy_in, copy_out


@lru_cache  # asked for with every chunk, and mostly for the same sizes
def slice_of(rank: int, size: int, owners: int) -> slice:
    """Return a rank's slice of ``size`` elements, of which the first ``owners`` ranks have one."""
    if rank >= owners:
        return slice(size, size)
    return slice(*arrays.slice_bounds(size, owners)[rank : rank + 2])


class Chunk(NamedTuple):
    """Arrays that one generation moves: a part of one array, or several small arrays.

    Attributes:
        sends: flat arrays of one dtype.
        results: an array of the same size for each of them, or the same arrays.
    """

    sends: Sequence[Any]
    results: Sequence[Any]
    size: int

    def split(self, whole: Any) -> list[Any]:
        """Return the part of the whole chunk that belongs to each array."""
        return arrays.cut(whole, [0, *accumulate(send.size for send in self.sends)])


def cut(sends: Sequence[Any], results: Sequence[Any], room: int) -> list[Chunk]:
    """Cut arrays into chunks of at most ``room`` elements.

    Arrays that fit a chunk together share it. So if one list of arrays is the beginning of another
    one, the first chunk of the longer list begins with that of the shorter.
    """
    chunks: list[Chunk] = []
    first, size = 0, 0
    for number, send in enumerate(sends):
        if number > first and size + send.size > room:
            chunks.append(Chunk(sends[first:number], results[first:number], size))
            first, size = number, 0
        if send.size <= room:
            size += send.size
            continue
        for start in range(0, send.size, room):
            parts = send[start : start + room], results[number][start : start + room]
            chunks.append(Chunk([parts[0]], [parts[1]], parts[0].size))
        first = number + 1
    if first < len(sends):
        chunks.append(Chunk(sends[first:], results[first:], size))
    return chunks


def load(slot: Any, chunk: Chunk, own: slice, lane: str) -> list[Call]:
    """Prepare to copy a chunk to a slot.

    Args:
        slot: the rank's own, for all elements of the chunk.
        own: the slice that no other rank reads; of a single array it is left out.
    """
    if len(chunk.sends) > 1:
        return [(copy_in, (chunk.sends, slot, lane))]
    (send,) = chunk.sends
    rest = (slice(0, own.start), slice(own.stop, chunk.size))
    return [(np.copyto, (slot[s], send[s])) for s in rest if s.start < s.stop]


def _unload(output: Any, chunk: Chunk, lane: str) -> Call:
    if len(chunk.results) == 1:
        return np.copyto, (chunk.results[0], output)
    return copy_out, (chunk.split(output), chunk.results, lane)


# The work of a rank between two generations: what the others wait for, done before this rank
# arrives at the next one; and what it needs alone, done between that and the wait for them, so that
# an early rank has something to do. No generation follows the last step.
_Step = tuple[list[Call], list[Call]]


@dataclass(eq=False)
class ChunkedAllreduce:
    """The work of a rank between the generations of a chunked allreduce.

    It is prepared before the first chunk, and only numpy runs between the generations. The Python
    code that finds out what to call would have to be fetched from memory each time, since a chunk
    evicts it from the caches.

    Args:
        chunks: at least one.
        owners: the number of ranks, from the first on, that reduce a slice of each chunk for all;
            0: each of two ranks reduces the chunks for itself.
    """

    barrier: Barrier
    rank: int
    chunks: Sequence[Chunk]
    owners: int
    reduce: PreparedReduction
    lane: str

    def __post_init__(self) -> None:
        self._steps: dict[int, list[_Step]] = {}

    def run(self, generation: int) -> None:
        """Reduce all chunks, of which the first has come with a generation."""
        parity = generation % COPIES
        if parity not in self._steps:
            self._steps[parity] = self._in_slices(parity) if self.owners else self._whole(parity)
        *steps, (last, _) = self._steps[parity]
        for before, after in steps:
            self.barrier.wait(generation)
            perform(before)
            generation = self.barrier.arrive()
            perform(after)
        self.barrier.wait(generation)
        perform(last)

    def _whole(self, generation: int) -> list[_Step]:
        """Reduce each chunk on both of two ranks, for itself."""
        steps: list[_Step] = []
        for number, chunk in enumerate(self.chunks, generation):
            if steps:
                steps[-1][0].extend(self._load(number, chunk))
            calls: list[Call] = []
            every = map(chunk.split, self._slots(number, chunk))
            for send, result, *parts in zip(chunk.sends, chunk.results, *every, strict=True):
                parts[self.rank] = send
                calls += self.reduce(result, parts)
            steps.append((calls, []))
        return steps

    def _in_slices(self, generation: int) -> list[_Step]:
        """Reduce a slice of each chunk on each rank, for all.

        For one generation each rank writes a chunk, and its slice of the result of the chunk
        before. After it has arrived it copies the result of the generation before.
        """
        steps: list[_Step] = []
        copies: list[Call] = []
        for number, chunk in enumerate(self.chunks):
            if steps:
                steps[-1][0].extend(self._load(generation + number, chunk))
            own = self._own(chunk)
            parts = [slot[own] for slot in self._slots(generation + number, chunk)]
            if len(chunk.sends) == 1:
                parts[self.rank] = chunk.sends[0][own]
            output = self.barrier.output(number, chunk.size, parts[0].dtype)
            is_empty = own.start == own.stop
            steps.append(([] if is_empty else self.reduce(output[own], parts), copies))
            copies = [_unload(output, chunk, self.lane)]
        return [*steps, (copies, [])]

    def _load(self, generation: int, chunk: Chunk) -> list[Call]:
        slot = self._slots(generation, chunk)[self.rank]
        return load(slot, chunk, self._own(chunk), self.lane)

    def _own(self, chunk: Chunk) -> slice:
        return slice_of(self.rank, chunk.size, self.owners)

    def _slots(self, generation: int, chunk: Chunk) -> list[Any]:
        return list(self.barrier.chunks(generation % COPIES, chunk.size, chunk.sends[0].dtype))
