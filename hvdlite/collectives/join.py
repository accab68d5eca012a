"""Join: a rank without data takes part in the operations of the others with zeros.

While a `Join` is pending on some ranks, `decide` in ``engine/agreement.py`` counts an operation
that only these lack as ready, and `Rounds._stand_in` in ``engine/rounds.py`` gives them one with
zeros (`_allreduce_zeros` in ``allreduce.py``). `Join.execute` runs once all ranks have joined.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hvdlite.base.interrupts import uninterrupted
from hvdlite.engine import Engine, runtime
from hvdlite.engine.calls import Calls
from hvdlite.engine.operation import Operation, Signature
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.errors import HorovodInternalError
from hvdlite.transport import Transport
from hvdlite.world import world


def join(process_set: ProcessSet = global_process_set) -> int:
    """Declare that this rank has no more data, and wait until all ranks do so.

    Until then this rank takes part with zeros in the allreduces of the others, those of gradients
    included; averages still divide by the number of all ranks. Other collectives raise on the
    ranks that call them meanwhile.

    Afterwards the ranks number their calls without a name alike, however many each has made.

    The weights of a joined rank stop changing. Afterwards broadcast the weights of the returned
    rank, which has taken every step.

    If an exception from a signal handler ends the wait, this rank stays joined; call again to
    continue waiting.

    Args:
        process_set: The ranks that take part.

    Returns:
        The rank that joined last of those that live, the same on all.

    Raises:
        ValueError: This rank is not in the process set.
        HorovodInternalError: A rank has shut down without joining, or communication failed.
    """
    engine = runtime.engine(process_set)
    _submit_joins(engine)
    try:
        ids = [handle.wait() for handle in engine.joins][-1]
    except HorovodInternalError:
        engine.joins.clear()
        raise
    engine.joins.clear()
    return world.current().numbers(ids)[0]


@uninterrupted
def _submit_joins(engine: Engine) -> None:
    if not engine.joins:  # otherwise an earlier call was interrupted in its wait
        lanes = (engine.gradients, engine.named)
        engine.joins.extend([lane.submit(Join(engine.calls)) for lane in lanes])


class Join(Operation):
    """A wait until every rank has joined; until then this one takes part with zeros.

    Args:
        calls: The calls without a name, of which this rank may have made fewer than others.
    """

    stall_exempt = joins = True

    def __init__(self, calls: Calls) -> None:
        super().__init__("join()", Signature((("the operation", "join"),)))
        self._calls = calls

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> list[int]:
        """Return the ids of the ranks, that of the one that joined last first."""
        here = time.monotonic() - self.submitted, self._calls.counts
        waited, counts = zip(*transport.gather_objects(here), strict=True)
        self._calls.catch_up(counts)
        return [each for _, each in sorted(zip(waited, transport.members, strict=True))]
