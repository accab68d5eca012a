"""Where the ranks of a node meet: a slot for each in shared memory."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdlite.errors import RankGoneError
from hvdlite.transport.base import WORD_SIZE, Patience
from hvdlite.transport.reduce import Call, perform
from hvdlite.transport.shared_memory.affinity import CoreBalancer
from hvdlite.transport.shared_memory.futex import Futex, give_way, pause
from hvdlite.transport.shared_memory.segment import Arena, Key, Peer

#: Words that a rank can bring to a meeting.
MOST_WORDS = 1024
#: Bytes that a rank can bring along at most, beside its note.
LARGEST_CHUNK = 4 * 2**20

# What a rank has written for a meeting may be read until the next one, see `Table`. So there
# have to be two of everything; more, and less of it stays in the cache.
_COPIES = 2
#: How many of what ranks reduce for each other may be read, while the next one is written.
SUMS = 3
# Four words, the one that others look at all the time on a cache line of its own, then notes,
# then chunks.
_ARRIVED, _SLEEPS, _GONE, _CORE = 0, 64, 68, 72
_HEADER = struct.Struct("<9q")
_NOTES, _NOTE_BYTES = 4096, _HEADER.size + MOST_WORDS * WORD_SIZE
# Not at the beginning of a page, as large arrays nearly do: where a copy goes 4 to 16 bytes further
# into its page than it comes from, recent AMD processors take three to six times as long (glibc's
# bug 30994).
_CHUNKS = 32 * 4096 + 2048
_REDUCED = _CHUNKS + _COPIES * LARGEST_CHUNK
_SLOT_BYTES = _REDUCED + SUMS * LARGEST_CHUNK

# A rank looks for the others for so long before it sleeps: to wake a core that sleeps takes 0.1 ms,
# and costs the one that wakes it nearly as much. With fewer cores than ranks it gives way between
# looks, to the one that it waits for perhaps; else that would only make looks rarer.
_SPIN_SECONDS = 0.5e-3
# Who waits in the kernel comes up as often to see whether those waited for are still alive.
_LOOK_SECONDS = 0.05


class Step(NamedTuple):
    """What a rank does between two meetings.

    Attributes:
        before: it arrives at the next one: what others wait for.
        after: that, and before it waits: what only it needs. Who is early has something to do.
    """

    before: list[Call]
    after: list[Call]


class _Copies(dict[np.dtype[Any], list[Any]]):
    """The copies of what a rank brings along, as arrays of each dtype that was asked for."""

    def __init__(self, memory: Any, start: int, count: int) -> None:
        super().__init__()
        self._bytes = [
            np.ndarray(LARGEST_CHUNK, np.uint8, memory, start + copy * LARGEST_CHUNK)
            for copy in range(count)
        ]

    def __missing__(self, dtype: np.dtype[Any]) -> list[Any]:
        self[dtype] = [copy.view(dtype) for copy in self._bytes]
        return self[dtype]


class Slot:
    """What one rank shows to the others of its node.

    Args:
        memory: bytes that its arena begins with.
        rank: whose slot it is, among all ranks.
        peer: its process.
    """

    def __init__(self, memory: Any, rank: int, peer: Peer) -> None:
        self.rank = rank
        self.peer = peer
        self.arrived = Futex.from_buffer(memory, _ARRIVED)
        self.sleeps = ctypes.c_uint32.from_buffer(memory, _SLEEPS)
        self.gone = ctypes.c_uint32.from_buffer(memory, _GONE)
        self.core = ctypes.c_uint32.from_buffer(memory, _CORE)
        self._notes = [
            memoryview(memory)[start : start + _NOTE_BYTES]
            for start in range(_NOTES, _NOTES + _COPIES * _NOTE_BYTES, _NOTE_BYTES)
        ]
        self._chunks = _Copies(memory, _CHUNKS, _COPIES)
        self._reduced = _Copies(memory, _REDUCED, SUMS)

    def write(self, meeting: int, numbers: Sequence[int], words: bytes = b"") -> None:
        """Write the note for a meeting: up to 8 integers, and words."""
        note = self._notes[meeting % _COPIES]
        _HEADER.pack_into(note, 0, len(words), *numbers, *[0] * (8 - len(numbers)))
        note[_HEADER.size : _HEADER.size + len(words)] = words

    def numbers(self, meeting: int) -> tuple[int, ...]:
        """The integers of the note."""
        return _HEADER.unpack_from(self._notes[meeting % _COPIES])[1:]

    def words(self, meeting: int) -> bytes:
        """The words of the note, one after the other."""
        note = self._notes[meeting % _COPIES]
        (length,) = struct.unpack_from("<q", note)
        return bytes(note[_HEADER.size : _HEADER.size + length])

    def chunk(self, meeting: int, size: int, dtype: np.dtype[Any]) -> Any:
        """The first ``size`` elements of what is brought along to a meeting."""
        return self._chunks[dtype][meeting % _COPIES][:size]

    def reduced(self, number: int, size: int, dtype: np.dtype[Any]) -> Any:
        """The same of something else, which has a number, and which all ranks write a part of."""
        return self._reduced[dtype][number % SUMS][:size]


class Barrier:
    """The slots of a node's ranks, and the meetings that they hold there.

    Meetings are numbered, alike on all ranks. A rank writes what it brings to the next one,
    arrives, waits for the others, and reads what they have brought, before it does the same
    again. So who arrives at a meeting has read all that was brought to the one before, and who
    has waited for it may overwrite that.

    Every word has one writer, so that nothing has to be read and written at once, for which Python
    has no means. Who waits for long waits in the kernel, having said so: to wake somebody is a
    system call, and most often nobody sleeps.

    Args:
        index: this rank's position on the node.
        ranks: of all that meet here, in the world.
        arena: what this rank shares; nothing has been taken from it yet.
        processes: every rank's process, and the key of its arena, by position.
        cores: those that the ranks may run on, if there are fewer than ranks.

    Raises:
        OSError: another rank's memory cannot be opened.

    Attributes:
        arena: as given.
        last: the number of the meeting that this rank has arrived at.
    """

    def __init__(
        self,
        index: int,
        ranks: Sequence[int],
        arena: Arena,
        processes: Sequence[tuple[int, Key]],
        cores: Collection[int] = (),
    ) -> None:
        self.arena = arena
        self.slots = []
        kind = np.dtype(np.uint8)
        own = arena.empty(_SLOT_BYTES, kind)
        for position, (pid, key) in enumerate(processes):
            peer = Peer(pid, key)
            memory = own if position == index else peer.view(0, _SLOT_BYTES, kind)
            self.slots.append(Slot(memory, ranks[position], peer))
        self.own = self.slots[index]
        self.others = [slot for slot in self.slots if slot is not self.own]
        self._sleeps = [slot.sleeps for slot in self.others]
        words = [slot.core for slot in self.slots]
        self._cores = CoreBalancer(words, index, cores) if cores else None
        self.last = 0
        self._met = 0  # at which it has waited for the others
        self._patience: Patience | None = None
        # Nobody else's, so always free. To take it is an atomic operation: what was written before
        # it is seen by others before anything is read after it.
        self._fence = threading.Lock()

    @property
    def next(self) -> int:
        """The number of the meeting that this rank arrives at next."""
        return self.last + 1

    @property
    def waits(self) -> bool:
        """Return whether a wait for the last meeting was interrupted; `wait` resumes it."""
        return self._met != self.last

    @staticmethod
    def turn(meeting: int) -> int:
        """Meetings with the same turn use the same memory; it stands for any of them."""
        return meeting % _COPIES

    def reduced(self, number: int, size: int, dtype: np.dtype[Any]) -> Any:
        """What the ranks reduce for each other: each brings a slice of it to a meeting.

        They number it as they like, the same for each meeting, and read it until they arrive at the
        second meeting after that, or wait for the next.
        """
        return self.slots[0].reduced(number, size, dtype)

    def arrive(self) -> int:
        """Arrive at the next meeting, and return its number."""
        last = self.last = self.last + 1
        arrived = self.own.arrived
        arrived.value = last
        # Who goes to sleep says so, and then looks once more, in the kernel. Here it is the other
        # way round, so at least one of the two sees the other.
        if self._fence.acquire(False):
            self._fence.release()
        last &= 0xFFFFFFFF
        for sleeps in self._sleeps:
            if sleeps.value == last:
                arrived.wake()
                break
        return self.last

    def wait(self, meeting: int, patience: Patience | None = None) -> None:
        """Wait until all ranks have arrived at a meeting.

        Args:
            meeting: its number.
            patience: asked while this rank waits, here and in later meetings.

        Raises:
            RankGoneError: a rank that has not arrived has left or ended.
        """
        self._patience = patience or self._patience
        start = 0.0
        for slot in self.others:
            # What `_reached` does, which would cost more to call.
            if (slot.arrived.value - meeting) & 0x80000000:
                start = start or time.monotonic()
                self._wait_for(slot, meeting, start)
        for slot in self.others:
            gone = slot.gone.value
            if gone and _reached(meeting, gone):  # it gave up after it had arrived
                raise RankGoneError(_has_ended(slot))
        self._met = meeting

    def meet(self) -> int:
        """Arrive at the next meeting, wait for the others, and return its number."""
        meeting = self.arrive()
        self.wait(meeting)
        return meeting

    def walk(self, meeting: int, steps: Sequence[Step]) -> None:
        """Wait for a meeting, take a step, arrive at the next one in it, and so on.

        Args:
            meeting: the first, at which this rank has arrived.
            steps: at least one. No meeting follows the last.
        """
        if self._cores is not None:
            self._cores.tell()
        *steps, last = steps
        for before, after in steps:
            self.wait(meeting)
            perform(before)
            meeting = self.arrive()
            perform(after)
        self.wait(meeting)
        perform(last.before)
        perform(last.after)

    def leave(self) -> None:
        """Let the others know the first meeting that this rank has no part in any more."""
        self.own.gone.value = ((self._met + 1) & 0xFFFFFFFF) or 1  # 0 stands for: it is here
        self.own.arrived.wake()

    def check_alive(self) -> None:
        """Raise if another rank has left or ended.

        Raises:
            RankGoneError: it has.
        """
        for slot in self.others:
            failure = self._failure(slot, _LOOK_SECONDS)
            if failure is not None:
                raise RankGoneError(failure)

    def absent(self) -> list[int]:
        """The ranks that have not arrived where this one waits."""
        return [slot.rank for slot in self.others if not _reached(slot.arrived.value, self.last)]

    def _wait_for(self, slot: Slot, meeting: int, start: float) -> None:
        look = pause
        if self._cores is not None:
            look = give_way
            self._cores.spread(start)
        while time.monotonic() < start + _SPIN_SECONDS:
            look()
            if _reached(slot.arrived.value, meeting):
                return
        while not _reached(seen := slot.arrived.value, meeting):
            elapsed = time.monotonic() - start
            self._look_at_others(meeting, elapsed)
            if self._patience is not None and elapsed > _LOOK_SECONDS:
                self._patience.check(elapsed)
            self.own.sleeps.value = meeting
            slot.arrived.wait(seen, _LOOK_SECONDS)

    def _look_at_others(self, meeting: int, elapsed: float) -> None:
        """Raise if any rank, not only the one that is waited for first, will not come."""
        for slot in self.others:
            if not _reached(slot.arrived.value, meeting):
                failure = self._failure(slot, elapsed)
                # It may have arrived before it ended.
                if failure is not None and not _reached(slot.arrived.value, meeting):
                    raise RankGoneError(failure)

    def _failure(self, slot: Slot, elapsed: float) -> str | None:
        """Why a rank will not come; None: as far as is known, it will."""
        if slot.gone.value:
            return _has_ended(slot)
        if elapsed >= _LOOK_SECONDS and not slot.peer.is_running():
            return (
                f"rank {slot.rank} (process {slot.peer.pid}) has died while this rank waits for "
                "it; see its output and the system's log for what killed it"
            )
        return None


def _has_ended(slot: Slot) -> str:
    return f"rank {slot.rank} has ended while this rank waits for it; see what ended it"


def _reached(seen: int, meeting: int) -> bool:
    """Whether a rank has come as far as a meeting; its count has 32 bits and wraps around."""
    return (seen - meeting) & 0xFFFFFFFF < 0x80000000
