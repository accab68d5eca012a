"""What a caller holds while an operation is on its way."""

from __future__ import annotations

import _thread
from collections.abc import Callable
from typing import Any


class Handle:
    """The future result of one operation.

    Args:
        name: the operation's.

    Attributes:
        drive: what may bring the end about in the thread of whoever waits for it.
    """

    __slots__ = ("_error", "_finished", "_open", "_result", "drive", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.drive: Callable[[Handle], None] | None = None
        self._finished = False
        self._result: Any = None
        self._error: BaseException | None = None
        # Held until the end: a lock costs a tenth of an event, and there may be hundreds.
        self._open = _thread.allocate_lock()
        self._open.acquire()

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Deliver the result, or the error that took its place; only the first counts."""
        if not self._finished:
            self._result, self._error = result, error
            self._finished = True
            self.drive = None
            self._open.release()

    def done(self) -> bool:
        """Whether the operation has ended, with a result or an error."""
        return self._finished

    def wait(self) -> Any:
        """Block until the operation has ended, and return its result.

        The wait ends: the lane that runs the operation reports a stall, and ends it
        where it has been told to.

        Raises:
            HorovodInternalError: the operation failed, on this rank or another.
        """
        drive = self.drive
        if drive is not None:
            drive(self)
        if not self._finished:
            with self._open:
                pass
        if self._error is not None:
            raise self._error
        return self._result
