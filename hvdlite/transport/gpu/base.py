"""The transport of device arrays, which goes through the host; NCCL's extends it (``nccl.py``)."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from hvdlite.base.arrays import as_bytes, cut
from hvdlite.base.reduction import ReduceOp, Scaling
from hvdlite.errors import HorovodInternalError
from hvdlite.transport.gpu.cuda import Cuda, Event, stored_as
from hvdlite.transport.transport import OnWait, Transport, back_off


class FlatArray:
    """A flat array of cupy's, and the dtype of its elements: cupy has uint16 for bfloat16."""

    def __init__(self, array: Any, dtype: np.dtype[Any]) -> None:
        self._array = array
        self.dtype = dtype
        self.size, self.itemsize, self.nbytes = array.size, dtype.itemsize, array.nbytes

    def __getitem__(self, part: slice) -> FlatArray:
        return FlatArray(self._array[part], self.dtype)

    def view(self, dtype: Any) -> Any:
        """View the memory as an array of cupy's."""
        return self._array.view(dtype)


class Work:
    """Work that `DeviceTransport.enqueue` has sent to the device.

    Attributes:
        value: what the function has returned that sent it.
    """

    def __init__(self, transport: DeviceTransport, event: Event, value: Any = None) -> None:
        self._transport = transport
        self._event = event
        self.value = value

    def wait_on(self, stream: int) -> None:
        """Make a stream's later work wait for this; the host does not wait.

        Raises:
            HorovodInternalError: the communication has failed.
        """
        self._transport.check()
        self._transport.hold(stream, self._event)

    def done(self) -> bool:
        """Return whether the device has finished it.

        Raises:
            HorovodInternalError: the communication, or the device, has failed.
        """
        try:
            finished = self._event.done
        except Exception as error:  # an error of CUDA, from which no later call recovers
            self._transport.abort(f"{type(error).__name__}: {error}")
        # Last: an abort ends the work, too, and leaves garbage in its results.
        self._transport.check()
        return finished

    def wait(self) -> None:
        """Wait on the host until the device has finished it.

        Raises:
            HorovodInternalError: the communication has failed, or it took longer than the
                transport's time limit. The transport is aborted then.
        """
        start = time.monotonic()
        while not self.done():
            elapsed = time.monotonic() - start
            if elapsed > self._transport.timeout:
                self._transport.abort(
                    f"nothing came for {elapsed:.1f} s; a rank has ended, hangs, or runs "
                    "different steps"
                )
            back_off(elapsed)


