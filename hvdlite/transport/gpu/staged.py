"""The transport of device arrays through the host, for ranks without NCCL or with one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdlite.base.arrays import as_bytes
from hvdlite.base.reduction import ReduceOp, Scaling
from hvdlite.transport.gpu.base import DeviceTransport, Work
from hvdlite.transport.gpu.cuda import Cuda, Event
from hvdlite.transport.transport import Transport


class HostStaged(DeviceTransport):
    """Copies to pinned memory, uses the lane's host transport, copies back.

    Large arrays move in chunks through two buffers: while the host exchanges one, the device
    copies the next to the host and the one before back. The calling thread, which is the lane's,
    waits for the device before every exchange; no other thread does. The guarantees of the host
    transport hold here: 16-bit floats are accumulated in float32, NaN passes through Min and Max.

    Args:
        cuda, control, device, timeout: as in `DeviceTransport`.
        chunk_bytes: the size of a chunk, a multiple of 16.
    """

    def __init__(
        self,
        cuda: Cuda,
        control: Transport,
        device: int,
        timeout: float | None = None,
        chunk_bytes: int = 4 * 2**20,
    ) -> None:
        super().__init__(cuda, control, device, timeout)
        self._chunk_bytes = chunk_bytes
        self._buffers = [_PinnedBuffer(self, cuda.pinned) for _ in range(2)]

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
            array.nbytes,
        )

    def close(self) -> None:
        """Wait for the device, and free the pinned memory."""
        if self._failure is None:
            for buffer in self._buffers:
                buffer.wait()
        self._buffers = []

    def _disconnect(self) -> None:
        """Do nothing: the ranks wait for each other on the host only."""

    def _mark(self) -> Event:
        return self.record(self.stream.ptr)

    def _through_host(
        self,
        source: Any,
        target: Any,
        exchange: Callable[[Any], None],
        step: int,
        nbytes: int | None = None,
    ) -> None:
        """Copy ``source`` to the host, call ``exchange``, and copy to ``target``, chunk by chunk.

        ``source`` or ``target`` may be None: nothing is copied to the host, or back.
        """
        self._check_entered()
        total = source.nbytes if nbytes is None else nbytes
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

    def __init__(self, transport: DeviceTransport, allocate: Callable[[int], Any]) -> None:
        self._transport = transport
        self._allocate = allocate
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
            self._memory = self._allocate(nbytes)
        return self._memory[:nbytes]

    def room(self, nbytes: int) -> Any:
        """Return the first bytes for the device to use."""
        return self._memory[:nbytes]


def _split(memory: Any, like: Sequence[Any]) -> list[Any]:
    bounds = itertools.accumulate((piece.nbytes for piece in like), initial=0)
    return [memory[start:stop] for start, stop in itertools.pairwise(bounds)]
