"""A lane: a queue of operations, one thread, one communicator.

Collectives of one communicator must be issued in the same order on all ranks, while ranks
submit them in any order, from any thread. So a lane works in rounds. In a round all ranks
meet and compare words, one for each operation that is pending, oldest first. What all ranks
have in the same place at the beginning of their lists runs, small allreduces together: this
costs one tiny exchange, which is also where early ranks wait for late ones. Where the first
words differ already, the ranks exchange what they have pending, and `agreement.decide` says,
alike on every rank, what can run, what cannot and what waits.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdlite import timeline
from hvdlite.engine.agreement import (
    Decision,
    Description,
    Report,
    decide,
    explain,
    ranks_text,
    report_missing,
)
from hvdlite.engine.device_side import DeviceSide
from hvdlite.engine.fusion import fuse
from hvdlite.engine.handle import Handle
from hvdlite.engine.operation import Operation
from hvdlite.engine.patience import WaitingPolicy
from hvdlite.errors import HorovodInternalError, MismatchError
from hvdlite.settings import Settings
from hvdlite.transport import Transport

_log = logging.getLogger("hvdlite")
_CLOSING_WORD = bytes(16)
# Pauses between rounds in which nothing could be decided; a new submission ends them.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5e-3, 20e-3
# How often an idle lane looks after what its device has not finished.
_WATCH_SECONDS = 0.1


class Lane:
    """An ordered queue of operations over one transport.

    Args:
        name: of the thread, and in messages.
        transport: the lane's own; nothing else may use it.
        settings: times of reports and time-outs.
    """

    def __init__(self, name: str, transport: Transport, settings: Settings) -> None:
        self._name = name
        self._transport = transport
        transport.lane = name
        self._settings = settings
        self._devices = DeviceSide(transport, settings)
        self._watching = False
        self._patience = WaitingPolicy(settings, self._describe_pending, transport.absent)
        self._pending: dict[str, Operation] = {}
        self._changed = threading.Condition(threading.Lock())
        self._pausing = False
        self._driven = False
        self._closing = False
        self._closed = False
        self._broken = False
        self._refusal: str | None = None
        self._changes = self._changes_seen = 0
        self._next_pause = _FIRST_PAUSE
        self._next_report = settings.stall_check_time_seconds
        self._thread = threading.Thread(target=self._serve, name=f"hvdlite-{name}", daemon=True)
        self._thread.start()

    def empty(self, size: int, dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised flat array that lies where the lane exchanges it best.

        Its memory is used again when the last view of it has gone.
        """
        return self._transport.empty(size, dtype)

    def submit(self, operation: Operation, begin: bool = True) -> Handle:
        """Queue an operation and return at once.

        Args:
            operation: what to run.
            begin: let the lane's thread turn to it; else it may stay until somebody waits.

        Raises:
            ValueError: an operation of this name is still on its way.
            HorovodInternalError: the lane has been closed or has failed.
        """
        with self._changed:
            self._enqueue(operation)
            if begin or self._driven:
                self._announce()
        return operation.handle

    def run(self, operation: Operation) -> Any:
        """Queue an operation, wait for it, and return its result.

        Raises:
            ValueError, HorovodInternalError: as `submit`, and as the operation.
        """
        return self.submit(operation, begin=False).wait()

    def _drive(self, handle: Handle) -> None:
        """Run rounds in the thread of whoever waits, if nobody else does, until it has ended.

        Two switches between threads cost more than a small collective.
        """
        with self._changed:
            drives = not self._driven and not handle.done()
            self._driven |= drives
        if drives:
            # The handle carries the error as well, with the operation's name.
            with contextlib.suppress(Exception), self._driving():
                while not handle.done():
                    self._round()

    def begin_close(self) -> None:
        """Tell the other ranks that this one submits no more.

        Operations that the others still wait for fail there, with this rank's number.
        """
        with self._changed:
            self._closing = True
            self._changes += 1
            self._refusal = "hvdlite has been shut down on this rank; call hvd.init() first"
            self._announce()

    def close(self, timeout: float) -> bool:
        """Begin to close, if that is not done yet, and wait until all ranks do.

        Args:
            timeout: seconds to wait for the other ranks.

        Returns:
            Whether all ranks have closed the lane; only then its communicator is free.
        """
        self.begin_close()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._patience.abandon()
            self._thread.join(1.0)
        if self._thread.is_alive():  # it waits for the device
            self._devices.abort("hvdlite was shut down on this rank")
            self._thread.join(1.0)
        if self._closed:
            self._devices.close()
            self._transport.close()
        return self._closed

    def _announce(self) -> None:
        """Wake who waits for a change; nobody in vain, or threads would fight for the GIL."""
        if self._pausing or not self._driven:
            self._changed.notify_all()

    def _enqueue(self, operation: Operation) -> None:
        if self._refusal is not None:
            raise HorovodInternalError(f"{operation.name!r} cannot be submitted: {self._refusal}")
        if operation.key in self._pending:
            raise ValueError(
                f"rank {self._transport.rank}: an operation named {operation.name!r} is still on "
                "its way; wait for it, or give this one another name"
            )
        if operation.memory is not None:
            self._devices.admit(operation)
        operation.lane = self._name
        operation.handle.drive = self._drive
        self._pending[operation.key] = operation
        operation.submitted = time.monotonic()
        self._changes += 1

    def _serve(self) -> None:
        """Drive rounds in the lane's thread while there is something to do."""
        while True:
            with self._changed:
                self._watching = bool(self._devices.under_way)
                self._changed.wait_for(self._is_wanted, _WATCH_SECONDS if self._watching else None)
            if self._pending and not self._closing:
                # More may be about to come, and who submits needs the GIL. Nobody waits yet: who
                # did would drive.
                time.sleep(self._settings.cycle_time * 1e-3)
            with self._changed:
                if self._closed or self._broken:
                    return
                if self._driven:
                    continue  # who drives looks after the device, too
                self._driven = True
            # The pending handles carry the error.
            with contextlib.suppress(Exception), self._driving():
                self._devices.look()
                while self._has_work() and not self._closed:
                    self._round()

    def _is_wanted(self) -> bool:
        """Whether the lane's thread has to do something, or to begin to watch the device."""
        if self._driven:
            return False
        return self._has_work() or (not self._watching and bool(self._devices.under_way))

    def _has_work(self) -> bool:
        return bool(self._pending) or self._closing or self._broken

    @contextlib.contextmanager
    def _driving(self) -> Iterator[None]:
        """Hold the driver's seat; a failure in it fails everything that is pending."""
        try:
            yield
        except BaseException as error:
            self._break(error)
            raise
        finally:
            with self._changed:
                self._driven = False
                if self._is_wanted():
                    self._changed.notify_all()

    def _break(self, error: BaseException) -> None:
        # Before anybody here can react; where even this fails there is no way to tell.
        with contextlib.suppress(Exception):
            self._transport.leave()
        reason = _describe_error(error)
        self._devices.abort(reason)
        with self._changed:
            self._broken = True
            self._refusal = self._refusal or (
                f"an earlier failure ended communication: {reason}; end the job, or call "
                "hvd.shutdown() and hvd.init() on all ranks"
            )
            pending = list(self._pending.values())
            self._pending.clear()
        for operation in pending:
            failure = HorovodInternalError(
                f"rank {self._transport.rank}: {operation.name!r} failed: {reason}"
            )
            failure.__cause__ = error
            operation.handle.finish(error=failure)

    def _round(self) -> None:
        with self._changed:
            operations = list(itertools.islice(self._pending.values(), self._transport.most_words))
        trace = timeline.current
        if trace is not None and trace.mark_cycles:
            trace.instant(self._name, timeline.CYCLE_START)
        if self._devices.under_way:
            self._devices.look()  # before the ranks meet, so that no other one goes on
        words = [operation.word() for operation in operations]
        groups = fuse(operations, self._settings.fusion_threshold)
        with self._negotiating(operations):
            agreed = self._transport.meet(
                words or [_CLOSING_WORD], self._patience, _cargo(groups[0]) if groups else ()
            )
            decision = None if agreed else self._negotiate()
        if decision is not None:
            self._carry_out(*decision)
        elif not operations:
            self._closed = True
        elif agreed == len(operations):
            self._execute(groups)
        else:
            self._execute(fuse(operations[:agreed], self._settings.fusion_threshold))

    def _negotiating(
        self, operations: Sequence[Operation]
    ) -> contextlib.AbstractContextManager[None]:
        """The time until it is agreed on what comes next, in the timeline."""
        if timeline.current is None or not operations:
            return contextlib.nullcontext()
        event = timeline.NEGOTIATE + operations[0].activity
        return timeline.span(self._name, event, tensor=operations[0].name)

    def _negotiate(self) -> tuple[Decision, list[Report]]:
        reports = self._exchange_reports()
        limit = self._settings.stall_shutdown_time_seconds or math.inf
        return decide(reports, give_up_after=limit), reports

    def _carry_out(self, decision: Decision, reports: Sequence[Report]) -> None:
        for key in decision.differing:
            self._fail_differing(key)
        for keys in decision.clashing:
            self._fail_differing(keys[self._transport.rank])
        for key, why in decision.failed.items():
            self._fail_if_pending(key, HorovodInternalError(why))
        ready = [self._pending[key] for key in decision.ready]
        self._execute(fuse(ready, self._settings.fusion_threshold), reports)
        if decision.closing:
            self._refuse_after(decision.closing)
        if not (decision.ready or decision.differing or decision.clashing or decision.failed):
            self._report_stall(decision)
            self._pause_between_rounds()

    def _exchange_reports(self) -> list[Report]:
        now = time.monotonic()
        with self._changed:
            descriptions = tuple(
                Description(
                    operation.name,
                    operation.signature.digest,
                    operation.payload,
                    operation.failure,
                    now - operation.submitted,
                    operation.key,
                )
                for operation in self._pending.values()
            )
            report = Report(descriptions, self._closing)
            self._changes_seen = self._changes
        messages = self._transport.gather(pickle.dumps(report))
        return [pickle.loads(message) for message in messages]

    def _fail_differing(self, key: str) -> None:
        """Exchange the full signatures, which the digests only stand for, and explain."""
        operation = self._pending[key]
        messages = self._transport.gather(pickle.dumps(operation.signature))
        signatures = {rank: pickle.loads(message) for rank, message in enumerate(messages)}
        self._fail(operation, MismatchError(explain(operation.name, signatures)))

    def _fail_if_pending(self, key: str, error: HorovodInternalError) -> None:
        operation = self._pending.get(key)
        if operation is not None:
            self._fail(operation, error)

    def _fail(self, operation: Operation, error: BaseException) -> None:
        self._remove([operation])
        operation.handle.finish(error=error)

    def _execute(
        self, groups: Sequence[Sequence[Operation]], reports: Sequence[Report] | None = None
    ) -> None:
        """Run operations that all ranks have; without reports, they have the same payloads."""
        for group in groups:
            first, *others = group
            if first.failure is not None:
                self._fail(first, HorovodInternalError(first.failure))
                continue
            # What an overflow becomes is in the result; an error would end the job for it.
            with self._executing(group), np.errstate(all="ignore"):
                if others:
                    results = first.execute_together(others, self._transport)
                else:
                    results = [first.execute(self._transport, self._payloads(first, reports))]
            self._remove(group)
            for operation, result in zip(group, results, strict=True):
                operation.handle.finish(result)

    def _executing(self, group: Sequence[Operation]) -> contextlib.AbstractContextManager[None]:
        """The time that a group takes, in the timeline; and how long each of it has waited."""
        trace = timeline.current
        if trace is None:
            return contextlib.nullcontext()
        now = trace.now()
        for operation in group:
            submitted = int(operation.submitted * 1e9)
            trace.overlapping(self._name, timeline.QUEUE, submitted, now, tensor=operation.name)
        return timeline.span(
            self._name,
            group[0].activity,
            tensor=group[0].name,
            tensors=len(group),
            bytes=sum(operation.nbytes for operation in group),
        )

    def _payloads(self, operation: Operation, reports: Sequence[Report] | None) -> list[bytes]:
        if reports is None:
            return [operation.payload] * self._transport.size
        return [_payload(report, operation.key) for report in reports]

    def _remove(self, operations: Sequence[Operation]) -> None:
        self._next_pause = _FIRST_PAUSE
        with self._changed:
            for operation in operations:
                del self._pending[operation.key]

    def _refuse_after(self, closing: Sequence[int]) -> None:
        with self._changed:
            if self._refusal is None:
                self._refusal = (
                    f"{ranks_text(closing)} shut down already; run the same steps on all "
                    "ranks, and call hvd.shutdown() after the last"
                )

    def _pause_between_rounds(self) -> None:
        with self._changed:
            self._pausing = True
            self._changed.wait_for(lambda: self._changes != self._changes_seen, self._next_pause)
            self._pausing = False
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)

    def _report_stall(self, decision: Decision) -> None:
        now = time.monotonic()
        with self._changed:
            waited = max((now - each.submitted for each in self._pending.values()), default=0.0)
        if waited < self._settings.stall_check_time_seconds:
            self._next_report = self._settings.stall_check_time_seconds
        elif waited >= self._next_report and not self._settings.stall_check_disable:
            self._next_report = waited + self._settings.stall_check_time_seconds
            _log.warning(
                "rank %d: waited %.0f s for %s; do all ranks run the same steps?",
                self._transport.rank,
                waited,
                report_missing(decision.missing),
            )

    def _describe_pending(self) -> str:
        with self._changed:
            names = [operation.name for operation in self._pending.values()]
        shown = ", ".join(map(repr, names[:4])) or "shutdown()"
        return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _describe_error(error: BaseException) -> str:
    return str(error) if isinstance(error, HorovodInternalError) else repr(error)


def _payload(report: Report, key: str) -> bytes:
    return next(entry.payload for entry in report.descriptions if entry.key == key)


def _cargo(group: Sequence[Operation]) -> list[Any]:
    """What the first operations may bring along; those of a group do so alike."""
    cargo = [] if group[0].failure is not None else [operation.cargo for operation in group]
    return [] if not cargo or cargo[0] is None else cargo
