"""The transport of one node's ranks; `SharedMemoryTransport` says which code adds and waits."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from hvdlite.base.reduction import ReduceOp, Scaling, accumulator
from hvdlite.transport.reduce import (
    Call,
    PreparedReduction,
    perform,
    prepare_reduction,
    reduce_into,
)
from hvdlite.transport.shared_memory import futex
from hvdlite.transport.shared_memory.barrier import COPIES, MAX_DIGESTS, Barrier
from hvdlite.transport.shared_memory.chunked import Chunk, ChunkedAllreduce, cut, load, slice_of
from hvdlite.transport.shared_memory.segment import Arena
from hvdlite.transport.transport import DIGEST_SIZE, LEAST_ANNOUNCED, OnWait, Transport
from hvdlite.world.world import World

_log = logging.getLogger("hvdlite")

# Smaller arrays, in bytes, are reduced on every rank, in one generation. Larger ones make up for a
# second generation, in which each rank reduces a slice for all.
_SMALL = LEAST_ANNOUNCED
# How many operations' places travel with the digests, in the note's integers; and the place of an
# array that lies elsewhere: at the beginning of a rank's memory lies its slot.
_ANNOUNCED, _NOWHERE = 4, (0, 0)
# Up to this number of ranks, unless they are 16-bit floats, every rank reduces whole chunks.
_FEW_RANKS = 2


class SharedMemoryTransport(Transport):
    """Collectives of the ranks of one node.

    Arrays from `empty` lie in memory that all ranks share. There, each rank reduces one slice of
    all ranks' arrays and writes it into all ranks' results (`_reduce_in_segments`). Other arrays
    move in chunks through slots that stay in the processors' cache (`ChunkedAllreduce`). Two ranks
    both reduce all of each chunk; more ranks share the work slice by slice. Small arrays, wherever
    they lie, are one chunk that every rank reduces (`_reduce_small`). `allreduce_init` chooses.

    A rank waits for the others in `Barrier.wait`, and adds by `prepare_reduction` (``reduce.py``):
    in the order of the ranks, so every rank and every run gets the same bits.

    Args:
        barrier: of the node's ranks.

    Attributes:
        barrier: the argument, for the transport that follows where a rank has died.
        arena: the memory of the arrays from `empty`.
        chunk: bytes of an array that a rank writes for one generation. With less, the interpreter
            is slower than memory; with more, chunks do not stay in the cache until the other ranks
            have read them.
        piece: bytes of the pieces in which a rank reduces arrays in shared memory: all that it
            reads and writes for one fits its cache.
    """

    title = "shared memory"
    max_digests = MAX_DIGESTS
    chunk = 2**20
    piece = 2**18

    def __init__(self, barrier: Barrier, index: int) -> None:
        self.rank = index
        self.size = len(barrier.slots)
        self.barrier = barrier
        self.arena = barrier.arena
        self._brought = 0  # the generation for which `meet` has written a chunk; 0: none
        # The offsets of arrays, in pairs: of this rank, for the next `meet`; of all ranks, by this
        # rank's.
        self._announced: list[int] = []
        self._places: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        self._is_incomplete = False  # whether results may lack what other ranks write
        self._owners = self.size  # of a slice each, the first ranks

    @classmethod
    def connect(cls, MPI: Any, world: World, barrier: Any) -> Transport | None:  # noqa: N803
        return cls(barrier, world.node.rank) if barrier and len(set(world.nodes)) == 1 else None

    def announce(self, arrays: Sequence[tuple[Any, Any]]) -> bool:
        self._announced = []
        for send, result in arrays[:_ANNOUNCED]:
            offsets = None if self._is_small(send.nbytes) else self._find(send, result)
            if offsets is None:
                break
            self._announced += offsets
        return bool(self._announced)

    def meet(self, digests: Sequence[bytes], on_wait: OnWait, data: Sequence[Any] = ()) -> int:
        """Compare all ranks' digests; the first chunk of the data travels with them."""
        barrier = self.barrier
        mine = b"".join(digests[:MAX_DIGESTS])
        if barrier.passed == barrier.last:  # else the wait was interrupted, and is resumed
            self._brought = self._load(data) if data else 0
            barrier.own.write(barrier.last + 1, self._announced, mine)
            barrier.arrive()
        generation = barrier.last
        barrier.wait(generation, on_wait)
        announced, self._announced = self._announced, []
        self._places = {}
        for slot in barrier.others:
            if slot.digests(generation) != mine:
                everywhere = sorted(slot.digests(generation) for slot in barrier.slots)
                pairs = enumerate(zip(everywhere[0], everywhere[-1], strict=False))
                return next((n for n, (a, b) in pairs if a != b), len(everywhere[0])) // DIGEST_SIZE
        for start in range(0, len(announced), 2):
            pair = slice(start, start + 2)
            places = [slot.numbers(generation)[pair] for slot in barrier.slots]
            if _NOWHERE not in places:
                self._places[announced[start], announced[start + 1]] = places
        return len(mine) // DIGEST_SIZE

    def absent(self) -> list[int]:
        return self.barrier.absent()

    def check_alive(self) -> None:
        self.barrier.check_alive()

    def leave(self) -> None:
        self.barrier.leave()

    def complete(self) -> None:
        if self._is_incomplete:
            self.confirm()

    def confirm(self) -> None:
        self._brought, self._is_incomplete = 0, False
        self.barrier.meet()

    def empty(self, size: int, dtype: np.dtype[Any]) -> Any:
        return self.arena.empty(size, np.dtype(dtype))

    def release(self, array: Any) -> None:
        self.arena.release(array)

    def reclaim(self, array: Any) -> None:
        self.arena.reclaim(array)

    def zero_copy_range(self, size: int) -> slice:
        """Return this rank's own slice, which it alone reduces."""
        return slice_of(self.rank, size, self._owners)

    def gather(self, message: bytes) -> list[bytes]:
        """Exchange the lengths, and then the messages."""
        self._brought = 0
        barrier = self.barrier
        barrier.own.write(barrier.next, [len(message)])
        generation = barrier.meet()
        result = [np.empty(slot.numbers(generation)[0], np.uint8) for slot in barrier.slots]
        self.allgather(np.frombuffer(message, np.uint8), result)
        return [part.tobytes() for part in result]

    def allreduce(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        offsets = None if self._is_small(send.nbytes) else self._find(send, result)
        if offsets is None:
            self.allreduce_init(send, result, op, scaling)()
        else:
            self._reduce_in_segments(send, result, offsets, op, scaling)

    def allreduce_all(
        self, sends: Sequence[Any], results: Sequence[Any], op: ReduceOp, scaling: Scaling
    ) -> None:
        """Fill chunks with several arrays."""
        if len(sends) == 1:
            super().allreduce_all(sends, results, op, scaling)
        elif self._is_small(sum(send.nbytes for send in sends)):
            self._reduce_small(sends, results, op, scaling)
        else:
            self._chunked(sends, results, op, scaling)()

    def allreduce_zero_copy(
        self,
        send: Any,
        parts: Sequence[tuple[int, Any]],
        result: Any,
        op: ReduceOp,
        scaling: Scaling,
    ) -> None:
        """Read the parts where they lie, if the arrays are in shared memory."""
        offsets = None if self._is_small(send.nbytes) else self._find(send, result)
        if offsets is None:
            super().allreduce_zero_copy(send, parts, result, op, scaling)
        else:
            self._reduce_in_segments(send, result, offsets, op, scaling, parts)

    def allreduce_init(
        self, send: Any, result: Any, op: ReduceOp, scaling: Scaling
    ) -> Callable[[], None]:
        """Keep the steps of a chunked allreduce.

        A user's array may lie in shared memory on some ranks only, as a gradient does and its copy
        does not. It is reduced there if all ranks have announced so.
        """
        if self._is_small(send.nbytes):
            return partial(self._reduce_small, [send], [result], op, scaling)
        offsets = self._find(send, result)
        if offsets is None:
            return self._chunked([send], [result], op, scaling)

        def reduce() -> None:
            if offsets in self._places:
                self._reduce_in_segments(send, result, offsets, op, scaling)
            else:
                self._chunked([send], [result], op, scaling)()

        return reduce

    def _chunked(
        self, sends: Sequence[Any], results: Sequence[Any], op: ReduceOp, scaling: Scaling
    ) -> Callable[[], None]:
        first = sends[0]
        chunks = cut(sends, results, self._room(first))
        reduce = self._reducer(first.dtype, op, scaling)
        owners = self._owners_of(first)
        chunked = ChunkedAllreduce(self.barrier, self.rank, chunks, owners, reduce, self.lane)
        return lambda: chunked.run(self._take_brought(sends))

    def _reduce_small(
        self, sends: Sequence[Any], results: Sequence[Any], op: ReduceOp, scaling: Scaling
    ) -> None:
        """Reduce all ranks' copies of arrays on every rank."""
        generation = self._take_brought(sends)
        if self.barrier.passed != generation:
            self.barrier.wait(generation)
        size = sum(send.size for send in sends) if len(sends) > 1 else sends[0].size
        slots = self.barrier.chunks(generation % COPIES, size, sends[0].dtype)
        if len(sends) == 1:
            reduce_into(results[0], slots, op, scaling)
            return
        every = map(Chunk(sends, results, size).split, slots)
        for result, *parts in zip(results, *every, strict=True):
            reduce_into(result, parts, op, scaling)

    def _take_brought(self, arrays: Sequence[Any]) -> int:
        """Return the generation for which the first chunk of arrays has been written."""
        generation, self._brought = self._brought, 0
        if not generation:
            self._load(arrays)
            generation = self.barrier.arrive()
        return generation

    def _is_small(self, nbytes: int) -> bool:
        return nbytes < _SMALL and nbytes <= self.chunk

    def _owners_of(self, array: Any) -> int:
        """Return the number of ranks that reduce a slice of every chunk, for all; 0: none does."""
        dtype = array.dtype
        if self.size <= _FEW_RANKS and accumulator(dtype) == dtype:
            return 0
        return self._owners

    def _room(self, array: Any) -> int:
        return max(self.chunk // int(array.itemsize), 1)

    def _load(self, arrays: Sequence[Any]) -> int:
        """Write the first chunk of some arrays for the next generation, and return its number.

        Other ranks may load more arrays, or fewer. The arrays that all ranks have come first, and
        lie at the same offsets.
        """
        following, first = self.barrier.last + 1, arrays[0]
        if len(arrays) == 1 and self._is_small(first.nbytes):
            slots = self.barrier.chunks(following % COPIES, first.size, first.dtype)
            np.copyto(slots[self.rank], first)
            return following
        chunk = cut(arrays, arrays, self._room(first))[0]
        own = slice_of(self.rank, chunk.size, self._owners_of(first))
        if self._is_small(chunk.size * first.itemsize):
            own = slice(0, 0)  # where that is all that the ranks have in common, each reads it all
        slots = self.barrier.chunks(following % COPIES, chunk.size, first.dtype)
        perform(load(slots[self.rank], chunk, own, self.lane))
        return following

    def _reduce_in_segments(
        self,
        send: Any,
        result: Any,
        offsets: tuple[int, int],
        op: ReduceOp,
        scaling: Scaling,
        elsewhere: Sequence[tuple[int, Any]] = (),
    ) -> None:
        """Reduce this rank's slice of all ranks' arrays into all ranks' results."""
        self._brought = 0
        barrier = self.barrier
        numbers = self._places.pop(offsets, [])
        is_announced = self._is_incomplete = bool(numbers)
        if not is_announced:
            barrier.own.write(barrier.next, offsets)
            generation = barrier.meet()
            numbers = [slot.numbers(generation) for slot in barrier.slots]
        sends = self._views(send, [each[0] for each in numbers])
        results = self._views(result, [each[1] for each in numbers])
        reduce = self._reducer(send.dtype, op, scaling)
        # In pieces that are still in the cache when they are copied to the other ranks. Where the
        # result lies on an input, through a buffer.
        own = slice_of(self.rank, send.size, self._owners)
        pieces = _pieces_of(send, own, elsewhere, max(self.piece // send.itemsize, 1))
        in_place = offsets[0] == offsets[1]
        largest = max((part.size for _, part in pieces), default=0)
        buffer = np.empty(largest if in_place else 0, send.dtype)
        calls: list[Call] = []
        for piece, part in pieces:
            reduced = buffer[: part.size] if in_place else result[piece]
            parts = [array[piece] for array in sends]
            parts[self.rank] = part
            calls += reduce(reduced, parts)
            for target in results:
                if target is not result or in_place:
                    calls.append((np.copyto, (target[piece], reduced)))
        perform(calls)
        if not is_announced:
            barrier.meet()  # before any rank may write inputs that others read, or read its result

    def _find(self, send: Any, result: Any) -> tuple[int, int] | None:
        """Return the offsets of two arrays in shared memory, or None if either lies elsewhere."""
        sent = self.arena.find(send)
        written = None if sent is None else self.arena.find(result)
        return None if sent is None or written is None else (sent, written)

    def _views(self, own: Any, offsets: Sequence[int]) -> list[Any]:
        """Return all ranks' arrays that correspond to one's own, from their offsets."""
        return [
            own if rank == self.rank else slot.peer.view(offset, own.size, own.dtype)
            for rank, (slot, offset) in enumerate(zip(self.barrier.slots, offsets, strict=True))
        ]

    def _reducer(self, dtype: np.dtype[Any], op: ReduceOp, scaling: Scaling) -> PreparedReduction:
        return prepare_reduction(dtype, op, scaling)

    def alltoall(self, pieces: Sequence[Any], result: Sequence[Any]) -> None:
        """Exchange in rounds, in each a part of every rank's chunk for each other rank."""
        barrier, byte = self.barrier, np.dtype(np.uint8)
        room = max(self.chunk // self.size, 1)
        barrier.own.write(barrier.next, [max(piece.size for piece in pieces)])
        generation = barrier.meet()
        longest = max(slot.numbers(generation)[0] for slot in barrier.slots)
        for start in range(0, longest, room):
            chunk = barrier.own.chunk(barrier.next, self.chunk, byte)
            for rank, piece in enumerate(pieces):
                part = piece[start : start + room]
                chunk[rank * room : rank * room + part.size] = part
            generation = barrier.meet()
            for target, slot in zip(result, barrier.slots, strict=True):
                part = target[start : start + room]
                theirs = slot.chunk(generation, self.chunk, byte)
                part[...] = theirs[self.rank * room : self.rank * room + part.size]

    def allgather(self, piece: Any, result: Sequence[Any]) -> None:
        """Exchange in rounds, in each a chunk of every rank's piece."""
        barrier = self.barrier
        longest = max(part.size for part in result)
        for start in range(0, longest, self.chunk):
            own = piece[start : start + self.chunk]
            barrier.own.chunk(barrier.next, own.size, own.dtype)[...] = own
            generation = barrier.meet()
            for target, slot in zip(result, barrier.slots, strict=True):
                if target is not piece:
                    part = target[start : start + self.chunk]
                    part[...] = slot.chunk(generation, part.size, part.dtype)

    def broadcast(self, array: Any, root: int) -> None:
        """Gather the root's array, and nothing from the others."""
        pieces = [array if rank == root else array[:0] for rank in range(self.size)]
        self.allgather(pieces[self.rank], pieces)

    def close(self) -> None:
        """Free all memory that is not in use any more."""
        self.arena.close()


def join_nodes(world: World, before: Barrier | None = None) -> Barrier | None:
    """Set up a barrier on each node of a world; collective.

    Args:
        before: a barrier that no rank uses any more, whose memory the new one uses; None: none.

    Returns:
        None on all ranks if any of them cannot share memory; rank 0 logs why.
    """
    barrier, failure = None, None
    try:
        barrier = _join_node(world, before)
    except OSError as error:
        failure = error  # its frames keep this rank's memory until the others have opened it
    everywhere = world.comm.allgather(None if failure is None else str(failure))
    failure = None
    for rank, text in enumerate(everywhere):
        if text is not None:
            if world.comm.rank == 0:
                _log.warning(
                    "rank %d cannot share memory with the ranks of its node (%s); all ranks use "
                    "MPI, which is slower; HVDLITE_SHARED_MEMORY=0 silences this",
                    world.ids[rank],
                    text,
                )
            return None
    return barrier


def _join_node(world: World, before: Barrier | None) -> Barrier | None:
    """Set up the barrier of this node; all of its ranks take part, whichever of them fails.

    Raises:
        OSError: this system or this user may not share memory so.
    """
    try:
        if not futex.is_supported():
            raise OSError("it needs Linux on x86-64")
        arena = Arena() if before is None else before.arena
        if before is not None:
            before.reset()  # before the others get the key: they poll it as soon as they do
        here = os.getpid(), arena.key, os.sched_getaffinity(0)
    except OSError:
        world.node.allgather(None)
        raise
    everywhere = world.node.allgather(here)
    if None in everywhere:
        return None  # that rank says why
    is_here = (node == world.node_index for node in world.nodes)
    ranks = list(itertools.compress(world.ids, is_here))
    cores = set().union(*(cores for _, _, cores in everywhere))
    processes = [(pid, key) for pid, key, _ in everywhere]
    crowded = len(processes) > len(cores)
    return Barrier(world.node.rank, ranks, arena, processes, crowded, before)


def _pieces_of(
    array: Any, whole: slice, elsewhere: Sequence[tuple[int, Any]], room: int
) -> list[tuple[slice, Any]]:
    """Cut a slice of an array, parts of which lie elsewhere, into pieces of ``room`` elements."""
    parts, end = [], whole.start
    for start, part in elsewhere:
        parts += [(end, array[end:start]), (start, part)]
        end = start + part.size
    parts.append((end, array[end : whole.stop]))
    return [
        (slice(begin + start, begin + min(start + room, part.size)), part[start : start + room])
        for begin, part in parts
        for start in range(0, part.size, room)
    ]
