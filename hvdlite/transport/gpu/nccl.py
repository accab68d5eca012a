"""The transport of device arrays over NCCL."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from hvdlite.base.arrays import as_bytes
from hvdlite.base.reduction import ReduceOp, Scaling
from hvdlite.errors import HorovodInternalError
from hvdlite.transport.gpu.base import DeviceTransport, Work, equal_parts
from hvdlite.transport.gpu.cuda import Cuda
from hvdlite.transport.reduce import is_integer_mean
from hvdlite.transport.transport import Transport

# NCCL's numbers, of which cupy names only some.
_BYTE = 1
_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float32": 7,
    "float64": 8,
}
_OPS = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}
_AVERAGE = 4
_INTEGERS = {"int8", "uint8", "int32", "uint32", "int64", "uint64"}
_NATIVE = {
    ReduceOp.SUM: {*_INTEGERS, "float32", "float64"},
    ReduceOp.PRODUCT: {*_INTEGERS, "float32", "float64"},
    # NCCL drops a NaN where another rank has a number; numpy lets it through.
    ReduceOp.MIN: _INTEGERS,
    ReduceOp.MAX: _INTEGERS,
}
# Seconds that an abort leaves to a call in another thread, which returns at once unless it waits
# for other ranks; then only the abort ends it.
_CALL_SECONDS = 5.0
_ID_BYTES = 128
# Seconds for the ranks to find each other inside NCCL, which sets no limit itself.
_JOIN_SECONDS = 120.0


class NCCLTransport(DeviceTransport):
    """Collectives by NCCL, and through the host what it lacks.

    NCCL reduces some types as numpy would: integers of 8, 32 and 64 bits, float32, float64, and
    sums of complex numbers. It would round 16-bit floats after every addition. So these, and all
    that NCCL lacks (16-bit integers, booleans) or does differently (NaN in Min and Max, means of
    integers whose sum is out of range), are exchanged in slices: rank r gets slice r of all ranks'
    arrays, reduces it on the device, 16-bit floats in float32, and sends it to all ranks. That
    moves as many bytes as a ring, without the roundings; but every rank sends to every other, so
    among many nodes a ring would have the better latency. Adasum goes through the host.

    Every rank gets the same bits. From run to run, those of NCCL's own reductions depend on
    the algorithm that it chooses for the machine; slices are summed in the order of ranks.

    A rank that dies may leave the others in work that never ends, which NCCL notices only where a
    network reports it. So a lane has to `Work.wait` with a time limit for work that it enqueued
    some operations ago, or call `check` while it waits otherwise. When that raises (the
    communicator is aborted then), it has to call `Transport.leave` on its host transport, so that
    the other ranks learn of it, and abort their own communicators.

    Args:
        cuda, control, device, timeout: as in `DeviceTransport`.
        communicator: cupy's ``NcclCommunicator`` of the same ranks on this device; the
            transport owns it.
    """

    def __init__(
        self,
        cuda: Cuda,
        control: Transport,
        device: int,
        communicator: Any,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(cuda, control, device, timeout)
        self._communicator = communicator
        self._lock = threading.Lock()

    def check(self) -> None:
        super().check()
        if not self._lock.acquire(blocking=False):
            return  # another thread is in a call, which reports errors itself
        failure = ""
        try:
            if self._failure is None:
                self._communicator.check_async_error()
        except Exception as error:  # cupy raises a KeyError for codes that it does not know
            failure = _describe(error)
        finally:
            self._lock.release()
        if failure:
            self.abort(failure)
        super().check()

    def allreduce(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        """Use ``ncclAllReduce`` where it is exact, slices elsewhere."""
        kind = send.dtype
        if kind.kind == "c":
            kind = np.dtype(f"float{4 * kind.itemsize}")
            send, result = send.view(kind), result.view(kind)
        self._check_entered()
        if not send.size:
            return
        if kind.name in _NATIVE[op] and not is_integer_mean(kind, op, scaling):
            self._allreduce_natively(send, result, op, scaling)
        else:
            self._allreduce_slices(send, result, op, scaling)

    def alltoall(self, pieces: Sequence[Any], result: Sequence[Any]) -> None:
        """Send and receive the pieces that are not empty, as one group."""
        self._check_entered()
        self._cuda.copy(result[self.rank], pieces[self.rank])
        with self._calling(), self._group():
            for shift in range(1, self.size):
                to, source = (self.rank + shift) % self.size, (self.rank - shift) % self.size
                if pieces[to].nbytes:
                    self._communicator.send(*self._place(pieces[to]), _BYTE, to, self.stream.ptr)
                if result[source].nbytes:
                    target = self._place(result[source])
                    self._communicator.recv(*target, _BYTE, source, self.stream.ptr)

    def allgather(self, piece: Any, result: Sequence[Any]) -> None:
        """Use ``ncclAllGather`` where the pieces are of one length."""
        self._check_entered()
        pointer, nbytes = self._place(piece)
        if any(part.nbytes != nbytes for part in result):
            self.alltoall([piece] * self.size, result)
            return
        start = self._cuda.pointer(result[0])
        places = [start + rank * nbytes for rank in range(self.size)]
        scattered = [self._cuda.pointer(part) for part in result] != places
        whole = self._cuda.empty(self.size * nbytes, np.dtype(np.uint8)) if scattered else result[0]
        if nbytes:
            with self._calling():
                self._communicator.allGather(
                    pointer, self._cuda.pointer(whole), nbytes, _BYTE, self.stream.ptr
                )
        if scattered:
            for part, source in zip(result, equal_parts(whole, self.size), strict=True):
                self._cuda.copy(part, source)

    def broadcast(self, array: Any, root: int) -> None:
        self._check_entered()
        pointer, nbytes = self._place(array)
        if nbytes:
            with self._calling():
                self._communicator.broadcast(pointer, pointer, nbytes, _BYTE, root, self.stream.ptr)

    def close(self) -> None:
        """Let the device finish, or abort if it does not; then end the communicator."""
        if self._failure is None:
            # A failure has been reported, and the communicator is as closed as it can be.
            with contextlib.suppress(HorovodInternalError):
                Work(self, self._mark()).wait()
        if self._failure is None:
            super().close()
            self._failure = f"rank {self.members[self.rank]}: the NCCL transport has been closed"
            with self._lock:
                self._communicator.destroy()

    def _disconnect(self) -> None:
        """Abort, and so free, the communicator: after a call in flight, if that ends soon."""
        alone = self._lock.acquire(timeout=_CALL_SECONDS)
        try:
            self._communicator.abort()
        finally:
            if alone:
                self._lock.release()

    def _allreduce_natively(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        kind, number = send.dtype, _OPS[op]
        # NCCL averages by multiplying with 1/size: as exact as the division for powers of 2.
        is_average = op is ReduceOp.SUM and scaling == Scaling(1.0, self.size)
        if is_average and kind.kind == "f" and self.size & (self.size - 1) == 0:
            number, scaling = _AVERAGE, Scaling()
        source, target = self._cuda.pointer(as_bytes(send)), self._cuda.pointer(as_bytes(result))
        with self._calling():
            self._communicator.allReduce(
                source, target, send.size, _TYPES[kind.name], number, self.stream.ptr
            )
        if not scaling.is_identity:
            self._cuda.reduce(result, result, ReduceOp.SUM, scaling)

    def _allreduce_slices(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        """Reduce equal slices, one on each rank, and the remainder on all ranks."""
        step, left = divmod(send.size, self.size)
        if step:
            mine = result[self.rank * step : (self.rank + 1) * step]
            self.reducescatter(equal_parts(send, self.size), mine, op, scaling)
            gathered = [as_bytes(part) for part in equal_parts(result, self.size)]
            self.allgather(as_bytes(mine), gathered)
        if left:
            rows = self.empty(self.size * left, send.dtype)
            gathered = [as_bytes(row) for row in equal_parts(rows, self.size)]
            self.allgather(as_bytes(send[-left:]), gathered)
            self._cuda.reduce(rows, result[-left:], op, scaling)

    def _place(self, array: Any) -> tuple[int, int]:
        return self._cuda.pointer(array), int(array.nbytes)

    @contextlib.contextmanager
    def _group(self) -> Iterator[None]:
        self._cuda.nccl.groupStart()
        try:
            yield
        finally:
            # Before any abort: the group holds on to the communicator.
            self._cuda.nccl.groupEnd()

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Keep aborts out while NCCL is called, and turn its errors into ours."""
        try:
            with self._lock:
                super().check()
                yield
        except HorovodInternalError:
            raise
        except Exception as error:
            self.abort(_describe(error))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def find_objection(facts: Sequence[dict[str, Any]]) -> str | None:
    """Return why ranks cannot use NCCL; None: each has the same version, and a device of its own.

    Args:
        facts: what `hvdlite.transport.registry.connect_device` knows of all ranks, by rank.
    """
    versions, ranks = [each["nccl"] for each in facts], [each["rank"] for each in facts]
    if 0 in versions:
        return (
            f"rank {ranks[versions.index(0)]} has no NCCL that cupy can load; install "
            "nvidia-nccl-cu13 (or -cu12), 2.10 or later, on all hosts"
        )
    for rank, version in zip(ranks, versions, strict=True):
        if version != versions[0]:
            return (
                f"rank {rank} has NCCL {version}, rank {ranks[0]} has {versions[0]}; install the "
                "same version on all hosts"
            )
    places = [(each["host"], each["device"]) for each in facts]
    for rank, place in zip(ranks, places, strict=True):
        first = ranks[places.index(place)]
        if first != rank and not all(each["sharing"] for each in facts):
            return (
                f"ranks {first} and {rank} share device {place[1]}; call hvd.pin_device() "
                "before the first collective, or start one rank for each device"
            )
    return None


