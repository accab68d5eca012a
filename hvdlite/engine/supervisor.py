"""Supervisor: forms the world of a job, and decides what happens when a rank dies.

The transport notices a death: `Barrier._failure` (``transport/shared_memory/barrier.py``) on one
node, else MPI. `Supervisor` lets the waiting operations raise, and the launcher ends the job;
`Recovery` (``elastic/recovery.py``) forms a new world of the survivors instead. `choose` selects by
the settings. A lane runs its rounds through the `guard` of its supervisor. If that `survives`
deaths, an exchange may run twice: operations keep their inputs (`Operation.protect`), and ranks
confirm outcomes before they deliver them (`Rounds`).
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

#: Forms a world over a communicator and returns its engine; gets a function that makes further
#: communicators.
Build = Callable[[Any, Create], "Engine"]


class Supervisor:
    """Lets a rank's death end the job.

    Attributes:
        survives: Whether the job continues when a rank dies, so that exchanges may run again.
        renumbering: The lock under which ranks get other numbers. An operation is described and
            submitted under it.
        place: This process's number at the start of the job, and how many processes there were.
        process_sets: Process sets to register in the world. ``init()`` sets them; `form` may
            change them.
    """

    survives = False
    renumbering: AbstractContextManager[Any] = nullcontext()
    process_sets: Sequence[ProcessSet] = ()
    place: tuple[int, int]

    def form(self, MPI: Any, comm: Any, settings: Settings, build: Build) -> Engine:  # noqa: N803
        """Form a world, and return its engine, once this process is a rank; collective.

        Args:
            comm: As for ``init()``.
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
            enter: Called with the world of the survivors when ranks have died.
        """
        self.place = int(whole.comm.rank), int(whole.comm.size)

    def begin(self, engine: Engine) -> None:
        """Note that ``init()`` has ended; called with the engine of all ranks."""

    def add(self, engine: Engine) -> None:
        """Supervise the lanes of a further engine; that of all ranks comes first."""

    def remove(self, engine: Engine) -> None:
        """Stop supervising an engine, whose communicators are about to be freed."""

    def guard(self, lane: Lane) -> Callable[[], object]:
        """Return the function that runs a round of the lane."""
        return lane.rounds.run

    def check(self) -> None:
        """Raise, to end a wait of this rank, if it has to take part in a recovery."""

    def form_part(
        self,
        ids: Sequence[int],
        of: World,
        make: Callable[[World], Engine],
        enter: Callable[[Sequence[int], Engine | None], object],
    ) -> None:
        """Form the world of a process set; all ranks call it, members or not.

        Args:
            ids: Of its ranks; no other set of all ranks has the same.
            make: Makes the set's engine in the set's world.
            enter: Called with the ids and the engine; None on a rank outside the set.

        Raises:
            HorovodInternalError: The world cannot be formed.
        """
        engine = make(of.subset(ids)) if of.id in ids else None
        if engine is not None:
            self.add(engine)
        enter(ids, engine)

    def close(self) -> None:
        """Free its own resources; all lanes have been closed on all ranks."""


#: Selects the supervisor of a job by its settings; `hvdlite.assembly` replaces it.
choose: Callable[[Settings], Supervisor] = lambda settings: Supervisor()  # noqa: E731
