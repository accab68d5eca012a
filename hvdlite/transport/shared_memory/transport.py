"""The ranks of one node exchange through memory that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from hvdlite.reduction import ReduceOp, Scaling, accumulator, integer_mean, integer_sums
from hvdlite.transport import adasum
from hvdlite.transport.base import WORD_SIZE, Patience, Transport, common_prefix
from hvdlite.transport.reduce import (
    Call,
    Reducer,
    combine,
    is_integer_mean,
    perform,
    reduce_into,
    reducer,
)
from hvdlite.transport.shared_memory.barrier import LARGEST_CHUNK, MOST_WORDS, Barrier, Step
from hvdlite.transport.shared_memory.chunked_allreduce import (
    ChunkedAllreduce,
    Prepared,
    bring,
    slice_of,
)
from hvdlite.transport.shared_memory.chunks import Chunk, cut

#: Bytes of an array that a rank brings to one meeting. Less, and
#: the interpreter is slower than memory; more, and chunks do not stay in the cache until the other
#: ranks have read them. More ranks read less of them each, and give way to each other more often.
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
        barrier: where the ranks meet.
        index: this rank's position there.
        cross: what reduces a slice further, over the nodes that this one is one of.
        owners: how many of this node's ranks have a slice; fewer than all where another node
            has fewer. Given with ``cross``.

    Attributes:
        chunk: bytes of a chunk; the same on all ranks.
    """

    most_words = MOST_WORDS

    def __init__(
        self, barrier: Barrier, index: int, cross: Transport | None = None, owners: int = 0
    ) -> None:
        self.rank = index
        self.size = len(barrier.slots)
        self.chunk = DEFAULT_CHUNK
        self._barrier = barrier
        self._arena = barrier.arena
        self._brought = 0
        self._cross = cross
        self._owners = owners or self.size

    def meet(self, words: Sequence[bytes], patience: Patience, cargo: Sequence[Any] = ()) -> int:
        """Compare everybody's notes; the first chunk of the cargo lies beside them."""
        barrier = self._barrier
        mine = b"".join(words[:MOST_WORDS])
        if not barrier.waits:
            self._brought = self._load(cargo) if cargo else 0
            barrier.own.write(barrier.next, (), mine)
            barrier.arrive()
        meeting = barrier.last
        barrier.wait(meeting, patience)
        brought = [place.words(meeting) for place in barrier.others]
        if all(theirs == mine for theirs in brought):
            return len(mine) // WORD_SIZE
        return common_prefix([_split(mine), *map(_split, brought)])

    def absent(self) -> list[int]:
        """Look whose place is empty."""
        return self._barrier.absent()

    def check_alive(self) -> None:
        """Look at the other ranks' places and processes."""
        self._barrier.check_alive()

    def leave(self) -> None:
        """Mark this rank's place."""
        self._barrier.leave()

    def empty(self, size: int, dtype: np.dtype[Any]) -> Any:
        """Return an array in a segment."""
        return self._arena.empty(size, np.dtype(dtype))

    def release(self, array: Any) -> None:
        """Let a forked child have a copy of it."""
        self._arena.release(array)

    def unread(self, size: int) -> slice:
        """This rank's own slice, which it alone reduces."""
        return slice(0, 0) if self._cross is not None else slice_of(self.rank, size, self._owners)

    def gather(self, message: bytes) -> list[bytes]:
        """Exchange the lengths, and then the messages."""
        self._brought = 0
        barrier = self._barrier
        barrier.own.write(barrier.next, [len(message)])
        meeting = barrier.meet()
        result = [np.empty(place.numbers(meeting)[0], np.uint8) for place in barrier.slots]
        self.allgather(np.frombuffer(message, np.uint8), result)
        return [part.tobytes() for part in result]

    def allreduce(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        """Reduce within segments, or chunk by chunk."""
        self.allreduce_all([send], [result], op, scaling)

    def allreduce_lent(
        self,
        send: Any,
        lent: Sequence[tuple[int, Any]],
        result: Any,
        op: ReduceOp,
        scaling: Scaling,
    ) -> None:
        """Read what is lent where it lies, within segments."""
        places = self._find(send, result)
        if places is None or self._cross is not None:
            super().allreduce_lent(send, lent, result, op, scaling)
        else:
            self._reduce_in_segments(send, result, places, op, scaling, lent)

    def allreduce_all(
        self, sends: Sequence[Any], results: Sequence[Any], op: ReduceOp, scaling: Scaling
    ) -> None:
        """Reduce one array, or fill chunks with several."""
        self._prepare(sends, results, op, scaling)()

    def allreduce_init(
        self, send: Any, result: Any, op: ReduceOp, scaling: Scaling
    ) -> Callable[[], None]:
        """Keep what is done between meetings."""
        return self._prepare([send], [result], op, scaling)

    def _prepare(
        self, sends: Sequence[Any], results: Sequence[Any], op: ReduceOp, scaling: Scaling
    ) -> Callable[[], None]:
        send, result = sends[0], results[0]
        if op is ReduceOp.ADASUM:
            return partial(adasum.allreduce, self, send, result, op, scaling)
        if len(sends) == 1:
            places = self._find(send, result)
            if places is not None:
                return partial(self._reduce_in_segments, send, result, places, op, scaling)
        steps = Prepared(partial(self._steps, sends, results, op, scaling))
        is_empty = not any(array.size for array in sends)
        return partial(self._reduce_in_chunks, sends, is_empty, steps)

    def _steps(
        self,
        sends: Sequence[Any],
        results: Sequence[Any],
        op: ReduceOp,
        scaling: Scaling,
        turn: int,
        chunk: int,  # which is what `_cut` goes by
    ) -> list[Step]:
        exchange = ChunkedAllreduce(
            self._barrier, self.rank, self._cut(sends), sends, results, op, scaling, self.lane
        )
        if self._in_slices(sends):
            reduce = self._reducer(sends[0].dtype, op, scaling)
            return exchange.in_slices(self._owners, reduce, turn)
        return exchange.apart(turn)

    def _reduce_in_chunks(
        self, sends: Sequence[Any], is_empty: bool, steps: Prepared[list[Step]]
    ) -> None:
        brought, self._brought = self._brought, 0
        if not is_empty:
            barrier = self._barrier
            if not brought:
                self._load(sends)
                brought = barrier.arrive()
            barrier.walk(brought, steps[barrier.turn(brought), self.chunk])

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
            unread = None
            if len(cargo) == 1 and self._in_slices(cargo):
                unread = slice_of(self.rank, chunk.size, self._owners)
            bring(self._barrier, chunk, cargo, self.lane, unread)
        return self._barrier.next

    def _reduce_in_segments(
        self,
        send: Any,
        result: Any,
        where: Sequence[int],
        op: ReduceOp,
        scaling: Scaling,
        lent: Sequence[tuple[int, Any]] = (),
    ) -> None:
        """Reduce this rank's slice of everybody's array into everybody's result."""
        self._brought = 0
        barrier = self._barrier
        barrier.own.write(barrier.next, where)
        meeting = barrier.meet()
        everywhere = [place.numbers(meeting) for place in barrier.slots]
        sends = self._views(send, [numbers[0] for numbers in everywhere])
        results = self._views(result, [numbers[1] for numbers in everywhere])
        reduce = self._reducer(send.dtype, op, scaling)
        # Across nodes all at once; else in pieces that are still in the cache when they are
        # passed on. Where the result lies on an input, a piece of its own.
        nbytes = _PIECE if self._cross is None else send.nbytes
        own = slice_of(self.rank, send.size, self._owners)
        pieces = _pieces_of(send, own, lent, max(nbytes // send.itemsize, 1))
        in_place = where[0] == where[1]
        largest = max((part.size for _, part in pieces), default=0)
        room = np.empty(largest if in_place else 0, send.dtype)
        calls: list[Call] = []
        for piece, part in pieces:
            reduced = room[: part.size] if in_place else result[piece]
            parts = [array[piece] for array in sends]
            parts[self.rank] = part
            calls += reduce(reduced, parts)
            for target in results:
                if target is not result or in_place:
                    calls.append((np.copyto, (target[piece], reduced)))
        perform(calls)
        barrier.meet()  # before anybody may write to what others read, or read what they write

    def _find(self, send: Any, result: Any) -> tuple[int, int] | None:
        """Return where two arrays begin in the segments, or None if either lies elsewhere."""
        sent = self._arena.find(send)
        written = None if sent is None else self._arena.find(result)
        return None if sent is None or written is None else (sent, written)

    def _views(self, own: Any, where: Sequence[int]) -> list[Any]:
        """The arrays of all ranks that correspond to one's own, from where they begin."""
        return [
            own if rank == self.rank else place.peer.view(offset, own.size, own.dtype)
            for rank, (place, offset) in enumerate(zip(self._barrier.slots, where, strict=True))
        ]

    def _reduce_across(
        self, out: Any, parts: Sequence[Any], op: ReduceOp, scaling: Scaling
    ) -> None:
        """Reduce a slice over this node's ranks, and then over the nodes."""
        assert self._cross is not None
        if is_integer_mean(out.dtype, op, scaling):
            sums = integer_sums(parts, scaling.divisor)
            for total in sums:
                self._cross.allreduce(total, total, op, Scaling())
            out[...] = integer_mean(sums, scaling.divisor)
        elif accumulator(out.dtype) == out.dtype:
            reduce_into(out, parts, op, Scaling())
            self._cross.allreduce(out, out, op, scaling)
        else:  # 16-bit floats stay wide until the end
            total = combine(parts, op)
            self._cross.allreduce(total, total, op, scaling)
            out[...] = total

    def _reducer(self, dtype: np.dtype[Any], op: ReduceOp, scaling: Scaling) -> Reducer:
        """Prepare to reduce slices for all, over all nodes."""
        if self._cross is None:
            return reducer(dtype, op, scaling)
        return lambda out, parts: [(self._reduce_across, (out, parts, op, scaling))]

    def alltoall(self, pieces: Sequence[Any], result: Sequence[Any]) -> None:
        """Exchange in rounds, in each a part of everybody's chunk for each rank."""
        barrier = self._barrier
        room = max(self.chunk // self.size, 1)
        barrier.own.write(barrier.next, [max(piece.size for piece in pieces)])
        meeting = barrier.meet()
        longest = max(place.numbers(meeting)[0] for place in barrier.slots)
        for start in range(0, longest, room):
            chunk = barrier.own.chunk(barrier.next, self.chunk, np.dtype(np.uint8))
            for rank, piece in enumerate(pieces):
                part = piece[start : start + room]
                chunk[rank * room : rank * room + part.size] = part
            chunks = self._chunks(barrier.meet(), self.chunk, np.dtype(np.uint8))
            for target, theirs in zip(result, chunks, strict=True):
                part = target[start : start + room]
                part[...] = theirs[self.rank * room : self.rank * room + part.size]

    def allgather(self, piece: Any, result: Sequence[Any]) -> None:
        """Exchange in rounds, in each a chunk of everybody's piece."""
        longest = max(part.size for part in result)
        for start in range(0, longest, self.chunk):
            meeting = self._bring(piece[start : start + self.chunk])
            self._barrier.wait(meeting)
            for target, place in zip(result, self._barrier.slots, strict=True):
                part = target[start : start + self.chunk]
                part[...] = place.chunk(meeting, part.size, part.dtype)

    def broadcast(self, array: Any, root: int) -> None:
        """Pass the root's array on, chunk by chunk."""
        for piece in _pieces(slice(0, array.size), array.dtype, self.chunk):
            part = array[piece]
            meeting = self._bring(part if self.rank == root else part[:0])
            self._barrier.wait(meeting)
            if self.rank != root:
                part[...] = self._barrier.slots[root].chunk(meeting, part.size, part.dtype)

    def close(self) -> None:
        """Hold nothing but what arrays that are still in use lie in."""
        self._arena.close()
        if self._cross is not None:
            self._cross.close()

    def _bring(self, part: Any) -> int:
        """Arrive at the next meeting with a chunk; return its number."""
        self._barrier.own.chunk(self._barrier.next, part.size, part.dtype)[...] = part
        return self._barrier.arrive()

    def _chunks(self, meeting: int, size: int, dtype: np.dtype[Any]) -> list[Any]:
        return [place.chunk(meeting, size, dtype) for place in self._barrier.slots]


def _pieces(whole: slice, dtype: np.dtype[Any], nbytes: int) -> list[slice]:
    step = max(nbytes // dtype.itemsize, 1)
    return [
        slice(start, min(start + step, whole.stop))
        for start in range(whole.start, whole.stop, step)
    ]


def _pieces_of(
    array: Any, whole: slice, lent: Sequence[tuple[int, Any]], room: int
) -> list[tuple[slice, Any]]:
    """Cut a slice of an array, parts of which lie elsewhere, into pieces of ``room`` elements."""
    parts, end = [], whole.start
    for start, part in lent:
        parts += [(end, array[end:start]), (start, part)]
        end = start + part.size
    parts.append((end, array[end : whole.stop]))
    return [
        (slice(begin + start, begin + min(start + room, part.size)), part[start : start + room])
        for begin, part in parts
        for start in range(0, part.size, room)
    ]


def _split(words: bytes) -> list[bytes]:
    return [words[start : start + WORD_SIZE] for start in range(0, len(words), WORD_SIZE)]
