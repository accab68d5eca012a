"""Memory that the processes of one node share, independent of the size of the shm mount."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np

from hvdlite.base import arrays, memory_file

#: Identifies an arena to peers: the descriptor of its file, and the inode.
Key = tuple[int, int]

# Bytes of the first region of an arena's file. Every other one is as large as all before it.
_FIRST = 2**26

_MAP_FIXED, _MAP_POPULATE = 0x10, 0x8000  # Linux
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_library = ctypes.CDLL(None, use_errno=True)
_mmap = _library.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_munmap = _library.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Arena:
    """An allocator of arrays in memory that peers can map; freed memory is used again.

    All arrays lie in one anonymous file (``memfd_create``), which counts as memory of the process
    and not against the shm mount, and disappears with the last process that maps it. Peers of the
    same user open it as ``/proc/PID/fd/N``. It grows by regions, each of which a process maps as a
    whole, so neither descriptors nor maps grow with the number of arrays. Pages that are never
    touched cost nothing.

    An array's memory is freed when the last array, or tensor, that views it is gone, so an array
    may be handed to a framework for any time.

    A child that this process forks shares none of it. Before the fork, arrays that users may hold
    (see `release`) become ordinary memory, copied once; the child's writes to the rest are its own.
    """

    def __init__(self) -> None:
        self._file = memory_file.create("hvdlite")
        self._close_file = weakref.finalize(self, os.close, self._file)
        self.key: Key = (self._file, os.fstat(self._file).st_ino)
        self._regions: dict[int, Any] = {}  # by offset in the file
        self._end = 0  # behind the last array
        self._lock = threading.Lock()
        self._in_use: dict[int, weakref.ref[Any]] = {}  # by address
        self._free: dict[int, list[int]] = {}  # addresses, by size
        self._released: set[int] = set()  # addresses of arrays that are exchanged no more
        self._private: set[int] = set()  # addresses of arrays that are shared no more
        self._forked = self._closed = False
        self._map(0)
        _arenas.add(self)

    def empty(self, size: int, dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised array of ``size`` elements; the first lies at offset 0.

        Raises:
            OSError: there is no memory, the arena is closed, or this process is a forked child.
        """
        # Sizes are rounded up to powers of two, which bounds the number of pieces of memory.
        nbytes = max(mmap.PAGESIZE, 1 << (size * dtype.itemsize - 1).bit_length())
        try:
            address = self._free.setdefault(nbytes, []).pop()
        except IndexError:
            address = self._extend(nbytes)
        # Every view has this object as its last base: views of views do not keep the array
        # between alive, which therefore could not tell.
        memory = (ctypes.c_byte * nbytes).from_address(address)
        self._in_use[address] = weakref.ref(memory)
        weakref.finalize(memory, self._take_back, address, nbytes).atexit = False
        return np.ndarray(size, dtype, memoryview(memory))

    def find(self, array: Any) -> int | None:
        """Return the offset of a contiguous array in the file; None if it does not lie there."""
        # An array without a base has memory of its own; an empty one may begin where it ends.
        if array.base is None or not array.size:
            return None
        return self._offset(arrays.address(array))

    def release(self, array: Any) -> None:
        """Declare that an array from `empty` is exchanged no more; users may still hold it."""
        address = arrays.address(array)
        if address in self._in_use:
            self._released.add(address)

    def reclaim(self, array: Any) -> None:
        """Exchange a released array again; nobody else holds it, and its elements are lost."""
        address = arrays.address(array)
        memory = self._in_use[address]() if address in self._released else None
        if memory is not None:
            self._share(address, len(memory))

    def close(self) -> None:
        """Allocate nothing any more; arrays that are in use stay as they are."""
        self._closed = True
        self._close_unused()

    def _close_unused(self) -> None:
        """Close the file, unless a fork needs it to give a child the arrays that users hold."""
        if self._closed and not self._released:
            self._close_file()

    def _extend(self, nbytes: int) -> int:
        """Return the address of memory that has not been used yet."""
        if self._forked:
            raise OSError(f"process {os.getpid()} was forked from one that shares memory")
        if self._closed:
            raise OSError("the ranks share no memory any more; call hvd.init() first")
        with self._lock:
            # A multiple of the size, which is a power of two: so it does not cross a region's end.
            start = -(-self._end // nbytes) * nbytes
            start = max(start, nbytes if nbytes > _FIRST else 0)
            first, _ = _region_of(start)
            if first not in self._regions:
                self._map(first)
            self._end = start + nbytes
            return ctypes.addressof(self._regions[first]) + start - first

    def _map(self, first: int) -> None:
        _, nbytes = _region_of(first)
        os.ftruncate(self._file, first + nbytes)
        self._regions[first] = _map_file(self._file, first, nbytes)

    def _offset(self, address: int) -> int | None:
        """Return the offset in the file of an address; None if it does not lie there."""
        for first, region in list(self._regions.items()):
            start = ctypes.addressof(region)
            if start <= address < start + len(region):
                return first + address - start
        return None

    def _take_back(self, address: int, nbytes: int) -> None:
        if self._in_use.pop(address, None) is None:  # it belongs to the parent of a fork
            return
        self._share(address, nbytes)
        self._free[nbytes].append(address)
        self._close_unused()

    def _share(self, address: int, nbytes: int) -> None:
        """Undo what `release` and forks since have done to an array."""
        self._released.discard(address)
        if address in self._private:
            self._private.discard(address)
            self._remap(address, nbytes, mmap.MAP_SHARED)

    def _remap(self, address: int, nbytes: int, flags: int) -> None:
        """Map the part of the file that belongs to an address there again, with other flags."""
        offset = self._offset(address)
        assert offset is not None
        found = _mmap(address, nbytes, _READ_WRITE, flags | _MAP_FIXED, self._file, offset)
        _check_mapped(found, nbytes)

    def _before_fork(self) -> None:
        """Turn arrays that are exchanged no more into ordinary memory, which a fork copies.

        The system copies the pages (MAP_POPULATE writes to private ones), so nothing is lost that
        another thread writes meanwhile.
        """
        for address in self._released - self._private:
            reference = self._in_use.get(address)  # another thread may free it at any time
            memory = None if reference is None else reference()
            if memory is not None:  # a reference, so that it stays while it is copied
                self._remap(address, len(memory), mmap.MAP_PRIVATE | _MAP_POPULATE)
                self._private.add(address)

    def _after_fork(self) -> None:
        """In the child: hide its writes from the parent and the parent's peers, and forget all."""
        self._forked = True
        if not self._close_file.alive:  # nothing of it is shared any more
            return
        in_use, self._in_use, self._free = self._in_use, {}, {}
        for address, reference in in_use.items():
            memory = reference()
            if memory is not None and address not in self._private:
                self._remap(address, len(memory), mmap.MAP_PRIVATE)


_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def _before_fork() -> None:
    for arena in list(_arenas):
        arena._before_fork()


def _after_fork() -> None:
    for arena in list(_arenas):
        arena._after_fork()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


class Peer:
    """Another process of this node, and its arena."""

    def __init__(self, pid: int, key: Key) -> None:
        self.pid = pid
        self._number, self._inode = key
        self._regions: dict[int, Any] = {}  # by offset in the file
        self._began = self._read()[1]

    def view(self, offset: int, size: int, dtype: np.dtype[Any]) -> Any:
        """View one of its arrays.

        Args:
            offset: of the array in the file, as `Arena.find` returns it there.

        Raises:
            OSError: the process is gone, on another host, or of another user.
        """
        first, nbytes = _region_of(offset)
        if first not in self._regions:
            self._regions[first] = self._open(first, nbytes)
        return np.ndarray(size, dtype, self._regions[first], offset - first)

    def is_running(self) -> bool:
        """Return whether the process still exists, running or stopped."""
        state, began = self._read()
        return state not in (b"", b"Z", b"X") and began == self._began  # else another has its id

    def _read(self) -> tuple[bytes, bytes]:
        """Return the state of the process, and when it began; empty: there is none."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                # They follow the name, which is in parentheses and may have more of them.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return b"", b""
        return fields[0], fields[19]

    def _open(self, first: int, nbytes: int) -> Any:
        file = os.open(self._path(), os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_ino != self._inode:
                raise OSError(f"{self._path()} is not the memory that was announced")
            return _map_file(file, first, nbytes)
        finally:
            os.close(file)

    def _path(self) -> str:
        return f"/proc/{self.pid}/fd/{self._number}"


def _region_of(offset: int) -> tuple[int, int]:
    """Return the offset and the bytes of the region that an offset lies in."""
    if offset < _FIRST:
        return 0, _FIRST
    first = 1 << (offset.bit_length() - 1)
    return first, first


def _map_file(file: int, offset: int, nbytes: int) -> Any:
    """Map a part of a file until its last view is gone.

    Unlike Python's ``mmap`` this keeps no descriptor.
    """
    address = _mmap(None, nbytes, _READ_WRITE, mmap.MAP_SHARED, file, offset)
    _check_mapped(address, nbytes)
    memory = (ctypes.c_byte * nbytes).from_address(address)
    weakref.finalize(memory, _munmap, address, nbytes).atexit = False
    return memory


def _check_mapped(address: int | None, nbytes: int) -> None:
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: {nbytes} bytes of shared memory")
