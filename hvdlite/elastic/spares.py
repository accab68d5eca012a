"""Spares: processes that wait in ``init()`` until ranks have died, and take their places.

``hvdliterun --elastic -np 4 --spares 1`` starts five processes, of which the first four are the
ranks. When these form their world anew in elastic training (`hvdlite.elastic`), they bring in as
many spares as ranks are missing.

All of them form the pool: a communicator that serves to form worlds, and for messages to the
spares. ``MPI_Comm_shrink`` and ``MPI_Comm_split`` make the new ones, both collective over the
pool; to make a communicator of some of its processes only (``MPI_Comm_create_group``) never returns
in Open MPI 5.0.11 when another process of the pool has died.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hvdlite.base.settings import Settings
from hvdlite.elastic.forming import Forming, form_of_living
from hvdlite.elastic.gathering import Gathering
from hvdlite.errors import SettingsError
from hvdlite.transport.mpi import has_ended

_log = logging.getLogger("hvdlite")

_COME, _END = 1, 2
# How often a spare looks for a message. Each look takes some microseconds for each rank.
_PAUSE = 0.05
_ALL_DIED = "hvdlite: all ranks have died, so this spare ends"
_SECONDS_TO_END = 5.0


def check(settings: Settings, processes: int) -> None:
    """Refuse a number of spares that a job of so many processes cannot have.

    Raises:
        SettingsError: There is no rank beside the spares, or nothing that brings them in.
    """
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
    """The ranks of a job and its spares.

    Args:
        comm: Over all of them, the spares last; the pool takes it over.

    Without a spare, it forms worlds without the ranks that have died.

    Attributes:
        place: This process's number at the start, and how many there were, spares included.
        places: The numbers of the ranks at the start.
        is_member: Whether this process is a rank.
        world: The communicator of the ranks; None on a spare.
    """

    def __init__(self, MPI: Any, comm: Any, spares: int) -> None:  # noqa: N803
        self._mpi = MPI
        self._all = Gathering(MPI, comm)
        self._size = comm.size - spares
        self._members = list(range(self._size))
        # Communicators before the last `form`, which nobody uses any more.
        self._old: list[Any] = []
        self._messages: list[Any] = []
        self.place = int(comm.rank), int(comm.size)
        self.places = list(self._members)
        self.is_member = comm.rank < self._size
        world = comm.Split(0 if self.is_member else MPI.UNDEFINED, key=comm.rank)
        self.world: Any = world if self.is_member else None
        self._tags = 0

    def reserve_tags(self, count: int) -> int:
        """Reserve tags for messages on `world`; return the first, the same on all its ranks.

        Those from 0 to 9 are never reserved; `form` makes the others free again.
        """
        first = self._tags or 10
        self._tags = first + count
        return first

    def wait(self) -> None:
        """Wait, without using a core, until the ranks bring this spare in.

        Raises:
            SystemExit: The job has ended.
        """
        waiting = set(self._members)
        ended = set[int]()
        while waiting:
            called = False
            for rank in list(waiting):
                called |= self._all.receive(rank, _COME) is not None
                if self._all.receive(rank, _END):
                    ended.add(rank)
            waiting -= {*ended, *self._all.dead}
            if called:
                self.form(None)
                if self.is_member:
                    return
                waiting = set(self._members)
            time.sleep(_PAUSE)
        if ended:
            raise SystemExit(0)
        raise SystemExit(_ALL_DIED)

    def form(self, message: Any, old: Sequence[Any] = (), grow: bool = True) -> bool:
        """Form the world of the ranks that live and of spares in the places of the others.

        All ranks that live call it, and the spares with them. Ranks keep their order, and the new
        ones follow. `take_messages` returns the messages that they have passed.

        Args:
            message: For the other ranks; None from those that were spares.
            old: Communicators that nobody uses any more, to be freed in time.
            grow: Whether spares may come in; all ranks have to say so.

        Returns:
            Whether any process of the pool has died since the last call.

        Raises:
            SystemExit: All ranks that were no spares have died, so nobody has the state.
            HorovodInternalError: They cannot communicate.
        """
        if self.is_member:
            self._all.send(_COME, ranks=self._spares())
        comm = self._all.comm
        old = [*old, comm, *([self.world] if self.world is not None else [])]

        def build(pool: Any, forming: Forming) -> Any:
            gathered = pool.allgather((self.is_member, message, grow, self.place[0]))
            living = [rank for rank, (is_member, *_) in enumerate(gathered) if is_member]
            spares = [rank for rank in range(pool.size) if rank not in living]
            missing = self._size - len(living) if all(grow for _, _, grow, _ in gathered) else 0
            members = living + spares[: max(missing, 0)]
            is_in = pool.rank in members
            color = 0 if is_in else self._mpi.UNDEFINED
            world = forming.create(pool.Split, color, members.index(pool.rank) if is_in else 0)
            return pool, world if is_in else None, members, gathered

        pool, world, members, gathered = form_of_living(self._mpi, comm, build, old)
        messages = [gathered[rank][1] for rank in members]
        if all(message is None for message in messages):
            raise SystemExit(_ALL_DIED)
        new = sum(not gathered[rank][0] for rank in members)
        if pool.rank == members[0] and new:
            _log.warning(
                "%s in: %d ranks",
                "a spare comes" if new == 1 else f"{new} spares come",
                len(members),
            )
        self._all.move(pool)
        self._members, self._tags = members, 0
        self.is_member, self.world = world is not None, world
        self._messages, self.places = messages, [gathered[rank][3] for rank in members]
        self._retire(old)
        return bool(pool.size < comm.size)

    def lacks(self, ranks: int) -> bool:
        """Return whether ranks are missing that have died since the last call, or have spares."""
        most = min(self._size, self._all.comm.size)
        return bool(ranks < max(len(self._members), most))

    def take_messages(self) -> list[Any]:
        """Return what the ranks have passed to `form`, by rank in the new world.

        None: from those that were spares. Empty: `form` has not been called since the last time.
        """
        messages, self._messages = self._messages, []
        return messages

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

    def _retire(self, old: list[Any]) -> None:
        """Free the communicators of the last call, and note others; see `Recovery._retire`."""
        old, self._old = self._old, [comm for comm in old if comm != self._mpi.COMM_NULL]
        for comm in old:
            with suppress(self._mpi.Exception):
                comm.Free()

    def _spares(self) -> list[int]:
        return [rank for rank in self._all.others if rank not in self._members]
