"""The self test that ``hvdlite check`` runs on two ranks: every collective, and its speed."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from logging.handlers import BufferingHandler
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite.engine import runtime
from hvdlite.tools.bench.measurement import Contender, Ranks, interleave

#: The transports to try, with the settings that lead to them.
TRANSPORTS: dict[str, dict[str, str]] = {
    "shared memory": {},
    "MPI": {"HVDLITE_SHARED_MEMORY": "0"},
}
NBYTES = 16 * 2**20
SECONDS = 60
"""The most time that it takes; a rank that needs more is killed by SIGALRM."""
_SECONDS, _MAX_ROUNDS = 1.0, 20


def size() -> int:
    """Return the number of ranks that MPI knows."""
    signal.alarm(SECONDS)
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


def run() -> dict[str, Any]:
    """Run every collective; collective.

    Returns:
        ``transport``: the one that was used; ``wrong``: the collectives with wrong results;
        ``seconds`` and ``memcpy``: of a sum of NBYTES, and of a copy; ``warnings``: of hvdlite.
    """
    signal.alarm(SECONDS)
    handler = BufferingHandler(1000)
    logging.getLogger("hvdlite").addHandler(handler)
    data = np.full(NBYTES // 4, 0.0, np.float32)  # written, so that it is real memory
    target = data.copy()
    memcpy = _seconds(lambda: np.copyto(target, data))
    hvd.init()
    wrong = [name for name, right in _collectives(hvd.rank(), hvd.size()) if not right]
    found = {
        "transport": runtime.engine().named.transport.title,
        "wrong": wrong,
        "seconds": _seconds(lambda: hvd.allreduce(data, op=hvd.Sum, name="bandwidth", out=data)),
        "memcpy": memcpy,
        "warnings": [record.getMessage() for record in handler.buffer],
    }
    hvd.shutdown()
    return found


def _collectives(rank: int, size: int) -> Iterator[tuple[str, bool]]:
    """Yield each collective's name, and whether its result is the closed form's."""
    total = size * (size + 1) // 2
    own = np.full(1001, rank + 1.0, np.float32)
    ranks = np.arange(size)
    for op, value in (
        (hvd.Sum, total),
        (hvd.Average, total / size),
        (hvd.Min, 1),
        (hvd.Max, size),
        (hvd.Product, float(np.prod(ranks + 1))),
    ):
        yield f"allreduce {op.name}", _all(hvd.allreduce(own, op=op), value)
    group = hvd.grouped_allreduce([own, own.astype(np.int64)], op=hvd.Sum)
    yield "grouped_allreduce", all(_all(each, total) for each in group)
    rows = hvd.allgather(np.full((rank + 1, 2), rank))
    yield "allgather", _all(rows, np.repeat(ranks, ranks + 1)[:, np.newaxis])
    yield "broadcast", _all(hvd.broadcast(own, size - 1), size)
    parts, _ = hvd.alltoall(np.arange(size) + size * rank, np.ones(size, int))
    yield "alltoall", _all(parts, ranks * size + rank)
    yield "reducescatter", _all(hvd.reducescatter(np.repeat(own[:1], size), op=hvd.Sum), total)
    yield "allgather_object", hvd.allgather_object({"rank": rank}) == [{"rank": r} for r in ranks]
    yield "broadcast_object", hvd.broadcast_object(rank, 0) == 0
    hvd.barrier()
    yield "join", hvd.join() in ranks


def _all(found: Any, expected: Any) -> bool:
    return bool(np.all(found == expected))


def _seconds(call: Callable[[], object]) -> float:
    """Return the median time of some calls, on all ranks at once."""
    from mpi4py import MPI

    ranks, contenders = Ranks(MPI.COMM_WORLD), [Contender("", call)]
    found = interleave(ranks, contenders, rounds=_MAX_ROUNDS, seconds=_SECONDS, at_least=2)
    (times,) = found.values()
    return float(np.median(times[1:]))


if __name__ == "__main__":
    print(f"{size()} ranks:", run())
