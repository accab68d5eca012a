"""The share of its node that is a rank's own."""

from __future__ import annotations

import os
from collections.abc import Sequence

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


def local_device_index(devices: Sequence[str]) -> int:
    """Return the index of the accelerator that this rank takes. Collective.

    Ranks of a node that see the same accelerators take one each, by local rank. Where a
    scheduler has given each rank its own, they see different ones, and each takes its first.

    Args:
        devices: What identifies each accelerator that this process sees, in their order
            (their UUIDs, say); at least one.

    Raises:
        ValueError: More ranks see these accelerators than there are; raised on all ranks.
    """
    own = (world.node_index(), tuple(devices))
    everyone = collectives.allgather_object(own, name="local_device_index")
    for rank, seen in enumerate(everyone):
        rivals, count = everyone.count(seen), len(seen[1])
        if rivals > count:
            raise ValueError(
                f"rank {rank}: {rivals} ranks on its node share {count} accelerator(s): start at "
                f"most {count} of them, make more accelerators visible (CUDA_VISIBLE_DEVICES), "
                "or hide them all to train on the CPU"
            )
    return everyone[: world.rank()].count(own)
