"""One bucket in device memory in the current step, and the operation that exchanges it."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite import timeline
from hvdlite.compression import Bucket, Strategy
from hvdlite.engine import Operation
from hvdlite.engine.device import DeviceMemory, DeviceOperation, DeviceResult
from hvdlite.engine.operation import Signature
from hvdlite.gradients.step import BucketStep
from hvdlite.reduction import Scaling
from hvdlite.transport import Transport
from hvdlite.transport.gpu.base import DeviceTransport
from hvdlite.transport.gpu.cuda import Event


class DeviceStep(BucketStep):
    """A bucket of tensors on a device.

    A gradient is copied into it on the stream that is current where it is marked, and the
    exchange follows all these streams. `wait` makes the current stream follow the exchange.

    Args:
        bucket: whose arrays are tensors in ``memory``.
        strategy: by which it travels; it works on devices.
        members: as there.
        memory: of the device.

    Attributes:
        memory: of the device.
        ready: what the exchange has to wait for.
    """

    def __init__(
        self, bucket: Bucket, strategy: Strategy, members: Sequence[int], memory: DeviceMemory
    ) -> None:
        self.memory = memory
        # Who else has used this memory did so before this point.
        self._allocated = memory.cuda.record(memory.index, memory.stream())
        self._read: Event | None = None  # the last exchange's end, and the streams behind it
        self._behind: set[int] = set()
        super().__init__(bucket, strategy, members)
        self.renews = False

    def reset(self) -> None:
        """Begin the next step."""
        super().reset()
        # The streams that copy averages from the result do so before it is written again.
        self._streams: set[int] = set(self._behind)
        self.ready = [self._allocated]

    def follow(self) -> None:
        """Let what the current stream writes into slots come after their last exchange.

        A stream that has not waited for that exchange might overtake it.
        """
        stream = self.memory.stream()
        if self._read is not None and stream not in self._behind:
            self.memory.cuda.wait_event(self.memory.index, stream, self._read)
            self._behind.add(stream)

    def mark(self, *positions: int) -> None:
        """Take note of gradients that the current stream brings."""
        super().mark(*positions)
        self._streams.add(self.memory.stream())
        if not self.absent:
            self._seal()

    def fill(self) -> None:
        """Write zeros for the gradients that have not come."""
        if self.has_gaps:
            self.follow()
            super().fill()
            self._streams.add(self.memory.stream())
            self._seal()

    def operation(self, name: str, signature: Signature) -> Operation:
        """Make the operation that exchanges the bucket as it is now."""
        return DeviceBucketExchange(name, signature, self)

    def wait(self) -> None:
        """Wait until the exchange is under way, and let the current stream wait for it."""
        if self.handle is not None:
            self.handle.wait().take()
            stream = self.memory.stream()
            self._read = self.memory.cuda.record(self.memory.index, stream)
            self._behind = {stream}

    def _seal(self) -> None:
        # Here and not where it is launched: that may be in another thread, and much later.
        cuda, index = self.memory.cuda, self.memory.index
        self.ready += [cuda.record(index, stream) for stream in self._streams]


class DeviceBucketExchange(DeviceOperation):
    """The exchange of one bucket on a device; its payload says which gradients are there.

    Args:
        name: of the operation.
        signature: of the whole plan.
        step: the bucket; what has not come counts as zeros.
    """

    def __init__(self, name: str, signature: Signature, step: DeviceStep) -> None:
        super().__init__(name, signature, step.memory, payload=step.tell())
        self._step = step
        self.ready = step.ready
        self.tensors = (step.bucket.send, step.bucket.result)
        self.nbytes = step.bucket.send.nbytes

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> DeviceResult:
        """Send the exchange to the device, unless the ranks' replicas differ.

        Raises:
            GradientError: as `report.read`, on all ranks.
            MismatchError: as `BucketStep.compare`.
        """
        self._step.compare(payloads, transport)
        return super().execute(transport, payloads)

    @property
    def about(self) -> str:
        """Return the names of the first parameters in the bucket."""
        return self._step.title

    def prepare(self, payloads: Sequence[bytes], rank: int) -> None:
        """Take note of which gradients are there.

        Raises:
            GradientError: as `report.read`, on all ranks.
        """
        self._told = self._step.learn(payloads, rank)

    def exchange(self, transport: DeviceTransport) -> None:
        """Exchange the bucket, unless no rank has any of its gradients as a dense one."""
        bucket, memory = self._step.bucket, self.memory
        if self._told.is_empty:
            return
        send, result = memory.array(bucket.send), memory.array(bucket.result)
        dtype, strategy = bucket.parameters[0].dtype, self._step.strategy
        with timeline.span(self.lane, timeline.EXCHANGE):
            if self._step.weight != 1.0:
                transport.scale(send, result, Scaling(self._step.weight), dtype)
                send = result
            strategy.exchange_on_device(send, result, dtype, bucket.reduction, transport)
