"""Waiting in the kernel until an integer in shared memory changes (Linux' futex)."""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
from typing import Any

_NUMBER = 202  # of the system call, on x86-64
_WAIT, _WAKE = 0, 1
_ALL_WAITERS = 2**31 - 1


def is_supported() -> bool:
    """Return whether this machine has futexes and keeps the order of a rank's writes for others.

    Only x86 does the latter without barriers, for which Python has no means.
    """
    return sys.platform == "linux" and platform.machine() == "x86_64"


_library = ctypes.CDLL(None, use_errno=True)
#: Yield this core to other processes.
yield_core = _library.sched_yield
#: Release the GIL for a moment, as every call does; this one, Linux only, does little else.
pause = getattr(_library, "sched_getcpu", yield_core)


def _syscall(library: ctypes.CDLL) -> Any:
    function = library.syscall
    function.restype = ctypes.c_long
    function.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
    ]
    return function


# A wait releases the GIL; waking takes less time than that would.
_wait = _syscall(_library)
_wake = _syscall(ctypes.PyDLL(None))


class Futex(ctypes.c_uint32):
    """An aligned 32-bit integer in shared memory that ranks wait on; only its owner writes it.

    Created by ``Futex.from_buffer(memory, offset)``: a writable buffer in shared memory, and the
    integer's offset in bytes.

    Attributes:
        value: the lowest 32 bits of what is assigned. Call `wake` afterwards.
    """

    def wake(self) -> None:
        """Wake all ranks that wait for it."""
        _wake(_NUMBER, ctypes.addressof(self), _WAKE, _ALL_WAITERS, None)

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep while the value is ``seen``, for ``seconds`` at most; it may wake for no reason.

        Raises:
            OSError: the system refuses the call.
        """
        limit = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))  # a timespec
        address = ctypes.addressof(self)
        code = _wait(_NUMBER, address, _WAIT, seen, ctypes.addressof(limit))
        if code < 0:
            number = ctypes.get_errno()
            if number not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(number, "futex")
