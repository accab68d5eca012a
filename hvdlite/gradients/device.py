"""A bucket of gradients in device memory."""

from __future__ import annotations

from hvdlite.compression import Bucket, Strategy
from hvdlite.engine.device import DeviceMemory
from hvdlite.engine.operation import Signature
from hvdlite.gradients.bucket import GradientBucket
from hvdlite.gradients.metadata import IN_SLOT
from hvdlite.transport.gpu.base import FlatArray
from hvdlite.transport.gpu.cuda import Event


class DeviceGradientBucket(GradientBucket):
    """A bucket of tensors on a device.

    A gradient is copied into it on the stream that is current when it is marked, and the
    exchange follows all these streams. `wait` makes the current stream follow the exchange.

    Args:
        name, signature, strategy: as in `GradientBucket`.
        arrays: tensors in ``memory``.
        memory: of the device.
    """

    memory: DeviceMemory
    ready: list[Event]

    def __init__(
        self,
        name: str,
        signature: Signature,
        arrays: Bucket,
        strategy: Strategy,
        memory: DeviceMemory,
    ) -> None:
        self.memory = memory
        self.tensors = (arrays.send, arrays.result)
        # Earlier users of this memory did so before this point.
        self._allocated = memory.cuda.record(memory.index, memory.stream())
        self._read: Event | None = None  # the end of the last exchange
        self._behind: set[int] = set()  # the streams that have waited for it
        super().__init__(name, signature, arrays, strategy)
        self.keeps_result = True

    def begin_step(self) -> None:
        super().begin_step()
        # The streams that copy averages from the result do so before it is written again.
        self._streams: set[int] = set(self._behind)
        self.ready = [self._allocated]

    def order_writes(self) -> None:
        """Let writes of the current stream into slots wait for the last exchange.

        A stream that has not waited for that exchange might overtake it.
        """
        stream = self.memory.stream()
        if self._read is not None and stream not in self._behind:
            self.memory.cuda.wait_event(self.memory.index, stream, self._read)
            self._behind.add(stream)

    def mark(self, start: int = 0, stop: int | None = None, kind: int = IN_SLOT) -> None:
        super().mark(start, stop, kind)
        self._streams.add(self.memory.stream())
        if not self.awaited:
            self._seal()

    def fill_gaps(self) -> None:
        self.order_writes()
        super().fill_gaps()
        self._streams.add(self.memory.stream())
        self._seal()

    def wait(self) -> None:
        """Wait until the exchange is under way, and let the current stream wait for it."""
        if self.pending is not None:
            self.pending.wait().take()
            stream = self.memory.stream()
            self._read = self.memory.cuda.record(self.memory.index, stream)
            self._behind = {stream}

    def _seal(self) -> None:
        # Here and not in `prepare_submission`: that may be in another thread, and much later.
        cuda, index = self.memory.cuda, self.memory.index
        self.ready += [cuda.record(index, stream) for stream in self._streams]

    def corrupt(self, name: str, value: float) -> None:
        """Set the first entry of a gradient, on the current stream, after all gradients."""
        self.order_writes()
        stream = self.memory.stream()
        for event in self.ready:
            self.memory.cuda.wait_event(self.memory.index, stream, event)
        super().corrupt(name, value)
        self._streams.add(stream)
        self._seal()

    def _exchanged(self) -> Bucket:
        view, dtype = self.memory.array, self.arrays.parameters[0].dtype
        send, result = (
            FlatArray(view(tensor), dtype) for tensor in (self.arrays.send, self.arrays.result)
        )
        return self.arrays.derive(send, result)
