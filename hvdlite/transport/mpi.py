"""Plain MPI: works wherever mpi4py does."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdlite.interrupts import Interrupted
from hvdlite.reduction import ReduceOp, Scaling
from hvdlite.transport import adasum
from hvdlite.transport.base import LARGEST_FUSED, WORD_SIZE, Patience, Transport
from hvdlite.transport.liveness import Liveness
from hvdlite.transport.reduce import is_integer_mean

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
# Ranks that arrive together meet within this time; whoever waits longer sleeps, because
# ranks often fill the cores and a spinning rank would take one from those it waits for.
_SPIN_SECONDS = 100e-6
_LONGEST_SLEEP = 1e-3
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
        members: by what numbers messages call its ranks; None: their own.
    """

    most_words = 32

    def __init__(self, MPI: Any, comm: Any, members: Sequence[int] | None = None) -> None:  # noqa: N803
        self._comm = comm.Dup()
        self.rank = int(comm.rank)
        self.size = int(comm.size)
        self.members = range(self.size) if members is None else members
        self._liveness = Liveness(MPI, comm.Dup(), self.members)
        self._meeting: tuple[Any, Any, Any] | None = None  # that this rank waits in
        self._patience: Patience | None = None
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

    def meet(self, words: Sequence[bytes], patience: Patience, cargo: Sequence[Any] = ()) -> int:
        """Compare the smallest words with the largest, which are the smallest complements.

        Where a rank brings fewer words than another, its rest are zeros, and the other's no
        words of a hash: they differ.
        """
        self._patience = patience
        if self._meeting is None:
            mine = np.zeros(self.most_words * WORD_SIZE // 8, np.uint64)
            brought = np.frombuffer(b"".join(words[: self.most_words]), np.uint64)
            mine[: brought.size] = brought
            offer = np.concatenate([mine, ~mine])
            least = np.empty_like(offer)
            self._liveness.begin()
            self._meeting = self._comm.Iallreduce(offer, least, self._min), offer, least
        request, offer, least = self._meeting
        self._complete(request, (offer, least))
        self._meeting = None
        # A rank that gave up waiting has left its word behind, and will not come along.
        self._liveness.listen()
        half = least.size // 2
        alike = (least[:half] == ~least[half:]).reshape(-1, WORD_SIZE // 8).all(axis=1)
        alike = alike[: min(len(words), self.most_words)]
        return int(alike.size if alike.all() else alike.argmin())

    def gather(self, message: bytes) -> list[bytes]:
        """Gather the lengths, and then the messages."""
        length = np.array([len(message)], np.int64)
        lengths = np.empty(self.size, np.int64)
        self._complete(self._comm.Iallgather(length, lengths), (length, lengths))
        whole = np.empty(lengths.sum(), np.uint8)
        request = self._comm.Iallgatherv(message, [whole, lengths, self._byte])
        self._complete(request, (message, whole))
        parts = np.split(whole, np.cumsum(lengths)[:-1])
        return [part.tobytes() for part in parts]

    def absent(self) -> list[int] | None:
        """Call the roll."""
        return self._liveness.absent()

    def _complete(self, request: Any, buffers: Any) -> None:
        """Wait for an operation that ranks may come late to, or that one may never come to."""
        start = time.monotonic()
        try:
            while not request.Test():
                elapsed = time.monotonic() - start
                if elapsed > _LISTEN_AFTER:
                    self._liveness.listen()
                if self._patience is not None:
                    self._patience.check(elapsed)
                _pause(elapsed)
        except Interrupted:
            raise
        except BaseException:
            _given_up.append((request, buffers))
            self.leave()
            raise

    def leave(self) -> None:
        """Tell it in the roll call, unless another rank has left before and told everybody."""
        self._liveness.leave()

    def allreduce(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        """Use ``MPI_Allreduce`` where it is exact and repeatable, slices elsewhere."""
        is_exact = self._is_native(op, send.dtype) and not is_integer_mean(send.dtype, op, scaling)
        if not is_exact or self._may_be_fused(op, send):
            adasum.allreduce(self, send, result, op, scaling)
            return
        if result is not send:
            result[...] = send
        for part in _parts(result):
            self._comm.Allreduce(self._in_place, part, self._ops[op])
        result[...] = scaling.apply(result)

    def allreduce_all(
        self, sends: Sequence[Any], results: Sequence[Any], op: ReduceOp, scaling: Scaling
    ) -> None:
        """Reduce several arrays together, each as if it were alone."""
        if len(sends) > 1 and self._depends_on_order(op, sends[0].dtype):
            together = np.concatenate(sends)
            adasum.allreduce(self, together, together, op, scaling)
            bounds = np.cumsum([array.size for array in sends])[:-1]
            for result, part in zip(results, np.split(together, bounds), strict=True):
                result[...] = part
        else:
            super().allreduce_all(sends, results, op, scaling)

    def _is_native(self, op: ReduceOp, dtype: np.dtype[Any]) -> bool:
        return dtype.name in _NATIVE.get(op, ())

    def _may_be_fused(self, op: ReduceOp, array: Any) -> bool:
        """Whether bits could depend on what an array travels with, which timing decides.

        The order in which MPI adds up an element depends on its place in the message.
        """
        return self._depends_on_order(op, array.dtype) and array.nbytes <= LARGEST_FUSED

    def _depends_on_order(self, op: ReduceOp, dtype: np.dtype[Any]) -> bool:
        exact = dtype.name in _INTEGERS or op in (ReduceOp.MIN, ReduceOp.MAX)
        return self.size > 2 and not exact

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
        self._liveness.close()
        self._comm.Free()


def _pause(elapsed: float) -> None:
    """Sleep in proportion to the time waited, so that a wait ends at most an eighth late."""
    if elapsed < _SPIN_SECONDS:
        time.sleep(0)
    else:
        time.sleep(min(elapsed / 8, _LONGEST_SLEEP))


def _parts(array: Any) -> Iterator[Any]:
    step = _MAX_BYTES // array.itemsize
    for start in range(0, array.size, step):
        yield array[start : start + step]
