"""Queue: the pending operations of a lane."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Sequence

from hvdlite.engine.agreement import Description, QueueReport
from hvdlite.engine.memory import MemoryInUse, MemoryInUseError
from hvdlite.engine.operation import Operation
from hvdlite.errors import HorovodInternalError
from hvdlite.observe import status


class Queue:
    """The operations that have been submitted and have not ended, oldest first.

    Attributes:
        lock: Lock for any change here. `add` and `close` are called with it held; the other methods
            take it themselves.
        changed: Condition of the same lock, to wait for a change.
        rank: This rank's id, which messages name.
        operations: The operations by key; read only.
        closing: Whether this rank submits no more.
        asked: Whether this rank takes part in a round without an operation, and reports what it
            waits for in other lanes.
        last: The name of the operation that ended last.
        gave_up: When an operation has ended because others did not submit it, and its title.
    """

    def __init__(self, rank: int) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.closing = self.asked = False
        self.last = ""
        self.gave_up = -math.inf, ""
        self.rank = rank
        self.operations: dict[str, Operation] = {}
        self._memory = MemoryInUse()
        # The only operation, if it is not in _memory yet.
        self._alone: Operation | None = None
        self._refusal: str | None = None
        self._changes = self._changes_reported = 0

    def add(self, operation: Operation) -> None:
        """Append an operation.

        Raises:
            ValueError: An operation of this name, or one that uses the same memory, is still in
                flight.
            HorovodInternalError: Operations are refused.
        """
        if self._refusal is not None:
            raise HorovodInternalError(f"{operation.name!r} cannot be submitted: {self._refusal}")
        if operation.key in self.operations:
            raise ValueError(
                f"rank {self.rank}: an operation named {operation.name!r} is still on "
                "its way; wait for it, or give this one another name"
            )
        if self.operations or operation.may_use_memory_twice:
            self._check_memory(operation)
        else:
            self._alone = operation
        operation.submitted = time.monotonic()
        self.operations[operation.key] = operation
        self._changes += 1

    def _check_memory(self, operation: Operation) -> None:
        if self._alone is not None:
            first, self._alone = self._alone, None
            self._memory.add(first, first.extents())
        other = self._memory.add(operation, operation.extents())
        if other is not None:
            found = f"{operation.name!r} uses the same memory twice"
            if other is not operation:
                also = f"{other.name!r}, which is still on its way"
                found = f"{operation.name!r} uses the same memory as {also}"
            raise MemoryInUseError(
                f"rank {self.rank}: {found}, and a result is written to it (in place or by out=); "
                "wait for one before the next, or give each an array of its own"
            )

    def _forget_memory(self, operations: Sequence[Operation]) -> None:
        if not self.operations:
            self._memory.clear()
            return
        for operation in operations:
            self._memory.remove(operation, operation.extents())

    def close(self, reason: str) -> None:
        """Refuse operations for this reason, which replaces an earlier one."""
        self.closing = True
        self._changes += 1
        self._refusal = reason

    def refuse(self, reason: str) -> None:
        """Refuse operations from now on; the first reason counts."""
        with self.lock:
            self._refusal = self._refusal or reason

    def accept(self) -> None:
        """Accept operations again after `refuse`."""
        with self.lock:
            self._refusal = None

    def oldest(self, count: int | None = None) -> list[Operation]:
        """Return the first operations, ``count`` at most; None: all."""
        with self.lock:
            return list(itertools.islice(self.operations.values(), count))

    def remove(self, operations: Sequence[Operation]) -> None:
        """Remove operations that have ended."""
        with self.lock:
            self.last = operations[-1].name
            for operation in operations:
                self.operations.pop(operation.key, None)  # a stand-in has never been here
            if self._alone is None:
                self._forget_memory(operations)
            elif not self.operations:
                self._alone = None

    def take_all(self) -> list[Operation]:
        """Remove all operations, and return them."""
        with self.lock:
            taken = list(self.operations.values())
            self.operations.clear()
            self._memory.clear()
            self._alone = None
        return taken

    def restart(self, members: Sequence[int]) -> None:
        """Prepare the operations to run, perhaps again, without ranks that have died."""
        with self.lock:
            for operation in self.operations.values():
                if operation.is_protected:
                    operation.restore()
                operation.go_on(members)

    def report(
        self, elsewhere: Sequence[str] = (), waited: float = 0.0, limit: float = math.inf
    ) -> QueueReport:
        """Return what the other ranks need to know for a decision.

        Args:
            elsewhere: The titles of operations for which this rank waits in other lanes.
            waited: The seconds since the oldest of them was submitted.
            limit: The seconds that this rank lets an operation wait.
        """
        now = time.monotonic()
        with self.lock:
            self._changes_reported = self._changes
            descriptions = tuple(
                Description(
                    operation.name,
                    operation.key,
                    operation.title,
                    operation.signature.digest,
                    operation.payload,
                    operation.failure,
                    now - operation.submitted,
                    operation.stands_in,
                    operation.stall_exempt,
                    b"" if operation.call is None else operation.call.agreed,
                )
                for operation in self.operations.values()
            )
            joined = any(operation.joins for operation in self.operations.values())
            done = tuple(elsewhere), waited, self.last, status.steps(), limit
            return QueueReport(descriptions, self.closing, joined, *done)

    def has_changed(self) -> bool:
        """Return whether there is news since the last `report`; called with ``lock`` held."""
        return self._changes != self._changes_reported

    def quiet(self) -> float:
        """Return the seconds since the newest operation was submitted."""
        with self.lock:
            newest = next(reversed(self.operations.values()), None)
        return math.inf if newest is None else time.monotonic() - newest.submitted

    def waited(self) -> float:
        """Return the seconds since the oldest operation that is not exempt was submitted."""
        pending = [each.submitted for each in self.oldest() if not each.stall_exempt]
        return time.monotonic() - min(pending) if pending else 0.0

    def stuck(self, seconds: float) -> list[str]:
        """Return the titles of the operations that are not exempt and have waited for so long."""
        since = time.monotonic() - seconds
        return [
            each.title
            for each in self.oldest()
            if each.submitted <= since and not each.stall_exempt
        ]

    def is_stall_exempt(self) -> bool:
        """Return whether all that is pending may wait without limit."""
        operations = self.oldest()
        if not operations:
            return not self.closing
        return all(operation.stall_exempt for operation in operations)

    def describe(self) -> str:
        """Return the names of the first operations."""
        titles = [operation.title for operation in self.oldest()]
        shown = ", ".join(titles[:4]) or "shutdown()"
        return shown + (f" and {len(titles) - 4} more" if len(titles) > 4 else "")
