"""Bootstrap: the ranks form the world that `hvdlite.engine.runtime.init` starts in.

In a job in which ranks may die, they form another one if one of them does meanwhile, and spares
wait here until they are brought in.
"""

from __future__ import annotations

import atexit
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hvdlite.base import points, settings
from hvdlite.elastic import spares
from hvdlite.elastic.recovery import Recovery
from hvdlite.elastic.spares import Pool
from hvdlite.engine import Engine
from hvdlite.engine.process_sets import ProcessSet
from hvdlite.errors import HorovodInternalError
from hvdlite.observe import status
from hvdlite.observe.trace_file import Run
from hvdlite.virtual import ranks as virtual
from hvdlite.world import mpi, world
from hvdlite.world.forming import Forming, require_survival

#: Called with the new world when ranks have died; see `hvdlite.elastic.recovery.Recovery`.
Enter = Callable[[world.World, Mapping[int, int]], object]

_pool: Pool | None = None
# What the first `init` has asked for; None: all ranks.
_asked: Any = None
# Where this process has come in as a spare: the ranks that have not.
_holders: list[int] | None = None
_NO_STATE = (
    "this process has come in as a spare, and the other ranks are in a function under "
    "hvd.elastic.run already; communicate before that function on no rank (hvd.elastic.run takes "
    "the place of the broadcasts)"
)


class Brought(NamedTuple):
    """A rank's message to the others when they form a world.

    Attributes:
        report: From the caller; None: the rank has nothing yet that a spare would need.
        rank: The rank's number before.
        sets: The ranks of the process sets, by the numbers before.
    """

    report: Any
    rank: int
    sets: list[list[int] | None]


class Formed(NamedTuple):
    """A world and what serves it."""

    whole: world.World
    recovery: Recovery | None
    engine: Engine
    run: Run
    step: int


def pool() -> Pool | None:
    """Return the pool of this job's ranks and spares; None: without HVDLITE_ELASTIC."""
    return _pool


def take_holders() -> list[int] | None:
    """Return which ranks have been there before this process came in as a spare.

    None: it is no spare, or this has been asked before. Until then a spare must not communicate.
    """
    global _holders
    holders, _holders = _holders, None
    return holders


def first_message(rank: int, sets: list[list[int] | None]) -> Brought | None:
    """Return what a rank tells the others at the start; None: it comes in as a spare."""
    return Brought(None, rank, sets) if _holders is None else None


def take_messages() -> list[Brought | None]:
    """Return what the ranks have brought, by rank; empty: they have formed no world anew."""
    told: list[Brought | None] = [] if _pool is None else _pool.take_messages()
    if _holders is not None:
        _holders[:] = [rank for rank, message in enumerate(told) if message]
    return told


def refuse_early(engine: Engine) -> None:
    """Refuse operations on a spare until `take_holders` is called; its process sets are made."""
    if _holders is not None:
        for lane in engine.lanes:
            lane.refuse(_NO_STATE)


def form_anew(brought: Brought | None) -> Any:
    """Return the communicator of the ranks that live, and of spares; collective.

    Args:
        brought: For the other ranks; None: this rank has been a spare.
    """
    assert _pool is not None
    _pool.form(brought)
    return _pool.world


def enter_pool(
    MPI: Any,  # noqa: N803
    comm: Any | Sequence[int] | None,
    values: settings.Settings,
) -> Any:
    """Return the communicator of the ranks; a spare waits here.

    Raises:
        ValueError: Others are asked for than at first, and there are spares.
    """
    global _pool, _asked, _holders
    if comm == MPI.COMM_WORLD:
        comm = None
    if _pool is None:
        _asked = comm
        processes = world.choose(MPI, comm)
        spares.check(values, processes.size)
        _pool = Pool(MPI, processes, values.spares)
        if values.spares:
            atexit.register(_pool.end)
        if not _pool.is_member:
            mpi.leave_unfinalized()
            status.note_start()
            _pool.wait()
            _holders = []
    elif comm is not None and comm not in (_asked, _pool.world):
        if values.spares:
            raise ValueError(
                f"rank {_pool.world.rank}: comm={comm!r} is not what init() got first "
                f"({_asked!r}), and spares wait for those ranks; give the same, or use no spares"
            )
        _pool = None  # the script has others in mind
        return enter_pool(MPI, comm, values)
    return _pool.world


