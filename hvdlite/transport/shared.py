"""The ranks of one node exchange through memory that they share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdlite import timeline
from hvdlite.reduction import ReduceOp, Scaling, accumulator
from hvdlite.transport import slices
from hvdlite.transport.base import WORD_SIZE, Patience, Transport, common_prefix
from hvdlite.transport.reduce import combine, reduce_apart, reduce_into
from hvdlite.transport.segment import Arena
from hvdlite.transport.table import LARGEST_CHUNK, MOST_WORDS, Table

#: Bytes of a user's array that a rank brings to one meeting. Less, and the interpreter is
#: slower than memory; more, and chunks do not stay in the cache between the ranks.
DEFAULT_CHUNK = 2**20
# Pieces in which a rank works on what lies in segments: what it reads and writes fits its cache.
_PIECE = 2**18
# With more ranks than this, and for 16-bit floats, each rank reduces a slice of a chunk for all,
# from these bytes on, which make up for a second meeting.
_FEW_RANKS = 2
_SLICED = 2**16

# Parts of arrays that travel together: the array's number, and which of its elements.
_Chunk = list[tuple[int, slice]]


class SharedMemoryTransport(Transport):
    """Collectives of the ranks of one node.

    Arrays from `empty` lie in segments that all ranks can see. There, each rank reduces one
    slice of everybody's array and writes it into everybody's result. All others travel in
    chunks through buffers that stay in the processors' cache. Two ranks reduce all of each
    chunk both, with the next one on its way; more share the work slice by slice.

    Reductions go through the ranks in their order, so every rank and every run gets the same
    bits.

    Args:
        table: where the ranks meet.
        index: this rank's position there.
        cross: what reduces a slice further, over the nodes that this one is one of.
        owners: how many of this node's ranks have a slice; fewer than all where another node
            has fewer. Given with ``cross``.

    Attributes:
        chunk: bytes of a chunk; the same on all ranks.
    """

    most_words = MOST_WORDS

    def __init__(
        self, table: Table, index: int, cross: Transport | None = None, owners: int = 0
    ) -> None:
        self.rank = index
        self.size = len(table.places)
        self.chunk: int = DEFAULT_CHUNK
        self._table = table
        self._arena = Arena()
        self._brought = 0
        self._cross = cross
        self._owners = owners or self.size

    def meet(self, words: Sequence[bytes], patience: Patience, cargo: Sequence[Any] = ()) -> int:
        """Compare everybody's notes; the first chunk of the cargo lies beside them."""
        table = self._table
        mine = b"".join(words[:MOST_WORDS])
        self._brought = self._load(cargo) if cargo else 0
        table.own.write(table.next, (), mine)
        meeting = table.arrive()
        table.wait(meeting, patience)
        brought = [place.words(meeting) for place in table.others]
        if all(theirs == mine for theirs in brought):
            return len(mine) // WORD_SIZE
        return common_prefix([_split(mine), *map(_split, brought)])

    def absent(self) -> list[int]:
        """Look whose place is empty."""
        return self._table.absent()

    def leave(self) -> None:
        """Mark this rank's place."""
        self._table.leave()

    def empty(self, size: int, dtype: np.dtype[Any]) -> Any:
        """Return an array in a segment."""
        return self._arena.empty(size, np.dtype(dtype))

    def gather(self, message: bytes) -> list[bytes]:
        """Exchange the lengths, and then the messages."""
        self._brought = 0
        table = self._table
        table.own.write(table.next, [len(message)])
        meeting = table.meet()
        result = [np.empty(place.numbers(meeting)[0], np.uint8) for place in table.places]
        self.allgather(np.frombuffer(message, np.uint8), result)
        return [part.tobytes() for part in result]

    def allreduce(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        """Reduce within segments, or chunk by chunk."""
        self.allreduce_all([send], [result], op, scaling)

    def allreduce_all(
        self, sends: Sequence[Any], results: Sequence[Any], op: ReduceOp, scaling: Scaling
    ) -> None:
        """Reduce one array, or fill chunks with several."""
        brought, self._brought = self._brought, 0
        send, result, dtype = sends[0], results[0], sends[0].dtype
        alone = len(sends) == 1
        where = (self._arena.find(send), self._arena.find(result)) if alone else (None, None)
        if op is ReduceOp.ADASUM:
            slices.allreduce(self, send, result, op, scaling)
        elif where[0] is not None and where[1] is not None:
            self._reduce_in_segments(send, result, (*where[0], *where[1]), op, scaling)
        elif not self._in_slices(sum(array.nbytes for array in sends), dtype):
            self._reduce_chunks(sends, results, op, scaling, brought)
        elif alone:
            self._reduce_slices(send, result, op, scaling)
        else:
            super().allreduce_all(sends, results, op, scaling)

    def _in_slices(self, nbytes: int, dtype: np.dtype[Any]) -> bool:
        if self._cross is not None:
            return True
        return nbytes >= self._sliced_from(dtype)

    def _sliced_from(self, dtype: np.dtype[Any]) -> float:
        """Bytes from which on each rank reduces a slice."""
        costly = self.size > _FEW_RANKS or accumulator(dtype) != dtype
        return _SLICED if costly else math.inf

    def _load(self, cargo: Sequence[Any]) -> int:
        """Put the first chunk of some arrays where the next meeting finds it.

        Other ranks may have more arrays with them, or fewer. Those that all have are the
        first of each, and as far as they are reduced in chunks they are in the first one.

        Returns:
            The meeting.
        """
        dtype = cargo[0].dtype
        room = max(int(min(self.chunk, self._sliced_from(dtype))) // dtype.itemsize, 1)
        for chunk in _fill([array.size for array in cargo], room):
            self._copy_in(cargo, chunk)
            break
        return self._table.next

    def _reduce_in_segments(
        self, send: Any, result: Any, where: Sequence[int], op: ReduceOp, scaling: Scaling
    ) -> None:
        """Reduce this rank's slice of everybody's array into everybody's result."""
        table = self._table
        table.own.write(table.next, where)
        meeting = table.meet()
        everywhere = [place.numbers(meeting) for place in table.places]
        sends = self._views(send, [numbers[:4] for numbers in everywhere])
        results = self._views(result, [numbers[4:] for numbers in everywhere])
        own = self._parts(send.size)[self.rank]
        in_place = where[:4] == where[4:]
        # Across nodes all at once; else in pieces that are still in the cache when they are
        # passed on. Where the result lies on an input, a piece of its own.
        nbytes = _PIECE if self._cross is None else send.nbytes
        for piece in _pieces(own.start, own.stop, send.dtype, nbytes):
            reduced = np.empty_like(result[piece]) if in_place else result[piece]
            self._reduce(reduced, [array[piece] for array in sends], op, scaling)
            for target in results:
                if target is not result or in_place:
                    target[piece] = reduced
        table.meet()  # before anybody may write to what others read, or read what they write

    def _views(self, own: Any, where: Sequence[Sequence[int]]) -> list[Any]:
        """The arrays of all ranks that correspond to one's own, from their places in segments."""
        return [
            own
            if rank == self.rank
            else np.ndarray(own.size, own.dtype, place.peer.map((file, inode, size)), offset)
            for rank, (place, (file, inode, size, offset)) in enumerate(
                zip(self._table.places, where, strict=True)
            )
        ]

    def _reduce_chunks(
        self,
        sends: Sequence[Any],
        results: Sequence[Any],
        op: ReduceOp,
        scaling: Scaling,
        brought: int,
    ) -> None:
        """Reduce each chunk on every rank, for itself: one meeting a chunk.

        The first may have been brought to a meeting already.
        """
        dtype = sends[0].dtype
        room = max(self.chunk // dtype.itemsize, 1)
        chunks = list(_fill([array.size for array in sends], room))
        following = brought
        if chunks and not brought:
            following = self._pack(sends, chunks[0])
        for number, chunk in enumerate(chunks):
            meeting = following
            if number + 1 < len(chunks):
                following = self._pack(sends, chunks[number + 1])
            self._table.wait(meeting)
            first, *others = chunk
            if others:
                self._unpack(meeting, results, chunk, op, scaling)
            else:
                out = results[first[0]][first[1]]
                reduce_into(out, self._chunks(meeting, out.size, dtype), op, scaling)

    def _pack(self, sends: Sequence[Any], chunk: _Chunk) -> int:
        """Arrive at the next meeting with a chunk; return its number."""
        self._copy_in(sends, chunk)
        return self._table.arrive()

    def _copy_in(self, sends: Sequence[Any], chunk: _Chunk) -> None:
        parts = [sends[index][piece] for index, piece in chunk]
        size = sum(part.size for part in parts)
        target = self._table.own.chunk(self._table.next, size, parts[0].dtype)
        if len(parts) == 1:
            target[...] = parts[0]
        else:
            with timeline.span(self.lane, timeline.MEMCPY_IN_FUSION_BUFFER):
                np.concatenate(parts, out=target)

    def _unpack(
        self, meeting: int, results: Sequence[Any], chunk: _Chunk, op: ReduceOp, scaling: Scaling
    ) -> None:
        """Reduce a chunk that holds parts of several arrays."""
        outs = [results[index][piece] for index, piece in chunk]
        size = sum(out.size for out in outs)
        with timeline.span(self.lane, timeline.MEMCPY_OUT_FUSION_BUFFER):
            reduce_apart(outs, self._chunks(meeting, size, outs[0].dtype), op, scaling)

    def _reduce_slices(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        """Reduce a slice of each chunk on each rank, for all: two meetings a chunk."""
        table, dtype = self._table, send.dtype
        for piece in _pieces(0, send.size, dtype, LARGEST_CHUNK):
            mine, out = send[piece], result[piece]
            parts = self._parts(out.size)
            own = parts[self.rank]
            theirs = [place.inputs(out.size, dtype)[own] for place in table.places]
            theirs[self.rank] = mine[own]  # which only this rank needs
            inputs = table.own.inputs(out.size, dtype)
            for others in (slice(0, own.start), slice(own.stop, out.size)):
                inputs[others] = mine[others]
            table.meet()
            reduced = table.own.outputs(out.size, dtype)[own]
            self._reduce(reduced, theirs, op, scaling)
            table.meet()
            for part, place in zip(parts, table.places, strict=True):
                out[part] = place.outputs(out.size, dtype)[part]

    def _parts(self, size: int) -> list[slice]:
        """The slice of each rank of an array of ``size`` elements; that of some may be empty."""
        bounds = slices.slice_bounds(size, self._owners)
        bounds += [size] * (self.size - self._owners)
        return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]

    def _reduce(self, out: Any, parts: Sequence[Any], op: ReduceOp, scaling: Scaling) -> None:
        """Reduce a slice over this node's ranks, and then over the nodes."""
        if self._cross is None:
            reduce_into(out, parts, op, scaling)
        elif self.rank < self._owners:
            # 16-bit floats stay wide until the end.
            total = combine(parts, op, out if accumulator(out.dtype) == out.dtype else None)
            self._cross.allreduce(total, total, op, scaling)
            if total is not out:
                out[...] = total

    def alltoall(self, pieces: Sequence[Any], result: Sequence[Any]) -> None:
        """Exchange in rounds, in each a part of everybody's chunk for each rank."""
        table = self._table
        room = max(self.chunk // self.size, 1)
        table.own.write(table.next, [max(piece.size for piece in pieces)])
        meeting = table.meet()
        longest = max(place.numbers(meeting)[0] for place in table.places)
        for start in range(0, longest, room):
            chunk = table.own.chunk(table.next, self.chunk, np.dtype(np.uint8))
            for rank, piece in enumerate(pieces):
                part = piece[start : start + room]
                chunk[rank * room : rank * room + part.size] = part
            chunks = self._chunks(table.meet(), self.chunk, np.dtype(np.uint8))
            for target, theirs in zip(result, chunks, strict=True):
                part = target[start : start + room]
                part[...] = theirs[self.rank * room : self.rank * room + part.size]

    def allgather(self, piece: Any, result: Sequence[Any]) -> None:
        """Exchange in rounds, in each a chunk of everybody's piece."""
        longest = max(part.size for part in result)
        for start in range(0, longest, self.chunk):
            meeting = self._bring(piece[start : start + self.chunk])
            self._table.wait(meeting)
            for target, place in zip(result, self._table.places, strict=True):
                part = target[start : start + self.chunk]
                part[...] = place.chunk(meeting, part.size, part.dtype)

    def broadcast(self, array: Any, root: int) -> None:
        """Pass the root's array on, chunk by chunk."""
        for piece in _pieces(0, array.size, array.dtype, self.chunk):
            part = array[piece]
            meeting = self._bring(part if self.rank == root else part[:0])
            self._table.wait(meeting)
            if self.rank != root:
                part[...] = self._table.places[root].chunk(meeting, part.size, part.dtype)

    def close(self) -> None:
        """Hold nothing but what arrays that are still in use lie in."""
        if self._cross is not None:
            self._cross.close()

    def _bring(self, part: Any) -> int:
        """Arrive at the next meeting with a chunk; return its number."""
        self._table.own.chunk(self._table.next, part.size, part.dtype)[...] = part
        return self._table.arrive()

    def _chunks(self, meeting: int, size: int, dtype: np.dtype[Any]) -> list[Any]:
        return [place.chunk(meeting, size, dtype) for place in self._table.places]


def _fill(sizes: Sequence[int], room: int) -> Iterator[_Chunk]:
    """Cut arrays into parts that fill chunks of ``room`` elements."""
    chunk: _Chunk = []
    left = room
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(start + left, size)
            chunk.append((index, slice(start, stop)))
            left -= stop - start
            start = stop
            if not left:
                yield chunk
                chunk, left = [], room
    if chunk:
        yield chunk


def _pieces(start: int, stop: int, dtype: np.dtype[Any], nbytes: int) -> Iterator[slice]:
    step = max(nbytes // dtype.itemsize, 1)
    for begin in range(start, stop, step):
        yield slice(begin, min(begin + step, stop))


def _split(words: bytes) -> list[bytes]:
    return [words[start : start + WORD_SIZE] for start in range(0, len(words), WORD_SIZE)]
