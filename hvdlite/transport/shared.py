"""The ranks of one node exchange through memory that they share."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from hvdlite import timeline
from hvdlite.reduction import ReduceOp, Scaling, accumulator
from hvdlite.transport import slices
from hvdlite.transport.base import WORD_SIZE, Patience, Transport, common_prefix
from hvdlite.transport.chunks import Chunk, cut, split
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


class SharedMemoryTransport(Transport):
    """Collectives of the ranks of one node.

    Arrays from `empty` lie in segments that all ranks can see. There, each rank reduces one
    slice of everybody's array and writes it into everybody's result. All others travel in
    chunks through buffers that stay in the processors' cache. Two ranks reduce all of each
    chunk both; more share the work slice by slice.

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
        send, result = sends[0], results[0]
        alone = len(sends) == 1
        where = (self._arena.find(send), self._arena.find(result)) if alone else (None, None)
        if op is ReduceOp.ADASUM:
            slices.allreduce(self, send, result, op, scaling)
        elif where[0] is not None and where[1] is not None:
            self._reduce_in_segments(send, result, (*where[0], *where[1]), op, scaling)
        else:
            chunks = self._cut(sends)
            reduce = self._reduce_slices if self._in_slices(sends) else self._reduce_chunks
            if chunks:
                meeting = brought or self._pack(sends, chunks[0])
                reduce(sends, results, chunks, meeting, op, scaling)

    def _in_slices(self, sends: Sequence[Any]) -> bool:
        """Whether each rank reduces a slice of every chunk, for all."""
        if self._cross is not None:
            return True
        dtype = sends[0].dtype
        if self.size <= _FEW_RANKS and accumulator(dtype) == dtype:
            return False
        nbytes: int = sum(array.nbytes for array in sends)
        return nbytes >= _SLICED

    def _cut(self, arrays: Sequence[Any]) -> tuple[Chunk, ...]:
        # Across nodes each chunk costs a message.
        nbytes = self.chunk if self._cross is None else LARGEST_CHUNK
        room = max(nbytes // arrays[0].itemsize, 1)
        return cut(tuple([array.size for array in arrays]), room)

    def _load(self, cargo: Sequence[Any]) -> int:
        """Put the first chunk of some arrays where the next meeting finds it.

        Other ranks may have more arrays with them, or fewer. Those that all have are the
        first of each, and lie in the same place.

        Returns:
            The meeting.
        """
        for chunk in self._cut(cargo)[:1]:
            self._copy_in(cargo, chunk)
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
        chunks: Sequence[Chunk],
        meeting: int,
        op: ReduceOp,
        scaling: Scaling,
    ) -> None:
        """Reduce each chunk on every rank, for itself.

        Args:
            sends: everything.
            results: likewise.
            chunks: its parts.
            meeting: to which the first has been brought.
            op: SUM, MIN, MAX or PRODUCT.
            scaling: of the results.
        """
        for chunk, following in itertools.zip_longest(chunks, chunks[1:]):
            self._table.wait(meeting)
            outs, own = chunk.parts(results), chunk.parts(sends)
            parts = self._chunks(meeting, chunk.size, outs[0].dtype)
            with self._fusing(chunk, timeline.MEMCPY_OUT_FUSION_BUFFER):
                reduce_apart(outs, own, parts, chunk.bounds, self.rank, op, scaling)
            if following:
                meeting = self._pack(sends, following)

    def _reduce_slices(
        self,
        sends: Sequence[Any],
        results: Sequence[Any],
        chunks: Sequence[Chunk],
        meeting: int,
        op: ReduceOp,
        scaling: Scaling,
    ) -> None:
        """Reduce a slice of each chunk on each rank, for all; arguments as `_reduce_chunks`.

        To one meeting each rank brings a chunk, and its slice of the chunk before.
        """
        table, dtype = self._table, sends[0].dtype
        before: Chunk | None = None
        for chunk, following in itertools.zip_longest(chunks, chunks[1:]):
            table.wait(meeting)
            self._take(before, meeting, results)
            own = self._slice(chunk)
            parts = [part[own] for part in self._chunks(meeting, chunk.size, dtype)]
            if not chunk.is_fused:
                parts[self.rank] = chunk.parts(sends)[0][own]
            reduced = table.own.slice(table.next, own.stop - own.start, dtype)
            self._reduce(reduced, parts, op, scaling)
            if following:
                self._copy_in(sends, following, for_slices=True)
            before, meeting = chunk, table.arrive()
        table.wait(meeting)
        self._take(before, meeting, results)

    def _take(self, chunk: Chunk | None, meeting: int, results: Sequence[Any]) -> None:
        """Copy what the ranks have reduced of a chunk."""
        if chunk is None:
            return
        outs = chunk.parts(results)
        whole = np.empty(chunk.size, outs[0].dtype) if chunk.is_fused else outs[0]
        for part, place in zip(self._parts(whole.size), self._table.places, strict=True):
            whole[part] = place.slice(meeting, part.stop - part.start, whole.dtype)
        if chunk.is_fused:
            with self._fusing(chunk, timeline.MEMCPY_OUT_FUSION_BUFFER):
                for out, part in zip(outs, split(whole, chunk.bounds), strict=True):
                    out[...] = part

    def _pack(self, sends: Sequence[Any], chunk: Chunk) -> int:
        """Arrive at the next meeting with a chunk; return its number."""
        self._copy_in(sends, chunk)
        return self._table.arrive()

    def _copy_in(self, sends: Sequence[Any], chunk: Chunk, for_slices: bool = False) -> None:
        """Write a chunk for the next meeting, as far as the others read it there."""
        parts = chunk.parts(sends)
        target = self._table.own.chunk(self._table.next, chunk.size, parts[0].dtype)
        if chunk.is_fused:
            with self._fusing(chunk, timeline.MEMCPY_IN_FUSION_BUFFER):
                np.concatenate(parts, out=target)
        elif for_slices:
            own = self._slice(chunk)
            for others in (slice(0, own.start), slice(own.stop, target.size)):
                target[others] = parts[0][others]
        else:
            target[...] = parts[0]

    def _slice(self, chunk: Chunk) -> slice:
        """This rank's of a chunk."""
        return self._parts(chunk.size)[self.rank]

    def _fusing(self, chunk: Chunk, event: str) -> contextlib.AbstractContextManager[None]:
        """The time that goes into the parts of a chunk, in the timeline."""
        return timeline.span(self.lane, event) if chunk.is_fused else contextlib.nullcontext()

    def _parts(self, size: int) -> list[slice]:
        """The slice of each rank of an array of ``size`` elements; that of some may be empty."""
        return _parts(size, self._owners, self.size)

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


@lru_cache  # asked for with every chunk, and chunks are alike
def _parts(size: int, owners: int, ranks: int) -> list[slice]:
    bounds = slices.slice_bounds(size, owners) + [size] * (ranks - owners)
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


def _pieces(start: int, stop: int, dtype: np.dtype[Any], nbytes: int) -> Iterator[slice]:
    step = max(nbytes // dtype.itemsize, 1)
    for begin in range(start, stop, step):
        yield slice(begin, min(begin + step, stop))


def _split(words: bytes) -> list[bytes]:
    return [words[start : start + WORD_SIZE] for start in range(0, len(words), WORD_SIZE)]
