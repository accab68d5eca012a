"""Start: forms the first world of a job whose ranks may die, again if one dies meanwhile.

Spares wait here until they become ranks.
"""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hvdlite.base.settings import Settings
from hvdlite.elastic import spares
from hvdlite.elastic.forming import require_survival
from hvdlite.elastic.recovery import Recovery
from hvdlite.elastic.spares import Pool
from hvdlite.engine import Engine
from hvdlite.engine.process_sets import ProcessSet
from hvdlite.engine.supervisor import Build
from hvdlite.observe import status
from hvdlite.world import mpi, world

#: The pool of this job's ranks and spares; None: without HVDLITE_ELASTIC.
pool: Pool | None = None
# What the first `init` has asked for; None: all ranks.
_asked: Any = None
# Where this process has come in as a spare: the ranks that have not.
_holders: list[int] | None = None
_NO_STATE = (
    "this process has come in as a spare, and the other ranks are in a function under "
    "hvd.elastic.run already; communicate before that function on no rank (hvd.elastic.run takes "
    "the place of the broadcasts)"
)


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


def take_holders() -> list[int] | None:
    """Return which ranks have been there before this process came in as a spare.

    None: it is no spare, or this has been asked before. Until then a spare must not communicate.
    """
    global _holders
    holders, _holders = _holders, None
    return holders


class Start(Recovery):
    """The start of a world, and the recovery of its ranks from the death of others.

    Args:
        message: For the other ranks, which form their world again with this one; None: this one
            has been a spare.
        again: Whether there has been a world before.

    Attributes:
        messages: Those of the ranks, by rank; None for those that were spares.
    """

    def __init__(self, message: Message | None = None, again: bool = False) -> None:
        super().__init__()
        self._message = message
        self._again = again
        self.messages: list[Message | None] = []

    def form(self, MPI: Any, comm: Any, settings: Settings, build: Build) -> Engine:  # noqa: N803
        global _holders
        if not self._again:
            _find_pool(MPI, comm, settings)
        assert pool is not None
        if pool.place[1] > 1:
            mpi.leave_unfinalized()
            status.note_start()
        if not pool.is_member:
            _holders = []
        if not self._again and _holders is None:
            self._message = Message(pool.rank, [each.ranks for each in self.process_sets])
        before = len(pool.places)
        engine, messages = pool.form(self._message, build, grow=self._again or _holders is not None)
        if _holders is not None:
            _holders[:] = [rank for rank, message in enumerate(messages) if message]
        if [message and message.rank for message in messages] != [*range(before)]:
            self.process_sets = [*_with_ranks(self.process_sets, messages)]
        self.messages = messages
        self._places = pool.places
        self.place = pool.place
        return engine

    def begin(self, engine: Engine) -> None:
        """Refuse operations on a spare until `take_holders` is called."""
        if _holders is not None:
            for lane in engine.lanes:
                lane.refuse(_NO_STATE)


def _find_pool(MPI: Any, comm: Any, settings: Settings) -> None:  # noqa: N803
    """Find the pool, with the ranks for which `init` asks, and the spares."""
    global pool, _asked
    if comm == MPI.COMM_WORLD:
        comm = None
    if pool is not None and comm is not None and comm not in (_asked, pool.world):
        if settings.spares:
            raise ValueError(
                f"rank {pool.rank}: comm={comm!r} is not what init() got first "
                f"({_asked!r}), and spares wait for those ranks; give the same, or use no "
                "spares"
            )
        pool = None  # the script has others in mind
    if pool is None:
        _asked = comm
        processes = world.choose(MPI, comm)
        spares.check(settings, processes.size)
        if processes.size > 1:
            require_survival(MPI, processes)
        pool = Pool(MPI, processes, settings.spares)
        if settings.spares:
            atexit.register(pool.end)


def _with_ranks(
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
