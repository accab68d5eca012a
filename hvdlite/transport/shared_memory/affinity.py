"""Ranks that have to share cores, spread evenly over them."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Collection, Sequence

_library = ctypes.PyDLL(None)  # to ask takes less time than to give up the GIL
_current_core = getattr(_library, "sched_getcpu", None)  # of Linux
_SECONDS_BETWEEN_LOOKS = 1e-3
# Where the kernel has reasons of its own to move a rank back, it shall not cost more than that.
_SECONDS_AFTER_MOVE = 10e-3


class CoreBalancer:
    """Lets ranks that wait move to where fewer of them are.

    At each meeting everybody waits for the core with most ranks. The kernel sees no reason to
    move any of them, as who waits looks instead of sleeping and so keeps every core busy: three
    ranks of four stayed on one core of two for longer than an allreduce of 16 MiB took.

    Each rank says where it runs. Who finds more than a fair share of the ranks on its core moves to
    one with less; its thread may run on as many cores afterwards as before.

    Args:
        words: of all ranks, in shared memory: its core, from 1 on; 0 until it is known.
        own: the position of this rank's.
        cores: those that the ranks may run on.
    """

    def __init__(self, words: Sequence[ctypes.c_uint32], own: int, cores: Collection[int]) -> None:
        self._words = words
        self._own = words[own]
        self._share = math.ceil(len(words) / len(cores))
        self._next_look = 0.0 if _current_core is not None else math.inf

    def tell(self) -> int:
        """Say where this rank runs, and return it."""
        here: int = -1 if _current_core is None else _current_core()
        self._own.value = here + 1
        return here

    def spread(self, now: float) -> None:
        """Move the calling thread, if its core has more ranks than need be.

        Args:
            now: seconds of a clock, as this looks from time to time only.
        """
        if now < self._next_look:
            return
        self._next_look = now + _SECONDS_BETWEEN_LOOKS
        here = self.tell() + 1
        words = [word.value for word in self._words]
        if words.count(here) <= self._share:
            return
        try:
            allowed = os.sched_getaffinity(0)
            emptiest = min(allowed, key=lambda core: words.count(core + 1))
            if words.count(emptiest + 1) < self._share:
                try:
                    os.sched_setaffinity(0, {emptiest})
                finally:
                    os.sched_setaffinity(0, allowed)
                self._next_look = now + _SECONDS_AFTER_MOVE
                self.tell()
        except OSError:  # not allowed here
            self._next_look = math.inf
