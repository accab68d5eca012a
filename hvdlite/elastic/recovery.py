"""Recovery: the ranks that are left go on in the same step when one has died.

A lane whose round fails because a rank has died calls `Recovery.recover`. It halts all lanes of
this rank, waits until all other ranks have come as far or have died, and forms the world of those
that are left, with a new transport for each lane. Operations stay in their lanes: what was being
exchanged is exchanged again, from inputs that are still there (`Operation.protect`).

An operation may have ended on some ranks only. So the ranks confirm each outcome by a barrier
before any of them delivers it (`Rounds`). If any rank has passed that barrier, all of them have the
outcome, and those that do not know it yet deliver it; otherwise the operation is repeated, unless
all of them have it anyway.

A process set is added in the same way, to a world of the same ranks: whoever dies meanwhile, all
others get it, or none, and then all of them once more.

It takes an MPI with user-level failure mitigation (ULFM), such as Open MPI 5 under
``mpirun --with-ft ulfm``: see W. Bland et al., "Post-failure recovery of MPI communication
capability", IJHPCA 27(3), 2013.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from hvdlite.base import points
from hvdlite.base.interrupts import run_overdue, uninterrupted
from hvdlite.base.settings import Settings
from hvdlite.engine import Engine
from hvdlite.engine.agreement import ranks_text
from hvdlite.engine.lane import Lane, LaneState
from hvdlite.errors import HorovodInternalError, RankGoneError
from hvdlite.transport import Transport, connect
from hvdlite.transport.mpi import forget_ended
from hvdlite.world import membership
from hvdlite.world.forming import Forming
from hvdlite.world.world import World

_log = logging.getLogger("hvdlite")

# What the ranks tell each other before a recovery: that they have come, that they have seen all
# others come, and that they have given up before that.
_COME, _READY, _GAVE_UP = range(3)
_FIRST_PAUSE, _MAX_PAUSE = 0.2e-3, 5e-3
# MPI knows of a death after 3 to 40 ms.
_NEWS_SECONDS = 1.0
# How often a thread that waits for another one's recovery checks whether it has ended.
_CHECK_SECONDS = 0.05


class Recovery:
    """Forms a new world when ranks have died, and replaces the transports of all lanes.

    Args:
        MPI: The module ``mpi4py.MPI``.
        whole: All ranks.
        settings: Settings read at ``init()``.
        enter: Called with the new world of all ranks and the new number of each rank that lives, by
            its old one, before any operation goes on.
        places: For each rank its number at the start of the job, for messages.

    Attributes:
        epoch: The number of recoveries so far.
        starts: For each rank its number when the world was formed.
    """

    def __init__(
        self,
        MPI: Any,  # noqa: N803
        whole: World,
        settings: Settings,
        enter: Callable[[World, Mapping[int, int]], object],
        places: Sequence[int],
    ) -> None:
        self._mpi = MPI
        self._world = whole
        self._settings = settings
        self._enter = enter
        self.starts = list(range(whole.comm.size))
        self._first_size = whole.comm.size
        self._places = list(places)
        self._engines: list[Engine] = []
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._under_way = False
        self.epoch = 0
        self._failure: HorovodInternalError | None = None
        self._adding = threading.Lock()
        self._wanted: _Part | None = None
        self._messages = whole.create(whole.comm.Dup)
        # Communicators of the last world, which no operation uses any more.
        self._old: list[Any] = []

    @property
    def has_lost_ranks(self) -> bool:
        """Return whether any rank has died since the world was formed."""
        return bool(len(self.starts) < self._first_size)

    def add(self, engine: Engine) -> None:
        """Serve an engine, too; that of all ranks comes first."""
        self._engines.append(engine)

    def remove(self, engine: Engine) -> None:
        """Serve an engine no more."""
        self._engines.remove(engine)

    def close(self) -> None:
        """Free the communicators that serve recoveries; all lanes have been closed everywhere."""
        self._retire([])
        self._messages.Free()

    def is_about_death(self, error: Exception) -> bool:
        """Return whether an error of this rank comes from the death of another one.

        Some do not say so: Open MPI's non-blocking collectives may end with ``MPI_ERR_OTHER``. Such
        an error can be there before MPI knows of the death.
        """
        if not isinstance(error, self._mpi.Exception):
            return isinstance(error, RankGoneError)
        MPI = self._mpi  # noqa: N806
        codes = MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED
        if error.Get_error_class() in codes:
            return True
        deadline = time.monotonic() + _NEWS_SECONDS
        while not (is_known := self._is_death_known()) and time.monotonic() < deadline:
            self._ask(self._messages.iprobe)  # lets MPI see what has happened
            time.sleep(_MAX_PAUSE)
        return is_known

    @property
    def _reason(self) -> str:
        return "a rank has died" if self._is_death_known() else "a process set is to be added"

    def _is_death_known(self) -> bool:
        comm = self._world.comm
        return bool(comm.Is_revoked()) or comm.Get_failed().size > 0

    def check(self) -> None:
        """Raise if another thread is about to replace the transports.

        Raises:
            RankGoneError: It is.
        """
        if self._under_way:
            raise RankGoneError("a rank has died")

    @uninterrupted
    def form_part(
        self,
        name: str,
        ranks: Sequence[int],
        of: World,
        make: Callable[[World], Engine],
        enter: Callable[[list[int], Engine | None], object],
    ) -> None:
        """Form the world of a process set; all ranks call it, members or not, with the same set.

        Args:
            name: The set's, unique among those of this world.
            ranks: Its ranks.
            of: The world that they are numbered in.
            make: Makes the set's engine in its world.
            enter: Called with the ranks, as rank 0 means them, numbered anew if one has died, and
                with the engine; None on a rank that is left out.

        Raises:
            HorovodInternalError: As `recover`.
        """
        with self._adding:
            with membership.lock:
                part = self._wanted = _Part(name, self._world.renumbered(ranks, of), make, enter)
            try:
                while True:
                    epoch = self.epoch
                    if self._wanted is not part:
                        return
                    self.recover(None, epoch)
            finally:
                with membership.lock:
                    self._wanted = None

    def recover(self, error: Exception | None, epoch: int) -> None:
        """Form the world of the ranks that live; called by a thread that runs a lane's rounds.

        All lanes may call it, of which one does the work, and `form_part` does.

        Args:
            error: What the lane has noticed; None: a process set is to be added.
            epoch: The number of recoveries when its round began; if there has been another one
                since, that was for this error.

        Raises:
            HorovodInternalError: It is impossible; what this rank communicates next fails, too.
        """
        with self._changed:
            is_first = not self._under_way and self.epoch == epoch
            self._under_way = self._under_way or is_first
            while not is_first and self.epoch == epoch:
                self._changed.wait(_CHECK_SECONDS)
        if is_first:
            lanes = [lane for engine in self._engines for lane in engine.lanes]
            try:
                if self._failure is None:
                    self._form_world(lanes, error)
            except HorovodInternalError as failure:
                self._failure = failure
            finally:
                with self._changed:
                    self._under_way = False
                    self.epoch += 1
                    self._changed.notify_all()
                for lane in lanes:  # whose waits must not be ended any more
                    lane.resume()
        if self._failure is not None:
            raise self._failure

    def _form_world(self, lanes: Sequence[Lane], error: Exception | None) -> None:
        began = time.monotonic()
        engines = list(self._engines)
        comm = self._world.comm
        if error is not None:
            self._revoke(lanes)
        states = {lane.name: lane.halt() for lane in lanes}
        self._wait_for_others(lanes, began)
        self._revoke(lanes)  # so that what is still going on ends, and can be freed
        if points.reach is not None:
            points.reach("recover")
        with membership.lock:
            failed: list[Any] = []
            attempt = None
            while True:
                living = comm.Shrink()
                if attempt is not None and living.size == comm.size:
                    raise HorovodInternalError(
                        f"rank {comm.rank}: the ranks cannot communicate anew "
                        f"({attempt.failure}); start the job again (hvdliterun --restarts), and "
                        "load the last checkpoint"
                    ) from attempt.failure
                comm = living
                attempt = _Attempt(self._mpi, comm, self._world, self._settings)
                attempt.run(engines, states, self._wanted)
                if attempt.failure is None:
                    break
                failed += attempt.made
            try:
                self._check(attempt)
            except HorovodInternalError:
                attempt.abandon()
                raise
            self._tell(attempt, time.monotonic() - began, error)
            old = [self._messages, *failed]
            for engine in engines:
                if engine.named.name in attempt.worlds:  # else who removes the set frees them
                    old += [engine.world.cross, engine.world.node, engine.world.comm]
                old += [comm for lane in engine.lanes for comm in lane.communicators]
            self._take_over(attempt, engines)
            if attempt.part is not None:
                self._add_part(attempt)
            self._retire(old)

    def _revoke(self, lanes: Sequence[Lane]) -> None:
        """End the calls of the other ranks, whose errors then tell them that a rank has died."""
        self._ask(self._world.comm.Revoke)
        for lane in lanes:
            lane.revoke()

    def _wait_for_others(self, lanes: Sequence[Lane], began: float) -> None:
        """Wait, without using a core, until the other ranks have come as far.

        They come by themselves, to add a process set, or because they have noticed a death. Who
        gives up says so, and then all do: once a rank has seen all others come, it gives up only
        if another one has before. What follows the second wait has no bound in MPI.
        """
        try:
            self._exchange(_COME, lanes, began)
        except BaseException:
            self._send(_GAVE_UP)
            raise
        self._exchange(_READY, lanes, began)

    def _send(self, message: int) -> list[Any]:
        comm, tag = self._messages, 3 * self.epoch + message
        return [self._ask(comm.isend, None, rank, tag) for rank in self._others]

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._messages.size) if rank != self._messages.rank]

    def _exchange(self, message: int, lanes: Sequence[Lane], began: float) -> None:
        """Tell the other ranks something, and wait until each has told it, too, or has died."""
        rank, waiting, sent = self._messages.rank, self._others, self._send(message)
        pause, reported = _FIRST_PAUSE, self._settings.stall_check_time_seconds
        is_revoked = False
        while True:
            waiting = [other for other in waiting if self._has_told(other, message) is False]
            if not waiting:
                break
            if gone := [other for other in self._others if self._has_told(other, _GAVE_UP)]:
                raise RankGoneError(
                    f"rank {rank}: {self._reason}, and {ranks_text(gone)} gave up waiting for "
                    "others"
                )
            if message == _COME:
                run_overdue()
            if self._is_death_known() and not is_revoked:
                is_revoked = True
                self._revoke(lanes)
            waited = time.monotonic() - began
            limit = self._settings.stall_shutdown_time_seconds
            if message == _COME and limit and waited > limit:
                raise RankGoneError(
                    f"rank {rank}: {self._reason}, and {ranks_text(waiting)} did not come "
                    f"within {limit:.0f} s (HVDLITE_STALL_SHUTDOWN_TIME_SECONDS) for it"
                )
            if waited > reported and not self._settings.stall_check_disable:
                reported += self._settings.stall_check_time_seconds
                _log.warning(
                    "rank %d: %s; waited %.0f s for %s",
                    rank,
                    self._reason,
                    waited,
                    ranks_text(waiting),
                )
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)
        del sent

    def _has_told(self, rank: int, message: int) -> bool | None:
        """Return whether a rank has told something; None if it has died."""
        tag = 3 * self.epoch + message
        found: bool | None = self._ask(self._messages.iprobe, rank, tag)
        if found:
            self._ask(self._messages.recv, None, rank, tag)
        return found

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return what an MPI call returns; None if the other rank has died."""
        try:
            return call(*args)
        except self._mpi.Exception:
            return None

    def _check(self, attempt: _Attempt) -> None:
        """Require that all ranks can go on.

        Raises:
            HorovodInternalError: A rank cannot, for a failure there.
            RankGoneError: The same, where a rank has died.
        """
        failures: dict[str, list[int]] = {}
        for rank, lanes in enumerate(attempt.states):
            for failure in {state.failure for state in lanes.values() if state.failure}:
                failures.setdefault(failure, []).append(rank)
        if not failures:
            return
        found = "; ".join(f"on {ranks_text(ranks)}: {why}" for why, ranks in failures.items())
        if attempt.world.comm.size == self._world.comm.size:
            raise HorovodInternalError(f"communication has failed {found}")
        raise RankGoneError(
            f"rank {self._world.comm.rank}: a rank has died, and the job cannot go on without it: "
            f"{found} (of those that are left); start it again (hvdliterun --restarts), and load "
            "the last checkpoint"
        )

    def _add_part(self, attempt: _Attempt) -> None:
        part, engine = attempt.part, attempt.part_engine
        assert part is not None
        if engine is not None:
            self.add(engine)
        part.enter(attempt.part_ranks, engine)
        self._wanted = None

    def _take_over(self, attempt: _Attempt, engines: Sequence[Engine]) -> None:
        has_lost = attempt.world.comm.size < self._world.comm.size
        self._world, self._messages = attempt.world, attempt.messages
        self._enter(attempt.world, attempt.new_ranks)
        if has_lost:
            comm = attempt.world.comm
            membership.renumber(attempt.positions, comm.rank, comm.size)
        if self._wanted is not None and attempt.part is None:
            self._wanted.ranks = attempt.renumbered(self._wanted.ranks)
        for engine in engines:
            engine.world = attempt.worlds.get(engine.named.name, engine.world)
            for lane in engine.lanes:
                states = [lanes[lane.name] for lanes in attempt.states if lane.name in lanes]
                deliver = is_delivered(attempt.own[lane.name], states)
                lane.replace(attempt.transports.get(lane.name), deliver, attempt.new_ranks)

    def _retire(self, old: Sequence[Any]) -> None:
        """Free the communicators that were given in the last call, and note others for the next.

        Not at once: messages may be on their way to them, which a later communicator of the same
        number would get, and threads may just be reading their rank from the old world.
        """
        if forget_ended(self._mpi, self._old):
            self._old, free = list(old), self._old
        else:  # MPI may still work on a collective over one of them
            self._old, free = [*self._old, *old], []
        for comm in free:
            # Open MPI 5 does it without the other ranks, of which some have died.
            with suppress(self._mpi.Exception):
                comm.Free()

    def _tell(self, attempt: _Attempt, seconds: float, error: Exception | None) -> None:
        """Log what has happened, with the numbers that the ranks had at the start of the job."""
        left = len(attempt.new_ranks)
        dead = [place for rank, place in enumerate(self._places) if rank not in attempt.new_ranks]
        self.starts = [self.starts[rank] for rank in attempt.new_ranks]
        self._places = [self._places[rank] for rank in attempt.new_ranks]
        if attempt.world.comm.rank != 0 or not dead:
            return
        _log.warning(
            "%s died; %s in the same step, after %.3f s",
            ranks_text(dead),
            f"the other {left} go on" if left > 1 else "the other one goes on",
            seconds,
        )
        _log.info("noticed by: %s", error)