class DeviceTransport(Transport):
    """The collectives of one communicator on flat contiguous arrays of one device.

    The lane uses it beside its host transport, over which the ranks meet and send messages. All
    data methods send work to the transport's own stream and may be called only in the function that
    `enqueue` runs. In there that stream is cupy's current one, so arithmetic on cupy arrays runs in
    order with the collectives.

    Events alone determine the order of work::

        ready = transport.record(stream)  # where the data are made, by the thread that does it
        work = transport.enqueue(lambda: transport.allreduce(...), [ready])  # the lane's thread
        work.wait_on(stream)  # where the results are used

    None of the three makes the host wait for the device. The arrays must stay alive, and unused by
    other streams, until the work is done.

    Arrays are cupy's, or `FlatArray`.

    Data are copied to pinned memory, exchanged by the lane's host transport, and copied back. Large
    arrays move in chunks through two buffers: while the host exchanges one, the device copies the
    next to the host and the one before back. The calling thread, which is the lane's, waits for the
    device before every exchange; no other thread does. The guarantees of the host transport hold
    here: 16-bit floats are accumulated in float32, NaN passes through Min and Max.

    After a failure every call raises. Work that the device still does then gives garbage: a caller
    that has used results without `Work.wait` has to restore whatever it computed from them.

    Args:
        control: the lane's host transport.
        timeout: seconds after which work that the host waits for has failed.
        chunk_bytes: the size of a chunk, a multiple of 16.

    Attributes:
        stream: its own stream, on which it works; ``ptr`` is its address.
        report: called once, when the communication has failed.
    """

    report: Callable[[], object] = staticmethod(lambda: None)

    def __init__(
        self,
        cuda: Cuda,
        control: Transport,
        device: int,
        timeout: float = 60.0,
        chunk_bytes: int = 4 * 2**20,
    ) -> None:
        self.rank, self.size, self.members = control.rank, control.size, control.members
        self.timeout = timeout
        self._cuda = cuda
        self._control = control
        self._device = device
        self.stream = cuda.stream(device)
        self._failure: str | None = None
        self._entered: int | None = None
        self._chunk_bytes = chunk_bytes
        self._buffers = [_PinnedBuffer(self) for _ in range(2)]

    def record(self, stream: int) -> Event:
        """Record an event after all work that a stream has been given so far; not collective."""
        return self._cuda.record(self._device, stream)

    def hold(self, stream: int, event: Event) -> None:
        """Make a stream's later work wait for an event; not collective."""
        self._cuda.wait_event(self._device, stream, event)

    def enqueue(self, exchange: Callable[[], Any], after: Iterable[Event] = ()) -> Work:
        """Run a function that calls data methods, and return its work on the device.

        Args:
            exchange: called with the transport's stream as the current one.
            after: events that the device waits for first.

        Raises:
            HorovodInternalError: the communication has failed.
        """
        self.check()
        with self._cuda.on(self._device, self.stream):
            for event in after:
                self.hold(self.stream.ptr, event)
            self._entered = threading.get_ident()
            try:
                value = exchange()
            finally:
                self._entered = None
            return Work(self, self.record(self.stream.ptr), value)

    def check(self) -> None:
        """Raise HorovodInternalError if the communication has failed; any thread may call this.

        The message names the reason, the rank and the device.
        """
        if self._failure is not None:
            raise HorovodInternalError(self._failure)

    def abort(self, reason: str) -> None:
        """End the communication, including work in flight; any thread may call this.

        `report` has the lane call `Transport.leave` on its host transport, so that the other ranks
        learn of it, whichever thread has found the failure.

        Raises:
            HorovodInternalError: always, with the reason of the first call.
        """
        if self._failure is None:
            self._failure = (
                f"rank {self.members[self.rank]}: the exchange on device {self._device} failed: "
                f"{reason}; end the job, or restore the last state that all ranks have and start "
                "anew"
            )
            self._disconnect()
            self.report()
        self.check()

    def meet(self, digests: Sequence[bytes], on_wait: OnWait, data: Sequence[Any] = ()) -> int:
        return self._control.meet(digests, on_wait)

    def leave(self) -> None:
        self._control.leave()

    def gather(self, message: bytes) -> list[bytes]:
        return self._control.gather(message)

    def empty(self, size: int, dtype: np.dtype[Any]) -> FlatArray:
        self._check_entered()
        return FlatArray(self._cuda.empty(size, stored_as(dtype)), dtype)

    def scratch(self, size: int, dtype: np.dtype[Any], exchanged: bool = False) -> FlatArray:
        return self.empty(size, dtype)

    def copy(self, source: Any, target: Any) -> None:
        self._check_entered()
        self._cuda.copy(target, source)

    def scale(self, source: Any, target: Any, scaling: Scaling) -> None:
        self._check_entered()
        self._cuda.reduce(source, target, ReduceOp.SUM, scaling)

    def convert(self, source: Any, target: Any, scaling: Scaling) -> None:
        self._check_entered()
        self._cuda.convert(source, target, scaling)

    def allreduce(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        """Reduce chunk by chunk."""

        def exchange(chunk: Any) -> None:
            values = chunk.view(send.dtype)
            self._control.allreduce(values, values, op, scaling)

        self._through_host(as_bytes(send), as_bytes(result), exchange, self._chunk_bytes)

    def adasum(self, send: Any, result: Any, scaling: Scaling, tensors: Sequence[int]) -> None:
        """Do it on the host, with the whole array at once."""

        def exchange(chunk: Any) -> None:
            values = chunk.view(send.dtype)
            self._control.adasum(values, values, scaling, tensors)

        self._through_host(as_bytes(send), as_bytes(result), exchange, max(1, send.nbytes))

    def alltoall(self, pieces: Sequence[Any], result: Sequence[Any]) -> None:
        outgoing = self._copy_in(pieces)
        incoming = self._buffers[1].take(sum(piece.nbytes for piece in result))
        parts = _split(incoming, result)
        self._buffers[0].wait()
        self._control.alltoall(outgoing, parts)
        self._copy_out(result, parts)

    def allgather(self, piece: Any, result: Sequence[Any]) -> None:
        (outgoing,) = self._copy_in([piece])
        incoming = self._buffers[1].take(sum(part.nbytes for part in result))
        parts = _split(incoming, result)
        self._buffers[0].wait()
        self._control.allgather(outgoing, parts)
        self._copy_out(result, parts)

    def broadcast(self, array: Any, root: int) -> None:
        is_root = self.rank == root
        self._through_host(
            array if is_root else None,
            None if is_root else array,
            lambda chunk: self._control.broadcast(chunk, root),
            self._chunk_bytes,
        )

    def reducescatter(
        self, pieces: Sequence[Any], result: Any, op: ReduceOp, scaling: Scaling
    ) -> None:
        """Reduce all ranks' ``pieces[r]`` on rank r, in the order of the ranks."""
        rows = self.empty(self.size * result.size, result.dtype)
        self.alltoall([as_bytes(piece) for piece in pieces], equal_parts(as_bytes(rows), self.size))
        self._cuda.reduce(rows, result, op, scaling)

    def close(self) -> None:
        """Wait for the device, and free the pinned memory."""
        if self._failure is None:
            for buffer in self._buffers:
                buffer.wait()
        self._buffers = []

    def _check_entered(self) -> None:
        """Raise if the work of a call would not be in order with the rest."""
        if self._entered != threading.get_ident():
            raise RuntimeError(
                "a collective on device arrays was called outside of enqueue(); pass a function "
                "that calls it to enqueue()"
            )

    def _disconnect(self) -> None:
        """End work on the device that waits for other ranks: these wait on the host alone."""

    def _mark(self) -> Event:
        return self.record(self.stream.ptr)

    def _through_host(
        self,
        source: Any,
        target: Any,
        exchange: Callable[[Any], None],
        step: int,
    ) -> None:
        """Copy ``source`` to the host, call ``exchange``, and copy to ``target``, chunk by chunk.

        Either ``source`` or ``target`` may be None: nothing is copied to the host, or back.
        """
        self._check_entered()
        total = (target if source is None else source).nbytes
        bounds = [(start, min(start + step, total)) for start in range(0, total, step)]
        places = [self._buffers[number % 2] for number in range(len(bounds))]

        def copy_in(number: int) -> None:
            if source is not None and number < len(bounds):
                start, stop = bounds[number]
                # The stream itself keeps this behind the copy out of the same buffer.
                self._cuda.copy(places[number].room(stop - start), source[start:stop])
                places[number].event = self._mark()

        for buffer in self._buffers:
            buffer.take(min(step, total))
        copy_in(0)
        for number, (start, stop) in enumerate(bounds):
            copy_in(number + 1)
            chunk = places[number].take(stop - start)
            exchange(chunk)
            if target is not None:
                self._cuda.copy(target[start:stop], chunk)
                places[number].event = self._mark()

    def _copy_in(self, pieces: Sequence[Any]) -> list[Any]:
        self._check_entered()
        parts = _split(self._buffers[0].take(sum(piece.nbytes for piece in pieces)), pieces)
        for part, piece in zip(parts, pieces, strict=True):
            self._cuda.copy(part, piece)
        self._buffers[0].event = self._mark()
        return parts

    def _copy_out(self, result: Sequence[Any], parts: Sequence[Any]) -> None:
        for target, part in zip(result, parts, strict=True):
            self._cuda.copy(target, part)
        self._buffers[1].event = self._mark()


class _PinnedBuffer:
    """Pinned host memory, and the event of the last copy to or from it."""

    def __init__(self, transport: DeviceTransport) -> None:
        self._transport = transport
        self._memory = np.empty(0, np.uint8)
        self.event: Event | None = None

    def wait(self) -> None:
        if self.event is not None:
            Work(self._transport, self.event).wait()
            self.event = None

    def take(self, nbytes: int) -> Any:
        """Wait for the device, and return the first bytes for the host to use."""
        self.wait()
        if nbytes > self._memory.size:
            self._memory = self._transport._cuda.pinned(nbytes)
        return self._memory[:nbytes]

    def room(self, nbytes: int) -> Any:
        """Return the first bytes for the device to use."""
        return self._memory[:nbytes]


def _split(memory: Any, like: Sequence[Any]) -> list[Any]:
    return cut(memory, [0, *itertools.accumulate(piece.nbytes for piece in like)])


def equal_parts(array: Any, count: int) -> list[Any]:
    """Cut an array into parts of the same size; the remainder is in none of them."""
    step = array.size // count
    return [array[number * step : (number + 1) * step] for number in range(count)]
