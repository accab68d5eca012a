"""Allreduce of arrays that lie anywhere, chunk by chunk through the slots of a node's ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from hvdlite import timeline
from hvdlite.arrays import slice_bounds
from hvdlite.reduction import ReduceOp, Scaling, accumulator
from hvdlite.transport.reduce import Call, Reducer, binary, reduce_into
from hvdlite.transport.shared_memory.barrier import Barrier, Step


@dataclass(frozen=True)
class Chunk:
    """Parts of consecutive arrays of a list; all are whole but for the first and the last.

    Attributes:
        arrays: their positions in the list.
        begin: the first element of the first one.
        end: behind the last element of the last one.
        bounds: the offset of each part within the chunk, and the end of the last one.
    """

    arrays: slice
    begin: int
    end: int
    bounds: tuple[int, ...]

    @cached_property
    def size(self) -> int:
        """Return the number of elements."""
        return self.bounds[-1]

    @cached_property
    def is_fused(self) -> bool:
        """Return whether there is more than one part."""
        return len(self.bounds) > 2

    def parts(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the parts, out of a list of flat arrays."""
        if not self.is_fused:  # nearly all, where there are many
            return [arrays[self.arrays.start][self.begin : self.end]]
        parts = list(arrays[self.arrays])
        parts[-1] = parts[-1][: self.end]
        parts[0] = parts[0][self.begin :]
        return parts


@lru_cache(32)  # a program exchanges the same sizes step after step
def cut(sizes: tuple[int, ...], room: int) -> tuple[Chunk, ...]:
    """Cut arrays of these sizes into chunks of ``room`` elements; the last may have fewer."""
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
    """Return the parts of an array between bounds."""
    return [array[start:stop] for start, stop in itertools.pairwise(bounds)]


@lru_cache  # asked for with every chunk, and mostly for the same sizes
def slice_of(rank: int, size: int, owners: int) -> slice:
    """Return a rank's slice of ``size`` elements, of which the first ``owners`` ranks have one."""
    bounds = slice_bounds(size, owners)
    return slice(*bounds[rank : rank + 2]) if rank < owners else slice(size, size)


class ChunkedAllreduce:
    """The work of a rank between the generations of a chunked allreduce.

    It is prepared before the first chunk, and only numpy runs between the generations. The Python
    code that finds out what to call would have to be fetched from memory each time, since a chunk
    evicts it from the caches.

    Args:
        barrier: of the node's ranks.
        rank: this rank's position there.
        chunks: of the arrays.
        sends: flat arrays of one dtype.
        results: flat arrays like the ``sends``, or the ``sends`` themselves.
        op: SUM, MIN, MAX or PRODUCT.
        scaling: of the results.
        lane: the lane whose timeline shows the copies of fused arrays.
        owners: the number of ranks, from the first on, that reduce a slice of each chunk for all;
            0: every rank reduces the chunks for itself.
        reduce: prepares the reduction of a slice.
    """

    def __init__(
        self,
        barrier: Barrier,
        rank: int,
        chunks: Sequence[Chunk],
        sends: Sequence[Any],
        results: Sequence[Any],
        op: ReduceOp,
        scaling: Scaling,
        lane: str,
        owners: int,
        reduce: Reducer,
    ) -> None:
        self.chunks = chunks
        self._barrier = barrier
        self._rank = rank
        self._sends = sends
        self._results = results
        self._op = op
        self._scaling = scaling
        self._lane = lane
        self._owners = owners
        self._reduce = reduce
        self._dtype = sends[0].dtype
        self._steps: dict[int, list[Step]] = {}

    def steps(self, generation: int) -> list[Step]:
        """Return the steps that begin when a generation has brought the first chunk."""
        parity = self._barrier.parity(generation)
        if parity not in self._steps:
            self._steps[parity] = self._in_slices(parity) if self._owners else self._whole(parity)
        return self._steps[parity]

    def _whole(self, generation: int) -> list[Step]:
        """Reduce each chunk on every rank, for itself."""
        steps: list[Step] = []
        for number, chunk in enumerate(self.chunks, generation):
            inputs, parts = chunk.parts(self._sends), self._parts(number, chunk)
            if steps:
                steps[-1].before.extend(pack(chunk, inputs, parts[self._rank], self._lane))
            if chunk.is_fused:
                steps.append(Step([self._reduce_fused(chunk, inputs, parts)], []))
            else:
                if self._rank < 2:  # else it could be overwritten before it is read
                    parts[self._rank] = inputs[0]
                steps.append(Step(self._reduce(chunk.parts(self._results)[0], parts), []))
        return steps

    def _in_slices(self, generation: int) -> list[Step]:
        """Reduce a slice of each chunk on each rank, for all.

        For one generation each rank writes a chunk, and its slice of the result of the chunk
        before. After it has arrived it unpacks the result of the generation before.
        """
        steps: list[Step] = []
        unpack: list[Call] = []
        for number, chunk in enumerate(self.chunks):
            own = slice_of(self._rank, chunk.size, self._owners)
            inputs, parts = chunk.parts(self._sends), self._parts(generation + number, chunk)
            if steps:
                steps[-1].before.extend(pack(chunk, inputs, parts[self._rank], self._lane, own))
            slices = [part[own] for part in parts]
            if not chunk.is_fused:
                slices[self._rank] = inputs[0][own]
            output = self._barrier.output(number, chunk.size, self._dtype)
            is_empty = own.start == own.stop
            steps.append(Step([] if is_empty else self._reduce(output[own], slices), unpack))
            unpack = [self._unpack(chunk, output)]
        return [*steps, Step(unpack, [])]

    def _parts(self, generation: int, chunk: Chunk) -> list[Any]:
        """Return all ranks' copies of a chunk."""
        return [slot.chunk(generation, chunk.size, self._dtype) for slot in self._barrier.slots]

    def _reduce_fused(self, chunk: Chunk, own: Sequence[Any], parts: Sequence[Any]) -> Call:
        outs = chunk.parts(self._results)
        arguments = (outs, own, parts, chunk.bounds, self._rank, self._op, self._scaling)
        event = timeline.MEMCPY_OUT_FUSION_BUFFER
        return (_timed, (self._lane, event, _reduce_parts, *arguments))

    def _unpack(self, chunk: Chunk, whole: Any) -> Call:
        """Copy the result of a chunk."""
        outs = chunk.parts(self._results)
        if not chunk.is_fused:
            return (np.copyto, (outs[0], whole))
        arguments = (outs, split(whole, chunk.bounds))
        return (_timed, (self._lane, timeline.MEMCPY_OUT_FUSION_BUFFER, _copy_all, *arguments))


