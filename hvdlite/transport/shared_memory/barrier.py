"""A barrier for the ranks of a node, with a slot for each rank's data in shared memory."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from hvdlite.errors import RankGoneError
from hvdlite.transport.shared_memory.futex import Futex, pause, yield_core
from hvdlite.transport.shared_memory.segment import Arena, Key, Peer
from hvdlite.transport.transport import DIGEST_SIZE, OnWait

#: Digests that a rank can write for one generation.
MAX_DIGESTS = 1024
#: Bytes of the largest chunk that a rank can write for one generation.
LARGEST_CHUNK = 4 * 2**20

#: Copies of a rank's data. Those of a generation may be read until the next one, see `Barrier`, so
#: two are needed; with more, less would stay in the cache.
COPIES = 2
#: Output buffers: two may still be read while the next one is written.
OUTPUTS = 3
# A slot: three integers, of which the one that others poll has a cache line of its own; then notes,
# chunks and outputs.
_ARRIVED, _SLEEPS, _GONE = 0, 64, 68
_HEADER = struct.Struct("<9q")
_NOTES, _NOTE_BYTES = 4096, _HEADER.size + MAX_DIGESTS * DIGEST_SIZE
# Away from the start of a page, near which large arrays begin: recent AMD processors take three to
# six times as long for a copy whose target lies 4 to 16 bytes further into its page than the source
# (glibc bug 30994).
_CHUNKS = 32 * 4096 + 2048
_OUTPUTS = _CHUNKS + COPIES * LARGEST_CHUNK
_SLOT_BYTES = _OUTPUTS + OUTPUTS * LARGEST_CHUNK

# A rank spins before it sleeps: to wake a sleeping core takes 0.1 ms, and costs the core that wakes
# it nearly as much. Each spin in vain halves how long, each success doubles it: where both ranks
# share a core, because other processes compute on the rest, it keeps the other from arriving. With
# fewer cores than ranks it yields its core while it spins, perhaps to the rank that it waits for;
# otherwise yielding would only make it notice later.
_LONGEST_SPIN, _SHORTEST_SPIN = 0.5e-3, 1e-5
# A rank that sleeps in the kernel wakes this often to check that the others are still alive.
_CHECK_SECONDS = 0.05


class Slot:
    """The data that one rank shows to the others of its node."""

    def __init__(self, memory: Any, rank: int, peer: Peer) -> None:
        self.rank = rank
        self.peer = peer
        self.arrived = Futex.from_buffer(memory, _ARRIVED)
        self.sleeps = ctypes.c_uint32.from_buffer(memory, _SLEEPS)
        self.gone = ctypes.c_uint32.from_buffer(memory, _GONE)
        self.memory = memory
        self._notes = [
            memoryview(memory)[start : start + _NOTE_BYTES]
            for start in range(_NOTES, _NOTES + COPIES * _NOTE_BYTES, _NOTE_BYTES)
        ]

    def write(self, generation: int, numbers: Sequence[int], digests: bytes = b"") -> None:
        """Write the note of a generation: up to 8 integers, and digests."""
        note = self._notes[generation % COPIES]
        _HEADER.pack_into(note, 0, len(digests), *numbers, *[0] * (8 - len(numbers)))
        note[_HEADER.size : _HEADER.size + len(digests)] = digests

    def numbers(self, generation: int) -> tuple[int, ...]:
        """Return the integers of the note."""
        return _HEADER.unpack_from(self._notes[generation % COPIES])[1:]

    def digests(self, generation: int) -> bytes:
        """Return the digests of the note, one after the other."""
        note = self._notes[generation % COPIES]
        (length,) = struct.unpack_from("<q", note)
        return bytes(note[_HEADER.size : _HEADER.size + length])

    def chunk(self, generation: int, size: int, dtype: np.dtype[Any]) -> Any:
        """Return the first ``size`` elements of the rank's chunk of a generation."""
        start = _CHUNKS + generation % COPIES * LARGEST_CHUNK
        return np.ndarray(size, dtype, self.memory, start)

    def output(self, number: int, size: int, dtype: np.dtype[Any]) -> Any:
        """Return the first ``size`` elements of an output buffer; see `Barrier.output`."""
        return np.ndarray(size, dtype, self.memory, _OUTPUTS + number % OUTPUTS * LARGEST_CHUNK)


