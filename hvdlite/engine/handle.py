"""What a caller holds while an operation is on its way."""

from __future__ import annotations

import threading
from typing import Any, Protocol

_waiting = threading.Lock()


class Driver(Protocol):
    """What can run operations in the thread that calls it."""

    def drive(self, handle: Handle) -> None:
        """Run what is pending until the handle's operation has ended, unless somebody does."""


class Handle:
    """The future result of one operation.

    Args:
        name: the operation's.

    Attributes:
        driver: what may bring the end about in the thread of whoever waits for it.
    """

    __slots__ = ("_ended", "_error", "_finished", "_result", "driver", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.driver: Driver | None = None
        self._finished = False
        self._result: Any = None
        self._error: BaseException | None = None
        # Made by the first that has to sleep: there may be hundreds of handles.
        self._ended: threading.Event | None = None

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Deliver the result, or the error that took its place; only the first counts."""
        if not self._finished:
            self._result, self._error = result, error
            self._finished = True
            self.driver = None
            if self._ended is not None:
                self._ended.set()

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
        driver = self.driver
        if driver is not None:
            driver.drive(self)
        if not self._finished:
            self._sleep()
        if self._error is not None:
            raise self._error
        return self._result

    def _sleep(self) -> None:
        with _waiting:
            ended = self._ended = self._ended or threading.Event()
        # Either `finish` has seen the event, or it has ended before this:
        if not self._finished:
            ended.wait()