def pack(
    chunk: Chunk, parts: Sequence[Any], target: Any, lane: str, own: slice | None = None
) -> list[Call]:
    """Prepare to copy a chunk to a buffer.

    Args:
        chunk: what is copied.
        parts: its parts.
        target: the buffer, as large as the chunk.
        lane: the lane whose timeline shows the copies of fused arrays.
        own: the part of a chunk that no other rank reads, which is left out unless the chunk is
            fused.
    """
    if chunk.is_fused:
        event = timeline.MEMCPY_IN_FUSION_BUFFER
        return [(_timed, (lane, event, _concatenate, parts, target))]
    if own is None:
        return [(np.copyto, (target, parts[0]))]
    rest = (slice(0, own.start), slice(own.stop, chunk.size))
    return [(np.copyto, (target[s], parts[0][s])) for s in rest if s.start < s.stop]


def _reduce_parts(
    results: Sequence[Any],
    own: Sequence[Any],
    parts: Sequence[Any],
    bounds: Sequence[int],
    position: int,
    op: ReduceOp,
    scaling: Scaling,
) -> None:
    """Do `reduce_into` for results that correspond to consecutive pieces of the parts.

    Args:
        results: flat arrays.
        own: the values of ``parts[position]``, in arrays like the results or in these.
        parts: arrays of the size of all results together.
        bounds: the offset of each result in them, and the end of the last one.
        position: of this rank's part.
        op: SUM, MIN, MAX or PRODUCT.
        scaling: applied once, at the end.
    """
    dtype = parts[0].dtype
    if len(parts) == 2 and scaling.is_identity and accumulator(dtype) == dtype:
        # One call for each, and no pass over memory more than it takes.
        theirs = split(parts[1 - position], bounds)
        first, second = (own, theirs) if position == 0 else (theirs, own)
        function = binary(op, dtype)
        for result, a, b in zip(results, first, second, strict=True):
            function(a, b, result)
        return
    total = np.empty(parts[0].size, dtype)
    reduce_into(total, parts, op, scaling)
    _copy_all(results, split(total, bounds))


def _timed(lane: str, event: str, function: Callable[..., object], *arguments: Any) -> None:
    with timeline.span(lane, event):
        function(*arguments)


def _concatenate(parts: Sequence[Any], whole: Any) -> None:
    np.concatenate(parts, out=whole)


def _copy_all(targets: Sequence[Any], parts: Sequence[Any]) -> None:
    for target, part in zip(targets, parts, strict=True):
        np.copyto(target, part)
