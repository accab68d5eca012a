"""Operations on device arrays: what they need of a framework's memory, and what they return."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hvdlite.engine.operation import Operation, Signature
from hvdlite.transport import Transport
from hvdlite.transport.gpu.base import DeviceTransport, Work
from hvdlite.transport.gpu.cuda import Cuda, Event

if TYPE_CHECKING:
    from hvdlite.engine.device_side import DeviceSide


class DeviceMemory(Protocol):
    """The memory of one device, as a framework has it: in tensors, used by streams."""

    @property
    def cuda(self) -> Cuda:
        """The devices of this process."""

    @property
    def index(self) -> int:
        """The number of this one."""

    def empty(self, size: int, dtype: np.dtype[Any]) -> Any:
        """Return a flat uninitialised tensor, made on the thread's current stream."""

    def array(self, tensor: Any) -> Any:
        """View a contiguous tensor as a flat device array, bfloat16 as uint16."""

    def stream(self) -> int:
        """The address of the stream that the calling thread's work goes to."""

    def on(self, stream: int) -> AbstractContextManager[Any]:
        """Send the calling thread's work to a stream while this lasts."""

    def keep(self, tensor: Any) -> None:
        """Once it is free, use a tensor's memory again only after the current stream."""


@dataclass(frozen=True, eq=False)
class DeviceArray:
    """A contiguous tensor in device memory.

    Attributes:
        tensor: the framework's.
        shape: of it.
        dtype: of its elements, as numpy's (``ml_dtypes`` has bfloat16).
        memory: where it lies.
    """

    tensor: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    memory: DeviceMemory

    @property
    def flat(self) -> Any:
        """Its elements as a device array."""
        return self.memory.array(self.tensor)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def like(self, shape: tuple[int, ...]) -> DeviceArray:
        """Return an uninitialised one of another shape beside it."""
        tensor = self.memory.empty(prod(shape), self.dtype).reshape(shape)
        return DeviceArray(tensor, shape, self.dtype, self.memory)


class DeviceResult:
    """What a device operation's handle delivers: the device may still have to do it.

    Args:
        transport: whose work it is.
        work: on the device.
        memory: where the tensors lie.
        tensors: what the work uses; they live until it is done, or `take` is called.
        value: what the operation results in.
    """

    def __init__(
        self,
        transport: DeviceTransport,
        work: Work,
        memory: DeviceMemory,
        tensors: Sequence[Any],
        value: Any,
    ) -> None:
        self._transport = transport
        self._work = work
        self._memory = memory
        self._tensors = tensors
        self._value = value

    def take(self) -> Any:
        """Let the current stream's later work wait for the result, and return it.

        The host does not wait. A communication that fails later is reported by what comes
        next, and leaves anything in the result.

        Raises:
            HorovodInternalError: the communication has failed.
        """
        self._transport.check()
        self._work.wait_on(self._memory.stream())
        for tensor in self._tensors:
            self._memory.keep(tensor)
        self._tensors = ()
        return self._value

    def done(self) -> bool:
        """Whether the device has finished it.

        Raises:
            HorovodInternalError: the communication has failed.
        """
        return self._work.done()


class DeviceOperation(Operation):
    """A collective on device arrays.

    Args:
        name, signature, payload: as in `Operation`.
        memory: where the arrays lie.

    Attributes:
        side: of the lane that it was submitted to.
        ready: what the device has to do before.
        tensors: what the collective uses.
        value: the result, once `exchange` has been called.
    """

    memory: DeviceMemory
    side: DeviceSide

    def __init__(
        self, name: str, signature: Signature, memory: DeviceMemory, payload: bytes = b""
    ) -> None:
        super().__init__(name, signature, payload)
        self.memory = memory
        self.ready: list[Event] = []
        self.tensors: tuple[Any, ...] = ()
        self.value: Any = None

    def follow(self, stream: int) -> None:
        """Wait, on the device, for what a stream has been given to do by now."""
        self.ready.append(self.memory.cuda.record(self.memory.index, stream))

    def prepare(self, payloads: Sequence[bytes], rank: int) -> None:
        """Do what is left to do once every rank's payload is known, on a rank."""

    @abstractmethod
    def exchange(self, transport: DeviceTransport) -> None:
        """Send the collective to the device."""

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> DeviceResult:
        """Send it to the device by the lane's device transport."""
        return self.side.run(self, payloads)
