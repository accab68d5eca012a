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


def local_device_index(devices: Sequence[str]) -> int | None:
    """Return the index of the accelerator that this rank takes. Collective.

    Ranks of a node that see the same accelerators take one each, by local rank. Where a
    scheduler has given each rank its own, they see different ones, and each takes its first.

    Args:
        devices: What identifies each accelerator that this process sees, in their order
            (their UUIDs, say).

    Returns:
        None where no rank sees an accelerator.

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
