"""What is pending in a lane."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Sequence

from hvdlite.engine.agreement import Description, Report
from hvdlite.engine.operation import Operation
from hvdlite.engine.overlap import Overlaps
from hvdlite.errors import HorovodInternalError


class Queue:
    """The operations that have been submitted and have not ended, oldest first.

    Args:
        rank: what messages call this one.

    Attributes:
        lock: held to change anything here. `add`, `close` and `refuse` are called with it held;
            the other methods take it themselves.
        changed: the same lock, to wait for a change.
        closing: whether this rank submits no more.
    """

    def __init__(self, rank: int) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.closing = False
        self._rank = rank
        self._operations: dict[str, Operation] = {}
        self._overlaps = Overlaps()
        self._alone: Operation | None = None  # whose memory there was nothing to compare with
        self._refusal: str | None = None
        self._changes = self._changes_reported = 0

    def __len__(self) -> int:
        return len(self._operations)

    def __getitem__(self, key: str) -> Operation:
        return self._operations[key]

    def get(self, key: str) -> Operation | None:
        """The operation of a key, if it is pending."""
        return self._operations.get(key)

    def add(self, operation: Operation) -> None:
        """Append an operation.

        Raises:
            ValueError: an operation of this name, or one that uses the same memory, is still on its
                way.
            HorovodInternalError: operations are refused.
        """
        if self._refusal is not None:
            raise HorovodInternalError(f"{operation.name!r} cannot be submitted: {self._refusal}")
        if operation.key in self._operations:
            raise ValueError(
                f"rank {self._rank}: an operation named {operation.name!r} is still on "
                "its way; wait for it, or give this one another name"
            )
        if self._operations or operation.several:
            self._check_memory(operation)
        else:
            self._alone = operation
        operation.submitted = time.monotonic()
        self._operations[operation.key] = operation
        self._changes += 1

    def _check_memory(self, operation: Operation) -> None:
        if self._alone is not None:
            first, self._alone = self._alone, None
            self._overlaps.add(first, first.extents())
        other = self._overlaps.add(operation, operation.extents())
        if other is not None:
            found = f"{operation.name!r} uses the same memory twice"
            if other is not operation:
                also = f"{other.name!r}, which is still on its way"
                found = f"{operation.name!r} uses the same memory as {also}"
            raise ValueError(
                f"rank {self._rank}: {found}, and a result is written to it (in place or by out=); "
                "wait for one before the next, or give each an array of its own"
            )

    def _forget_memory(self, operations: Sequence[Operation]) -> None:
        if not self._operations:
            self._overlaps.clear()
            return
        for operation in operations:
            self._overlaps.remove(operation, operation.extents())

    def close(self, reason: str) -> None:
        """Submit no more, whatever was refused for before."""
        self.closing = True
        self._changes += 1
        self._refusal = reason

    def refuse(self, reason: str) -> None:
        """Take no operation from now on; the first reason counts."""
        self._refusal = self._refusal or reason

    def oldest(self, count: int) -> list[Operation]:
        """The first operations, ``count`` at most."""
        with self.lock:
            return list(itertools.islice(self._operations.values(), count))

    def remove(self, operations: Sequence[Operation]) -> None:
        """Forget operations that have ended."""
        with self.lock:
            for operation in operations:
                self._operations.pop(operation.key, None)  # a stand-in has never been here
            if self._alone is None:
                self._forget_memory(operations)
            elif not self._operations:
                self._alone = None

    def take_all(self) -> list[Operation]:
        """Forget all operations, and return them."""
        with self.lock:
            taken = list(self._operations.values())
            self._operations.clear()
            self._overlaps.clear()
            self._alone = None
        return taken

    def report(self) -> Report:
        """What the other ranks are told."""
        now = time.monotonic()
        with self.lock:
            self._changes_reported = self._changes
            descriptions = tuple(
                Description(
                    operation.name,
                    operation.signature.digest,
                    operation.payload,
                    operation.failure,
                    now - operation.submitted,
                    operation.key,
                    operation.stands_in,
                    operation.patient,
                    operation.about,
                )
                for operation in self._operations.values()
            )
            joined = any(operation.joins for operation in self._operations.values())
            return Report(descriptions, self.closing, joined)

    def has_changed(self) -> bool:
        """Whether something has come since the last `report`; with ``lock`` held."""
        return self._changes != self._changes_reported

    def quiet(self) -> float:
        """Seconds since the newest operation was submitted."""
        with self.lock:
            newest = next(reversed(self._operations.values()), None)
        return math.inf if newest is None else time.monotonic() - newest.submitted

    def waited(self) -> float:
        """Seconds since the oldest operation was submitted, of those that are not patient."""
        with self.lock:
            pending = [each.submitted for each in self._operations.values() if not each.patient]
        return time.monotonic() - min(pending) if pending else 0.0

    def is_patient(self) -> bool:
        """Whether all that is pending may wait as long as it takes."""
        with self.lock:
            operations = list(self._operations.values())
        return bool(operations) and all(operation.patient for operation in operations)

    def describe(self) -> str:
        """The names of the first operations."""
        with self.lock:
            titles = [operation.title for operation in self._operations.values()]
        shown = ", ".join(titles[:4]) or "shutdown()"
        return shown + (f" and {len(titles) - 4} more" if len(titles) > 4 else "")