def join(control: Transport, device: int, cuda: Cuda) -> tuple[Any, str | None]:
    """Create the communicator; if that fails on any rank, give it up on all; collective.

    The ranks meet inside NCCL, which does not promise to return where one fails or hangs.

    Returns:
        The communicator, or None and why there is none.
    """
    identifier = np.zeros(_ID_BYTES, np.uint8)
    communicator, failure = None, ""
    try:
        if control.rank == 0:
            with cuda.on(device, cuda.stream(device)):
                identifier[:] = np.frombuffer(cuda.unique_id(), np.uint8)
    except Exception as error:
        failure = f"NCCL made no id: {error}"
    control.broadcast(identifier, 0)
    if identifier.any():
        connecting = _connect_in_thread(control, device, cuda, identifier.tobytes())
        try:
            communicator = connecting.result(_JOIN_SECONDS)
        except TimeoutError:
            connecting.add_done_callback(_abort_late)
            failure = (
                f"NCCL did not connect within {_JOIN_SECONDS:g} s; check that the hosts reach each "
                "other (NCCL_SOCKET_IFNAME names the interface, NCCL_DEBUG=INFO tells more)"
            )
        except Exception as error:
            failure = f"NCCL could not connect: {error} (NCCL_DEBUG=INFO tells more)"
    failures = [message.decode() for message in control.gather(failure.encode())]
    for rank, text in zip(control.members, failures, strict=False):
        if text:
            if communicator is not None:
                communicator.abort()
            return None, f"rank {rank}: {text}"
    return communicator, None


def _connect_in_thread(
    control: Transport, device: int, cuda: Cuda, identifier: bytes
) -> Future[Any]:
    """Create the communicator in a thread, which can be given up."""
    connecting: Future[Any] = Future()

    def connect() -> None:
        try:
            with cuda.on(device, cuda.stream(device)):
                made = cuda.communicator(control.size, identifier, control.rank)
        except Exception as error:
            connecting.set_exception(error)
        else:
            connecting.set_result(made)

    threading.Thread(target=connect, name="hvdlite-nccl", daemon=True).start()
    return connecting


def _abort_late(connecting: Future[Any]) -> None:
    """End a communicator that was created after its ranks had given it up."""
    if connecting.exception() is None:
        connecting.result().abort()
