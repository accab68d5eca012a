"""Ranks of the count of what a step sends."""

from __future__ import annotations

import sys
import time

import numpy as np
from mpi4py import MPI

import hvdlite as hvd
from hvdlite.compression import Parameter, Reduction
from hvdlite.engine import runtime
from hvdlite.gradients.exchange import GradientExchange
from tests.benchmarks.growth import BUCKETS, NBYTES, SUMS


def main(steps: int) -> None:
    """Exchange gradients, and print the generations on rank 0."""
    hvd.init()
    engine = runtime.engine()
    parameters = [
        Parameter(f"{number}", (NBYTES // 4,), np.dtype(np.float32)) for number in range(BUCKETS)
    ]
    exchange = GradientExchange(engine, "model", parameters, hvd.Compression.none, Reduction())
    for step in range(steps):
        exchange.begin()
        for number in range(BUCKETS):
            exchange.buckets.slot(number)[...] = np.full(NBYTES // 4, hvd.rank() + step)
            exchange.mark(number)
        exchange.finish()
        expected = step + (hvd.size() - 1) / 2
        assert all((exchange.buckets.result_slot(n) == expected).all() for n in range(BUCKETS))
    if hvd.rank() == 0:
        node = getattr(engine.gradients.transport, "_node", engine.gradients.transport)
        barrier = getattr(node, "_barrier", None)
        print(barrier.last if barrier is not None else 0)
    hvd.shutdown()


def timed(comm: MPI.Comm) -> list[float]:
    """Return the median seconds of sums of `SUMS` bytes."""
    hvd.init(comm)
    medians = []
    for nbytes in SUMS:
        array = np.ones(nbytes // 4, np.float32)
        seconds = []
        for _ in range(12):
            comm.Barrier()
            start = time.perf_counter()
            hvd.allreduce(array, op=hvd.Average, name=f"{nbytes}", out=array)
            seconds.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
        medians.append(float(np.median(seconds[2:])))
    hvd.shutdown()
    return medians


if __name__ == "__main__":
    main(int(sys.argv[1]))
