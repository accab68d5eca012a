"""Handle: the future result of an operation in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvdlite.base import observers
from hvdlite.base.interrupts import deferred, run_deferred, uninterrupted

if TYPE_CHECKING:
    from hvdlite.engine.lane import Lane

# How often a sleeping waiter checks for deferred signal handlers.
_CHECK_SECONDS = 0.05
_waiting = threading.Lock()


class Handle:
    """The future result of one operation.

    Attributes:
        driver: The lane, which can run the operation in the waiting thread.
    """

    __slots__ = ("_callbacks", "_ended", "_error", "_result", "driver", "finished", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.driver: Lane | None = None
        self.finished = False
        self._result: Any = None
        self._error: BaseException | None = None
        # Made by the first waiter that has to sleep: there may be hundreds of handles.
        self._ended: threading.Lock | None = None
        self._callbacks: list[Callable[[Handle], object]] = []

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Deliver the result, or the error that took its place; only the first call counts."""
        if not self.finished:
            self._result, self._error = result, error
            self.finished = True
            self.driver = None
            if self._ended is not None:
                self._ended.release()
            if self._callbacks:
                self._call()

    def add_done_callback(self, call: Callable[[Handle], object]) -> None:
        """Have a function called with this handle once the operation has ended.

        The thread that ends the operation calls it, or this one if it has ended already. It must
        neither wait nor communicate.
        """
        self._callbacks.append(call)
        if self.finished:
            self._call()

    def _call(self) -> None:
        with _waiting:
            callbacks, self._callbacks = self._callbacks, []
        for call in callbacks:
            call(self)

    def done(self) -> bool:
        """Return whether the operation has ended, with a result or an error."""
        return self.finished

    def wait(self) -> Any:
        """Block until the operation has ended, and return its result.

        The lane reports a wait that exceeds ``HVDLITE_STALL_CHECK_TIME_SECONDS``, and fails the
        operation after ``HVDLITE_STALL_SHUTDOWN_TIME_SECONDS`` if that is set; by default the wait
        has no other bound than the death of a rank.

        An exception from a signal handler also ends the wait. The operation stays submitted, and
        can be waited for again.

        Raises:
            HorovodInternalError: The operation failed, on this rank or another.
        """
        watching = () if self.finished else observers.current
        began = time.monotonic_ns() if watching else 0
        try:
            if (driver := self.driver) is not None:
                driver.drive(self)
            while deferred or not self.finished:
                if run_deferred():
                    if (driver := self.driver) is not None:
                        driver.drive(self)
                elif self.finished:  # the handlers wait for another thread
                    break
                else:
                    self._sleep()
        finally:
            for observe in watching:
                observe("waited", self.name, began)
        if self._error is not None:
            raise self._error
        return self._result

    def ends_within(self, seconds: float) -> bool:
        """Leave the operation to the lane's thread for so long; return whether it has ended."""
        deadline = time.monotonic() + seconds
        while not self.finished and time.monotonic() < deadline:
            if not run_deferred():
                self._sleep(min(_CHECK_SECONDS, deadline - time.monotonic()))
        return self.finished

    def _sleep(self, seconds: float = _CHECK_SECONDS) -> None:
        """Wait for the end, for a while.

        Use a plain lock: unlike a `threading.Event`, an exception cannot leave it half acquired.
        """
        ended = self._lock()
        # Either `finish` has seen the lock, or the operation has ended before this:
        if not self.finished and ended.acquire(timeout=max(seconds, 0.0)):
            ended.release()  # for the next waiter

    @uninterrupted  # until `wait` continues; a handler may come here, too
    def _lock(self) -> threading.Lock:
        with _waiting:
            self._ended = self._ended or _taken_lock()
            return self._ended


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def poll(handle: Handle) -> bool:
    """Return whether the operation behind a handle has ended."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for the operation behind a handle, and return its result."""
    return handle.wait()
