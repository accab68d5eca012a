"""Balances ranks that share cores evenly over the cores."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Collection, Sequence

_library = ctypes.PyDLL(None)  # the call takes less time than releasing the GIL
_current_core = getattr(_library, "sched_getcpu", None)  # Linux only
_SECONDS_BETWEEN_CHECKS = 1e-3
# Limits the cost where the kernel keeps moving a rank back for reasons of its own.
_SECONDS_AFTER_MOVE = 10e-3


class CoreBalancer:
    """Moves waiting ranks to cores with fewer ranks.

    Each time they meet, all ranks wait for the core with most ranks. The kernel sees no reason to
    move any of them, because waiting ranks spin and so keep every core busy: three ranks of four
    stayed on one core of two for longer than an allreduce of 16 MiB took.

    Each rank publishes its core. A rank that finds more than a fair share of the ranks on its core
    moves to one with less; afterwards its thread may run on as many cores as before.

    Args:
        words: for each rank the number of its core, in shared memory: from 1 on, 0 if unknown.
        own: the position of this rank's word.
        cores: those that the ranks may run on.
    """

    def __init__(self, words: Sequence[ctypes.c_uint32], own: int, cores: Collection[int]) -> None:
        self._words = words
        self._own = words[own]
        self._share = math.ceil(len(words) / len(cores))
        self._next_check = 0.0 if _current_core is not None else math.inf

    def publish(self) -> int:
        """Publish the core that this rank runs on, and return it."""
        here: int = -1 if _current_core is None else _current_core()
        self._own.value = here + 1
        return here

    def balance(self, now: float) -> None:
        """Move the calling thread if its core has more ranks than its share.

        Args:
            now: seconds of a clock; most calls do nothing, to save time.
        """
        if now < self._next_check:
            return
        self._next_check = now + _SECONDS_BETWEEN_CHECKS
        here = self.publish() + 1
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
                self._next_check = now + _SECONDS_AFTER_MOVE
                self.publish()
        except OSError:  # not permitted here
            self._next_check = math.inf
