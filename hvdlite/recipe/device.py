"""The share of its node that is a rank's own."""

from __future__ import annotations

import os

from hvdlite import collectives, world


def threads_per_rank() -> int:
    """Return how many CPU threads this rank may use without crowding the others.

    These are the cores that the process may run on, divided by the ranks of the same node
    that may run on any of them. Collective: every rank calls it.

    Returns:
        At least 1.
    """
    own = (world.node_index(), frozenset(os.sched_getaffinity(0)))
    return _fair_share(own, collectives.allgather_object(own, name="threads_per_rank"))


def _fair_share(
    own: tuple[int, frozenset[int]], all_ranks: list[tuple[int, frozenset[int]]]
) -> int:
    node, cores = own
    rivals = sum(other == node and bool(cores & theirs) for other, theirs in all_ranks)
    return max(1, len(cores) // max(1, rivals))


def local_device_index(devices: int) -> int:
    """Return the index of the accelerator that this rank takes: its local rank.

    Args:
        devices: The number of accelerators that this process sees. 0: there are none,
            and the index says nothing.

    Raises:
        ValueError: There are accelerators, but fewer than ranks on this node.
    """
    if 0 < devices < world.local_size():
        raise ValueError(
            f"rank {world.rank()}: {world.local_size()} ranks on this node, but this process sees "
            f"{devices} accelerator(s): start at most {devices} ranks per node, make "
            "more of them visible (CUDA_VISIBLE_DEVICES), or hide them all to train on the CPU"
        )
    return world.local_rank()
