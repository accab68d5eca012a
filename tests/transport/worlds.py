"""Transports of one node, or of several simulated ones, over MPI or among threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from hvdlite.transport import Transport
from hvdlite.transport.registry import connect
from hvdlite.transport.shared_memory.barrier import Barrier
from hvdlite.transport.shared_memory.segment import Arena
from hvdlite.transport.shared_memory.transport import SharedMemoryTransport
from hvdlite.world import mpi
from hvdlite.world.world import World


@contextlib.contextmanager
def connected(local_size: int = 0, shared_memory: bool = True) -> Iterator[Transport]:
    """Connect the ranks of this job by the transport that `connect` chooses.

    Args:
        local_size: the ranks that count as one node; 0: as the hardware says.
        shared_memory: whether it may be used.
    """
    MPI = mpi.load()
    world = World.split(MPI, MPI.COMM_WORLD.Dup(), local_size)
    made = connect(MPI, world, shared_memory)
    yield made
    made.close()
    world.free()


def barriers(size: int) -> list[Barrier]:
    """Return the barriers of threads of this process, as global ranks 10, 11, ..."""
    arenas = [Arena() for _ in range(size)]
    processes = [(os.getpid(), arena.key) for arena in arenas]
    ranks = [10 + index for index in range(size)]
    return [Barrier(index, ranks, arena, processes) for index, arena in enumerate(arenas)]


def threads(size: int) -> list[SharedMemoryTransport]:
    """Return the shared memory transports of threads of this process."""
    return [SharedMemoryTransport(barrier, index) for index, barrier in enumerate(barriers(size))]


def placed(made: Transport, array: Any, place: str) -> Any:
    """Return a copy of an array, in the transport's memory ("segment") or in this rank's own."""
    copy = made.empty(array.size, array.dtype) if place == "segment" else np.empty_like(array)
    copy[...] = array
    return copy
