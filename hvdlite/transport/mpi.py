"""Plain MPI: works wherever mpi4py does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvdlite.reduction import ReduceOp, Scaling
from hvdlite.transport import slices
from hvdlite.transport.base import Patience, Transport
from hvdlite.transport.roll_call import RollCall

# Counts are 32-bit in MPI 3: larger arrays travel in pieces of at most this many bytes.
_MAX_BYTES = 2**30
_INTEGERS = {"int32", "int64", "uint32", "uint64"}
# MPI only recommends that MPI_Allreduce gives all ranks the same bits for sums of floats. The
# algorithms of Open MPI and MPICH do: each element is reduced on one rank and passed on, or by
# all in one order but for swapped operands. The tests compare the bits; a float type for which
# an MPI departs from it has to leave this table for `slices`.
_NATIVE = {
    ReduceOp.SUM: {*_INTEGERS, "float32", "float64", "complex64", "complex128"},
    ReduceOp.PRODUCT: {*_INTEGERS, "float32", "float64"},
    # MPI drops a NaN or lets it through as it happens to come; numpy always lets it through.
    ReduceOp.MIN: _INTEGERS,
    ReduceOp.MAX: _INTEGERS,
}
# Seconds of waiting from which on a rank looks for what others tell it.
_LISTEN_AFTER = 0.2
# What MPI may still write to after a wait that was given up.
_given_up: list[Any] = []


class MPITransport(Transport):
    """Collectives of one communicator, which the transport owns.

    Ranks meet in non-blocking calls, whose wait can be reported and ended. The data, for
    which all ranks are on their way, move in blocking calls. Polled ones could be ended as
    well, but MPI moves them only while it is polled: with Open MPI 5 and 2 ranks, an
    allreduce of float32 took 2.3 times as long for 64 MiB, and 19 times for 4 KiB. So
    operations allocate before they meet whatever they can: a rank that fails between the
    meeting and the data leaves the others in a call that cannot end.

    Args:
        MPI: the module ``mpi4py.MPI``.
        comm: the communicator to duplicate; collective.
    """

    def __init__(self, MPI: Any, comm: Any) -> None:  # noqa: N803
        self._comm = comm.Dup()
        self._roll_call = RollCall(MPI, comm.Dup())
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
        self._roll_call.begin()
        request = self._comm.Iallreduce(offer, least, self._min)
        self._complete(request, (offer, least), patience.pause)
        # A rank that gave up waiting has left its word behind, and will not come along.
        self._roll_call.listen()
        half = mine.size
        return bool((least[:half] == ~least[half:]).all())

    def gather(self, message: bytes) -> list[bytes]:
        """Gather the lengths, and then the messages."""
        length = np.array([len(message)], np.int64)
        lengths = np.empty(self.size, np.int64)
        self._complete(self._comm.Iallgather(length, lengths), (length, lengths), _nap)
        whole = np.empty(lengths.sum(), np.uint8)
        request = self._comm.Iallgatherv(message, [whole, lengths, self._byte])
        self._complete(request, (message, whole), _nap)
        parts = np.split(whole, np.cumsum(lengths)[:-1])
        return [part.tobytes() for part in parts]

    def absent(self) -> list[int] | None:
        """Call the roll."""
        return self._roll_call.absent()

    def _complete(self, request: Any, buffers: Any, pause: Callable[[float], None]) -> None:
        """Wait for an operation that ranks may come late to, or that one may never come to."""
        start = time.monotonic()
        try:
            while not request.Test():
                elapsed = time.monotonic() - start
                if elapsed > _LISTEN_AFTER:
                    self._roll_call.listen()
                pause(elapsed)
        except BaseException:
            _given_up.append((request, buffers))
            self.leave()
            raise

    def leave(self) -> None:
        """Tell it in the roll call, unless another rank has left before and told everybody."""
        self._roll_call.leave()

    def allreduce(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        """Use ``MPI_Allreduce`` where it is exact, slices elsewhere."""
        if send.dtype.name not in _NATIVE.get(op, ()):
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
        """Free the communicators."""
        self._roll_call.close()
        self._comm.Free()


def _nap(elapsed: float) -> None:
    """Pause in a wait for ranks that are on their way."""
    time.sleep(0 if elapsed < 1e-3 else 1e-3)


def _parts(array: Any) -> Iterator[Any]:
    step = _MAX_BYTES // array.itemsize
    for start in range(0, array.size, step):
        yield array[start : start + step]