@dataclass
class _Part:
    """A process set that is to be added; see `Recovery.form_part`."""

    name: str
    ranks: list[int]
    make: Callable[[World], Engine]
    enter: Callable[[list[int], Engine | None], object]


class _Attempt:
    """One attempt to form the world of the ranks that are left.

    Args:
        MPI: The module ``mpi4py.MPI``.
        comm: Over these ranks.
        before: The world of all ranks, with those that have died.
        settings: Settings read at ``init()``.

    Attributes:
        failure: Why it failed; None: it did not.
        states: The states of each rank's lanes, by the rank and the lane's name.
        own: Those of this rank.
        positions: The `membership.positions` of each rank.
        new_ranks: The new number of each rank, by the old one.
        world: The new world of all ranks.
        messages: For the messages of the next recovery.
        worlds: The new world of each engine, by the name of its lane for named operations.
        made: The communicators that have been made.
        transports: By the lane's name; None: the lane has been closed.
        part: The process set that has been added; None: not all ranks want one.
        part_ranks: Its ranks.
        part_engine: Its engine; None: this rank is left out.
    """

    world: World
    messages: Any

    def __init__(self, MPI: Any, comm: Any, before: World, settings: Settings) -> None:  # noqa: N803
        self._mpi = MPI
        self._comm = comm
        self._before = before
        self._settings = settings
        self.failure: BaseException | None = None
        self.states: list[Mapping[str, LaneState]] = []
        self.own: Mapping[str, LaneState] = {}
        self.positions: list[Mapping[Any, Any]] = []
        self.new_ranks: dict[int, int] = {}
        self.worlds: dict[str, World] = {}
        self.made = [comm]
        self.transports: dict[str, Transport | None] = {}
        self.part: _Part | None = None
        self.part_ranks: list[int] = []
        self.part_engine: Engine | None = None

    def run(
        self, engines: Sequence[Engine], states: Mapping[str, LaneState], wanted: _Part | None
    ) -> None:
        """Make the worlds and the transports; collective, and on failure another attempt follows.

        Args:
            engines: Of this rank, that of all ranks first.
            states: Of this rank's lanes, by their names.
            wanted: The process set that this rank wants.
        """
        parts = {engine.named.name: engine.world.ranks for engine in engines[1:]}
        with Forming(self._mpi, self._comm, self.made) as forming:
            here = wanted and (wanted.name, wanted.ranks)
            told = self._comm.allgather(
                (self._before.comm.rank, states, membership.positions(), parts, here)
            )
            self.states, self.own = [theirs for _, theirs, *_ in told], states
            self.positions = [theirs for _, _, theirs, *_ in told]
            self.new_ranks = {old: new for new, (old, *_) in enumerate(told)}
            local_size = self._settings.force_local_size
            self.world = World.split(self._mpi, self._comm, local_size, forming.create)
            self.messages = forming.create(self._comm.Dup)
            self._replace(engines[0], self.world)
            by_name = {engine.named.name: engine for engine in engines[1:]}
            for each, ranks in self._kept([theirs for *_, theirs, _ in told]):
                engine = by_name.get(each)
                self._form_part(self.renumbered(ranks), forming, partial(self._replace, engine))
            if wanted is not None and all(there for *_, there in told):
                if any(there[0] != wanted.name for *_, there in told):
                    raise HorovodInternalError(
                        "the ranks add different process sets; add them in the same order on all "
                        "ranks, and from one thread"
                    )
                self.part = wanted
                # As rank 0 means them: those who asked after a death meant other ranks by them.
                *_, (_, ranks) = told[0]
                self.part_ranks = self.renumbered(ranks)
                self._form_part(self.part_ranks, forming, self._make_part)
        self.failure = forming.failure
        if self.failure is not None:
            self.abandon()

    def abandon(self) -> None:
        """End what has been made of the process set; its communicators remain."""
        if self.part_engine is not None:
            self.part_engine.abandon()

    def _kept(self, everywhere: Sequence[Mapping[str, Sequence[int]]]) -> Iterator[Any]:
        """Yield the process sets that none of their ranks has removed, and their ranks before."""
        for name, ranks in sorted({k: v for each in everywhere for k, v in each.items()}.items()):
            if all(name in everywhere[rank] for rank in self.renumbered(ranks)):
                yield name, ranks

    def renumbered(self, ranks: Iterable[int]) -> list[int]:
        """Return the new numbers of those of the ranks that live."""
        return sorted(self.new_ranks[old] for old in ranks if old in self.new_ranks)

    def _form_part(
        self, ranks: Sequence[int], forming: Forming, use: Callable[[World], object]
    ) -> None:
        """Make the world of a process set, and use it on its ranks.

        Args:
            ranks: Its ranks.
            forming: The forming in which all ranks take part.
            use: Makes the transports.
        """
        comm = self.world.split_off(self._mpi, ranks, forming.create)
        if comm is None:
            return
        with Forming(self._mpi, comm, self.made) as inner:
            use(self.world.around(comm, ranks, inner.create))
        if inner.failure is not None:
            raise inner.failure

    def _make_part(self, world: World) -> None:
        assert self.part is not None
        self.part_engine = self.part.make(world)

    def _replace(self, engine: Engine | None, world: World) -> None:
        """Make the transports of an engine's lanes."""
        assert engine is not None  # of a set that this rank is in, and has not removed
        self.worlds[engine.named.name] = world
        for lane in engine.lanes:
            closed = any(lanes[lane.name].closed for lanes in self.states if lane.name in lanes)
            shared_memory = self._settings.shared_memory
            self.transports[lane.name] = (
                None if closed else connect(self._mpi, world, shared_memory, lane.transport)
            )


def is_delivered(own: LaneState, states: Sequence[LaneState]) -> bool:
    """Return whether a rank delivers the outcome that is in doubt there.

    Args:
        own: The state of its lane.
        states: Those of all ranks, this one included. Their numbers of confirmed outcomes differ by
            one at most.
    """
    newest = max(state.confirmed for state in states)
    # A rank that has confirmed one more: so all have that outcome. Or all have it, and know it now.
    return own.confirmed < newest or all(state.in_doubt for state in states)
