"""Lane: a queue of operations, one transport, and a thread.

All ranks must issue the collectives of a transport in the same order, but submit operations in any
order and from any thread. So a lane works in rounds (`rounds.py`), in which the ranks agree on the
operations to run next, and run them (`Rounds.run`). A thread that waits for an operation drives the
rounds itself (`Lane.drive`); if none waits, the lane's own thread drives them (`Lane._serve`).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hvdlite.base import observers
from hvdlite.base.interrupts import Interrupted, deferred, is_due, leave, uninterrupted, workers
from hvdlite.base.settings import Settings
from hvdlite.engine.device import DeviceExecutor
from hvdlite.engine.handle import Handle
from hvdlite.engine.operation import Operation
from hvdlite.engine.queue import Queue
from hvdlite.engine.rounds import Rounds
from hvdlite.engine.stall import StallInspector
from hvdlite.engine.supervisor import Supervisor
from hvdlite.errors import HorovodInternalError
from hvdlite.observe.status import Pending
from hvdlite.transport import Transport
from hvdlite.world import world

# The lane's thread waits, for at most this many cycles, while operations are submitted at shorter
# intervals: two threads that compete for the GIL take twice as long.
_BURST_SECONDS, _MAX_BURST_CYCLES = 1e-4, 10
# How often an idle lane checks the work that its device has not finished.
_WATCH_SECONDS = 0.1
# How often a thread that waits for the lane to close checks for deferred signal handlers.
_CHECK_SECONDS = 0.05
# How often a thread that holds the lane checks whether its rounds have stopped.
_HOLD_SECONDS = 1e-3
# How long an operation waits before its rank looks whether the others wait for it in another lane,
# and how often it looks.
_ELSEWHERE_SECONDS = 1.0
# How often a rank without an operation looks whether others have come to the round.
_IDLE_SECONDS = 0.05
# The driver of a lane that is held.
_NOBODY = -1


class Lane:
    """An ordered queue of operations over one transport.

    Args:
        name: Name of the lane in messages, in the timeline and of its thread.
        transport: The lane's own transport; nothing else may use it.
        supervisor: Guards the rounds, and replaces the transport when a rank has died; None: the
            lane breaks then.

    Attributes:
        queue, devices, stall, settings: Its own, which its `Rounds` use.
        failure: Why rounds cannot go on; None: they can.
        is_released: Whether the transport has been closed with the lane.
        all_lanes: Returns the lanes of this rank, those of process sets included.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        settings: Settings,
        supervisor: Supervisor | None = None,
    ) -> None:
        self.name = name
        self.transport = transport
        self._supervisor = supervisor = supervisor or Supervisor()
        transport.lane = name
        transport.confirms = supervisor.survives
        self.settings = settings
        self.devices = DeviceExecutor(self)
        self._watching = False
        self.queue = Queue(transport.members[transport.rank])
        self.all_lanes: Callable[[], Iterable[Lane]] = lambda: ()
        self._looked = 0.0
        self._lock, self._changed = self.queue.lock, self.queue.changed
        self.stall = StallInspector(
            settings,
            self.queue.describe,
            lambda: self.transport.absent(),
            self.queue.is_stall_exempt,
            lambda: self.rounds.waiting,
            supervisor.check,
            self._wait_long,
        )
        self.rounds = Rounds(self)
        self._driver: int | None = None  # the thread that runs rounds
        self._sleeping = False
        self._broken = False
        self.failure: str | None = None
        self.is_released = False
        self._run_round = supervisor.guard(self)
        self._thread = threading.Thread(target=self._serve, name=f"hvdlite-{name}", daemon=True)
        self._thread.start()
        workers.add(self)

    def empty(self, size: int, dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised flat array in memory that the lane exchanges fastest.

        Its memory is reused when the last view of it has gone.
        """
        return self.transport.empty(size, dtype)

    def release(self, array: Any) -> None:
        """Declare that no operation uses such an array any more, see `Transport.release`."""
        self.transport.release(array)

    def zero_copy_range(self, size: int) -> slice:
        """Return the `Transport.zero_copy_range` of such an array.

        It is empty where an exchange may have to be repeated, for which it needs all gradients.
        """
        if self._supervisor.survives:
            return slice(0, 0)
        return self.transport.zero_copy_range(size)

    @uninterrupted
    def pending(self) -> list[Pending]:
        """Return the operations that have not ended."""
        members, now = tuple(self.transport.members), time.monotonic()
        return [
            Pending(f"{self.name}: {each.name}", each.title, now - each.submitted, members)
            for each in self.queue.oldest()
        ]

    def submit(self, operation: Operation, begin: bool = True) -> Handle:
        """Queue an operation and return its handle at once.

        Args:
            operation: Operation to run; one that has ended may be submitted again.
            begin: Whether the lane's thread runs it; otherwise it may stay until a thread waits.

        Raises:
            ValueError: An operation of this name is still in flight.
            HorovodInternalError: The lane has been closed or has failed.
        """
        try:
            return self.enqueue(operation, begin)
        finally:
            if deferred:
                leave()

    @uninterrupted
    def enqueue(self, operation: Operation, begin: bool = True) -> Handle:
        """Submit an operation, for callers that run deferred signal handlers themselves."""
        if world.is_child:
            raise world.child_error()
        handle = Handle(operation.name)
        for observe in observers.current:
            observe("submit", self.name, (operation,))
        with self._lock:
            self.queue.add(operation)
            operation.is_protected = False
            operation.handle = handle  # now that it is known not to be in flight with another
            if operation.memory is not None:
                self.devices.admit(operation, operation.memory.index)
            operation.lane = self.name
            handle.driver = self
            if begin or self._driver is not None:
                self._announce()
        return handle

    def run(self, operation: Operation) -> Any:
        """Queue an operation, wait for it, and return its result."""
        return self.submit(operation, begin=False).wait()

    @uninterrupted
    def drive(self, handle: Handle | None) -> None:
        """Run rounds in this thread until a handle is finished, unless another thread does.

        Two switches between threads cost more than a small collective. It returns early if a
        signal handler is due, and the lane's thread continues the round. A failure in a round fails
        all pending operations.

        Args:
            handle: Handle that this thread waits for; None: run until there is nothing to do.

        Raises:
            HorovodInternalError: This process was forked from the rank that submitted it, or the
                caller is called by an operation of the lane, which would have to end first.
        """
        if world.is_child:
            raise world.child_error()
        thread = threading.get_ident()
        with self._lock:
            if self._broken or (handle is not None and handle.finished):
                return  # in a broken lane, each handle has been finished or is about to be
            driver = self._driver
            if driver is None:
                self._driver = thread
        if driver is not None:
            if handle is not None and driver == thread:
                raise HorovodInternalError(
                    f"{handle.name!r} was called from within another operation, which would have "
                    "to end first; do not communicate in a compressor's methods, or in a signal's "
                    "handler that has waited for an exchange of data to end"
                )
            return
        run = self._run_round
        try:
            while not (handle.finished if handle is not None else self._rests()):
                if deferred and is_due():
                    break
                run()
        except Interrupted:
            pass  # the next driver continues with that round
        except BaseException as error:
            self._break(error)
            if not isinstance(error, Exception):  # else the handles carry it
                raise
        finally:
            with self._lock:
                self._driver = None
                if self._is_wanted():
                    self._changed.notify_all()

    def hold(self, is_waiting: Callable[[], bool]) -> None:
        """Keep rounds from running until `let_go`.

        Args:
            is_waiting: returns whether the thread that runs the rounds waits for `let_go`.
        """
        with self._changed:
            while self._driver is not None and not is_waiting() and not self._broken:
                self._changed.wait(_HOLD_SECONDS)
            if self._driver is None:
                self._driver = _NOBODY

    def let_go(self) -> None:
        """Let rounds run again after `hold`."""
        with self._changed:
            if self._driver == _NOBODY:
                self._driver = None
            self._changed.notify_all()

    def replace(self, transport: Transport | None, deliver: bool) -> None:
        """Continue without ranks that have died, between `hold` and `let_go`.

        Args:
            transport: Transport of the survivors; None: a rank has closed the lane.
            deliver: Whether an outcome that was in doubt counts; otherwise its operations run
                again.
        """
        if transport is None:
            self.rounds.closed = self.is_released = True
            return
        transport.lane = self.name
        transport.confirms = True
        self.transport = transport
        self.rounds.replace(deliver)

    def abandon(self) -> None:
        """End the lane's thread; nothing has been submitted, and nothing will be."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    @property
    def communicators(self) -> list[Any]:
        """Return the transport's communicators, unless it has been closed with the lane."""
        return [] if self.is_released else self.transport.communicators

    @uninterrupted
    def take_over(self) -> None:
        """Have the lane's thread run the pending operations, which may have lost their waiter."""
        with self._lock:
            if self.queue.operations:
                self._announce()

    @uninterrupted
    def begin_close(self) -> None:
        """Announce to the other ranks that this one submits nothing further.

        Operations for which they still wait fail there, with this rank's number.
        """
        with self._changed:
            self.queue.close("hvdlite has been shut down on this rank; call hvd.init() first")
            self._announce()

    def close(self, timeout: float) -> bool:
        """Begin to close, unless that has been done, and wait until all ranks do.

        Returns:
            Whether all ranks have closed the lane; only then is its transport free. If a signal
            handler raises, call it again.
        """
        self.begin_close()
        if not self._join(timeout):
            self.stall.abandon()
            if not self._join(1.0):  # it waits for the device
                self.devices.abort("hvdlite was shut down on this rank")
                self._join(1.0)
        self._release()
        if deferred:
            leave()
        return self.rounds.closed

    def _join(self, seconds: float) -> bool:
        """Wait for the lane's thread to end; return whether it has."""
        deadline = time.monotonic() + seconds
        while not (ended := self._has_ended(min(_CHECK_SECONDS, deadline - time.monotonic()))):
            if deferred:
                leave()
            if time.monotonic() >= deadline:
                break
        return ended

    @uninterrupted  # an exception in `join` makes Python consider the thread ended
    def _has_ended(self, seconds: float) -> bool:
        self._thread.join(max(seconds, 0.0))
        return not self._thread.is_alive()

    @uninterrupted
    def _release(self) -> None:
        if self.rounds.closed and not self.is_released:
            self.is_released = True
            self.devices.close()
            self.transport.close()

    def elsewhere(self) -> tuple[list[str], float]:
        """Return what this rank waits for in other lanes, and how long.

        A rank may wait there for this one, which waits here for that rank: neither lane alone can
        tell why.
        """
        if self.queue.operations:
            if self.queue.waited() < _ELSEWHERE_SECONDS:
                return [], 0.0
            self._look_elsewhere()
        queues = [lane.queue for lane in self.all_lanes() if lane is not self]
        titles = [title for queue in queues for title in queue.stuck(_ELSEWHERE_SECONDS)]
        limit = self.settings.stall_shutdown_time_seconds
        since = time.monotonic() - limit
        given_up = [title for at, title in (queue.gave_up for queue in queues) if at > since]
        if given_up:
            return titles + given_up, math.inf
        return titles, max((queue.waited() for queue in queues), default=0.0)

    def _wait_long(self) -> None:
        """Look elsewhere in a long wait; one without an operation is no reason to use a core."""
        if self._has_work():
            self._look_elsewhere()
            return
        with self._changed:
            self.rounds.pausing = True
            self._changed.wait_for(self._has_work, _IDLE_SECONDS)
            self.rounds.pausing = False

    def _look_elsewhere(self) -> None:
        """Let idle lanes take part in a round, in which others may wait for this rank."""
        now = time.monotonic()
        if now - self._looked >= _ELSEWHERE_SECONDS <= self.queue.waited():
            self._looked = now
            self._ask_others()

    def give_up(self, title: str) -> None:
        """Remember an operation for which this rank has waited too long, and ask the others."""
        self.queue.gave_up = time.monotonic(), title
        self._ask_others()

    def _ask_others(self) -> None:
        for lane in self.all_lanes():
            if lane is not self:
                lane.ask()

    @uninterrupted
    def ask(self) -> None:
        """Take part in a round, also without an operation."""
        with self._lock:
            if not self._has_work():
                self.queue.asked = True
                self._announce()

    def report_device(self) -> None:
        """Have the lane's thread see that the device has failed; any thread may call it."""
        self.ask()
        if deferred:
            leave()

    def _announce(self) -> None:
        """Notify waiters, but only if a thread sleeps, to avoid contention for the GIL."""
        if self.rounds.pausing or (self._sleeping and self._driver is None):
            self._sleeping = False
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._sleep()
            if self.queue.operations and not self.queue.closing:
                self._let_more_come()
            if self.rounds.closed or self._broken:
                return
            if self._has_work():
                self.drive(None)  # or another thread does, which watches the device, too
            else:
                self._attend()

    def _attend(self) -> None:
        """Take part in a round without an operation; reports of stacks leave this thread out."""
        self.drive(None)

    def _let_more_come(self) -> None:
        """Leave the GIL to the submitting thread; nobody waits yet, a waiter would drive."""
        for _ in range(_MAX_BURST_CYCLES):
            time.sleep(self.settings.cycle_time * 1e-3)
            if self._driver is not None or self.queue.quiet() > _BURST_SECONDS:
                return

    def _sleep(self) -> None:
        """Sleep until there is an operation to run or device work to check."""
        self._watching = bool(self.devices.under_way)
        while not self._is_wanted():
            self._sleeping = True
            if not self._changed.wait(_WATCH_SECONDS if self._watching else None):
                break

    def _is_wanted(self) -> bool:
        """Return whether the lane's thread has to work, or to begin to watch the device."""
        return self._driver is None and (
            self._has_work()
            or self.queue.asked
            or (not self._watching and bool(self.devices.under_way))
        )

    def _has_work(self) -> bool:
        """Return whether this rank itself needs another round."""
        return bool(self.queue.operations) or self.queue.closing or self._broken

    def _rests(self) -> bool:
        self.devices.check()
        return self.rounds.closed or not (self._has_work() or self.queue.asked)

    def _break(self, error: BaseException) -> None:
        # First tell the other ranks; if this fails too, there is no other channel.
        with contextlib.suppress(Exception):
            self.transport.leave()
        reason = describe_error(error)
        self.devices.abort(reason)
        self.queue.refuse(
            f"an earlier failure ended communication: {reason}; end the job, or call "
            "hvd.shutdown() and hvd.init() on all ranks"
        )
        with self._changed:
            self._broken, self.failure = True, reason
        for operation in self.queue.take_all():
            failure = HorovodInternalError(
                f"rank {self.queue.rank}: {operation.title} failed: {reason}"
            )
            failure.__cause__ = error
            operation.handle.finish(error=failure)


def describe_error(error: BaseException) -> str:
    """Return an error's message, with its type where it is not one of hvdlite's."""
    return str(error) if isinstance(error, HorovodInternalError) else repr(error)
