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
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hvdlite.base.settings import Settings
from hvdlite.errors import HorovodInternalError, SettingsError
from hvdlite.world.forming import Forming

_log = logging.getLogger("hvdlite")

_COME, _END = 1, 2
# How often a spare looks for a message. Each look takes some microseconds for each rank.
_PAUSE = 0.05
_ALL_DIED = "hvdlite: all ranks have died, so this spare ends"
_SECONDS_TO_END = 5.0


def check(settings: Settings, processes: int) -> None:
    """Refuse a number of spares that a job cannot have.

    Args:
        settings: Those of this process.
        processes: The number of all processes.

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
        MPI: The module ``mpi4py.MPI``.
        comm: Over all of them, the spares last; the pool takes it over.
        spares: The number of spares.

    Without a spare, it forms worlds without the ranks that have died.

    Attributes:
        place: This process's number at the start, and how many there were, spares included.
        places: The numbers of the ranks at the start.
        is_member: Whether this process is a rank.
        world: The communicator of the ranks; None on a spare.
    """

    def __init__(self, MPI: Any, comm: Any, spares: int) -> None:  # noqa: N803
        self._mpi = MPI
        self._comm = comm
        self._size = comm.size - spares
        self._members = list(range(self._size))
        self._sent: list[Any] = []
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
                tag = self._last_message(rank)
                called = called or tag == _COME
                if tag in (_END, None):
                    waiting.discard(rank)
                if tag == _END:
                    ended.add(rank)
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
        ones follow. `take_messages` returns what they have told each other.

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
            self._call_spares()
        old = [*old, self._comm, *([self.world] if self.world is not None else [])]
        size = self._comm.size
        tried, failure = 0, None
        while True:
            pool = self._comm.Shrink()
            if pool.size == tried:
                raise HorovodInternalError(
                    f"rank {pool.rank}: the ranks cannot communicate, although none has died since "
                    f"they tried before ({failure}); start the job again"
                ) from failure
            with Forming(self._mpi, pool, old) as forming:
                told = pool.allgather((self.is_member, message, grow, self.place[0]))
                living = [rank for rank, (is_member, *_) in enumerate(told) if is_member]
                spares = [rank for rank in range(pool.size) if rank not in living]
                missing = self._size - len(living) if all(grow for _, _, grow, _ in told) else 0
                members = living + spares[: max(missing, 0)]
                is_in = pool.rank in members
                key = members.index(pool.rank) if is_in else 0
                color = 0 if is_in else self._mpi.UNDEFINED
                world = forming.create(pool.Split, color, key)
                messages = [told[rank][1] for rank in members]
                places = [told[rank][3] for rank in members]
            if forming.failure is None:
                old.remove(world)
                break
            old.append(pool)
            tried, failure = pool.size, forming.failure
        if all(message is None for message in messages):
            raise SystemExit(_ALL_DIED)
        if pool.rank == living[0] and len(members) > len(living):
            new = len(members) - len(living)
            _log.warning(
                "%s in: %d ranks",
                "a spare comes" if new == 1 else f"{new} spares come",
                len(members),
            )
        self._comm, self._members = pool, members
        self.is_member, self.world, self._tags = is_in, world if is_in else None, 0
        self._messages, self.places = messages, places
        self._retire(old)
        return bool(pool.size < size)

    @property
    def is_short(self) -> bool:
        """Return whether ranks are missing for which there are spares."""
        return bool(len(self._members) < min(self._size, self._comm.size))

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
        told = [self._ask(self._comm.issend, None, rank, _END) for rank in self._others()]
        deadline = time.monotonic() + _SECONDS_TO_END
        while told and time.monotonic() < deadline:
            told = [request for request in told if request and self._ask(request.Test) is False]
            time.sleep(1e-3)

    def _retire(self, old: list[Any]) -> None:
        """Free the communicators of the last call, and note others; see `Recovery._retire`."""
        old, self._old = self._old, [comm for comm in old if comm != self._mpi.COMM_NULL]
        for comm in old:
            with suppress(self._mpi.Exception):
                comm.Free()

    def _call_spares(self) -> None:
        self._sent = [self._ask(self._comm.isend, None, rank, _COME) for rank in self._others()]

    def _others(self) -> list[int]:
        return [rank for rank in range(self._comm.size) if rank not in self._members]

    def _last_message(self, rank: int) -> int | None:
        """Return the tag of a rank's last message; 0: there is none; None: it has died."""
        for tag in (_COME, _END):
            found = self._ask(self._comm.iprobe, rank, tag)
            if found is None:
                return None
            if found:
                self._ask(self._comm.recv, None, rank, tag)
                return tag
        return 0

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return what an MPI call returns; None if the other rank has died."""
        try:
            return call(*args)
        except self._mpi.Exception:
            return None
