"""Handle: the future result of an operation in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from hvdlite.base.interrupts import deferred, run_deferred, uninterrupted
from hvdlite.observe import timeline

# How often a sleeping waiter checks for deferred signal handlers.
_CHECK_SECONDS = 0.05
_waiting = threading.Lock()


class WaitClock:
    """Counts the time in which threads wait for operations; threads at a time count once.

    Attributes:
        users: The number of readers; nothing is counted without one.
    """

    def __init__(self) -> None:
        self.users = 0
        self._seconds = 0.0
        self._waiting = 0
        self._began = 0.0
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """The time counted so far, with that of waits that have not ended."""
        with self._lock:
            under_way = time.perf_counter() - self._began if self._waiting else 0.0
            return self._seconds + under_way

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the time of a block."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    @uninterrupted  # or a handler that waits would find the lock taken
    def _change(self, threads: int) -> None:
        with self._lock:
            now = time.perf_counter()
            if self._waiting:
                self._seconds += now - self._began
            self._began = now
            self._waiting += threads


waits = WaitClock()


class Driver(Protocol):
    """A lane, which can run operations in the thread that calls it."""

    def drive(self, handle: Handle) -> None:
        """Run pending operations until the handle's one has ended, unless another thread does.

        It may return before, where a signal handler is to run.
        """


class Handle:
    """The future result of one operation.

    Args:
        name: Name of the operation.

    Attributes:
        driver: The lane, which can run the operation in the waiting thread.
        finished: Whether the operation has ended.
    """

    __slots__ = ("_ended", "_error", "_result", "driver", "finished", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.driver: Driver | None = None
        self.finished = False
        self._result: Any = None
        self._error: BaseException | None = None
        # Made by the first waiter that has to sleep: there may be hundreds of handles.
        self._ended: threading.Lock | None = None

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Deliver the result, or the error that took its place; only the first call counts."""
        if not self.finished:
            self._result, self._error = result, error
            self.finished = True
            self.driver = None
            if self._ended is not None:
                self._ended.release()

    def done(self) -> bool:
        """Return whether the operation has ended, with a result or an error."""
        return self.finished

    def wait(self) -> Any:
        """Block until the operation has ended, and return its result.

        The wait is bounded: the lane that runs the operation reports a stall, and ends the
        operation where it has been told to.

        An exception from a signal handler ends the wait, too. The operation stays submitted, and
        may be waited for again.

        Raises:
            HorovodInternalError: The operation failed, on this rank or another.
        """
        if waits.users and not self.finished:
            with waits.counted():
                return self._wait()
        return self._wait()

    def _wait(self) -> Any:
        trace = None if self.finished else timeline.current
        began = 0 if trace is None else trace.now()
        driver = self.driver
        if driver is not None:
            driver.drive(self)
        while deferred or not self.finished:
            if run_deferred():
                if (driver := self.driver) is not None:
                    driver.drive(self)
            elif self.finished:  # the handlers wait for another thread
                break
            else:
                self._sleep()
        if trace is not None:
            self._record(trace, began)
        if self._error is not None:
            raise self._error
        return self._result

    def _record(self, trace: timeline.Timeline, began: int) -> None:
        """Record a wait; those of several threads overlap."""
        is_main = threading.get_ident() == threading.main_thread().ident
        record = trace.complete if is_main else trace.overlapping
        record("step", timeline.SYNCHRONIZE, began, trace.now(), tensor=self.name)

    def _sleep(self) -> None:
        """Wait for the end, for a while.

        Use a plain lock: unlike a `threading.Event`, an exception cannot leave it half acquired.
        """
        ended = self._lock()
        # Either `finish` has seen the lock, or the operation has ended before this:
        if not self.finished and ended.acquire(timeout=_CHECK_SECONDS):
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
