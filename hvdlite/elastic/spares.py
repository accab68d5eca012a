"""Spares: processes that wait in ``init()`` until ranks have died, and take their places.

``hvdliterun --elastic -np 4 --spares 1`` starts five processes, of which the first four are the
ranks. All form the pool: a communicator that serves to form worlds, and for messages to the spares.
``MPI_Comm_shrink`` and ``MPI_Comm_split`` make the new ones, both collective over the pool; to make
a communicator of some of its processes only (``MPI_Comm_create_group``) never returns in Open MPI
5.0.11 when another process of the pool has died.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from hvdlite.base.settings import Settings
from hvdlite.elastic.forming import Forming, form_of_living, require_survival, retire
from hvdlite.elastic.gathering import Gathering
from hvdlite.engine import Engine
from hvdlite.engine.process_sets import ProcessSet
from hvdlite.engine.supervisor import Build
from hvdlite.errors import HorovodInternalError, SettingsError
from hvdlite.transport.mpi import has_ended
from hvdlite.world.world import choose, create_at_once

_log = logging.getLogger("hvdlite")

_COME, _END = 1, 2
# How often a spare looks for a message. Each look takes some microseconds for each rank.
_PAUSE = 0.05
_ALL_DIED = "hvdlite: all ranks have died, so this spare ends"
_SECONDS_TO_END = 5.0

#: The pool of this job's ranks and spares; None: without HVDLITE_ELASTIC.
pool: Pool | None = None


class Message(NamedTuple):
    """A rank's message to the others when they form a world.

    Attributes:
        rank: The rank's number before.
        sets: The ranks of the process sets, by the numbers before.
        error: Why it forms the world again; empty: the hosts have changed.
    """

    rank: int = 0
    sets: Sequence[list[int] | None] = ()
    error: str = ""
    failures: int = 0
    skip_sync: bool = False


def find(MPI: Any, comm: Any, settings: Settings) -> Pool:  # noqa: N803
    """Return the pool, with the ranks for which `init` asks, and the spares."""
    global pool
    if comm == MPI.COMM_WORLD:
        comm = None
    if pool is not None and comm is not None and comm not in (pool.asked, pool.world):
        if settings.spares:
            raise ValueError(
                f"rank {pool.rank}: comm={comm!r} is not what init() got first "
                f"({pool.asked!r}), and spares wait for those ranks; give the same, or use no "
                "spares"
            )
        pool = None  # the script has others in mind
    if pool is None:
        processes = choose(MPI, comm)
        check(settings, processes.size)
        if processes.size > 1:
            require_survival(MPI, processes)
        pool = Pool(MPI, processes, settings.spares, comm)
        if settings.spares:
            atexit.register(pool.end)
    return pool


def check(settings: Settings, processes: int) -> None:
    """Refuse a number of spares that a job of so many processes cannot have."""
    if not settings.elastic:
        raise SettingsError(
            f"HVDLITE_SPARES: found {settings.spares} without HVDLITE_ELASTIC=1; spares come in "
            "where ranks may die: `hvdliterun --elastic --spares N`"
        )
    if settings.spares >= processes:
        raise SettingsError(
            f"HVDLITE_SPARES: found {settings.spares} for {processes} processes, spares included; "
            "at least one has to be a rank"
        )


class Pool:
    """The ranks of a job and its spares; without a spare it forms worlds of the ranks that live.

    Args:
        comm: Over all of them, the spares last; the pool takes it over.
        asked: What `init` has asked for; None: all ranks.

    Attributes:
        holders: Where this process has come in as a spare: the ranks that have not, which have the
            state that it lacks; None: it is no spare, or `take_holders` has been called.
        place: This process's number at the start, and how many there were, spares included.
        places: The numbers of the ranks at the start.
        world: The communicator of the ranks; None on a spare, and before the first `form`.
    """

    def __init__(self, MPI: Any, comm: Any, spares: int, asked: Any = None) -> None:  # noqa: N803
        self._mpi = MPI
        self.asked = asked
        self.holders: list[int] | None = None
        self._all = Gathering(MPI, comm)
        self._size = comm.size - spares
        self._members = list(range(self._size))
        # Communicators before the last `form`, which nobody uses any more.
        self._old: list[Any] = []
        self.place = int(comm.rank), int(comm.size)
        self.places = list(self._members)
        self.world: Any = None
        self._tags = 0

    @property
    def is_member(self) -> bool:
        """Return whether this process is a rank."""
        return self._all.comm.rank in self._members

    def take_holders(self) -> list[int] | None:
        """Return `holders`, once. Until then a spare must not communicate."""
        holders, self.holders = self.holders, None
        return holders

    @property
    def rank(self) -> int:
        """Return this rank's number in the last world, or at first in the next."""
        return self._members.index(self._all.comm.rank)

    def reserve_tag(self) -> int:
        """Return a tag that no message on `world` has yet, nor the next tag.

        It is the same on all ranks of the world.
        """
        self._tags += 2
        return self._tags

    def form(self, message: Any, build: Build, grow: bool) -> tuple[Engine, list[Any]]:
        """Form the world of the ranks that live and of spares in the places of the others.

        All ranks that live call it, and the spares, which wait in it, without using a core, until
        they are ranks. Ranks keep their order, and the new ones follow.

        Args:
            message: For the other ranks; None from those that have been spares.
            build: Makes the engine of the world.
            grow: Whether spares may come in; all ranks have to say so.

        Returns:
            The engine, and the messages of the ranks by their new numbers.

        Raises:
            SystemExit: The job has ended, or all ranks that were no spares have died, so nobody has
                the state.
            HorovodInternalError: The ranks cannot communicate.
            ValueError: As ``build``.
        """
        while True:
            if self.is_member:
                self._all.send(_COME, ranks=self._spares())
            else:
                self._wait()
            try:
                if formed := self._form(message, build, grow):
                    return formed
            except HorovodInternalError as error:
                if isinstance(error.__cause__, ValueError):  # of a setting or an argument
                    raise error.__cause__ from None
                raise

    def _wait(self) -> None:
        """Wait until the ranks form a world."""
        waiting, ended = set(self._members), set[int]()
        while waiting:
            called = False
            for rank in list(waiting):
                called |= self._all.receive(rank, _COME) is not None
                if self._all.receive(rank, _END):
                    ended.add(rank)
            if called:
                return
            waiting -= {*ended, *self._all.dead}
            time.sleep(_PAUSE)
        raise SystemExit(0 if ended else _ALL_DIED)

    def _form(self, message: Any, build: Build, grow: bool) -> tuple[Engine, list[Any]] | None:
        """Form a world together with the rest of the pool; return None if this is a spare still."""
        comm = self._all.comm
        old = [comm, *([self.world] if self.world is not None else [])]

        def build_world(pool: Any, forming: Forming) -> Any:
            gathered = pool.allgather((self.is_member, message, grow, self.place[0]))
            living = [rank for rank, (is_member, *_) in enumerate(gathered) if is_member]
            spares = [rank for rank in range(pool.size) if rank not in living]
            missing = self._size - len(living) if all(grow for _, _, grow, _ in gathered) else 0
            members = living + spares[: max(missing, 0)]
            messages = [gathered[rank][1] for rank in members]
            if all(message is None for message in messages):
                members = []
            is_in = pool.rank in members
            color = 0 if is_in else self._mpi.UNDEFINED
            world = forming.create(pool.Split, color, members.index(pool.rank) if is_in else 0)
            if not is_in:
                return pool, None, members, gathered, None
            with forming.part(world) as inner:
                engine = build(inner.create(world.Dup), inner.create)
                inner.undo.callback(engine.abandon)
            return pool, world, members, gathered, (engine, messages)

        if comm.size == 1:  # without another one to go on, whether MPI survives a death or not
            self.world = self.world or comm.Dup()
            return build(self.world.Dup(), create_at_once), [message]
        formed: tuple[Engine, list[Any]] | None
        pool, self.world, self._members, gathered, formed = form_of_living(
            self._mpi, comm, build_world, old
        )
        if not self._members:
            raise SystemExit(_ALL_DIED)
        new = sum(not gathered[rank][0] for rank in self._members)
        if pool.rank == self._members[0] and new:
            _log.warning(
                "%s in: %d ranks",
                "a spare comes" if new == 1 else f"{new} spares come",
                len(self._members),
            )
        self._all.move(pool)
        self._tags = 0
        self.places = [gathered[rank][3] for rank in self._members]
        self._old = retire(self._mpi, self._old, old)
        return formed

    def lacks(self, ranks: int) -> bool:
        """Return whether a world of so many ranks lacks some: it has had more, or spares wait."""
        most = min(self._size, self._all.comm.size)
        return bool(ranks < max(len(self._members), most))

    def end(self) -> None:
        """Tell the spares that this rank has come to its end; a spare tells nobody."""
        if not self.is_member:
            return
        comm, requests = self._all.comm, []
        for rank in self._spares():
            with suppress(self._mpi.Exception):
                requests.append(comm.issend(None, rank, _END))
        deadline = time.monotonic() + _SECONDS_TO_END
        while requests and time.monotonic() < deadline:
            requests = [request for request in requests if not has_ended(self._mpi, request)]
            time.sleep(1e-3)

    def _spares(self) -> list[int]:
        return [rank for rank in self._all.others if rank not in self._members]


def with_ranks(
    process_sets: Sequence[ProcessSet], messages: Sequence[Message | None]
) -> Iterator[ProcessSet]:
    """Yield process sets with the ranks that they have in the world that has been formed.

    The script of a spare does not know of all that there are by now.
    """
    sets: Iterable[list[int] | None] = next((each.sets for each in messages if each), ())
    new_ranks = {each.rank: new for new, each in enumerate(messages) if each}
    for given, before in itertools.zip_longest(process_sets, sets):
        process_set = given or ProcessSet(before)
        if before is not None:
            process_set.ranks = [new_ranks[rank] for rank in before if rank in new_ranks]
        if process_set.ranks != []:
            yield process_set
