"""Supervisor: what a job does about the ranks of its world, at the start and when one dies.

The one here forms the world of the ranks that are asked for, and ends the job with the first of
them that dies. A room beside the core derives from it (`hvdlite.elastic`); `choose` selects it. A
lane asks its supervisor for the guard of its rounds, for the numbers that operations are described
by, and whether an exchange may be repeated. If so, inputs are kept (`Operation.protect`), and
outcomes are confirmed before they are delivered (`Rounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from hvdlite.base.settings import Settings
from hvdlite.world import world
from hvdlite.world.world import Create, World

if TYPE_CHECKING:
    from hvdlite.engine import Engine
    from hvdlite.engine.lane import Lane
    from hvdlite.engine.process_sets import ProcessSet

#: Forms a world over a communicator, with what makes further ones, and returns its engine.
Build = Callable[[Any, Create], "Engine"]


class Supervisor:
    """Ends the job when a rank dies.

    Attributes:
        survives: Whether the other ranks go on when one dies, so that exchanges may be repeated.
        renumbering: The lock under which ranks get other numbers. An operation is described and
            submitted under it.
        place: This process's number at the start of the job, and how many processes there were.
        process_sets: Those to register in the world. ``init()`` sets them; `form` may change them.
    """

    survives = False
    renumbering: AbstractContextManager[Any] = nullcontext()
    process_sets: Sequence[ProcessSet] = ()
    place: tuple[int, int]

    def select(self, MPI: Any, comm: Any, settings: Settings) -> Any:  # noqa: N803
        """Return the ranks to form a world of, for `form`; wait until this process is one of them.

        Args:
            MPI: The module ``mpi4py.MPI``.
            comm: As for ``init()``.
            settings: Settings read at ``init()``.
        """
        return comm

    def form(self, MPI: Any, comm: Any, build: Build) -> Engine:  # noqa: N803
        """Form a world, and return its engine; collective.

        Args:
            MPI: The module ``mpi4py.MPI``.
            comm: What `select` has returned.
            build: Called with a communicator of hvdlite's own.
        """
        return build(world.choose(MPI, comm), world.create_at_once)

    def watch(
        self,
        MPI: Any,  # noqa: N803
        whole: World,
        settings: Settings,
        enter: Callable[[World], object],
    ) -> None:
        """Supervise a world from now on.

        Args:
            MPI: The module ``mpi4py.MPI``.
            whole: All ranks.
            settings: Settings read at ``init()``.
            enter: Called with the world of those that are left when some have died.
        """
        self.place = int(whole.comm.rank), int(whole.comm.size)

    def begin(self, engine: Engine) -> None:
        """Hear that ``init()`` has come to its end, with the engine of all ranks."""

    def add(self, engine: Engine) -> None:
        """Supervise the lanes of an engine, too; the one of all ranks comes first."""

    def remove(self, engine: Engine) -> None:
        """Supervise an engine no more, whose communicators are about to be freed."""

    def guard(self, lane: Lane) -> Any:
        """Return an object that runs a round of a lane each time its ``run`` is called."""
        return lane.rounds

    def check(self) -> None:
        """End a wait of this rank by an exception, if there is something to do about a death."""

    def form_part(
        self,
        name: str,
        ids: Sequence[int],
        of: World,
        make: Callable[[World], Engine],
        enter: Callable[[Sequence[int], Engine | None], object],
    ) -> None:
        """Form the world of a process set; all ranks call it, members or not, with the same set.

        Args:
            name: The set's, unique among those of this world.
            ids: Of its ranks; see `World.ids`.
            of: The world of all ranks.
            make: Makes the set's engine in its world.
            enter: Called with the ids, and with the engine; None on a rank that is left out.

        Raises:
            HorovodInternalError: It is impossible.
        """
        engine = make(of.subset(ids)) if of.id in ids else None
        if engine is not None:
            self.add(engine)
        enter(ids, engine)

    def close(self) -> None:
        """Free what serves it; all lanes have been closed on all ranks."""


#: Selects the supervisor of a job by its settings; the facade knows the rooms beside the core.
choose: Callable[[Settings], Supervisor] = lambda settings: Supervisor()  # noqa: E731
