"""Rounds: the ranks agree on the next operations of a lane, and run them."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdlite.base import observers
from hvdlite.engine import agreement
from hvdlite.engine.agreement import Decision, QueueReport
from hvdlite.engine.handle import Handle
from hvdlite.engine.operation import Operation
from hvdlite.errors import GradientError, HorovodInternalError, MismatchError, ranks_text
from hvdlite.observe import status
from hvdlite.transport import NoRoomError

if TYPE_CHECKING:
    from hvdlite.engine.lane import Lane

_log = logging.getLogger("hvdlite")
_digest_of, _handle_of, _places_of = map(attrgetter, ("digest", "handle", "places"))
# Of a rank without operations, which closes the lane, or says what it does elsewhere.
_CLOSING_DIGEST, _IDLE_DIGEST = bytes(16), b"\1" * 16
# Pauses between rounds in which nothing could be decided; a new submission ends them.
_FIRST_PAUSE, _MAX_PAUSE = 0.5e-3, 20e-3
#: Seconds after which a rank reports that others, for which it waits, wait for something else.
ASTRAY_SECONDS = 3.0


class Rounds:
    """The rounds of a lane, one after the other; one thread at a time runs them.

    In a round all ranks compare the digests of their pending operations, oldest first. The common
    prefix runs, small allreduces together: this costs one tiny exchange, which is also where early
    ranks wait for late ones. Where the first digests differ already, the ranks exchange
    descriptions of what they have pending, and `agreement.decide` says, with the same outcome on
    every rank, what can run, what cannot and what waits.

    Attributes:
        closed: Whether all ranks have closed the lane.
        pausing: Whether a pause between rounds waits for a change of the queue.
        waiting: Whether this rank has sent its digests and has no outcome yet. If the wait for the
            others is interrupted, the next `run` continues it.
        confirmed: The number of outcomes that the ranks have confirmed; the same on all ranks,
            except for an outcome in doubt.
        in_doubt: Delivers an outcome that this rank has and other ranks may lack.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane, self._queue = lane, lane.queue
        self.closed = False
        self.pausing = False
        self.waiting = False
        self._operations: list[Operation] = []  # of a round, until the digests are compared
        self._closes = False  # in this round
        self._has_gone_astray = False
        self._next_pause = _FIRST_PAUSE
        self._next_report = lane.settings.stall_check_time_seconds
        self.confirmed = 0
        self.in_doubt: Callable[[], object] | None = None

    def run(self) -> None:
        """Run one round.

        Raises:
            HorovodInternalError: Communication failed; and what an operation raises.
            Interrupted: A signal handler is due; run the round again afterwards.
        """
        if not self.waiting:
            self._operations = self._queue.oldest(self._lane.transport.max_digests)
            self._closes = self._queue.closing and not self._operations
            if self._lane.devices.under_way:
                self._lane.devices.check()  # first, so that a failure here stops all ranks
            for observe in observers.current:
                observe("meet", self._lane.name, self._operations)
        operations = self._operations
        groups = fuse(operations, self._lane.settings.fusion_threshold)
        digests = [*map(_digest_of, operations)]
        digests = digests or [_CLOSING_DIGEST if self._closes else _IDLE_DIGEST]
        if operations and operations[0].places is not None and not self.waiting:
            places = [*itertools.takewhile(bool, map(_places_of, operations))]
            if not self._lane.transport.announce(places):
                operations[0].places = None  # it will not lie there next time either
        self.waiting = True
        try:
            agreed = self._lane.transport.meet(
                digests, self._lane.stall.check, _inline_data(groups)
            )
        except NoRoomError as error:
            self.waiting = False
            for operation in groups[0]:  # the next round tells the other ranks
                operation.failure = f"{operation.title} failed: {MemoryError(*error.args)!r}"
            return
        self.waiting, self._operations = False, []  # which hold arrays
        self._queue.asked = False
        if not operations and agreed:
            if self._closes:
                self._deliver(self._close)
            return
        outcome = None if agreed else self._negotiate()
        for observe in observers.current:
            observe("agreed", self._lane.name, operations)
        if outcome is not None:
            self._carry_out(*outcome)
        elif agreed == len(operations):
            self._execute(groups)
        else:
            self._execute(fuse(operations[:agreed], self._lane.settings.fusion_threshold))

    def replace(self, deliver: bool) -> None:
        """Continue over another transport, without ranks that have died.

        Args:
            deliver: Whether an outcome in doubt counts; otherwise its operations run again.
        """
        outcome, self.in_doubt = self.in_doubt, None
        if deliver and outcome is not None:
            self.confirmed += 1
            outcome()
        self.waiting, self._operations = False, []
        self._queue.restart(self._lane.transport.members)

    def _close(self) -> None:
        self.closed = True

    def _deliver(self, outcome: Callable[[], object]) -> None:
        """Deliver an outcome, under recovery once all ranks have it.

        Otherwise a rank could continue with a result that the others can no longer compute after
        the death of a rank.
        """
        if self._lane.transport.confirms:
            self.in_doubt = outcome
            for observe in observers.current:
                observe("confirm", self._lane.name)
            self._lane.transport.confirm()
            self.in_doubt = None
            self.confirmed += 1
        for observe in observers.current:
            observe("deliver", self._lane.name)
        outcome()
        for observe in observers.current:
            observe("delivered", self._lane.name)

    def _negotiate(self) -> tuple[Decision, dict[int, QueueReport]]:
        limit = self._lane.settings.stall_shutdown_time_seconds or math.inf
        report = self._queue.report(*self._lane.elsewhere(), limit)
        pending = self._gather(report)
        return agreement.decide(pending), pending

    def _gather(self, value: Any) -> dict[int, Any]:
        """Exchange a value of each rank."""
        transport = self._lane.transport
        return dict(zip(transport.members, transport.gather_objects(value), strict=False))

    def _carry_out(self, decision: Decision, pending: Mapping[int, QueueReport]) -> None:
        for keys in decision.differing:
            self._fail_differing(keys[self._queue.rank])
        if decision.parted:
            self._compare_calls(decision)
        if decision.failed or decision.closing:
            self._deliver(partial(self._refuse, decision))
        stand_ins = self._stand_in(decision.substituted)
        ready = [self._queue.operations.get(key) or stand_ins[key] for key in decision.ready]
        self._execute(fuse(ready, self._lane.settings.fusion_threshold), pending)
        if not (decision.ready or decision.differing or decision.failed):
            self._report_stall(decision)
            self._pause()

    def _refuse(self, decision: Decision) -> None:
        """Fail operations that cannot run, and refuse those that could not."""
        half = self._lane.settings.stall_shutdown_time_seconds / 2
        gives_up = 0 < half < self._queue.waited() and not (decision.closing or decision.crossed)
        if gives_up:
            status.ask_launcher()  # while all ranks still wait
        for key, why in decision.failed.items():
            operation = self._queue.operations.get(key)
            if operation is not None:
                kind = MismatchError if key in decision.crossed else HorovodInternalError
                self._fail(operation, kind(why))
                if gives_up:
                    self._lane.give_up(operation.title)
        if decision.closing:
            self._queue.refuse(
                f"{ranks_text(decision.closing)} shut down already; run the same steps on all "
                "ranks, and call hvd.shutdown() after the last"
            )

    def _compare_calls(self, decision: Decision) -> None:
        """Exchange where operations were called without a name; warn on the lowest rank."""
        here = {
            key: operation.call
            for key in decision.parted
            if (operation := self._queue.operations.get(key)) and operation.call is not None
        }
        reports = {key: call.report() for key, call in here.items()}
        everywhere = self._gather(reports)
        own = self._queue.rank
        for key, calls in agreement.compare_calls(decision, everywhere).items():
            if key in here and here[key].calls.learn(here[key], calls) and own == min(calls):
                _log.warning("%s", agreement.parted_text(calls))

    def _fail_differing(self, key: str) -> None:
        """Exchange the full signatures, and fail the operation with their first difference."""
        operation = self._queue.operations.get(key)  # None: this rank has joined
        call = operation and operation.call
        own = operation and (operation.signature, call and call.place)
        self._deliver(partial(self._fail_by_signatures, operation, self._gather(own)))

    def _fail_by_signatures(self, operation: Operation | None, found: Mapping[int, Any]) -> None:
        if operation is not None:
            known = {member: each for member, each in found.items() if each}
            signatures = {member: signature for member, (signature, _) in known.items()}
            places = {member: place for member, (_, place) in known.items() if place}
            self._fail(
                operation, MismatchError(agreement.explain(operation.name, signatures, places))
            )

    def _stand_in(self, keys: Sequence[str]) -> dict[str, Operation]:
        """Make the operations that this rank, if it has joined, runs in place of its own."""
        if not keys:
            return {}
        own = {key: self._queue.operations.get(key) for key in keys}
        makers = {key: operation.stand_in() for key, operation in own.items() if operation}
        found: dict[str, Callable[[], Operation]] = {}
        for of_rank in self._gather(makers).values():
            found = {**of_rank, **found}
        stand_ins = {key: found[key]() for key, operation in own.items() if operation is None}
        for operation in stand_ins.values():
            operation.handle = Handle(operation.name)  # no thread waits for it
            operation.lane = self._lane.name
            operation.submitted = time.monotonic()
        return stand_ins

    def _fail(self, operation: Operation, error: BaseException) -> None:
        handle = operation.handle  # read first: once removed, the operation may be resubmitted
        operation.failure = None  # next time there may be none
        self._next_pause = _FIRST_PAUSE
        self._queue.remove([operation])
        handle.finish(error=error)

    def _execute(
        self,
        groups: Sequence[Sequence[Operation]],
        pending: Mapping[int, QueueReport] | None = None,
    ) -> None:
        """Run operations that all ranks have.

        Args:
            pending: The ranks' descriptions, with payloads; None: all payloads equal this rank's.
        """
        unfinished = []
        for group in groups:
            first, *others = group
            if pending is None:
                payloads = [first.payload] * self._lane.transport.size
            else:
                payloads = [_payload(each, first.key) for each in pending.values()]
            if first.failure is not None:
                self._deliver(partial(self._fail, first, HorovodInternalError(first.failure)))
                continue
            if self._lane.transport.confirms:
                for operation in group:
                    operation.protect()
                    operation.is_protected = True
            for observe in observers.current:
                observe("exchange", self._lane.name, group)
            try:
                # An overflow shows in the result; an error would end the job for it.
                with np.errstate(all="ignore"):
                    if others:
                        results = first.execute_together(others, self._lane.transport)
                    elif first.memory is not None:
                        results = [self._lane.devices.execute(first, payloads)]
                    else:
                        results = [first.execute(self._lane.transport, payloads)]
            except (GradientError, MismatchError) as error:  # the same on all ranks
                self._deliver(partial(self._fail, first, error))
                continue
            for observe in observers.current:
                observe("exchanged", self._lane.name, group)
            if self._lane.transport.confirms:
                self._deliver(partial(self._finish, group, results))
            elif first.places is None:
                self._finish(group, results)
            else:
                unfinished.append((group, results))
        if unfinished:
            self._lane.transport.complete()
        for group, results in unfinished:
            self._finish(group, results)

    def _finish(self, group: Sequence[Operation], results: Sequence[Any]) -> None:
        handles = [*map(_handle_of, group)]
        self._next_pause = _FIRST_PAUSE
        self._queue.remove(group)  # from now on each may be submitted again
        for handle, result in zip(handles, results, strict=True):
            handle.finish(result)

    def _pause(self) -> None:
        with self._queue.changed:
            self.pausing = True
            self._queue.changed.wait_for(self._queue.has_changed, self._next_pause)
            self.pausing = False
        self._next_pause = min(2 * self._next_pause, _MAX_PAUSE)

    def _report_stall(self, decision: Decision) -> None:
        waited = self._queue.waited()
        interval = self._lane.settings.stall_check_time_seconds
        if waited < min(self._next_report, interval):  # for another operation
            self._next_report = interval
            self._has_gone_astray &= waited >= ASTRAY_SECONDS
        if waited < ASTRAY_SECONDS:
            self._has_gone_astray = False
        is_first = bool(decision.astray) and waited >= ASTRAY_SECONDS and not self._has_gone_astray
        if (
            is_first or waited >= self._next_report
        ) and not self._lane.settings.stall_check_disable:
            self._has_gone_astray |= is_first
            self._next_report = waited + interval
            _log.warning(
                "rank %d: waited %.0f s for %s%s; %s%s",
                self._queue.rank,
                waited,
                agreement.report_missing(decision.missing),
                decision.astray and f"; {decision.astray}",
                agreement.LIKELY,
                "" if self._lane.settings.stall_shutdown_time_seconds else agreement.BOUND,
            )


