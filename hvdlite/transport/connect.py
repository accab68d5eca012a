"""The choice of a transport."""

from __future__ import annotations

import itertools
import logging
import os
from typing import Any

from hvdlite.transport.base import Transport
from hvdlite.transport.hierarchical import HierarchicalTransport
from hvdlite.transport.loopback import Loopback
from hvdlite.transport.mpi import MPITransport
from hvdlite.transport.shared_memory import futex
from hvdlite.transport.shared_memory.barrier import Barrier
from hvdlite.transport.shared_memory.segment import Arena
from hvdlite.transport.shared_memory.transport import SharedMemoryTransport
from hvdlite.world import World

_log = logging.getLogger("hvdlite")


def connect(MPI: Any, world: World, shared_memory: bool = True) -> Transport:  # noqa: N803
    """Return the best transport for a world's ranks; collective.

    Args:
        MPI: the module ``mpi4py.MPI``.
        world: the ranks and their nodes; the transport makes communicators of its own.
        shared_memory: use it; the same on all ranks.
    """
    transport = _choose(MPI, world, shared_memory)
    transport.members = world.ranks
    return transport


def _choose(MPI: Any, world: World, shared_memory: bool) -> Transport:  # noqa: N803
    if world.comm.size == 1:
        return Loopback()
    largest = max(world.nodes.count(node) for node in set(world.nodes))
    if not shared_memory or largest == 1:
        return MPITransport(MPI, world.comm, world.ranks)
    try:
        barrier, failure = _sit_down(world), None
    except OSError as error:
        barrier, failure = None, error
    if _anywhere(world, failure):
        return MPITransport(MPI, world.comm, world.ranks)
    assert barrier is not None
    if world.node.size == world.comm.size:
        return SharedMemoryTransport(barrier, world.node.rank)
    smallest = min(world.nodes.count(node) for node in set(world.nodes))
    cross = MPITransport(MPI, world.cross)
    node = SharedMemoryTransport(barrier, world.node.rank, cross, smallest)
    whole = MPITransport(MPI, world.comm, world.ranks)
    return HierarchicalTransport(whole, node, len(set(world.nodes)))


def _sit_down(world: World) -> Barrier | None:
    """Take this rank's place, and find the others'; all ranks come along, whatever fails.

    Raises:
        OSError: this system or this user may not share memory so.
    """
    try:
        if not futex.is_supported():
            raise OSError("it needs Linux on x86-64")
        arena = Arena()
        here = os.getpid(), arena.key, os.sched_getaffinity(0)
    except OSError as error:
        arena, here, failure = None, None, error
    processes = world.node.allgather(here)
    if arena is None:
        raise failure
    if None in processes:
        return None  # that rank says why
    here_too = (node == world.node_index for node in world.nodes)
    ranks = list(itertools.compress(world.ranks, here_too))
    cores = set().union(*(cores for _, _, cores in processes))
    places = [(pid, key) for pid, key, _ in processes]
    crowded = len(places) > len(cores)
    return Barrier(world.node.rank, ranks, arena, places, cores if crowded else ())


def _anywhere(world: World, failure: OSError | None) -> bool:
    """Whether any rank has failed; the first one says so, for all."""
    failures = world.comm.allgather(None if failure is None else str(failure))
    failed = {rank: text for rank, text in enumerate(failures) if text is not None}
    if failed and world.comm.rank == 0:
        rank, text = next(iter(failed.items()))
        _log.warning(
            "rank %d cannot share memory with the ranks of its node (%s); all ranks use MPI, which "
            "is slower; HVDLITE_SHARED_MEMORY=0 silences this",
            world.ranks[rank],
            text,
        )
    return bool(failed)
