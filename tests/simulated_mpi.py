"""MPI with user-level failure mitigation (ULFM), simulated: ranks are threads that take turns.

A rank gets on by one MPI call per turn (one poll, for a call that waits), and nothing else of what
it does can be seen by the others. So the same order of turns gives the same run, and a rank can be
made to die at each of its turns. Between two turns it may as well die at either of them.

A collective ends on a rank when all ranks of its communicator have entered it. If one of them has
died, a crash says which of the others its contributions have reached: there a collective ends that
fails elsewhere, as in MPI.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

#: Wall time in which a rank has to get to its next call.
_SECONDS = 5.0
_ENDING_SECONDS = 1.0
#: More turns than a run takes that ends, unless a thread of a rank gets no processor, while another
#: one polls: from these turns on, each takes a while.
_MANY_TURNS = 2_000
_MAX_TURNS = 7_000
_LONG_TURN_SECONDS = 1e-3
_PENDING = object()

ANY_SOURCE = -1
BYTE, IN_PLACE, COMM_TYPE_SHARED, UNDEFINED = "BYTE", "IN_PLACE", "SHARED", -32766
MIN, MAX, SUM, PROD = np.minimum, np.maximum, np.add, np.multiply
Datatype = SimpleNamespace(fromcode=str)
SUCCESS, ERR_PENDING, ERR_IN_STATUS, ERR_PROC_FAILED, ERR_REVOKED = 0, 18, 17, 75, 76
ERR_PROC_FAILED_PENDING = 77


class Exception(Exception):  # noqa: N818 - as in mpi4py
    """An MPI error."""

    def __init__(self, code: int) -> None:
        super().__init__(f"MPI error {code}")
        self._code = code

    def Get_error_class(self) -> int:  # noqa: N802
        return self._code

    Get_error_code = Get_error_class


class HangError(AssertionError):
    """The ranks do not get on."""


class Crash(NamedTuple):
    """The death of a rank.

    Attributes:
        rank: Its number.
        turn: Which of its turns, from 1.
        takes_effect: Whether the call of that turn does.
        reaches: Whom its contributions to collectives that are under way reach: "none", "first",
            "last" or "all" of the others.
    """

    rank: int
    turn: int
    takes_effect: bool = False
    reaches: str = "none"


class Process:
    """A rank.

    Attributes:
        number: Its number.
        turn: Notified when it may go on.
        turns: How many it has had since `count` was called.
        waiting: Its threads that wait for one, in the order in which they get it: one that polls
            must not keep another one from the call that it waits for.
        crashes: The ways to die at each of them.
        is_dead: Whether it has died.
        has_ended: Whether it has come to its end, which the others take for its death if they
            still wait for it: a rank leaves out ``MPI_Finalize``.
    """

    def __init__(self, number: int, turn: threading.Condition) -> None:
        self.number = number
        self.turn = turn
        self.turns = 0
        self.waiting: deque[object] = deque()
        self.crashes: list[Crash] = []
        self.is_dead = False
        self.sent = 0
        self.has_come = False
        self.is_counting = False
        self.has_ended = False
        self.doing = "start"

    @property
    def is_gone(self) -> bool:
        """Return whether it takes part in nothing any more."""
        return self.is_dead or self.has_ended


class Job:
    """The ranks of a job.

    Args:
        size: How many.
        crashes: Who dies, and when.
        seed: Of the order of turns; None: in turn.

    Attributes:
        processes: The ranks.
        turn: Notified when it may go on.
        turns: How many turns there have been, of all ranks.
        lock: Held in a turn.
    """

    def __init__(self, size: int, crashes: Sequence[Crash] = (), seed: int | None = None) -> None:
        self.processes: list[Process] = []
        self.turns = 0
        self._crashes = list(crashes)
        self._chance = None if seed is None else random.Random(seed)
        self.lock = threading.RLock()
        self._ended = threading.Condition(self.lock)
        for number in range(size):
            self.processes.append(Process(number, threading.Condition(self.lock)))
        self._next: Process | None = self.processes[0]
        self._records: list[_Record] = []
        self._threads: set[threading.Thread] = set()
        self._failure: HangError | None = None
        self._has_entered = False

    def run(self, function: Callable[[Process, Comm], Any]) -> dict[int, Any]:
        """Call a function on all ranks; return the results of those that live.

        Raises:
            HangError: They do not come to an end.
        """
        results: dict[int, Any] = {}
        shared = _Shared(self, self.processes)

        def call(process: Process) -> None:
            try:
                results[process.number] = function(process, Comm(shared, process))
            except BaseException as error:
                if not process.is_dead:  # else its lanes have told what happened to them
                    self._give_up(error)
            finally:
                self._end(process)

        # Daemons, since those of a job that hangs do not come to an end.
        for each in self.processes:
            threading.Thread(target=call, args=(each,), daemon=True).start()
        with self._ended:
            self._ended.wait_for(
                lambda: self._failure or all(each.is_gone for each in self.processes)
            )
        # A thread that ends later would tell of its SystemExit in another test.
        for thread in list(self._threads):
            thread.join(_ENDING_SECONDS)
        if self._failure is not None:
            raise self._failure
        return {rank: result for rank, result in results.items() if not self._is_dead(rank)}

    def count(self, process: Process) -> None:
        """Wait for the others, and count the turns of a rank from now on: in these it may die."""

        def start() -> Any:
            process.has_come = True
            if not all(each.has_come for each in self.processes):
                return _PENDING
            process.is_counting = True
            return None

        self.take(process, "count", start)

    def take(self, process: Process, doing: str, attempt: Callable[[], Any]) -> Any:
        """Do something in turns of a rank, until it returns anything but ``_PENDING``.

        Raises:
            SystemExit: The rank has died. Threads end by it without a word.
        """
        while True:
            with self.lock:
                self._threads.add(threading.current_thread())
                self._await_turn(process, doing)
                try:
                    result = self._attempt(process, attempt)
                finally:
                    self._pass_turn()
            if result is not _PENDING:
                return result

    def _await_turn(self, process: Process, doing: str) -> None:
        process.doing = doing
        place = object()
        process.waiting.append(place)

        def is_due() -> bool:
            return self._next is process and process.waiting[0] is place

        is_mine: object = False
        try:
            before = -1
            while not is_mine and self.turns > before:  # others get on, on a busy machine
                before = self.turns
                is_mine = process.turn.wait_for(
                    lambda: self._failure or process.is_dead or is_due(), _SECONDS
                )
        finally:
            process.waiting.remove(place)
        if self._failure is not None or process.is_dead:
            raise SystemExit
        if not is_mine:
            self._hang(f"no turn for any rank in {_SECONDS} s")
        self.turns += 1
        if self.turns > _MANY_TURNS:
            time.sleep(_LONG_TURN_SECONDS)
        if self.turns > _MAX_TURNS:
            self._hang(f"more than {_MAX_TURNS} turns")

    def _hang(self, why: str) -> None:
        doing = {each.number: each.doing for each in self.processes if not each.has_ended}
        stacks = (traceback.format_stack(each) for each in sys._current_frames().values())
        where = "".join(f"\n{''.join(stack[-3:])}" for stack in stacks)
        self._fail(HangError(f"{why}; the ranks are in {doing}, the threads in{where}"))
        raise SystemExit

    def _give_up(self, error: BaseException) -> None:
        with self.lock:
            failure = HangError(f"a rank raised {error!r}")
            failure.__cause__ = error
            self._fail(failure)

    def _fail(self, failure: HangError) -> None:
        self._failure = self._failure or failure
        self._ended.notify_all()
        for each in self.processes:
            each.turn.notify_all()

    def _attempt(self, process: Process, attempt: Callable[[], Any]) -> Any:
        if not process.is_counting:
            return attempt()
        process.turns += 1
        crash = next(
            (
                each
                for each in self._crashes
                if (each.rank, each.turn) == (process.number, process.turns)
            ),
            None,
        )
        if crash is None:
            sent = process.sent
            try:
                return attempt()
            finally:
                self._note_crashes(process, process.sent > sent)
        if crash.takes_effect:
            with contextlib.suppress(Exception):
                attempt()
        self._die(process, crash.reaches)
        raise SystemExit

    def _die(self, process: Process, reaches: str) -> None:
        process.is_dead = True
        process.turn.notify_all()  # its other threads
        others = [each for each in self.processes if each is not process]
        chosen = {"none": [], "first": others[:1], "last": others[-1:], "all": others}[reaches]
        for record in self._records:
            record.reached[process] = chosen

    def _note_crashes(self, process: Process, has_sent: bool) -> None:
        """Note the ways to die in the turn that a rank has just had."""
        self._records = [record for record in self._records if not record.has_ended()]
        rank, turn = process.number, process.turns
        process.crashes.append(Crash(rank, turn))
        if any(process in record.given for record in self._records) or self._has_entered:
            process.crashes += [Crash(rank, turn, True, each) for each in ("first", "last", "all")]
        elif has_sent:
            process.crashes.append(Crash(rank, turn, True))
        self._has_entered = False

    def enter(self, record: _Record) -> None:
        """Note that a rank has entered a collective, in its turn."""
        self._has_entered = True
        if record not in self._records:
            self._records.append(record)

    def _pass_turn(self) -> None:
        ready = [each for each in self.processes if not each.is_gone]
        if not ready:
            self._next = None
        elif self._chance is not None:
            self._next = self._chance.choice(ready)
        else:
            last = -1 if self._next is None else self._next.number
            self._next = next((each for each in ready if each.number > last), ready[0])
        if self._next is not None:
            self._next.turn.notify_all()

    def _end(self, process: Process) -> None:
        with self.lock:
            process.has_ended = True
            if self._next is process:
                self._pass_turn()
            self._ended.notify_all()
            process.turn.notify_all()

    def _is_dead(self, rank: int) -> bool:
        return self.processes[rank].is_dead


class _Record:
    """A collective.

    Attributes:
        given: What each rank has brought.
        reached: For ranks that have died, whom their contributions have reached.
    """

    def __init__(self, kind: str, members: Sequence[Process]) -> None:
        self.kind = kind
        self.members = members
        self.given: dict[Process, Any] = {}
        self.reached: dict[Process, Sequence[Process]] = {}
        self.ended: set[Process] = set()
        self.outcome: Any = _PENDING

    def has_ended(self) -> bool:
        """Return whether no rank waits for it, or will."""
        return all(each in self.ended or each.is_gone for each in self.members)

    def check(self, process: Process) -> bool:
        """Return whether it has come to its end on a rank.

        Raises:
            Exception: A rank has died.
        """
        for member in self.members:
            reached = process in self.reached.get(member, self.members)
            if member.is_gone and not (member in self.given and reached):
                self.ended.add(process)
                raise Exception(ERR_PROC_FAILED)
        return len(self.given) == len(self.members)


class _Shared:
    """The state that the ranks of a communicator share."""

    def __init__(self, job: Job, members: Sequence[Process]) -> None:
        self.job = job
        self.members = list(members)
        self.is_revoked = False
        self.records: dict[int, _Record] = {}
        self.mail: dict[Process, deque[tuple[int, int, Any]]] = {each: deque() for each in members}


class Group:
    """A group of ranks."""

    def __init__(self, members: Sequence[Process]) -> None:
        self.members = list(members)
        self.size = len(self.members)


class Status:
    """The status of a receipt or of a request."""

    source = -1
    error = SUCCESS

    def Get_source(self) -> int:  # noqa: N802
        return self.source


class Request:
    """A call that has begun.

    Args:
        comm: The communicator.
        doing: What it is, for reports.
        attempt: Returns the result, or ``_PENDING``.
    """

    def __init__(self, comm: Comm, doing: str, attempt: Callable[[], Any]) -> None:
        self._comm = comm
        self._doing = doing
        self._attempt = attempt
        self._has_ended = False

    def Test(self) -> bool:  # noqa: N802
        return bool(self._comm.turn(f"Test of {self._doing}", self._poll))

    @staticmethod
    def Waitall(requests: Sequence[Request], statuses: list[Any]) -> None:  # noqa: N802
        """Wait for all; leave those open that have not ended when one fails."""
        if not requests:
            return

        def poll() -> Any:
            found = [each._status() for each in requests]
            if any(each.error not in (SUCCESS, ERR_PENDING) for each in found):
                statuses[:] = found
                raise Exception(ERR_IN_STATUS)
            return _PENDING if any(each.error for each in found) else None

        requests[0]._comm.turn("Waitall", poll)

    def _poll(self) -> bool:
        if not self._has_ended:
            self._has_ended = self._attempt() is not _PENDING
        return self._has_ended

    def _status(self) -> Status:
        status = Status()
        try:
            status.error = SUCCESS if self._poll() else ERR_PENDING
        except Exception as error:
            status.error, self._has_ended = error.Get_error_code(), True
        return status


class Comm:
    """A communicator, as one rank has it; the methods are those of mpi4py."""

    def __init__(self, shared: _Shared, process: Process) -> None:
        self._shared = shared
        self._process = process
        self._entered = 0
        self._recovered = 0
        self._freed = False
        self.rank = shared.members.index(process)
        self.size = len(shared.members)

    @property
    def group(self) -> Group:
        """Its ranks."""
        return Group(self._shared.members)

    def turn(self, doing: str, attempt: Callable[[], Any]) -> Any:
        """Do something in turns of this rank."""
        assert not self._freed, f"{doing} on a communicator that has been freed"
        return self._shared.job.take(self._process, doing, attempt)

    # Collectives

    def _begin(self, kind: str, given: Any) -> Callable[[], Any]:
        """Enter a collective; return what to call until it returns all contributions."""
        assert not self._freed, f"{kind} on a communicator that has been freed"
        shared, process = self._shared, self._process
        number, self._entered = self._entered, self._entered + 1
        record = shared.records.setdefault(number, _Record(kind, shared.members))
        assert record.kind == kind, f"rank {process.number} is in {kind}, others in {record.kind}"
        shared.job.enter(record)
        record.given[process] = given

        def attempt() -> Any:
            if shared.is_revoked:
                record.ended.add(process)
                raise Exception(ERR_REVOKED)
            if not record.check(process):
                return _PENDING
            record.ended.add(process)
            return [record.given[each] for each in shared.members]

        return attempt

    def _all(self, kind: str, given: Any) -> list[Any]:
        """Wait in a collective; return what each rank has brought."""
        begun: list[Callable[[], Any]] = []

        def attempt() -> Any:
            if not begun:
                self._check_revoked()
                begun.append(self._begin(kind, given))
            return begun[0]()

        return list(self.turn(kind, attempt))

    def _start(self, kind: str, given: Any, finish: Callable[[list[Any]], object]) -> Request:
        """Begin a collective that does not wait."""

        def enter() -> Callable[[], Any]:
            self._check_revoked()
            return self._begin(kind, given)

        begun = self.turn(kind, enter)

        def attempt() -> Any:
            everything = begun()
            if everything is not _PENDING:
                finish(everything)
                return None
            return _PENDING

        return Request(self, kind, attempt)

    def _check_revoked(self) -> None:
        if self._shared.is_revoked:
            raise Exception(ERR_REVOKED)

    def allgather(self, value: Any) -> list[Any]:
        return self._all("allgather", copy.deepcopy(value))

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self._all("bcast", copy.deepcopy(value))[root]

    def Bcast(self, buffer: Any, root: int = 0) -> None:  # noqa: N802
        array = _array(buffer)
        array[...] = self._all("Bcast", array.copy())[root]

    def Allreduce(self, send: Any, result: Any, op: Any) -> None:  # noqa: N802
        """Reduce in place."""
        assert send is IN_PLACE
        array = _array(result)
        array[...] = _reduced(self._all("Allreduce", array.copy()), op)

    def Iallreduce(self, send: Any, result: Any, op: Any) -> Request:  # noqa: N802

        def finish(given: list[Any]) -> None:
            result[...] = _reduced(given, op)

        return self._start("Iallreduce", send.copy(), finish)

    def Iallgather(self, send: Any, result: Any) -> Request:  # noqa: N802

        def finish(given: list[Any]) -> None:
            result[...] = np.concatenate(given)

        return self._start("Iallgather", send.copy(), finish)

    def Iallgatherv(self, send: bytes, result: Sequence[Any]) -> Request:  # noqa: N802

        def finish(given: list[Any]) -> None:
            result[0][...] = np.frombuffer(b"".join(given), np.uint8)

        return self._start("Iallgatherv", bytes(send), finish)

    def Ibarrier(self) -> Request:  # noqa: N802
        return self._start("Ibarrier", None, lambda given: None)

    def Dup(self) -> Comm:  # noqa: N802
        return self._made("Dup", 0, 0)

    def Split(self, color: int, key: int = 0) -> Comm:  # noqa: N802
        return self._made("Split", color, key)

    def Split_type(self, kind: str, key: int = 0) -> Comm:  # noqa: N802
        """Split it by node: there is one."""
        return self._made("Split_type", 0, key)

    def _made(self, kind: str, color: int, key: int) -> Comm:
        number = self._entered
        told = self._all(kind, (color, key))
        record = self._shared.records[number]
        with self._shared.job.lock:  # other ranks may be here, and all have the same one
            if record.outcome is _PENDING:
                record.outcome = {
                    each: _Shared(self._shared.job, self._with_color(told, each))
                    for each in {color for color, _ in told}
                }
        return Comm(record.outcome[color], self._process)

    def _with_color(self, told: Sequence[tuple[int, int]], color: int) -> list[Process]:
        members = self._shared.members
        chosen = [rank for rank in range(self.size) if told[rank][0] == color]
        return [members[rank] for rank in sorted(chosen, key=lambda rank: told[rank][1])]

    def Free(self) -> None:  # noqa: N802
        """Have all further calls of this rank fail; it needs no other rank."""
        self._freed = True

    # Failures

    def Revoke(self) -> None:  # noqa: N802
        """Have all calls fail, on all ranks."""

        def revoke() -> None:
            self._shared.is_revoked = True

        self.turn("Revoke", revoke)

    def Is_revoked(self) -> bool:  # noqa: N802
        return bool(self.turn("Is_revoked", lambda: self._shared.is_revoked))

    def Get_failed(self) -> Group:  # noqa: N802
        members = self._shared.members
        found = self.turn("Get_failed", lambda: [each for each in members if each.is_gone])
        return Group(found)

    def Shrink(self) -> Comm:  # noqa: N802
        """Return a communicator of those that live: the same on all of them."""
        shared = self._agreed(
            "Shrink", None, lambda record, living: _Shared(self._shared.job, living)
        )
        return Comm(shared, self._process)

    def Agree(self, flag: int) -> int:  # noqa: N802
        """Return the bitwise and of the flags of all; raise if one has died, on all."""

        def decide(record: _Record, living: Sequence[Process]) -> int | None:
            if len(living) < self.size:
                return None
            return int(np.bitwise_and.reduce([record.given[each] for each in living]))

        agreed = self._agreed("Agree", flag, decide)
        if agreed is None:
            raise Exception(ERR_PROC_FAILED)
        return int(agreed)

    def _agreed(
        self, kind: str, given: Any, decide: Callable[[_Record, Sequence[Process]], Any]
    ) -> Any:
        """Agree among those that live, also on a communicator that is revoked.

        The outcome is decided when the first rank sees that all of them have come.
        """
        shared, process = self._shared, self._process
        number, self._recovered = -1 - self._recovered, self._recovered + 1

        def attempt() -> Any:
            record = shared.records.setdefault(number, _Record(kind, shared.members))
            assert record.kind == kind, f"{kind} on rank {process.number}, others in {record.kind}"
            if process not in record.given:
                record.given[process] = given
            living = [each for each in shared.members if not each.is_gone]
            if record.outcome is _PENDING and all(each in record.given for each in living):
                record.outcome = decide(record, living)
            return record.outcome

        return self.turn(kind, attempt)

    # Messages

    def isend(self, value: Any, dest: int, tag: int = 0) -> Request:
        self._send(copy.deepcopy(value), dest, tag)
        return Request(self, "isend", lambda: None)

    def Isend(self, buffer: Any, dest: int, tag: int = 0) -> Request:  # noqa: N802
        self._send(_array(buffer).copy(), dest, tag)
        return Request(self, "Isend", lambda: None)

    def _send(self, value: Any, dest: int, tag: int) -> None:
        other = self._shared.members[dest]

        def send() -> None:
            self._check_revoked()
            if other.is_gone:
                raise Exception(ERR_PROC_FAILED)
            self._shared.mail[other].append((self.rank, tag, value))
            self._process.sent += 1

        self.turn(f"send to {other.number}", send)

    def _find(self, source: int, tag: int, take: bool) -> Any:
        """Return a message, or ``_PENDING``.

        Raises:
            Exception: There is none, and the sender has died.
        """
        self._check_revoked()
        mail = self._shared.mail[self._process]
        for message in mail:
            if source in (ANY_SOURCE, message[0]) and message[1] == tag:
                if take:
                    mail.remove(message)
                return message
        if source != ANY_SOURCE and self._shared.members[source].is_gone:
            raise Exception(ERR_PROC_FAILED)
        return _PENDING

    def iprobe(self, source: int, tag: int = 0) -> bool:
        found = self.turn("iprobe", lambda: (self._find(source, tag, take=False),))
        return found[0] is not _PENDING

    def Iprobe(self, source: int, tag: int = 0, status: Status | None = None) -> bool:  # noqa: N802
        (found,) = self.turn("Iprobe", lambda: (self._find(source, tag, take=False),))
        if found is _PENDING:
            return False
        if status is not None:
            status.source = found[0]
        return True

    def recv(self, buffer: Any, source: int, tag: int = 0) -> Any:
        return self.turn("recv", lambda: self._find(source, tag, take=True))[2]

    def Recv(self, buffer: Any, source: int, tag: int = 0) -> None:  # noqa: N802
        buffer[...] = self.turn("Recv", lambda: self._find(source, tag, take=True))[2]

    def Irecv(self, buffer: Any, source: int, tag: int = 0) -> Request:  # noqa: N802
        array = _array(buffer)

        def attempt() -> Any:
            found = self._find(source, tag, take=True)
            if found is _PENDING:
                return _PENDING
            array[...] = found[2]
            return None

        return Request(self, f"Irecv from {source}", attempt)


class Clock:
    """In place of the module ``time``: it goes on by turns, and nobody sleeps.

    Args:
        job: Whose turns.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def monotonic(self) -> float:
        """Return the time in seconds."""
        return self._job.turns * 1e-4

    def sleep(self, seconds: float) -> None:
        """Do nothing."""


def Get_library_version() -> str:  # noqa: N802
    """Return the name of this MPI."""
    return "simulated"


def _array(buffer: Any) -> Any:
    return buffer[0] if isinstance(buffer, (list, tuple)) else buffer


def _reduced(arrays: Sequence[Any], op: Any) -> Any:
    return op.reduce(np.stack(arrays), axis=0)
