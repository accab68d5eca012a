"""Recovery: the ranks that are left go on in the same step when one has died.

A lane whose round fails because a rank has died calls `Recovery.recover`. It halts all lanes of
this rank, waits until all other ranks have come as far or have died, and forms the world of those
that are left, with a new transport for each lane. Operations stay in their lanes: what was being
exchanged is exchanged again, from inputs that are still there (`Operation.protect`).

An operation may have ended on some ranks only. So the ranks confirm each outcome by a barrier
before any of them delivers it (`Rounds`). If any rank has passed that barrier, all of them have the
outcome, and those that do not know it yet deliver it; otherwise the operation is repeated, unless
all of them have it anyway.

It takes an MPI with user-level failure mitigation (ULFM), such as Open MPI 5 under
``mpirun --with-ft ulfm``: see W. Bland et al., "Post-failure recovery of MPI communication
capability", IJHPCA 27(3), 2013.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from hvdlite import membership, rehearsal
from hvdlite.engine import Engine
from hvdlite.engine.agreement import ranks_text
from hvdlite.engine.lane import Lane, LaneState
from hvdlite.errors import HorovodInternalError, RankGoneError
from hvdlite.settings import Settings
from hvdlite.transport import Transport, connect
from hvdlite.transport.mpi import forget_ended
from hvdlite.world import World

_log = logging.getLogger("hvdlite")

_FIRST_PAUSE, _MAX_PAUSE = 0.2e-3, 5e-3
_FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
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

    Attributes:
        epoch: The number of recoveries so far.
        starts: For each rank its number at the start.

    Raises:
        HorovodInternalError: The MPI cannot go on without a rank.
    """

    def __init__(
        self,
        MPI: Any,  # noqa: N803
        whole: World,
        settings: Settings,
        enter: Callable[[World, Mapping[int, int]], object],
    ) -> None:
        self._mpi = MPI
        self._world = whole
        self._settings = settings
        self._enter = enter
        self.starts = list(range(whole.comm.size))
        self._engines: list[Engine] = []
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._under_way = False
        self.epoch = 0
        self._failure: HorovodInternalError | None = None
        if not _goes_on(MPI, whole.comm):
            raise HorovodInternalError(
                f"rank {whole.comm.rank}: HVDLITE_ELASTIC is 1, and this MPI ends when a rank "
                "dies; start the job by `hvdliterun --elastic` with Open MPI 5, or unset "
                "HVDLITE_ELASTIC"
            )
        self._messages = whole.comm.Dup()
        # Communicators of the last world, which no operation uses any more.
        self._old: list[Any] = []

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

    def recover(self, error: Exception, epoch: int) -> None:
        """Go on without the ranks that have died; called by the thread that runs a lane's rounds.

        All lanes may call it, of which one does the work.

        Args:
            error: What the lane has noticed.
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

    def _form_world(self, lanes: Sequence[Lane], error: Exception) -> None:
        began = time.monotonic()
        engines = list(self._engines)
        states = {lane.name: lane.halt() for lane in lanes}
        comm = self._world.comm
        self._ask(comm.Revoke)  # ends the calls of ranks that make a process set
        self._wait_for_others(began)
        if rehearsal.reach is not None:
            rehearsal.reach("recover")
        with membership.lock:
            failed: list[Any] = []
            while True:
                comm = comm.Shrink()
                attempt = _Attempt(self._mpi, comm, self._world, self._settings)
                attempt.run(engines, states)
                if all_agree(self._mpi, comm, attempt.failure is None):
                    break
                failed += attempt.communicators
            self._check(attempt.states)
            self._tell(attempt, time.monotonic() - began, error)
            old = [self._messages, *failed]
            for engine in engines:
                old += [engine.world.cross, engine.world.node, engine.world.comm]
                old += [comm for lane in engine.lanes for comm in lane.communicators]
            self._take_over(attempt, engines)
            self._retire(old)

    def _wait_for_others(self, began: float) -> None:
        """Wait, without using a core, until the other ranks have noticed it, too."""
        comm, tag = self._messages, self.epoch
        waiting = [rank for rank in range(comm.size) if rank != comm.rank]
        sent = [self._ask(comm.isend, None, rank, tag) for rank in waiting]
        pause, reported = _FIRST_PAUSE, self._settings.stall_check_time_seconds
        while True:
            waiting = [rank for rank in waiting if not self._has_come(rank, tag)]
            if not waiting:
                break
            waited = time.monotonic() - began
            limit = self._settings.stall_shutdown_time_seconds
            if limit and waited > limit:
                raise RankGoneError(
                    f"rank {comm.rank}: a rank has died, and {ranks_text(waiting)} did not come "
                    f"within {limit:.0f} s (HVDLITE_STALL_SHUTDOWN_TIME_SECONDS) to go on without "
                    "it"
                )
            if waited > reported and not self._settings.stall_check_disable:
                reported += self._settings.stall_check_time_seconds
                _log.warning(
                    "rank %d: a rank has died; waited %.0f s for %s to go on without it",
                    comm.rank,
                    waited,
                    ranks_text(waiting),
                )
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)
        del sent

    def _has_come(self, rank: int, tag: int) -> bool:
        """Return whether a rank has come as far as this one, or has died."""
        found = self._ask(self._messages.iprobe, rank, tag)
        if found:
            self._ask(self._messages.recv, None, rank, tag)
        return found is not False

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return what an MPI call returns; None if the other rank has died."""
        try:
            return call(*args)
        except self._mpi.Exception:
            return None

    def _check(self, states: Sequence[Mapping[str, LaneState]]) -> None:
        """Require that all ranks can go on.

        Raises:
            RankGoneError: A rank cannot.
        """
        broken = [
            rank for rank, lanes in enumerate(states) if any(s.broken for s in lanes.values())
        ]
        if broken:
            raise RankGoneError(
                f"rank {self._world.comm.rank}: a rank has died, and the job cannot go on without "
                f"it: on {ranks_text(broken)} of those that are left, communication has failed "
                "before, or arrays lie on a GPU; start it again (hvdliterun --restarts), and load "
                "the last checkpoint"
            )

    def _take_over(self, attempt: _Attempt, engines: Sequence[Engine]) -> None:
        self._world, self._messages = attempt.world, attempt.messages
        self._enter(attempt.world, attempt.new_ranks)
        membership.renumber(attempt.positions, attempt.world.comm.rank, attempt.world.comm.size)
        for engine in engines:
            engine.world = attempt.worlds[engine.named.name]
            for lane in engine.lanes:
                states = [lanes[lane.name] for lanes in attempt.states if lane.name in lanes]
                deliver = is_delivered(attempt.own[lane.name], states)
                lane.replace(attempt.transports[lane.name], deliver, attempt.new_ranks)

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

    def _tell(self, attempt: _Attempt, seconds: float, error: Exception) -> None:
        """Log what has happened, with the numbers that the ranks had at the start."""
        starts, left = self.starts, len(attempt.new_ranks)
        dead = [start for rank, start in enumerate(starts) if rank not in attempt.new_ranks]
        self.starts = [starts[rank] for rank in attempt.new_ranks]
        if attempt.world.comm.rank != 0:
            return
        _log.warning(
            "%s died; %s in the same step, after %.3f s",
            ranks_text(dead),
            f"the other {left} go on" if left > 1 else "the other one goes on",
            seconds,
        )
        _log.info("noticed by: %s", error)


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
        made: The communicators of these worlds.
        transports: By the lane's name; None: the lane has been closed.
    """

    world: World
    messages: Any

    def __init__(self, MPI: Any, comm: Any, before: World, settings: Settings) -> None:  # noqa: N803
        self._mpi = MPI
        self._comm = comm
        self._before = before
        self._settings = settings
        self.failure: Exception | None = None
        self.states: list[Mapping[str, LaneState]] = []
        self.own: Mapping[str, LaneState] = {}
        self.positions: list[Mapping[Any, Any]] = []
        self.new_ranks: dict[int, int] = {}
        self.worlds: dict[str, World] = {}
        self.made = [comm]
        self.transports: dict[str, Transport | None] = {}

    @property
    def communicators(self) -> list[Any]:
        """Return those that have been made."""
        transports = [each for each in self.transports.values() if each is not None]
        inner = [comm for transport in transports for comm in transport.communicators]
        messages = [self.messages] if hasattr(self, "messages") else []
        return [*inner, *messages, *reversed(self.made)]

    def run(self, engines: Sequence[Engine], states: Mapping[str, LaneState]) -> None:
        """Make the worlds and the transports; collective, and on failure another attempt follows.

        Args:
            engines: Of this rank, that of all ranks first.
            states: Of this rank's lanes, by their names.
        """
        made = self.made
        try:
            with revoked_on_failure(made):
                told = self._comm.allgather(
                    (self._before.comm.rank, states, membership.positions())
                )
                self.states, self.own = [theirs for _, theirs, _ in told], states
                self.positions = [theirs for _, _, theirs in told]
                self.new_ranks = {old: new for new, (old, _, _) in enumerate(told)}
                local_size = self._settings.force_local_size
                self.world = World.split(self._mpi, self._comm, local_size, made)
                self.messages = self._comm.Dup()
                for engine in engines:
                    self._replace(engine, engine is engines[0], made)
        except (self._mpi.Exception, HorovodInternalError, OSError) as error:
            self.failure = error

    def _replace(self, engine: Engine, whole: bool, made: list[Any]) -> None:
        """Make an engine's world and the transports of its lanes."""
        ranks = sorted(self.new_ranks[old] for old in engine.world.ranks if old in self.new_ranks)
        world = self.world if whole else self.world.subset(ranks, made)
        self.worlds[engine.named.name] = world
        for lane in engine.lanes:
            closed = any(lanes[lane.name].closed for lanes in self.states if lane.name in lanes)
            shared_memory = self._settings.shared_memory
            self.transports[lane.name] = (
                None if closed else connect(self._mpi, world, shared_memory, lane.transport)
            )


