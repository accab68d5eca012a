"""Each rank's share of the cores and accelerators of its node."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hvdlite import collectives
from hvdlite.world import parts, world


def threads_per_rank() -> int:
    """Return the number of CPU threads for this rank; collective.

    This is the number of cores that the process may run on, divided by the number of ranks of
    the node that may run on any of them. With virtual ranks it is 1: the bits of a result depend on
    the number of threads.

    Returns:
        At least 1.
    """
    if parts.current.are_fixed:
        return 1
    own = node, cores = world.node_index(), frozenset(os.sched_getaffinity(0))
    everyone = collectives.allgather_object(own, name="threads_per_rank")
    rivals = sum(bool(other == node and cores & theirs) for other, theirs in everyone)
    return max(1, len(cores) // rivals)


def local_device_index(devices: Sequence[str]) -> int | None:
    """Return the index of the accelerator for this rank; collective.

    Ranks of a node that see the same accelerators take one each, by local rank. If a
    scheduler has given each rank its own, they see different ones, and each takes its first.

    Args:
        devices: Unique names (such as UUIDs) of the accelerators that this process sees, in
            order.

    Returns:
        The index, or None if no rank sees an accelerator.

    Raises:
        ValueError: More ranks see some accelerators than there are, or only some ranks see
            any; raised on all ranks.
    """
    own = (world.node_index(), tuple(devices))
    everyone = collectives.allgather_object(own, name="local_device_index")
    if not any(seen for _, seen in everyone):
        return None
    for rank, (node, seen) in enumerate(everyone):
        rivals = everyone.count((node, seen))
        if rivals > len(seen):
            raise ValueError(
                f"rank {rank}: {rivals} rank(s) on its node share {len(seen)} accelerator(s): "
                "start fewer, make more accelerators visible (CUDA_VISIBLE_DEVICES), or hide "
                "them from all ranks to train on the CPU"
            )
    return everyone[: world.rank()].count(own)
