"""What a caller holds while an operation is on its way."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from hvdlite.interrupts import deferred, run_deferred, uninterrupted

# How often one that sleeps looks whether a signal's handler wants to run.
_LOOK_SECONDS = 0.05
_waiting = threading.Lock()


class Driver(Protocol):
    """What can run operations in the thread that calls it."""

    def drive(self, handle: Handle) -> None:
        """Run what is pending until the handle's operation has ended, unless somebody does.

        It may end before, where a signal's handler is to run.
        """


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
        self._ended: threading.Lock | None = None

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Deliver the result, or the error that took its place; only the first counts."""
        if not self._finished:
            self._result, self._error = result, error
            self._finished = True
            self.driver = None
            if self._ended is not None:
                self._ended.release()

    def done(self) -> bool:
        """Whether the operation has ended, with a result or an error."""
        return self._finished

    def wait(self) -> Any:
        """Block until the operation has ended, and return its result.

        The wait ends: the lane that runs the operation reports a stall, and ends it
        where it has been told to.

        An exception from a signal's handler ends the wait, too. The operation stays submitted, and
        may be waited for again.

        Raises:
            HorovodInternalError: the operation failed, on this rank or another.
        """
        driver = self.driver
        if driver is not None:
            driver.drive(self)
        while deferred or not self._finished:
            if run_deferred():
                if (driver := self.driver) is not None:
                    driver.drive(self)
            elif self._finished:  # the handlers wait for another thread
                break
            else:
                self._sleep()
        if self._error is not None:
            raise self._error
        return self._result

    def _sleep(self) -> None:
        """Wait for the end, for a while.

        By a plain lock, which no exception can leave half taken, as it could a `threading.Event`.
        """
        ended = self._lock()
        # Either `finish` has seen the lock, or it has ended before this:
        if not self._finished and ended.acquire(timeout=_LOOK_SECONDS):
            ended.release()  # for the next that waits

    @uninterrupted  # until `wait` goes on; a handler may come here, too
    def _lock(self) -> threading.Lock:
        with _waiting:
            self._ended = self._ended or _taken_lock()
            return self._ended


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
