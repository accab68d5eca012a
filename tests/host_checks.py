"""Checks on each rank of a job over several hosts: ``python -m tests.host_checks NAME ...``.

A rank that finds something wrong ends with a traceback, and one that waits too long with its
stacks.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from pathlib import Path

import numpy as np

import hvdlite as hvd
from hvdlite.world import world
from tests.references import Digest, check_reduction, sample, samples

SECONDS = 200
"""When a rank that still waits shows its stacks and gives up."""


def received() -> int:
    """The bytes that have come to this host from others."""
    return int(Path("/proc/net/dev").read_text().partition("eth0:")[2].split()[0])


def layout(*counts: str) -> None:
    """The ranks are where the slots were: so many on host0, so many on host1, ..."""
    from mpi4py import MPI

    slots = [int(count) for count in counts]
    nodes = [node for node, count in enumerate(slots) for _ in range(count)]
    node, first = nodes[hvd.rank()], nodes.index(nodes[hvd.rank()])
    assert hvd.size() == len(nodes)
    assert MPI.Get_processor_name() == os.uname().nodename == f"host{node}"
    shared = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    assert (shared.rank, shared.size) == (hvd.rank() - first, slots[node])
    assert (hvd.local_rank(), hvd.local_size()) == (shared.rank, shared.size)
    peers = [other for other, count in enumerate(slots) if count > shared.rank]
    assert (hvd.cross_rank(), hvd.cross_size()) == (peers.index(node), len(peers))
    assert world.node_index() == node
    assert hvd.is_homogeneous() == (len(set(slots)) == 1)


def results() -> None:
    """Right results, the same bits on all ranks."""
    digest = Digest()
    for dtype in ("float32", "bfloat16", "int8"):
        for size in (1, 1_000_003):
            arrays = samples(hvd.size(), dtype, (size,))
            for op in (hvd.Sum, hvd.Average, hvd.Max):
                result = hvd.allreduce(arrays[hvd.rank()], op=op)
                digest.add(result)
                check_reduction(result, arrays, op)
        shapes = [(100_003 + rank, 3) for rank in range(hvd.size())]
        parts = [sample(rank, dtype, shape) for rank, shape in enumerate(shapes)]
        gathered = hvd.allgather(parts[hvd.rank()])
        np.testing.assert_array_equal(gathered, np.concatenate(parts))
        for root in range(hvd.size()):
            sent = parts[root] if hvd.rank() == root else np.zeros_like(parts[root])
            np.testing.assert_array_equal(hvd.broadcast(sent, root_rank=root), parts[root])
    assert len(set(hvd.allgather_object(digest.value()))) == 1


def everything(*counts: str) -> None:
    """The ranks are where the slots were, and get right results."""
    layout(*counts)
    results()


def traffic(megabytes: str) -> None:
    """Print the bytes that an allreduce brings to a host, and the seconds that it takes."""
    array = np.ones(int(float(megabytes) * 1e6) // 4, np.float32)
    hvd.allreduce(array, op=hvd.Sum)  # Connections are made in the first one.
    hvd.barrier()
    before, started = received(), time.perf_counter()
    hvd.allreduce(array, op=hvd.Sum)
    seconds = time.perf_counter() - started
    hvd.barrier()  # So that the counter has what the others sent.
    print(hvd.rank(), received() - before, seconds, flush=True)


def fail_on(rank: str) -> None:
    """One rank fails while the others wait for it."""
    if hvd.rank() == int(rank):
        raise AssertionError("the reason")
    hvd.barrier()


CHECKS = (layout, everything, traffic, fail_on)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    name, *arguments = sys.argv[1:]
    hvd.init()
    {check.__name__: check for check in CHECKS}[name](*arguments)