class Barrier:
    """A barrier that a node's ranks pass again and again, and their slots.

    Each passage is a generation; their numbers are the same on all ranks. A rank writes its data
    for the next generation, arrives, waits for the others, and reads their data before it does the
    same again. So a rank that arrives has read all data of the generation before, and a rank that
    has waited for the others may overwrite that.

    Every integer has one writer: Python has no atomic read-modify-write. A rank that waits for long
    sleeps in the kernel, and publishes that it does: waking it is a system call, and mostly no rank
    sleeps.

    Args:
        arena: this rank's shared memory; nothing has been allocated from it yet but by ``before``.
        processes: every rank's process id, and the key of its arena, by position.
        crowded: whether there are fewer cores than ranks.
        before: a barrier that no rank uses any more and that has been `reset`, whose memory this
            one uses; None: there is none.

    Raises:
        OSError: another rank's memory cannot be opened.

    Attributes:
        chunks: returns the first elements of all ranks' chunks, by position; takes a generation
            modulo `COPIES`, the number of elements and their dtype.
        last: the generation that this rank has arrived at.
        passed: the generation in which it has waited for the others; less than `last` where a wait
            was interrupted, which `wait` resumes.
    """

    def __init__(
        self,
        index: int,
        ranks: Sequence[int],
        arena: Arena,
        processes: Sequence[tuple[int, Key]],
        crowded: bool = False,
        before: Barrier | None = None,
    ) -> None:
        self.arena = arena
        self.slots = []
        byte = np.dtype(np.uint8)
        own = arena.empty(_SLOT_BYTES, byte) if before is None else before.own.memory
        for position, (pid, key) in enumerate(processes):
            peer = Peer(pid, key)
            memory = own if position == index else peer.view(0, _SLOT_BYTES, byte)
            self.slots.append(Slot(memory, ranks[position], peer))
        self.own: Slot = self.slots[index]
        self.others = [slot for slot in self.slots if slot is not self.own]
        self._sleeps = [slot.sleeps for slot in self.others]
        self.chunks: Callable[[int, int, np.dtype[Any]], tuple[Any, ...]]
        slots = self.slots
        # Mostly the same sizes.
        self.chunks = lru_cache(64)(lambda *which: tuple(slot.chunk(*which) for slot in slots))
        self._spin = yield_core if crowded else pause
        self.last = 0
        self.passed = 0
        self._on_wait: OnWait | None = None
        self._spin_seconds = _LONGEST_SPIN
        # Used by this rank alone, so always free. To acquire it is an atomic operation: others see
        # what was written before it before anything is read after it.
        self._fence = threading.Lock()

    @property
    def next(self) -> int:
        """The generation that this rank arrives at next."""
        return self.last + 1

    def output(self, number: int, size: int, dtype: np.dtype[Any]) -> Any:
        """Return the buffer in which the ranks reduce for each other, a slice each.

        All ranks number the buffers in the same way. They may read one until they arrive at the
        second generation after the one that completed it, or wait for the next.
        """
        return self.slots[0].output(number, size, dtype)

    def arrive(self) -> int:
        """Arrive at the next generation, and return its number."""
        last = self.last = self.last + 1
        arrived = self.own.arrived
        arrived.value = last
        # A rank that goes to sleep publishes it, and then checks once more, in the kernel. Here the
        # order is reversed, so at least one of the two sees the other.
        if self._fence.acquire(False):
            self._fence.release()
        last &= 0xFFFFFFFF
        for sleeps in self._sleeps:
            if sleeps.value == last:
                arrived.wake()
                break
        return self.last

    def wait(self, generation: int, on_wait: OnWait | None = None) -> None:
        """Wait until all ranks have arrived at a generation.

        Args:
            on_wait: called while this rank waits, here and in later generations.

        Raises:
            RankGoneError: a rank that has not arrived has left or ended.
        """
        self._on_wait = on_wait or self._on_wait
        start = 0.0
        for slot in self.others:
            # The body of `_reached`, inlined because a call would cost more.
            if (slot.arrived.value - generation) & 0x80000000:
                start = start or time.monotonic()
                self._wait_for(slot, generation, start)
        for slot in self.others:
            gone = slot.gone.value
            if gone and _reached(generation, gone):  # it gave up after it had arrived
                raise RankGoneError(_has_ended(slot))
        self.passed = generation

    def meet(self) -> int:
        """Arrive at the next generation, wait for the others, and return its number."""
        generation = self.arrive()
        self.wait(generation)
        return generation

    def leave(self) -> None:
        """Publish the first generation that this rank takes no part in."""
        self.own.gone.value = ((self.passed + 1) & 0xFFFFFFFF) or 1  # 0 means: not gone
        self.own.arrived.wake()

    def check_alive(self) -> None:
        """Raise RankGoneError if another rank has left or ended."""
        for slot in self.others:
            failure = self._failure(slot, _CHECK_SECONDS)
            if failure is not None:
                raise RankGoneError(failure)

    def absent(self) -> list[int]:
        """Return the ranks that have not arrived where this one waits."""
        return [slot.rank for slot in self.others if not _reached(slot.arrived.value, self.last)]

    def reset(self) -> None:
        """Prepare this rank's memory for another barrier: no rank uses this one any more."""
        self.own.memory[:_NOTES] = 0

    def _wait_for(self, slot: Slot, generation: int, start: float) -> None:
        while time.monotonic() < start + self._spin_seconds:
            self._spin()
            if _reached(slot.arrived.value, generation):
                self._spin_seconds = min(2 * self._spin_seconds, _LONGEST_SPIN)
                return
        self._spin_seconds = max(self._spin_seconds / 2, _SHORTEST_SPIN)
        while not _reached(seen := slot.arrived.value, generation):
            elapsed = time.monotonic() - start
            self._check_others(generation, elapsed)
            if self._on_wait is not None and elapsed > _CHECK_SECONDS:
                self._on_wait(elapsed)
            self.own.sleeps.value = generation
            slot.arrived.wait(seen, _CHECK_SECONDS)

    def _check_others(self, generation: int, elapsed: float) -> None:
        """Raise if any rank, not only the one that is waited for first, will not arrive."""
        for slot in self.others:
            if not _reached(slot.arrived.value, generation):
                failure = self._failure(slot, elapsed)
                # It may have arrived before it ended.
                if failure is not None and not _reached(slot.arrived.value, generation):
                    raise RankGoneError(failure)

    def _failure(self, slot: Slot, elapsed: float) -> str | None:
        """Return why a rank will not arrive; None if it still may."""
        if slot.gone.value:
            return _has_ended(slot)
        if elapsed >= _CHECK_SECONDS and not slot.peer.is_running():
            return (
                f"rank {slot.rank} (process {slot.peer.pid}) has died while this rank waits for "
                "it; see its output for an error, or else the system's log for what killed it"
            )
        return None


def _has_ended(slot: Slot) -> str:
    return f"rank {slot.rank} has ended while this rank waits for it; see what ended it"


def _reached(seen: int, generation: int) -> bool:
    """Return whether a rank has reached a generation; its count has 32 bits and wraps around."""
    return (seen - generation) & 0xFFFFFFFF < 0x80000000
