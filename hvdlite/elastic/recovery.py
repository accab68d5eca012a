"""Recovery: the survivors continue in the same step when a rank has died.

``docs/architecture.md``, "When a rank dies", follows a death through the files. A process set is
added in the same way, to a world of the same ranks: all survivors get it or none does.

It needs an MPI with user-level failure mitigation (ULFM), such as Open MPI 5 under
``mpirun --with-ft ulfm``: see W. Bland et al., "Post-failure recovery of MPI communication
capability", IJHPCA 27(3), 2013.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from hvdlite.base import observers
from hvdlite.base.interrupts import run_overdue, uninterrupted
from hvdlite.base.settings import Settings
from hvdlite.elastic import spares
from hvdlite.elastic.forming import Forming, form_of_living, retire
from hvdlite.elastic.gathering import Gathering
from hvdlite.engine import Engine
from hvdlite.engine.lane import Lane, describe_error
from hvdlite.engine.operation import Gather, Signature
from hvdlite.engine.supervisor import Build, Supervisor
from hvdlite.errors import HorovodInternalError, RankGoneError, ranks_text
from hvdlite.observe import protocol, status
from hvdlite.transport import Transport
from hvdlite.transport.registry import connect
from hvdlite.world import membership, mpi
from hvdlite.world.world import World

_log = logging.getLogger("hvdlite")

# MPI knows of a death after 3 to 40 ms.
_NEWS_SECONDS, _NEWS_PAUSE = 1.0, 5e-3
# How often a thread that waits for another one's recovery checks whether it has ended.
_CHECK_SECONDS = 0.05
_NO_STATE = (
    "this process has come in as a spare, and the other ranks are in a function under "
    "hvd.elastic.run already; communicate before that function on no rank (hvd.elastic.run takes "
    "the place of the broadcasts)"
)


class LaneState(NamedTuple):
    """The progress of a lane when a rank has died.

    Attributes:
        confirmed: The number of outcomes that all ranks have.
        in_doubt: Whether this rank has a further one, which other ranks may lack.
        failure: Why this rank cannot continue in it; None: it can.
    """

    confirmed: int
    in_doubt: bool
    closed: bool
    failure: str | None = None


class Recovery(Supervisor):
    """Forms a world, and a new one when ranks have died, and replaces the transports of all lanes.

    Args:
        message: Sent to the other ranks when they form their world again with this one; None:
            this one has been a spare.
        again: Whether there has been a world before.

    Attributes:
        messages: Those of the ranks, by rank; None for those that were spares.
    """

    #: The recoveries so far; adding a process set is one, too.
    recoveries = 0

    def __init__(self, message: spares.Message | None = None, again: bool = False) -> None:
        self._message = message
        self._again = again
        self.messages: list[spares.Message | None] = []
        self._engines: list[Engine] = []
        self._waiting: set[Lane] = set()  # whose rounds wait for the recovery
        self._changed = threading.Condition()
        self._under_way = False
        self._failure: HorovodInternalError | None = None
        self._adding = threading.Lock()
        # A process set to be added: its ids, and `make` and `enter` of `Supervisor.form_part`.
        self._wanted: tuple[Sequence[int], Any, Callable[..., object]] | None = None
        # Communicators of the last world, which no operation uses any more.
        self._old: list[Any] = []

    def form(self, MPI: Any, comm: Any, settings: Settings, build: Build) -> Engine:  # noqa: N803
        self._pool = pool = spares.find(MPI, comm, settings)
        if pool.place[1] > 1:
            mpi.leave_unfinalized()
            status.note(protocol.MET, True)
        if not pool.is_member:
            pool.holders = []
        is_spare = pool.holders is not None
        if not self._again and not is_spare:
            self._message = spares.Message(pool.rank, [each.ranks for each in self.process_sets])
        before = len(pool.places)
        engine, self.messages = pool.form(self._message, build, grow=self._again or is_spare)
        if is_spare:
            pool.holders = [rank for rank, message in enumerate(self.messages) if message]
        if [message and message.rank for message in self.messages] != [*range(before)]:
            self.process_sets = [*spares.with_ranks(self.process_sets, self.messages)]
        self.place = pool.place
        return engine

    def begin(self, engine: Engine) -> None:
        if self._pool.holders is not None:
            for lane in engine.lanes:
                lane.queue.refuse(_NO_STATE)

    def watch(
        self,
        MPI: Any,  # noqa: N803
        whole: World,
        settings: Settings,
        enter: Callable[[World], object],
    ) -> None:
        super().watch(MPI, whole, settings, enter)
        self.survives = whole.comm.size > 1  # also after an attempt with others
        if not self.survives:
            return
        self._mpi = MPI
        self._world = whole
        self._settings = settings
        self._enter = enter
        self._gathering = Gathering(MPI, whole.create(whole.comm.Dup))
        self.renumbering = membership.lock

    def guard(self, lane: Lane) -> Callable[[], object]:
        return partial(self.run_round, lane) if self.survives else super().guard(lane)

    def add(self, engine: Engine) -> None:
        self._engines.append(engine)

    def remove(self, engine: Engine) -> None:
        self._engines.remove(engine)

    def close(self) -> None:
        self._engines.clear()
        if self.survives:
            self.survives = False
            self._old = retire(self._mpi, self._old, [])
            self._gathering.comm.Free()

    def run_round(self, lane: Lane) -> None:
        """Run a round of a lane, and recover from the death of ranks in it."""
        recoveries = self.recoveries
        try:
            self.check()  # also where no round waits long enough to do so
            lane.rounds.run()
        except Exception as error:
            is_recoverable = self._is_about_death(lane, error)
            if not is_recoverable:
                lane.failure = describe_error(error)
                with suppress(Exception):
                    lane.transport.leave()
            _end_calls(lane)  # others may be in this round, and wait for this rank
            self._waiting.add(lane)
            try:  # if it is not recoverable, the recovery fails, which all ranks notice
                self.recover(error, recoveries)
            except HorovodInternalError:
                if is_recoverable:
                    raise
                raise error from None
            finally:
                self._waiting.discard(lane)

    def _is_about_death(self, lane: Lane, error: Exception) -> bool:
        """Return whether an error of a lane's round comes from the death of another rank.

        Some errors do not show it: Open MPI's non-blocking collectives may end with
        ``MPI_ERR_OTHER``, even before MPI knows of the death.
        """
        if isinstance(error, OSError):  # the memory of a process that has gone, perhaps
            with suppress(RankGoneError):
                lane.transport.check_alive()
                return False
            return True
        if not isinstance(error, self._mpi.Exception):
            return isinstance(error, RankGoneError)
        MPI = self._mpi  # noqa: N806
        codes = MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED
        if error.Get_error_class() in codes:
            return True
        deadline = time.monotonic() + _NEWS_SECONDS
        while not (is_known := self._is_death_known()) and time.monotonic() < deadline:
            with suppress(self._mpi.Exception):
                self._gathering.comm.iprobe()  # lets MPI see what has happened
            time.sleep(_NEWS_PAUSE)
        return is_known

    @property
    def _reason(self) -> str:
        return "a rank has died" if self._is_death_known() else "a process set is to be added"

    def _is_death_known(self) -> bool:
        comm = self._world.comm
        return bool(comm.Is_revoked()) or comm.Get_failed().size > 0

    def check(self) -> None:
        """Raise if another thread is about to replace the transports."""
        if self._under_way:
            raise RankGoneError("a rank has died")

    @uninterrupted
    def form_part(
        self,
        ids: Sequence[int],
        of: World,
        make: Callable[[World], Engine],
        enter: Callable[[Sequence[int], Engine | None], object],
    ) -> None:
        if not self.survives or self._is_on_device():
            super().form_part(ids, of, make, enter)
            return
        with self._adding:
            with membership.lock:
                part = self._wanted = ids, make, enter
            try:
                while self._wanted is part:
                    self.recover(None, self.recoveries)
            finally:
                with membership.lock:
                    self._wanted = None

    def _is_on_device(self) -> bool:
        """Return whether any rank has exchanged arrays on a GPU, which rules out a recovery."""
        is_here = any(lane.devices.is_connected for each in self._engines for lane in each.lanes)
        engine = self._engines[0]
        signature = Signature((("the operation", "add_process_set, on a device or not"),))
        name = engine.unnamed("add_process_set")
        return b"1" in engine.named.run(Gather(name, signature, b"1" if is_here else b"0"))

    def recover(self, error: Exception | None, recoveries: int) -> None:
        """Form the world of the survivors; called by a thread that runs a lane's rounds.

        All lanes of a rank may call it; the first call does the work, and the others wait for it.

        Args:
            error: The error of the lane's round; None: a process set is to be added.
            recoveries: How many there had been when its round began; if there has been one since,
                it was for this error.

        Raises:
            HorovodInternalError: There is no recovery; all further communication fails, too.
        """
        with self._changed:
            is_first = not self._under_way and self.recoveries == recoveries
            self._under_way = self._under_way or is_first
            while not is_first and self.recoveries == recoveries:
                self._changed.wait(_CHECK_SECONDS)
        if is_first:
            lanes = [lane for engine in self._engines for lane in engine.lanes]
            try:
                if self._failure is None:
                    self._form_world(lanes, error)
            except HorovodInternalError as failure:
                self._failure = failure
            except Exception as failure:  # of memory, say; the lanes that wait must fail, too
                text = f"rank {self._gathering.comm.rank}: no recovery: {failure!r}; "
                text += "end this process, so that the others go on without it"
                self._failure = HorovodInternalError(text)
                self._failure.__cause__ = failure
            finally:
                with self._changed:
                    self._under_way = False
                    self.recoveries += 1
                    self._changed.notify_all()
                for lane in lanes:  # whose waits must not be ended any more
                    self._waiting.discard(lane)  # else a further `hold` might not wait for it
                    lane.let_go()
        if self._failure is not None:
            raise self._failure

    def _form_world(self, lanes: Sequence[Lane], error: Exception | None) -> None:
        began = time.monotonic()
        engines = list(self._engines)
        if error is not None:
            self._revoke(lanes)
        states = {lane.name: self._hold(lane) for lane in lanes}
        self._wait_for_others(lanes, began)
        self._revoke(lanes)  # so that what is still going on ends, and can be freed
        for observe in observers.current:
            observe("recover")
        old: list[Any] = [self._gathering.comm]
        build = partial(self._attempt, engines=engines, own=states)
        with membership.lock:
            attempt = form_of_living(self._mpi, self._world.comm, build, old)
            self._check(attempt)
            self._tell(attempt, time.monotonic() - began, error)
            for engine in engines:
                if engine.named.name in attempt.worlds:  # else who removes the set frees them
                    old += [engine.world.cross, engine.world.node, engine.world.comm]
                old += [comm for lane in engine.lanes for comm in lane.communicators]
            self._take_over(attempt, engines, states)
            self._old = retire(self._mpi, self._old, old)

    def _hold(self, lane: Lane) -> LaneState:
        """Hold a lane until `Lane.let_go`, and return its state.

        A thread that runs rounds notices the death itself or in `check`, and then waits.
        """
        lane.hold(lambda: lane in self._waiting)
        failure = "arrays lie on a GPU" if lane.devices.is_connected else lane.failure
        rounds = lane.rounds
        return LaneState(rounds.confirmed, rounds.in_doubt is not None, rounds.closed, failure)

    def _revoke(self, lanes: Sequence[Lane]) -> None:
        """End the calls of the other ranks by errors, by which they notice the death."""
        with suppress(self._mpi.Exception):
            self._world.comm.Revoke()
        for lane in lanes:
            _end_calls(lane)

    def _wait_for_others(self, lanes: Sequence[Lane], began: float) -> None:
        """Wait until the other ranks have reached this recovery.

        They reach it to add a process set, or because they have noticed a death. A rank that gives
        up announces it, and then all give up: once a rank has seen all others here, it gives up
        only if another one has. MPI gives no bound for what follows the second wait.
        """
        gathering, rank = self._gathering, self._gathering.comm.rank
        # Tags of messages: a rank is here, has seen all others here, or has given up before.
        come, ready, gave_up = (3 * self.recoveries + message for message in range(3))
        reported = self._settings.stall_check_time_seconds
        is_revoked = False

        def watch(missing: Sequence[int], limit: float = 0.0) -> None:
            nonlocal is_revoked, reported
            if gone := [other for other in gathering.others if gathering.receive(other, gave_up)]:
                raise RankGoneError(
                    f"rank {rank}: {self._reason}, and {ranks_text(gone)} gave up waiting for "
                    "others"
                )
            if self._is_death_known() and not is_revoked:
                is_revoked = True
                self._revoke(lanes)
            waited = time.monotonic() - began
            if limit and waited > limit:
                raise RankGoneError(
                    f"rank {rank}: {self._reason}, and {ranks_text(missing)} did not come "
                    f"within {limit:.0f} s (HVDLITE_STALL_SHUTDOWN_TIME_SECONDS) for it"
                )
            if waited > reported and not self._settings.stall_check_disable:
                reported += self._settings.stall_check_time_seconds
                found = rank, self._reason, waited, ranks_text(missing)
                _log.warning("rank %d: %s; waited %.0f s for %s", *found)

        def watch_coming(missing: Sequence[int]) -> None:
            run_overdue()
            watch(missing, self._settings.stall_shutdown_time_seconds)

        try:
            gathering.meet(come, None, watch_coming)
        except BaseException:
            gathering.send(gave_up)
            raise
        gathering.meet(ready, None, watch)

    def _attempt(
        self,
        comm: Any,
        forming: Forming,
        engines: Sequence[Engine],
        own: Mapping[str, LaneState],
    ) -> _Attempt:
        """Make worlds and transports of this rank's engines, of which all ranks' comes first.

        It is collective. After a failure another attempt follows.
        """
        parts = {engine.named.name: engine for engine in engines[1:]}
        part_ids = {name: engine.world.ids for name, engine in parts.items()}
        wanted = self._wanted
        here = wanted and wanted[0]
        found = comm.allgather((self._world.id, own, membership.positions(), part_ids, here))
        ids, states, positions, everywhere, asked = zip(*found, strict=True)
        local_size = self._settings.force_local_size
        world = World.split(self._mpi, comm, local_size, forming.create, ids)
        gathering = Gathering(self._mpi, forming.create(comm.Dup))
        attempt = _Attempt(world, gathering, states, positions)

        @contextmanager
        def forming_part(ids: Sequence[int]) -> Iterator[World | None]:
            own_comm = world.split_off(self._mpi, ids, forming.create)
            if own_comm is None:
                yield None
                return
            with forming.part(own_comm) as inner:
                yield world.around(own_comm, ids, inner.create)

        self._connect(attempt, engines[0], world)
        for name, members in _kept(everywhere, world):
            with forming_part(members) as part:
                if part is not None:
                    self._connect(attempt, parts[name], part)
        if wanted is not None and all(asked):
            if any(there != here for there in asked):
                raise HorovodInternalError(
                    "the ranks add different process sets; add them in the same order on all "
                    "ranks, and from one thread"
                )
            given, make, enter = wanted
            members = _living(given, world)
            with forming_part(members) as part:
                if part is not None:
                    attempt.part_engine = make(part)
                    forming.undo.callback(attempt.part_engine.abandon)
            attempt.enter_part = partial(enter, members, attempt.part_engine)
        return attempt

    def _connect(self, attempt: _Attempt, engine: Engine, world: World) -> None:
        """Make the transports of an engine's lanes in its new world; collective."""
        attempt.worlds[engine.named.name] = world
        for lane in engine.lanes:
            closed = any(lanes[lane.name].closed for lanes in attempt.states if lane.name in lanes)
            shared_memory = self._settings.shared_memory
            attempt.transports[lane.name] = (
                None if closed else connect(self._mpi, world, shared_memory, lane.transport)
            )

    def _check(self, attempt: _Attempt) -> None:
        """Raise on all ranks if one of them has failed otherwise than by a death."""
        failures: dict[str, list[int]] = {}
        for member, lanes in zip(attempt.world.ids, attempt.states, strict=True):
            rank = self._world.ids.index(member)  # as programs have known it until now
            for failure in {state.failure for state in lanes.values() if state.failure}:
                failures.setdefault(failure, []).append(rank)
        if not failures:
            return
        if attempt.part_engine is not None:
            attempt.part_engine.abandon()
        found = "; ".join(f"on {ranks_text(ranks)}: {why}" for why, ranks in failures.items())
        if attempt.world.ids == self._world.ids:
            raise HorovodInternalError(f"communication has failed {found}")
        raise RankGoneError(
            f"rank {self._world.comm.rank}: a rank has died, and the job cannot go on without it: "
            f"{found}; start it again (hvdliterun --restarts), and load the last checkpoint"
        )

    def _take_over(
        self, attempt: _Attempt, engines: Sequence[Engine], own: Mapping[str, LaneState]
    ) -> None:
        has_lost = len(attempt.world.ids) < len(self._world.ids)
        self._world, self._gathering = attempt.world, attempt.gathering
        self._enter(attempt.world)
        if has_lost:
            comm = attempt.world.comm
            membership.renumber(attempt.positions, comm.rank, comm.size)
        for engine in engines:
            engine.world = attempt.worlds.get(engine.named.name, engine.world)
            for lane in engine.lanes:
                states = [lanes[lane.name] for lanes in attempt.states if lane.name in lanes]
                deliver = is_delivered(own[lane.name], states)
                lane.replace(attempt.transports.get(lane.name), deliver)
        if attempt.part_engine is not None:
            self.add(attempt.part_engine)
        if attempt.enter_part is not None:
            attempt.enter_part()
            self._wanted = None

    def _tell(self, attempt: _Attempt, seconds: float, error: Exception | None) -> None:
        """Log the recovery; ranks are named by their numbers at the start of the job."""
        left = attempt.world.ids
        dead = [self._pool.places[each] for each in self._world.ids if each not in left]
        if attempt.world.comm.rank != 0 or not dead:
            return
        _log.warning(
            "%s died; %s in the same step, after %.3f s",
            ranks_text(dead),
            f"the other {len(left)} go on" if len(left) > 1 else "the other one goes on",
            seconds,
        )
        _log.info("noticed by: %s", error)


