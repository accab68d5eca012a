"""Start: forms the first world of a job whose ranks may die, again if one dies meanwhile.

Spares wait here until they become ranks.
"""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hvdlite.base.settings import Settings
from hvdlite.elastic import spares
from hvdlite.elastic.forming import Forming, require_survival
from hvdlite.elastic.recovery import Recovery
from hvdlite.elastic.spares import Pool
from hvdlite.engine import Engine
from hvdlite.engine.process_sets import ProcessSet
from hvdlite.engine.supervisor import Build
from hvdlite.errors import HorovodInternalError
from hvdlite.observe import status
from hvdlite.world import mpi, world
from hvdlite.world.world import World

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


class Message(NamedTuple):
    """A rank's message to the others when they form a world.

    Attributes:
        report: From the caller; None: the rank has nothing yet that a spare would need.
        rank: The rank's number before.
        sets: The ranks of the process sets, by the numbers before.
    """

    report: Any
    rank: int
    sets: list[list[int] | None]


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


class Start(Recovery):
    """The start of a world, and the recovery of its ranks from the death of others.

    Args:
        message: For the other ranks, which form their world again with this one; None: this one
            has been a spare.
        again: Whether there has been a world before.

    Attributes:
        reports: What the ranks have brought, by rank; None for those that were spares.
    """

    def __init__(self, message: Message | None = None, again: bool = False) -> None:
        super().__init__()
        self._message = message
        self._again = again
        self.reports: list[Any] = []

    def select(self, MPI: Any, comm: Any, settings: Settings) -> Any:  # noqa: N803
        global _pool, _asked, _holders
        if self._again:
            assert _pool is not None
            _pool.form(self._message)
            return _pool.world
        if comm == MPI.COMM_WORLD:
            comm = None
        if _pool is not None and comm is not None and comm not in (_asked, _pool.world):
            if settings.spares:
                raise ValueError(
                    f"rank {_pool.world.rank}: comm={comm!r} is not what init() got first "
                    f"({_asked!r}), and spares wait for those ranks; give the same, or use no "
                    "spares"
                )
            _pool = None  # the script has others in mind
        if _pool is None:
            _asked = comm
            processes = world.choose(MPI, comm)
            spares.check(settings, processes.size)
            _pool = Pool(MPI, processes, settings.spares)
            if settings.spares:
                atexit.register(_pool.end)
            if not _pool.is_member:
                mpi.leave_unfinalized()
                status.note_start()
                _pool.wait()
                _holders = []
        if _holders is None:
            sets = [each.ranks for each in self.process_sets]
            self._message = Message(None, _pool.world.rank, sets)
        return _pool.world

    def form(self, MPI: Any, comm: Any, build: Build) -> Engine:  # noqa: N803
        assert _pool is not None
        engine = super().form(MPI, comm, build) if comm.size == 1 else self._form(MPI, comm, build)
        messages: list[Message | None] = _pool.take_messages()
        if _holders is not None:
            _holders[:] = [rank for rank, message in enumerate(messages) if message]
        if messages:
            self.process_sets = [*_with_ranks(self.process_sets, messages)]
        self.reports = [message and message.report for message in messages]
        return engine

    def _form(self, MPI: Any, comm: Any, build: Build) -> Engine:  # noqa: N803
        """Form the world; if a rank dies meanwhile, the others form another one."""
        assert _pool is not None
        require_survival(MPI, comm)
        mpi.leave_unfinalized()
        status.note_start()
        while True:
            made: list[Any] = []
            engine = None
            with Forming(MPI, _pool.world, made) as forming:
                engine = build(forming.create(_pool.world.Dup), forming.create)
            if forming.failure is None and engine is not None:
                return engine
            if engine is not None:
                engine.abandon()
            is_again = self._message is None or self._message.report is not None
            if not _pool.form(self._message, made, grow=is_again):
                if isinstance(forming.failure, ValueError):  # of a setting or an argument
                    raise forming.failure
                raise HorovodInternalError(
                    f"rank {_pool.world.rank}: the ranks cannot communicate, although none has "
                    f"died ({forming.failure}); see what each of them says, and start the job again"
                ) from forming.failure

    def watch(
        self,
        MPI: Any,  # noqa: N803
        whole: World,
        settings: Settings,
        enter: Callable[[World], object],
    ) -> None:
        assert _pool is not None
        if whole.comm.size > 1:
            super().watch(MPI, whole, settings, enter)
            self._places = _pool.places
        self.place = _pool.place

    def begin(self, engine: Engine) -> None:
        """Refuse operations on a spare until `take_holders` is called."""
        if _holders is not None:
            for lane in engine.lanes:
                lane.refuse(_NO_STATE)


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
