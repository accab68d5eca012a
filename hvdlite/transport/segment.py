"""Memory that the processes of one node share, whatever the size of the shm mount."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np

#: With which a peer finds a segment: file number, inode, bytes.
Key = tuple[int, int, int]


class Segment:
    """A piece of memory that peers can open; it lives as long as somebody has it mapped.

    It is an anonymous file (``memfd_create``), which counts as memory of the process and not
    against the shm mount, and disappears with the last process that holds it. Peers of the
    same user reach it as ``/proc/PID/fd/N``.

    Args:
        nbytes: its size; pages that are never touched cost nothing.
    """

    def __init__(self, nbytes: int) -> None:
        self._file = os.memfd_create("hvdlite", os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, nbytes)
        self.memory = mmap.mmap(self._file, nbytes)
        self.key: Key = (self._file, os.fstat(self._file).st_ino, nbytes)


class Arena:
    """Arrays in shared memory; what is not used any more is used again.

    Memory returns when the last array, or tensor, that views it has gone, so an array may be
    handed to a framework for as long as that likes.
    """

    def __init__(self) -> None:
        self._lent: dict[int, Segment] = {}  # by address
        self._free: dict[int, list[Segment]] = {}  # by size

    def empty(self, size: int, dtype: np.dtype[Any]) -> Any:
        """Return an array of ``size`` elements, uninitialised."""
        # Of few sizes, so that there are few segments, whatever is asked for.
        nbytes = max(mmap.PAGESIZE, 1 << (size * dtype.itemsize - 1).bit_length())
        free = self._free.setdefault(nbytes, [])
        segment = free.pop() if free else Segment(nbytes)
        # Every view has this object as its last base: views of views do not keep the array
        # between alive, which therefore could not tell.
        lease = (ctypes.c_byte * nbytes).from_buffer(segment.memory)
        address = ctypes.addressof(lease)
        self._lent[address] = segment
        weakref.finalize(lease, self._take_back, address).atexit = False
        return np.ndarray(size, dtype, memoryview(lease))

    def find(self, array: Any) -> tuple[int, int, int, int] | None:
        """The key of a contiguous array's segment, and its offset there in bytes.

        Returns:
            None where it does not lie in a segment.
        """
        if not array.size:  # may seem to lie in the segment behind its own
            return None
        address = array.__array_interface__["data"][0]
        # A copy, since the search itself may set off the garbage collector, and that `_take_back`.
        for start, segment in self._lent.copy().items():
            if start <= address < start + segment.key[2]:
                return *segment.key, address - start
        return None

    def _take_back(self, address: int) -> None:
        segment = self._lent.pop(address)
        self._free[segment.key[2]].append(segment)


class Peer:
    """Another process of this node, and what it shares.

    Args:
        pid: the process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._maps: dict[Key, mmap.mmap] = {}

    def map(self, key: Key) -> mmap.mmap:
        """Map one of its segments.

        Raises:
            OSError: the process is gone, on another host, or of another user.
        """
        if key not in self._maps:
            self._maps = {other: memory for other, memory in self._maps.items() if self._has(other)}
            self._maps[key] = self._open(key)
        return self._maps[key]

    def is_running(self) -> bool:
        """Whether the process has not ended; one that is stopped has not."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                # The state follows the name, which is in parentheses and may have more of them.
                return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
        except OSError:
            return False

    def _open(self, key: Key) -> mmap.mmap:
        number, inode, nbytes = key
        file = os.open(self._path(number), os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_ino != inode:
                raise OSError(f"{self._path(number)} is not the segment that was announced")
            return mmap.mmap(file, nbytes)
        finally:
            os.close(file)

    def _has(self, key: Key) -> bool:
        """Whether the process still holds the segment."""
        try:
            return os.stat(self._path(key[0])).st_ino == key[1]
        except OSError:
            return False

    def _path(self, number: int) -> str:
        return f"/proc/{self.pid}/fd/{number}"
