"""Each rank's share of the cores and accelerators of its node."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hvdlite import collectives
from hvdlite.world import parts, world


def share_of_node(devices: Sequence[str]) -> tuple[int, int | None]:
    """Return the number of CPU threads for this rank, and its accelerator's index; collective.

    The threads are the cores that the process may run on, divided by the number of ranks of the
    node that may run on any of them; at least 1. With virtual ranks they are 1: the bits of a
    result depend on the number of threads.

    Ranks of a node that see the same accelerators take one each, by local rank. If a
    scheduler has given each rank its own, they see different ones, and each takes its first.
    The index is None if no rank sees an accelerator.

    Args:
        devices: Unique names (such as UUIDs) of the accelerators that this process sees, in
            order.

    Raises:
        ValueError: More ranks see some accelerators than there are, or only some ranks see
            any; raised on all ranks.
    """
    own = node, cores = world.node_index(), frozenset(os.sched_getaffinity(0))
    everyone = collectives.allgather_object((own, (node, tuple(devices))), name="share_of_node")
    rivals = sum(bool(other == node and cores & theirs) for (other, theirs), _ in everyone)
    threads = 1 if parts.current.are_fixed else max(1, len(cores) // rivals)
    seen_by = [seen for _, seen in everyone]
    if not any(seen for _, seen in seen_by):
        return threads, None
    for rank, (_, seen) in enumerate(seen_by):
        rivals = seen_by.count(seen_by[rank])
        if rivals > len(seen):
            raise ValueError(
                f"rank {rank}: {rivals} rank(s) on its node share {len(seen)} accelerator(s): "
                "start fewer, make more accelerators visible (CUDA_VISIBLE_DEVICES), or hide "
                "them from all ranks to train on the CPU"
            )
    return threads, seen_by[: world.rank()].count(seen_by[world.rank()])
