"""Operations that a program submits again and again."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from hvdlite.interrupts import uninterrupted

T = TypeVar("T")


class Persistent(Generic[T]):
    """What has been made of named calls, kept for the next time; the oldest makes room.

    To describe an operation takes longer than to submit it, so a program that submits the same
    ones step after step need not do that every time. MPI calls such operations persistent;
    Horovod has its cache of responses for them.

    Args:
        capacity: how many are kept at most.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: dict[str, T] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, name: str) -> T | None:
        """What is kept for a name."""
        return self._entries.get(name)

    @uninterrupted  # until what follows, a wait for the operation
    def keep(self, name: str, entry: T) -> None:
        """Keep something for a name, in the place of what was kept for it before."""
        with self._lock:
            self._entries.pop(name, None)
            self._entries[name] = entry
            if len(self._entries) > self._capacity:
                self._entries.pop(next(iter(self._entries), ""), None)

    def forget(self, name: str, entry: T) -> None:
        """Keep an entry no more; it may be called at any time, by the garbage collector, too."""
        # Without the lock, which this thread may hold. At worst another entry goes.
        if self._entries.get(name) is entry:
            self._entries.pop(name, None)
