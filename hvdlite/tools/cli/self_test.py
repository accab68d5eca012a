"""The program that ``hvdlite check`` runs on two ranks: every collective on every transport.

Each process writes its findings as JSON into a file of its own, step by step, so that they are
complete up to the step that failed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite.engine import runtime
from hvdlite.tools.bench.measurement import Contender, Limit, Ranks, interleave

#: The transports to try, with the settings that lead to them.
TRANSPORTS: dict[str, dict[str, str]] = {
    "shared memory": {},
    "MPI": {"HVDLITE_SHARED_MEMORY": "0"},
}
NBYTES = 16 * 2**20
_SECONDS, _MAX_ROUNDS = 1.0, 20


def main(folder: str) -> None:
    """Write the findings of this process into ``folder``."""
    path = Path(folder) / f"{os.getpid()}.json"
    found: dict[str, Any] = {}

    def write(**news: Any) -> None:
        found.update(news)
        path.write_text(json.dumps(found))

    from mpi4py import MPI

    write(size=MPI.COMM_WORLD.size)
    if MPI.COMM_WORLD.size < 2:
        return
    source, target = _memory(), _memory()
    memcpy = _seconds(lambda: np.copyto(target, source))
    results: dict[str, Any] = {}
    for name, settings in TRANSPORTS.items():
        results[name] = {"state": "began"}
        write(memcpy_seconds=memcpy, transports=results)
        results[name] = _try(settings)
        write(transports=results)


def _try(settings: dict[str, str]) -> dict[str, Any]:
    """Run every collective in a world with these settings, and time the largest."""
    handler = BufferingHandler(1000)
    logger = logging.getLogger("hvdlite")
    logger.addHandler(handler)
    logger.propagate = False
    os.environ.update(settings)
    try:
        hvd.init()
        try:
            wrong = [name for name, right in _collectives(hvd.rank(), hvd.size()) if not right]
            data = _memory()
            seconds = _seconds(lambda: hvd.allreduce(data, op=hvd.Sum, name="bandwidth", out=data))
            return {
                "state": "wrong" if wrong else "works",
                "transport": runtime.engine().named.carrier,
                "wrong": wrong,
                "seconds": seconds,
                "warnings": [record.getMessage() for record in handler.buffer],
            }
        finally:
            hvd.shutdown()
    except Exception as error:
        return {"state": "failed", "error": f"{type(error).__name__}: {error}"}
    finally:
        logger.removeHandler(handler)
        for name in settings:
            del os.environ[name]


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


def _memory() -> Any:
    return np.full(NBYTES // 4, 0.0, np.float32)  # written, so that it is real memory


def _seconds(call: Callable[[], object]) -> float:
    """Return the median time of some calls, on all ranks at once."""
    from mpi4py import MPI

    limit = Limit(_MAX_ROUNDS, _SECONDS, at_least=2)
    (times,) = interleave(Ranks(MPI.COMM_WORLD), [Contender("", call)], limit).values()
    return float(np.median(times[1:]))


if __name__ == "__main__":
    main(sys.argv[1])
