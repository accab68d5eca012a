"""Plain MPI: works wherever mpi4py does."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdlite.reduction import ReduceOp, Scaling
from hvdlite.transport import slices
from hvdlite.transport.base import Patience, Transport

# Counts are 32-bit in MPI 3: larger arrays travel in pieces of at most this many bytes.
_MAX_BYTES = 2**30
_NATIVE = {"float32", "float64", "int32", "int64", "uint32", "uint64", "complex64", "complex128"}


class MPITransport(Transport):
    """Collectives of one communicator, which the transport owns.

    Args:
        MPI: the module ``mpi4py.MPI``.
        comm: the communicator to duplicate; collective.
    """

    def __init__(self, MPI: Any, comm: Any) -> None:  # noqa: N803
        self._comm = comm.Dup()
        self.rank = int(comm.rank)
        self.size = int(comm.size)
        self._byte = MPI.BYTE
        self._in_place = MPI.IN_PLACE
        self._request = MPI.Request
        self._min = MPI.MIN
        self._ops = {
            ReduceOp.SUM: MPI.SUM,
            ReduceOp.MIN: MPI.MIN,
            ReduceOp.MAX: MPI.MAX,
            ReduceOp.PRODUCT: MPI.PROD,
        }

    def unanimous(self, word: bytes, patience: Patience) -> bool:
        """Compare the smallest word with the largest, which is the smallest complement."""
        mine = np.frombuffer(word, np.uint64)
        offer = np.concatenate([mine, ~mine])
        least = np.empty_like(offer)
        request = self._comm.Iallreduce(offer, least, self._min)
        start = time.monotonic()
        while not request.Test():
            patience.pause(time.monotonic() - start)
        half = mine.size
        return bool((least[:half] == ~least[half:]).all())

    def gather(self, message: bytes) -> list[bytes]:
        """Let mpi4py gather the messages with their lengths."""
        messages: list[bytes] = self._comm.allgather(message)
        return messages

    def allreduce(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        """Use ``MPI_Allreduce`` where it is exact, slices elsewhere."""
        if op not in self._ops or send.dtype.name not in _NATIVE:
            slices.allreduce(self, send, result, op, scaling)
            return
        if result is not send:
            result[...] = send
        for part in _parts(result):
            self._comm.Allreduce(self._in_place, part, self._ops[op])
        result[...] = scaling.apply(result)

    def alltoall(self, pieces: Sequence[Any], result: Sequence[Any]) -> None:
        """Exchange the pieces that are not empty, all at once."""
        requests = []
        for shift in range(1, self.size):
            source, to = (self.rank - shift) % self.size, (self.rank + shift) % self.size
            requests += [
                self._comm.Irecv([part, self._byte], source) for part in _parts(result[source])
            ]
            requests += [self._comm.Isend([part, self._byte], to) for part in _parts(pieces[to])]
        result[self.rank][...] = pieces[self.rank]
        self._request.Waitall(requests)

    def broadcast(self, array: Any, root: int) -> None:
        """Use ``MPI_Bcast``, piece by piece."""
        for part in _parts(array):
            self._comm.Bcast([part, self._byte], root)

    def close(self) -> None:
        """Free the communicator."""
        self._comm.Free()


def _parts(array: Any) -> Iterator[Any]:
    step = _MAX_BYTES // array.itemsize
    for start in range(0, array.size, step):
        yield array[start : start + step]
