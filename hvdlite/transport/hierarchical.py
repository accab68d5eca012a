"""The transport of several nodes: shared memory within each, MPI between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.base.reduction import ReduceOp, Scaling
from hvdlite.transport.mpi import MPITransport
from hvdlite.transport.shared_memory.barrier import Barrier
from hvdlite.transport.shared_memory.transport import SharedMemoryTransport
from hvdlite.transport.transport import Join, Transport
from hvdlite.world.world import World


class HierarchicalTransport(MPITransport):
    """MPI over all ranks, with an allreduce in three steps, of which only the second uses it.

    Each rank reduces one slice over its node; then all of them at once reduce their slices over the
    nodes; then every rank copies the slices of its node's other ranks. So each byte crosses the
    network once for a node, not once for a rank. Where nodes have different numbers of ranks there
    are as many slices as the smallest node has ranks.

    16-bit floats travel as float32 between the nodes, since partial sums need not fit them.
    """

    title = "shared memory within nodes, MPI between them"

    def __init__(self, MPI: Any, world: World, barrier: Barrier) -> None:  # noqa: N803
        ranks = [world.nodes.count(node) for node in set(world.nodes)]
        cross = MPITransport(MPI, world.cross, (), world.create)
        super().__init__(MPI, world.comm, world.ids, world.create)
        self._node = SharedMemoryTransport(barrier, world.node.rank, cross, min(ranks))
        self._nodes = len(ranks)
        self.arena = barrier.arena

    @classmethod
    def connect(cls, MPI: Any, world: World, join: Join) -> Transport | None:  # noqa: N803
        barrier = join() if len(set(world.nodes)) < world.comm.size else None
        return None if barrier is None else cls(MPI, world, barrier)

    def revoke(self) -> None:
        super().revoke()
        self._node.revoke()

    def check_alive(self) -> None:
        self._node.check_alive()

    def leave(self) -> None:
        self._node.leave()
        super().leave()

    def empty(self, size: int, dtype: np.dtype[Any]) -> Any:
        return self._node.empty(size, dtype)

    def release(self, array: Any) -> None:
        self._node.release(array)

    def _reserve(self, data: Sequence[Any]) -> None:
        """Reserve nothing: an allreduce moves the arrays in chunks."""

    def allreduce(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        """Reduce within the node and across nodes, slice by slice."""
        self._node.allreduce(send, result, op, scaling)

    def allreduce_all(
        self, sends: Sequence[Any], results: Sequence[Any], op: ReduceOp, scaling: Scaling
    ) -> None:
        """Reduce several arrays together, unless sums would depend on what they are fused with."""
        if self._nodes > 2:
            for send, result in zip(sends, results, strict=True):
                self.allreduce(send, result, op, scaling)
        else:
            super().allreduce_all(sends, results, op, scaling)

    def allreduce_fused(self, array: Any, op: ReduceOp, scaling: Scaling) -> None:
        self.allreduce(array, array, op, scaling)

    @property
    def communicators(self) -> list[Any]:
        return [*self._node.communicators, *super().communicators]

    def close(self) -> None:
        self._node.close()
        super().close()
