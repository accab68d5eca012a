"""Cache of operations that a program submits again and again."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from hvdlite.interrupts import uninterrupted

T = TypeVar("T")


class PersistentCache(Generic[T]):
    """Entries by the name of a call; the oldest is evicted.

    To describe an operation takes longer than to submit it, so a program that submits the same
    ones step after step need not do that every time. MPI calls such operations persistent;
    Horovod has a response cache for them.

    Args:
        capacity: Number of entries at most.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: dict[str, T] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, name: str) -> T | None:
        """Return the entry of a name, if there is one."""
        return self._entries.get(name)

    @uninterrupted  # until the wait for the operation, which follows
    def put(self, name: str, entry: T) -> None:
        """Add an entry, in the place of an earlier one of that name."""
        with self._lock:
            self._entries.pop(name, None)
            self._entries[name] = entry
            if len(self._entries) > self._capacity:
                self._entries.pop(next(iter(self._entries), ""), None)

    def remove(self, name: str, entry: T) -> None:
        """Remove an entry; the garbage collector may call this at any time."""
        # Without the lock, which this thread may hold. At worst another entry goes.
        if self._entries.get(name) is entry:
            self._entries.pop(name, None)