def fuse(operations: Iterable[Operation], limit: float) -> list[list[Operation]]:
    """Group operations that may run together, up to ``limit`` bytes a group.

    Groups come in the order of their first members, so ranks that have the same operations
    make the same groups. An operation that has failed, or has no fusion key, is a group by itself.
    """
    operations = list(operations)
    if len(operations) == 1:
        return [operations]
    groups: list[list[Operation]] = []
    growing: dict[Hashable, tuple[list[Operation], int]] = {}
    signature, kind = None, None
    for operation in operations:
        if operation.failure is not None:
            signature, kind = None, None
        elif operation.signature is not signature:  # else it is of the same kind as the last
            signature, kind = operation.signature, operation.fusion
        if kind is None or limit == 0:
            groups.append([operation])
            continue
        group, filled = growing.get(kind, (None, 0))
        if group is None or filled + operation.nbytes > limit:
            group, filled = [], 0
            groups.append(group)
        group.append(operation)
        growing[kind] = group, filled + operation.nbytes
    return groups


def _payload(pending: QueueReport, key: str) -> bytes:
    found = (entry.payload for entry in pending.descriptions if entry.key == key)
    return next(found, b"")  # the rank has joined


def _inline_data(groups: Sequence[Sequence[Operation]]) -> list[Any]:
    """Return the arrays that travel with the digests: those of the first group, or none."""
    if not groups or groups[0][0].failure is not None:
        return []
    arrays = []
    for operation in groups[0]:
        array = operation.inline_data
        if array is None:
            return []
        arrays.append(array)
    return arrays