@dataclass
class _Attempt:
    """One attempt to form the world of the survivors.

    Attributes:
        gathering: The gathering for the next recovery.
        states: The states of each rank's lanes, by the rank and the lane's name.
        positions: The `membership.positions` of each rank.
        worlds: The new world of each engine, by the name of its lane for named operations.
        transports: The new transports, by the lane's name; None: the lane has been closed.
        part_engine: The engine of the process set that has been added; None outside of it.
        enter_part: Registers that set; None: not all ranks want one.
    """

    world: World
    gathering: Gathering
    states: Sequence[Mapping[str, LaneState]]
    positions: Sequence[Mapping[Any, Any]]
    worlds: dict[str, World] = field(default_factory=dict)
    transports: dict[str, Transport | None] = field(default_factory=dict)
    part_engine: Engine | None = None
    enter_part: Callable[[], object] | None = None


def _kept(everywhere: Sequence[Mapping[str, Sequence[int]]], world: World) -> Iterator[Any]:
    """Yield the process sets that no member has removed, and the ids of their ranks."""
    for name, ids in sorted({k: v for each in everywhere for k, v in each.items()}.items()):
        living = _living(ids, world)
        if all(name in everywhere[rank] for rank in world.numbers(living)):
            yield name, living


def _living(ids: Iterable[int], world: World) -> list[int]:
    return [each for each in ids if each in world.ids]


def _end_calls(lane: Lane) -> None:
    """End the other ranks' calls on a lane by errors."""
    if not lane.is_released:
        lane.transport.revoke()


def is_delivered(own: LaneState, states: Sequence[LaneState]) -> bool:
    """Return whether a rank delivers its outcome in doubt, by its lane's states on all ranks.

    Their numbers of confirmed outcomes differ by one at most.
    """
    newest = max(state.confirmed for state in states)
    # A rank has confirmed one more, so all have that outcome; or all report that they have it.
    return own.confirmed < newest or all(state.in_doubt for state in states)
