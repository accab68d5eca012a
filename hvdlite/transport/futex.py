"""Waiting in the kernel for a word of shared memory to change (Linux' futex)."""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
from typing import Any

_NUMBERS = {"x86_64": 202}
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


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


def is_supported() -> bool:
    """Whether this machine can wait so, and shows a rank's writes to others in their order.

    Only x86 does the latter without barriers, which Python has no way to ask for.
    """
    return sys.platform == "linux" and platform.machine() in _NUMBERS


#: Let whoever else can run on this core do so.
give_way = ctypes.CDLL(None).sched_yield


class Futex:
    """One aligned 32-bit word of shared memory that ranks wait on; only its owner writes it.

    Args:
        memory: a writable buffer in shared memory.
        offset: the word's place in it, in bytes.
    """

    def __init__(self, memory: Any, offset: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self._address = ctypes.addressof(self._word)
        self._number = _NUMBERS[platform.machine()]
        # A wait gives up the GIL; to wake takes less time than to give it up.
        self._wait = _syscall(ctypes.CDLL(None, use_errno=True))
        self._wake = _syscall(ctypes.PyDLL(None))

    @property
    def value(self) -> int:
        """The word."""
        return self._word.value

    def set(self, value: int) -> None:
        """Write the word, and wake whoever waits for it."""
        self._word.value = value & 0xFFFFFFFF
        self._wake(self._number, self._address, _WAKE, _EVERYBODY, None)

    def pause(self) -> None:
        """Give up the GIL for a moment: this thread has only to look at the word again."""
        # A wait for another value than the word has ends at once.
        self._wait(self._number, self._address, _WAIT, self._word.value ^ 0x80000000, None)

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep while the word is ``seen``, for ``seconds`` at most; it may wake for no reason.

        Raises:
            OSError: the system refuses the call.
        """
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        code = self._wait(self._number, self._address, _WAIT, seen, ctypes.addressof(limit))
        if code < 0:
            number = ctypes.get_errno()
            if number not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(number, "futex")
