"""Waiting in the kernel for a word of shared memory to change (Linux' futex)."""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
from typing import Any

_NUMBER = 202  # of the system call, on x86-64
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_supported() -> bool:
    """Whether this machine can wait so, and shows a rank's writes to others in their order.

    Only x86 does the latter without barriers, which Python has no way to ask for.
    """
    return sys.platform == "linux" and platform.machine() == "x86_64"


_library = ctypes.CDLL(None, use_errno=True)
#: Let whoever else can run on this core do so.
give_way = _library.sched_yield
#: Give up the GIL for a moment. Every call does that; this one, which Linux has, nothing else.
pause = getattr(_library, "sched_getcpu", give_way)


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


# A wait gives up the GIL; to wake takes less time than to give it up.
_wait = _syscall(_library)
_wake = _syscall(ctypes.PyDLL(None))


class Futex(ctypes.c_uint32):
    """One aligned 32-bit word of shared memory that ranks wait on; only its owner writes it.

    Made by ``Futex.from_buffer(memory, offset)``, of a writable buffer in shared memory and the
    word's place in it, in bytes.

    Attributes:
        value: the word; of what is written, the lowest 32 bits. Then call `wake`.
    """

    def wake(self) -> None:
        """Wake whoever waits for the word."""
        _wake(_NUMBER, ctypes.addressof(self), _WAKE, _EVERYBODY, None)

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep while the word is ``seen``, for ``seconds`` at most; it may wake for no reason.

        Raises:
            OSError: the system refuses the call.
        """
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        address = ctypes.addressof(self)
        code = _wait(_NUMBER, address, _WAIT, seen, ctypes.addressof(limit))
        if code < 0:
            number = ctypes.get_errno()
            if number not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(number, "futex")
