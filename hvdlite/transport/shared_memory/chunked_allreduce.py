"""Allreduce of arrays that lie anywhere, through the buffers that the ranks of a node share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hvdlite import timeline
from hvdlite.reduction import ReduceOp, Scaling
from hvdlite.transport import adasum
from hvdlite.transport.reduce import Call, Reducer, perform, reduce_apart, reducer
from hvdlite.transport.shared_memory.barrier import SUMS, Barrier, Step
from hvdlite.transport.shared_memory.chunks import Chunk, split

T = TypeVar("T")


class Prepared(dict[tuple[int, ...], T]):
    """What a function makes, by its arguments.

    `functools.cache` does the same, but to make one takes a tenth of a small allreduce.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, arguments: tuple[int, ...]) -> T:
        made = self[arguments] = self._make(*arguments)
        return made


class ChunkedAllreduce:
    """What a rank does with each chunk, between one meeting and the next.

    It is prepared before the first meeting. What runs between meetings then is numpy's; the
    Python that finds out what to call would have to come back from memory each time, since a
    chunk drives it out of the caches.

    Args:
        barrier: where the ranks meet.
        rank: this one's position there.
        chunks: of the arrays, at least one.
        sends: flat arrays of one dtype; what this rank has.
        results: likewise; where the outcome goes. They may be ``sends``.
        op: SUM, MIN, MAX or PRODUCT.
        scaling: of the results.
        lane: whose timeline shows the copies of arrays that share a chunk.
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
    ) -> None:
        self._barrier = barrier
        self._rank = rank
        self._chunks = chunks
        self._sends = sends
        self._results = results
        self._op = op
        self._scaling = scaling
        self._lane = lane
        self._dtype = sends[0].dtype

    def apart(self, turn: int) -> list[Step]:
        """Reduce each chunk on every rank, for itself.

        Args:
            turn: of the meeting to which the first chunk has been brought, see `Barrier.turn`.
        """
        barrier, dtype = self._barrier, self._dtype
        reduce = reducer(dtype, self._op, self._scaling)

        def everybodys(turn: int, size: int) -> list[Any]:
            return [place.chunk(turn, size, dtype) for place in barrier.slots]

        parts_of = Prepared(everybodys)
        steps: list[Step] = []
        for here, chunk in enumerate(self._chunks, turn):
            parts = parts_of[barrier.turn(here), chunk.size]
            own = chunk.parts(self._sends)
            if steps:
                steps[-1].before.append(_pack(own, parts[self._rank], self._lane))
            if chunk.is_fused:
                steps.append(Step([self._reduce_fused(chunk, own, parts)], []))
            else:
                if self._rank < 2:  # else it could be overwritten before it is read
                    parts = [*parts]
                    parts[self._rank] = own[0]
                steps.append(Step(reduce(chunk.parts(self._results)[0], parts), []))
        return steps

    def in_slices(self, owners: int, reduce: Reducer, turn: int) -> list[Step]:
        """Reduce a slice of each chunk on each rank, for all.

        To one meeting each rank brings a chunk, and its slice of the chunk before. When it has
        arrived it unpacks what has been brought to the one before.

        Args:
            owners: how many ranks have a slice, the first ones.
            reduce: a slice.
            turn: as in `apart`.
        """
        barrier = self._barrier

        def shared(turn: int, number: int, size: int) -> _Shared:
            own = slice_of(self._rank, size, owners)
            return _Shared.of(barrier, turn, number, size, self._dtype, own)

        shared_of = Prepared(shared)
        steps: list[Step] = []
        unpack: list[Call] = []
        for number, chunk in enumerate(self._chunks):
            there = shared_of[barrier.turn(turn + number), number % SUMS, chunk.size]
            own, parts = chunk.parts(self._sends), there.parts
            if steps:
                packed = _pack(own, there.whole, self._lane)
                read = [(np.copyto, (to, own[0][some])) for some, to in there.read]
                steps[-1].before.extend([packed] if chunk.is_fused else read)
            if not chunk.is_fused:
                parts = [*parts]
                parts[self._rank] = own[0][there.own]
            has_slice = there.own.start < there.own.stop
            reduced = reduce(there.reduced[there.own], parts) if has_slice else []
            steps.append(Step(reduced, unpack))
            unpack = [self._unpack(chunk, there.reduced)]
        return [*steps, Step(unpack, [])]

    def _reduce_fused(self, chunk: Chunk, own: Sequence[Any], parts: Sequence[Any]) -> Call:
        outs = chunk.parts(self._results)
        arguments = (outs, own, parts, chunk.bounds, self._rank, self._op, self._scaling)
        event = timeline.MEMCPY_OUT_FUSION_BUFFER
        return (_timed, (self._lane, event, reduce_apart, *arguments))

    def _unpack(self, chunk: Chunk, whole: Any) -> Call:
        """Copy what the ranks have reduced of a chunk."""
        outs = chunk.parts(self._results)
        if not chunk.is_fused:
            return (np.copyto, (outs[0], whole))
        arguments = (outs, split(whole, chunk.bounds))
        return (_timed, (self._lane, timeline.MEMCPY_OUT_FUSION_BUFFER, _copy_all, *arguments))


class _Shared(NamedTuple):
    """What ranks share of the chunks that lie in the same buffers.

    Attributes:
        own: this rank's slice.
        parts: the same slice of what each rank brings.
        whole: what this rank brings.
        read: the parts of it that others read: where they are, and they themselves.
        reduced: what the ranks reduce of it for each other.
    """

    own: slice
    parts: list[Any]
    whole: Any
    read: list[tuple[slice, Any]]
    reduced: Any

    @staticmethod
    def of(
        barrier: Barrier, turn: int, number: int, size: int, dtype: np.dtype[Any], own: slice
    ) -> _Shared:
        """Of chunks of ``size`` elements."""
        parts = [place.chunk(turn, size, dtype)[own] for place in barrier.slots]
        whole = barrier.own.chunk(turn, size, dtype)
        read = [(some, whole[some]) for some in _without(own, size)]
        return _Shared(own, parts, whole, read, barrier.reduced(number, size, dtype))


def bring(
    barrier: Barrier, chunk: Chunk, sends: Sequence[Any], lane: str, unread: slice | None = None
) -> None:
    """Write a chunk where the next meeting finds it.

    Args:
        barrier, chunk, sends, lane: as of `ChunkedAllreduce`.
        unread: what no other rank reads of a chunk that is not fused.
    """
    target = barrier.own.chunk(barrier.next, chunk.size, sends[0].dtype)
    parts = chunk.parts(sends)
    if unread is not None:
        for some in _without(unread, chunk.size):
            np.copyto(target[some], parts[0][some])
    else:
        perform([_pack(parts, target, lane)])


def _without(part: slice, size: int) -> list[slice]:
    """What is left of ``size`` elements."""
    left = (slice(0, part.start), slice(part.stop, size))
    return [some for some in left if some.start < some.stop]


@lru_cache  # asked for with every chunk, and chunks are alike
def slice_of(rank: int, size: int, owners: int) -> slice:
    """A rank's slice of an array of ``size`` elements, of which the first ``owners`` have one."""
    bounds = adasum.slice_bounds(size, owners)
    return slice(*bounds[rank : rank + 2]) if rank < owners else slice(size, size)


def _pack(parts: Sequence[Any], whole: Any, lane: str) -> Call:
    if len(parts) == 1:
        return (np.copyto, (whole, parts[0]))
    return (_timed, (lane, timeline.MEMCPY_IN_FUSION_BUFFER, _concatenate, parts, whole))


def _timed(lane: str, event: str, function: Callable[..., object], *arguments: Any) -> None:
    with timeline.span(lane, event):
        function(*arguments)


def _concatenate(parts: Sequence[Any], whole: Any) -> None:
    np.concatenate(parts, out=whole)


def _copy_all(targets: Sequence[Any], parts: Sequence[Any]) -> None:
    for target, part in zip(targets, parts, strict=True):
        np.copyto(target, part)
