"""The transport over plain MPI, which works wherever mpi4py does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdlite.base.interrupts import Interrupted
from hvdlite.base.reduction import ReduceOp, Scaling
from hvdlite.transport.liveness import Liveness
from hvdlite.transport.reduce import is_integer_mean
from hvdlite.transport.transport import (
    DIGEST_SIZE,
    LARGEST_FUSED,
    NoRoomError,
    OnWait,
    Transport,
    back_off,
)
from hvdlite.world.world import Create, World, create_at_once

# Counts have 32 bits in MPI 3: larger arrays are sent in pieces of at most this many bytes.
_MAX_BYTES = 2**30
_INTEGERS = {"int32", "int64", "uint32", "uint64"}
# The types that MPI_Allreduce is trusted with; the others are reduced in slices, by
# `Transport.allreduce`: 16-bit floats (MPI has no such types), narrow integers (vectorised Open MPI
# saturates them) and booleans. MPI only recommends that MPI_Allreduce gives all ranks the same bits
# for sums of floats. The algorithms of Open MPI and MPICH do: each element is reduced on one rank
# and passed on, or by all in one order but for swapped operands. The tests compare the bits; a
# float type for which an MPI departs from it has to leave this table.
_NATIVE = {
    ReduceOp.SUM: {*_INTEGERS, "float32", "float64", "complex64", "complex128"},
    ReduceOp.PRODUCT: {*_INTEGERS, "float32", "float64"},
    # MPI may drop a NaN; numpy always lets it through.
    ReduceOp.MIN: _INTEGERS,
    ReduceOp.MAX: _INTEGERS,
}
# Seconds of waiting after which a rank listens for announcements of others.
_LISTEN_AFTER = 0.2
# Abandoned collectives: the request, the buffers, to which MPI may still write, the communicator.
_abandoned: list[tuple[Any, Any, Any]] = []


class MPITransport(Transport):
    """Collectives of one communicator, which the transport owns.

    Ranks meet in non-blocking calls, whose wait can be reported and ended. The data, for which all
    ranks are on their way, move in blocking calls. Non-blocking ones could be ended as well, but
    MPI moves data only while it is polled: with Open MPI 5 and 2 ranks, an allreduce of float32
    took 2.3 times as long for 64 MiB, and 19 times for 4 KiB. So operations allocate whatever they
    can before they meet: a rank that fails between `meet` and the data leaves the others in a
    call that cannot end. `meet` allocates for the arrays that it is given.

    Args:
        comm: the communicator to duplicate; collective.
        members: global ranks, used in messages; empty: the communicator's own.
    """

    title = "MPI"
    max_digests = 32

    def __init__(
        self,
        MPI: Any,  # noqa: N803
        comm: Any,
        members: Sequence[int] = (),
        create: Create = create_at_once,
    ) -> None:
        self._comm = create(comm.Dup)
        self.rank = int(comm.rank)
        self.size = int(comm.size)
        self.members = members or range(self.size)
        self._liveness = Liveness(MPI, create(comm.Dup), self.members)
        self._comparison: tuple[Any, Any, Any] | None = None  # in progress: request and buffers
        self._on_wait: OnWait | None = None
        self._reserved: list[Any] = []  # byte arrays for the collectives after `meet`
        self._mpi = MPI
        self._ops = {
            ReduceOp.SUM: MPI.SUM,
            ReduceOp.MIN: MPI.MIN,
            ReduceOp.MAX: MPI.MAX,
            ReduceOp.PRODUCT: MPI.PROD,
        }

    @classmethod
    def connect(cls, MPI: Any, world: World, barrier: Any) -> Transport | None:  # noqa: N803
        return cls(MPI, world.comm, world.ids, world.create)

    def meet(self, digests: Sequence[bytes], on_wait: OnWait, data: Sequence[Any] = ()) -> int:
        """Compare the smallest digests with the largest, found as the smallest complements.

        Where a rank has fewer digests than another it fills up with zeros, which no hash is: they
        differ.
        """
        self._on_wait = on_wait
        if self._comparison is None:
            self._reserve(data)
            own = np.zeros(self.max_digests * DIGEST_SIZE // 8, np.uint64)
            given = np.frombuffer(b"".join(digests[: self.max_digests]), np.uint64)
            own[: given.size] = given
            offer = np.concatenate([own, ~own])
            least = np.empty_like(offer)
            self._liveness.begin()
            self._comparison = self._comm.Iallreduce(offer, least, self._mpi.MIN), offer, least
        request, offer, least = self._comparison
        self._complete(request, (offer, least))
        self._comparison = None
        # A rank that gave up waiting has left its digests behind, but will not take part.
        self._liveness.listen()
        half = least.size // 2
        same = (least[:half] == ~least[half:]).reshape(-1, DIGEST_SIZE // 8).all(axis=1)
        same = same[: min(len(digests), self.max_digests)]
        return int(same.size if same.all() else same.argmin())

    def _reserve(self, data: Sequence[Any]) -> None:
        """Allocate what an `allreduce_all` of arrays may take: a fusion buffer, and slices."""
        self._reserved = []
        if not data:
            return
        first = data[0]
        if first.nbytes > LARGEST_FUSED and first.dtype.name in _NATIVE[ReduceOp.SUM]:
            return  # mostly for MPI_Allreduce, which needs neither
        nbytes = sum(array.nbytes for array in data)
        try:
            self._reserved.append(np.empty(nbytes + self.size * first.itemsize, np.uint8))
            if len(data) > 1:
                self._reserved.append(np.empty(nbytes, np.uint8))
        except MemoryError as error:
            raise NoRoomError(*error.args) from error

    def scratch(self, size: int, dtype: np.dtype[Any], exchanged: bool = False) -> Any:
        """Return an array that `meet` has allocated, if one is left that is large enough."""
        nbytes = size * dtype.itemsize
        if self._reserved and nbytes <= self._reserved[-1].size:
            return self._reserved.pop()[:nbytes].view(dtype)
        return super().scratch(size, dtype, exchanged)

    def gather(self, message: bytes) -> list[bytes]:
        """Gather the lengths, and then the messages."""
        length = np.array([len(message)], np.int64)
        lengths = np.empty(self.size, np.int64)
        self._complete(self._comm.Iallgather(length, lengths), (length, lengths))
        whole = np.empty(lengths.sum(), np.uint8)
        request = self._comm.Iallgatherv(message, [whole, lengths, self._mpi.BYTE])
        self._complete(request, (message, whole))
        parts = np.split(whole, np.cumsum(lengths)[:-1])
        return [part.tobytes() for part in parts]

    def absent(self) -> list[int] | None:
        return self._liveness.absent()

    def _complete(self, request: Any, buffers: Any) -> None:
        """Wait for an operation that ranks may be late to, or may never enter."""
        start = time.monotonic()
        try:
            while not request.Test():
                elapsed = time.monotonic() - start
                if elapsed > _LISTEN_AFTER:
                    self._liveness.listen()
                if self._on_wait is not None:
                    self._on_wait(elapsed)
                back_off(elapsed)
        except Interrupted:
            raise
        except BaseException:
            _abandoned.append((request, buffers, self._comm))
            self.leave()
            raise

    def _complete_all(self, requests: Sequence[Any]) -> None:
        """Wait for all requests; raise an error that one of them has.

        ``MPI_Waitall`` only says that there is one. If a rank has died, it leaves the other
        requests open, which may still write to their arrays: revoking the communicator ends them.
        """
        failure = None
        while True:
            statuses: list[Any] = []
            try:
                self._mpi.Request.Waitall(requests, statuses)
                break
            except self._mpi.Exception as error:
                if not self.confirms or error.Get_error_class() != self._mpi.ERR_IN_STATUS:
                    raise
                codes = {status.error for status in statuses} - {
                    self._mpi.SUCCESS,
                    self._mpi.ERR_PENDING,
                }
                failure = failure or self._mpi.Exception(min(codes, default=error.Get_error_code()))
                self.revoke()
        if failure is not None:
            raise failure

    def leave(self) -> None:
        """Tell it on the side channel, unless another rank has left before and notified all."""
        self._liveness.leave()

    def confirm(self) -> None:
        self._complete(self._comm.Ibarrier(), None)

    def revoke(self) -> None:
        with contextlib.suppress(self._mpi.Exception):
            self._comm.Revoke()

    def allreduce(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        """Use ``MPI_Allreduce`` where it is exact and repeatable, slices elsewhere."""
        is_native = send.dtype.name in _NATIVE.get(op, ())
        # Bits must not depend on what an array is fused with, which timing decides: the order in
        # which MPI adds up an element depends on its place in the message.
        may_be_fused = self._depends_on_order(op, send.dtype) and send.nbytes <= LARGEST_FUSED
        if not is_native or is_integer_mean(send.dtype, op, scaling) or may_be_fused:
            super().allreduce(send, result, op, scaling)
            return
        if result is not send:
            result[...] = send
        kind = self._mpi.Datatype.fromcode(result.dtype.char)  # not found for unaligned arrays
        for part in _parts(result):
            self._comm.Allreduce(self._mpi.IN_PLACE, [part, kind], self._ops[op])
        result[...] = scaling.apply(result)

    def allreduce_fused(self, array: Any, op: ReduceOp, scaling: Scaling) -> None:
        """Reduce several arrays together, with the bits that each would have alone."""
        by_slices = self._depends_on_order(op, array.dtype)
        (super().allreduce if by_slices else self.allreduce)(array, array, op, scaling)

    def _depends_on_order(self, op: ReduceOp, dtype: np.dtype[Any]) -> bool:
        exact = dtype.name in _INTEGERS or op in (ReduceOp.MIN, ReduceOp.MAX)
        return self.size > 2 and not exact

    def alltoall(self, pieces: Sequence[Any], result: Sequence[Any]) -> None:
        """Exchange the pieces that are not empty, all at once."""
        requests, byte = [], self._mpi.BYTE
        for shift in range(1, self.size):
            source, to = (self.rank - shift) % self.size, (self.rank + shift) % self.size
            requests += [self._comm.Irecv([part, byte], source) for part in _parts(result[source])]
            requests += [self._comm.Isend([part, byte], to) for part in _parts(pieces[to])]
        result[self.rank][...] = pieces[self.rank]
        self._complete_all(requests)

    def broadcast(self, array: Any, root: int) -> None:
        for part in _parts(array):
            self._comm.Bcast([part, self._mpi.BYTE], root)

    @property
    def communicators(self) -> list[Any]:
        return [self._liveness.comm, self._comm]

    def close(self) -> None:
        self._liveness.close()
        self._comm.Free()


def has_ended(MPI: Any, request: Any) -> bool:  # noqa: N803
    """Return whether a request has ended, with an error perhaps; None has, too."""
    try:
        return request is None or bool(request.Test())
    except MPI.Exception:
        return True


def forget_ended(MPI: Any, comms: Sequence[Any]) -> bool:  # noqa: N803
    """Forget the abandoned collectives over some communicators that have ended; return if all have.

    Those over a communicator that has been revoked end with an error.
    """
    theirs = [each for each in _abandoned if any(each[-1] is comm for comm in comms)]
    ended = [each for each in theirs if has_ended(MPI, each[0])]
    for each in ended:  # the list's `remove` would compare arrays
        del _abandoned[next(i for i, other in enumerate(_abandoned) if other is each)]
    return len(ended) == len(theirs)


def _parts(array: Any) -> Iterator[Any]:
    step = _MAX_BYTES // array.itemsize
    for start in range(0, array.size, step):
        yield array[start : start + step]
