"""A round: the ranks meet, agree on what is next, and do it."""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite import timeline
from hvdlite.engine.agreement import Decision, Report, decide, explain, ranks_text, report_missing
from hvdlite.engine.device_side import DeviceSide
from hvdlite.engine.fusion import fuse
from hvdlite.engine.handle import Handle
from hvdlite.engine.operation import Operation
from hvdlite.engine.patience import WaitingPolicy
from hvdlite.engine.queue import Queue
from hvdlite.errors import GradientError, HorovodInternalError, MismatchError
from hvdlite.settings import Settings
from hvdlite.transport import Transport

_log = logging.getLogger("hvdlite")
_CLOSING_WORD = bytes(16)
_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
# Pauses between rounds in which nothing could be decided; a new submission ends them.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5e-3, 20e-3


class Rounds:
    """The rounds of a lane, one after the other; one thread at a time runs them.

    In a round all ranks meet and compare words, one for each operation that is pending,
    oldest first. What all ranks have in the same place at the beginning of their lists runs,
    small allreduces together: this costs one tiny exchange, which is also where early ranks
    wait for late ones. Where the first words differ already, the ranks exchange what they
    have pending, and `agreement.decide` says, alike on every rank, what can run, what cannot
    and what waits.

    Args:
        name: of the lane, for the timeline.
        queue: what is pending.
        transport: the lane's.
        devices: likewise.
        patience: with which the ranks meet.
        settings: times of reports and time-outs.

    Attributes:
        closed: whether all ranks have closed the lane.
        pausing: whether a pause between rounds waits for a change of the queue.
        meets: whether this rank has gone to a meeting that it has not come back from. If the wait
            for the others is interrupted, the next `run` goes on with it.
    """

    def __init__(
        self,
        name: str,
        queue: Queue,
        transport: Transport,
        devices: DeviceSide,
        patience: WaitingPolicy,
        settings: Settings,
    ) -> None:
        self.closed = False
        self.pausing = False
        self.meets = False
        self._operations: list[Operation] = []  # of a round, until its meeting is over
        self._name = name
        self._queue = queue
        self._transport = transport
        self._devices = devices
        self._patience = patience
        self._settings = settings
        self._next_pause = _FIRST_PAUSE
        self._next_report = settings.stall_check_time_seconds

    def run(self) -> None:
        """Run one round.

        Raises:
            HorovodInternalError: communication failed; and what an operation raises.
            Interrupted: a signal's handler is to run; the round is to be run again.
        """
        if not self.meets:
            self._begin()
        operations = self._operations
        words = [operation.word() for operation in operations]
        groups = fuse(operations, self._settings.fusion_threshold)
        with self._negotiating(operations):
            self.meets = True
            agreed = self._transport.meet(
                words or [_CLOSING_WORD], self._patience, _cargo(groups[0]) if groups else ()
            )
            self.meets, self._operations = False, []  # which hold arrays
            decision = None if agreed else self._negotiate()
        if decision is not None:
            self._carry_out(*decision)
        elif not operations:
            self.closed = True
        elif agreed == len(operations):
            self._execute(groups)
        else:
            self._execute(fuse(operations[:agreed], self._settings.fusion_threshold))

    def _begin(self) -> None:
        """Choose what to bring to the meeting."""
        self._operations = self._queue.oldest(self._transport.most_words)
        trace = timeline.current
        if trace is not None and trace.mark_cycles:
            trace.instant(self._name, timeline.CYCLE_START)
        if self._devices.under_way:
            self._devices.look()  # before the ranks meet, so that no other one goes on

    def _negotiating(
        self, operations: Sequence[Operation]
    ) -> contextlib.AbstractContextManager[None]:
        """The time until it is agreed on what comes next, in the timeline."""
        if timeline.current is None or not operations:
            return _NOTHING
        event = timeline.NEGOTIATE + operations[0].activity
        return timeline.span(self._name, event, tensor=operations[0].name)

    def _negotiate(self) -> tuple[Decision, dict[int, Report]]:
        messages = self._transport.gather(pickle.dumps(self._queue.report()))
        reports = self._by_member([pickle.loads(message) for message in messages])
        limit = self._settings.stall_shutdown_time_seconds or math.inf
        return decide(reports, give_up_after=limit), reports

    def _by_member(self, values: Sequence[Any]) -> dict[int, Any]:
        return dict(zip(self._transport.members, values, strict=False))

    def _carry_out(self, decision: Decision, reports: Mapping[int, Report]) -> None:
        for key in decision.differing:
            self._fail_differing(key)
        for keys in decision.clashing:
            self._fail_differing(keys[self._transport.members[self._transport.rank]])
        for key, why in decision.failed.items():
            self._fail_if_pending(key, HorovodInternalError(why))
        stand_ins = self._stand_in(decision.substituted)
        ready = [self._queue.get(key) or stand_ins[key] for key in decision.ready]
        self._execute(fuse(ready, self._settings.fusion_threshold), reports)
        if decision.closing:
            with self._queue.changed:
                self._queue.refuse(
                    f"{ranks_text(decision.closing)} shut down already; run the same steps on all "
                    "ranks, and call hvd.shutdown() after the last"
                )
        if not (decision.ready or decision.differing or decision.clashing or decision.failed):
            self._report_stall(decision)
            self._pause()

    def _fail_differing(self, key: str) -> None:
        """Exchange the full signatures, which the digests only stand for, and explain."""
        operation = self._queue.get(key)  # None: this rank has joined
        messages = self._transport.gather(pickle.dumps(operation and operation.signature))
        if operation is not None:
            signatures = self._by_member([pickle.loads(message) for message in messages])
            known = {member: signature for member, signature in signatures.items() if signature}
            self._fail(operation, MismatchError(explain(operation.name, known)))

    def _stand_in(self, keys: Sequence[str]) -> dict[str, Operation]:
        """Make what this rank, if it has joined, runs in the place of others' operations."""
        if not keys:
            return {}
        own = {key: self._queue.get(key) for key in keys}
        makers = {key: operation.stand_in() for key, operation in own.items() if operation}
        found: dict[str, Callable[[], Operation]] = {}
        for message in self._transport.gather(pickle.dumps(makers)):
            found = {**pickle.loads(message), **found}
        stand_ins = {key: found[key]() for key, operation in own.items() if operation is None}
        for operation in stand_ins.values():
            operation.handle = Handle(operation.name)  # for which nobody waits
            operation.lane = self._name
            operation.submitted = time.monotonic()
        return stand_ins

    def _fail_if_pending(self, key: str, error: HorovodInternalError) -> None:
        operation = self._queue.get(key)
        if operation is not None:
            self._fail(operation, error)

    def _fail(self, operation: Operation, error: BaseException) -> None:
        handle = operation.handle  # it may be submitted again as soon as it is removed
        self._remove([operation])
        handle.finish(error=error)

    def _execute(
        self, groups: Sequence[Sequence[Operation]], reports: Mapping[int, Report] | None = None
    ) -> None:
        """Run operations that all ranks have; without reports, they have the same payloads."""
        for group in groups:
            first, *others = group
            if first.failure is not None:
                self._fail(first, HorovodInternalError(first.failure))
                continue
            # What an overflow becomes is in the result; an error would end the job for it.
            try:
                with self._executing(group), np.errstate(all="ignore"):
                    if others:
                        results = first.execute_together(others, self._transport)
                    else:
                        results = [first.execute(self._transport, self._payloads(first, reports))]
            except (GradientError, MismatchError) as error:  # on all ranks alike
                self._fail(first, error)
                continue
            handles = [operation.handle for operation in group]
            self._remove(group)  # from now on each may be submitted again
            for handle, result in zip(handles, results, strict=True):
                handle.finish(result)

    def _executing(self, group: Sequence[Operation]) -> contextlib.AbstractContextManager[None]:
        """The time that a group takes, in the timeline; and how long each of it has waited."""
        trace = timeline.current
        if trace is None:
            return _NOTHING
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

    def _payloads(self, operation: Operation, reports: Mapping[int, Report] | None) -> list[bytes]:
        if reports is None:
            return [operation.payload] * self._transport.size
        return [_payload(report, operation.key) for report in reports.values()]

    def _remove(self, operations: Sequence[Operation]) -> None:
        self._next_pause = _FIRST_PAUSE
        self._queue.remove(operations)

    def _pause(self) -> None:
        with self._queue.changed:
            self.pausing = True
            self._queue.changed.wait_for(self._queue.has_changed, self._next_pause)
            self.pausing = False
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)

    def _report_stall(self, decision: Decision) -> None:
        waited = self._queue.waited()
        if waited < self._settings.stall_check_time_seconds:
            self._next_report = self._settings.stall_check_time_seconds
        elif waited >= self._next_report and not self._settings.stall_check_disable:
            self._next_report = waited + self._settings.stall_check_time_seconds
            _log.warning(
                "rank %d: waited %.0f s for %s; do all ranks run the same steps?",
                self._transport.members[self._transport.rank],
                waited,
                report_missing(decision.missing, about=decision.about),
            )


def _payload(report: Report, key: str) -> bytes:
    found = (entry.payload for entry in report.descriptions if entry.key == key)
    return next(found, b"")  # the rank has joined


def _cargo(group: Sequence[Operation]) -> list[Any]:
    """What the first operations may bring along; those of a group do so alike."""
    cargo = [] if group[0].failure is not None else [operation.cargo for operation in group]
    return [] if not cargo or cargo[0] is None else cargo
