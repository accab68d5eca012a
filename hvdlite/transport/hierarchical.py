"""The transport of several nodes: shared memory within each, MPI between them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.base.reduction import ReduceOp, Scaling, accumulator, integer_mean, integer_sums
from hvdlite.transport.mpi import MPITransport
from hvdlite.transport.reduce import PreparedReduction, combine, is_integer_mean, reduce_into
from hvdlite.transport.shared_memory.barrier import LARGEST_CHUNK, Barrier
from hvdlite.transport.shared_memory.transport import SharedMemoryTransport
from hvdlite.transport.transport import Transport
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
        self._node = _NodeTransport(barrier, world.node.rank, cross, min(ranks))
        self._cross = cross
        self._nodes = len(ranks)
        self.barrier = barrier

    @classmethod
    def connect(cls, MPI: Any, world: World, barrier: Any) -> Transport | None:  # noqa: N803
        return cls(MPI, world, barrier) if barrier else None

    def revoke(self) -> None:
        """Revoke the communicators, and end waits on this node for this rank."""
        super().revoke()
        self._cross.revoke()
        self._node.leave()

    def check_alive(self) -> None:
        self._node.check_alive()

    def leave(self) -> None:
        self._node.leave()
        super().leave()

    def empty(self, size: int, dtype: np.dtype[Any]) -> Any:
        return self._node.empty(size, dtype)

    def release(self, array: Any) -> None:
        self._node.release(array)

    def reclaim(self, array: Any) -> None:
        self._node.reclaim(array)

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
        return [*self._cross.communicators, *super().communicators]

    def close(self) -> None:
        self._node.close()
        self._cross.close()
        super().close()


class _NodeTransport(SharedMemoryTransport):
    """The ranks of one node, each of which reduces its slices further, over the nodes.

    Args:
        cross: reduces a slice over the nodes.
        owners: how many ranks of this node have a slice; another may have fewer.
    """

    # Each chunk and each piece costs a message.
    chunk = LARGEST_CHUNK
    piece = sys.maxsize

    def __init__(self, barrier: Barrier, index: int, cross: Transport, owners: int) -> None:
        super().__init__(barrier, index)
        self._cross, self._owners = cross, owners

    def _is_small(self, nbytes: int) -> bool:
        return False

    def _owners_of(self, array: Any) -> int:
        return self._owners

    def _reducer(self, dtype: np.dtype[Any], op: ReduceOp, scaling: Scaling) -> PreparedReduction:
        return lambda out, parts: [(self._reduce_across, (out, parts, op, scaling))]

    def _reduce_across(
        self, out: Any, parts: Sequence[Any], op: ReduceOp, scaling: Scaling
    ) -> None:
        """Reduce a slice over this node's ranks, and then over the nodes."""
        if is_integer_mean(out.dtype, op, scaling):
            sums = integer_sums(parts, scaling.divisor)
            for total in sums:
                self._cross.allreduce(total, total, op, Scaling())
            out[...] = integer_mean(sums, scaling.divisor)
        elif accumulator(out.dtype) == out.dtype:
            reduce_into(out, parts, op, Scaling())
            self._cross.allreduce(out, out, op, scaling)
        else:  # 16-bit floats stay wide until the end
            total = combine(parts, op)
            self._cross.allreduce(total, total, op, scaling)
            out[...] = total