def form(
    MPI: Any,  # noqa: N803
    comm: Any,
    values: settings.Settings,
    brought: Brought | None,
    enter: Enter,
) -> Formed:
    """Form a world and make its engine; collective.

    If a rank of the pool dies meanwhile, the others form another one.

    Args:
        MPI: The module ``mpi4py.MPI``.
        comm: Over the ranks; see `hvdlite.world.world.choose`.
        values: The settings.
        brought: For the other ranks, if they form another one; None: this rank has been a spare.
        enter: Called with the new world when ranks have died later.

    Raises:
        HorovodInternalError: A rank cannot, and none has died.
        ValueError: The ranks' settings or arguments do not fit.
    """
    step = virtual.take_kept()
    if _pool is None or comm.size == 1:
        chosen = world.choose(MPI, comm)
        return _connect(MPI, chosen, values, step, enter, world.create_at_once)
    require_survival(MPI, comm)
    mpi.leave_unfinalized()
    status.note_start()
    while True:
        made: list[Any] = []
        formed = None
        with Forming(MPI, _pool.world, made) as forming:
            chosen = forming.create(_pool.world.Dup)
            formed = _connect(MPI, chosen, values, step, enter, forming.create)
        if forming.failure is None and formed is not None:
            return formed
        if formed is not None:
            formed.engine.abandon()
        is_anew = brought is None or brought.report is not None
        if not _pool.form(brought, made, grow=is_anew):
            if isinstance(forming.failure, ValueError):  # of a setting or an argument
                raise forming.failure
            raise HorovodInternalError(
                f"rank {_pool.world.rank}: the ranks cannot communicate, although none has died "
                f"({forming.failure}); see what each of them says, and start the job again"
            ) from forming.failure


def _connect(
    MPI: Any,  # noqa: N803
    comm: Any,
    values: settings.Settings,
    step: int,
    enter: Enter,
    create: world.Create,
) -> Formed:
    """Form a world and make its engine; collective.

    Args:
        MPI: The module ``mpi4py.MPI``.
        comm: A communicator of hvdlite's own over the ranks.
        values: The settings.
        step: This rank's step of virtual ranks.
        enter: Called with the new world when ranks have died later.
        create: Makes further communicators.
    """
    settings.compare(values, comm)
    virtual.check(values.virtual_ranks, comm.size)
    whole = world.World.split(MPI, comm, values.force_local_size, create)
    if points.reach is not None:
        points.reach("form")
    step = max(whole.comm.allgather(step))
    run = Run(whole.comm.bcast(os.urandom(8).hex()), 0)
    recovery = None
    if _pool is not None and whole.comm.size > 1:
        recovery = Recovery(MPI, whole, values, enter, _pool.places)
    engine = Engine(MPI, whole, values, recovery=recovery)
    return Formed(whole, recovery, engine, run, step)


def with_ranks(
    process_sets: Sequence[ProcessSet], told: Sequence[Brought | None]
) -> Iterator[ProcessSet]:
    """Yield process sets with the ranks that they have in the world that has been formed.

    Args:
        process_sets: Those of the script; a spare's does not know of all that there are by now.
        told: The messages of all ranks of that world; empty: they have formed none anew.
    """
    sets: Iterable[list[int] | None] = next((each.sets for each in told if each), ())
    new_ranks = {each.rank: new for new, each in enumerate(told) if each}
    for given, before in itertools.zip_longest(process_sets, sets):
        process_set = given or ProcessSet(before)
        if before is not None:
            process_set.ranks = [new_ranks[rank] for rank in before if rank in new_ranks]
        if process_set.ranks != [] or not told:
            yield process_set
