"""Allreduce of an array that lies anywhere, chunk by chunk through the slots of a node's ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from hvdlite.arrays import slice_bounds
from hvdlite.transport.reduce import Call, PreparedReduction
from hvdlite.transport.shared_memory.barrier import COPIES, Barrier, Step


@lru_cache  # asked for with every chunk, and mostly for the same sizes
def slice_of(rank: int, size: int, owners: int) -> slice:
    """Return a rank's slice of ``size`` elements, of which the first ``owners`` ranks have one."""
    if rank >= owners:
        return slice(size, size)
    return slice(*slice_bounds(size, owners)[rank : rank + 2])


def load(target: Any, chunk: Any, own: slice) -> list[Call]:
    """Prepare to copy a chunk to a slot, without the slice that no other rank reads."""
    rest = (slice(0, own.start), slice(own.stop, chunk.size))
    return [(np.copyto, (target[s], chunk[s])) for s in rest if s.start < s.stop]


class ChunkedAllreduce:
    """The work of a rank between the generations of a chunked allreduce.

    It is prepared before the first chunk, and only numpy runs between the generations. The Python
    code that finds out what to call would have to be fetched from memory each time, since a chunk
    evicts it from the caches.

    Args:
        barrier: of the node's ranks.
        rank: this rank's position there.
        send: flat array.
        result: flat array like ``send``, or ``send`` itself.
        room: the elements of a chunk.
        owners: the number of ranks, from the first on, that reduce a slice of each chunk for all;
            0: each of two ranks reduces the chunks for itself.
        reduce: prepares the reduction of a chunk, or of a slice.
    """

    def __init__(
        self,
        barrier: Barrier,
        rank: int,
        send: Any,
        result: Any,
        room: int,
        owners: int,
        reduce: PreparedReduction,
    ) -> None:
        self._barrier = barrier
        self._rank = rank
        self._owners = owners
        self._reduce = reduce
        self._chunks = [
            (send[start : start + room], result[start : start + room])
            for start in range(0, send.size, room)
        ]
        self._steps: dict[int, list[Step]] = {}

    def run(self, generation: int) -> None:
        """Reduce all chunks, of which the first has come with a generation."""
        parity = generation % COPIES
        if parity not in self._steps:
            self._steps[parity] = self._in_slices(parity) if self._owners else self._whole(parity)
        self._barrier.run(generation, self._steps[parity])

    def _whole(self, generation: int) -> list[Step]:
        """Reduce each chunk on both of two ranks, for itself."""
        steps: list[Step] = []
        for number, (send, result) in enumerate(self._chunks, generation):
            if steps:
                steps[-1].before.extend(self._load(number, send))
            parts = self._parts(number, send)
            parts[self._rank] = send
            steps.append(Step(self._reduce(result, parts), []))
        return steps or [Step([], [])]

    def _in_slices(self, generation: int) -> list[Step]:
        """Reduce a slice of each chunk on each rank, for all.

        For one generation each rank writes a chunk, and its slice of the result of the chunk
        before. After it has arrived it copies the result of the generation before.
        """
        steps: list[Step] = []
        copies: list[Call] = []
        for number, (send, result) in enumerate(self._chunks):
            if steps:
                steps[-1].before.extend(self._load(generation + number, send))
            own = self._own(send)
            parts = [part[own] for part in self._parts(generation + number, send)]
            parts[self._rank] = send[own]
            output = self._barrier.output(number, send.size, send.dtype)
            is_empty = own.start == own.stop
            steps.append(Step([] if is_empty else self._reduce(output[own], parts), copies))
            copies = [(np.copyto, (result, output))]
        return [*steps, Step(copies, [])]

    def _load(self, generation: int, send: Any) -> list[Call]:
        return load(self._parts(generation, send)[self._rank], send, self._own(send))

    def _own(self, chunk: Any) -> slice:
        return slice_of(self._rank, chunk.size, self._owners)

    def _parts(self, generation: int, chunk: Any) -> list[Any]:
        """Return all ranks' copies of a chunk."""
        return list(self._barrier.chunks(generation % COPIES, chunk.size, chunk.dtype))