def all_agree(MPI: Any, comm: Any, here: bool) -> bool:  # noqa: N803
    """Return whether all ranks say yes, the same on all of them, and no other rank has died.

    Args:
        MPI: The module ``mpi4py.MPI``.
        comm: Over the ranks; if this one says no, calls of the others on it end.
        here: What this rank says.
    """
    if not here:
        with suppress(MPI.Exception):
            comm.Revoke()
    try:
        return bool(comm.Agree(int(here)))
    except MPI.Exception:  # on all ranks
        return False


@contextmanager
def revoked_on_failure(comms: Sequence[Any]) -> Iterator[None]:
    """Have the other ranks' calls on communicators fail, too, if this rank's do.

    Otherwise a rank could wait for this one, which has seen the death of a third and gone on.

    Args:
        comms: The communicators; more may be added in the meantime.
    """
    try:
        yield
    except BaseException:
        for comm in comms:
            with suppress(Exception):
                comm.Revoke()
        raise


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


def _goes_on(MPI: Any, comm: Any) -> bool:  # noqa: N803
    """Return whether MPI is ready to go on when a rank has died."""
    if "Open MPI" in MPI.Get_library_version():
        # What `mpirun --with-ft ulfm` sets. Without it the functions exist, and wait forever.
        return os.environ.get(_FAULT_TOLERANCE, "0") not in ("0", "false", "no")
    try:
        comm.Get_failed()
    except (MPI.Exception, NotImplementedError):
        return False
    return True
