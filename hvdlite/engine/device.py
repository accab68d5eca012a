"""Device arrays, and the part of a lane that runs operations on them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hvdlite.engine.operation import Operation
from hvdlite.engine.stall import StallInspector
from hvdlite.errors import HorovodInternalError

if TYPE_CHECKING:
    from hvdlite.engine.lane import Lane
    from hvdlite.transport.gpu.base import DeviceTransport, FlatArray, Work
    from hvdlite.transport.gpu.cuda import Cuda

# A few steps of a large model; the host does not run further ahead.
_MAX_UNDER_WAY = 256
_POLL_SECONDS = 1e-3
# How often to check that the ranks for which the device may be waiting are alive.
_ALIVE_SECONDS = 0.1
# Work that all ranks have enqueued ends in this time unless the settings say otherwise, or a rank
# hangs.
_TIMEOUT_SECONDS = 600.0


class DeviceMemory(Protocol):
    """The memory of one device, as a framework manages it: in tensors, used by streams.

    Attributes:
        cuda: The CUDA runtime of this process.
        index: The number of the device.
    """

    cuda: Cuda
    index: int

    def empty(self, size: int, dtype: np.dtype[Any]) -> Any:
        """Return a flat uninitialised tensor, allocated on the thread's current stream."""

    def array(self, tensor: Any) -> Any:
        """View a contiguous tensor as a flat device array, bfloat16 as uint16."""

    def stream(self) -> int:
        """Return the address of the calling thread's current stream."""

    def on(self, stream: int) -> AbstractContextManager[Any]:
        """Make a stream the calling thread's current one while the context lasts."""

    def keep(self, tensor: Any) -> None:
        """Delay the reuse of a tensor's memory, once freed, until the current stream gets there."""


@dataclass(frozen=True, eq=False)
class DeviceArray:
    """A contiguous tensor in device memory.

    Attributes:
        dtype: Its dtype as numpy's (``ml_dtypes`` has bfloat16).
    """

    tensor: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    memory: DeviceMemory

    def ravel(self) -> FlatArray:
        """Return its elements, as transports take them."""
        from hvdlite.transport.gpu.base import FlatArray

        return FlatArray(self.memory.array(self.tensor), self.dtype)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def like(self, shape: tuple[int, ...]) -> DeviceArray:
        """Return an uninitialised array of another shape in the same memory."""
        tensor = self.memory.empty(prod(shape), self.dtype).reshape(shape)
        return DeviceArray(tensor, shape, self.dtype, self.memory)


@dataclass(eq=False)
class DeviceResult:
    """The result of a device operation's handle, which the device may still have to compute.

    Args:
        tensors: Tensors that the work uses; they live until it is done, or `take` is called.
    """

    work: Work
    memory: DeviceMemory
    tensors: Sequence[Any]

    def take(self) -> Any:
        """Make the current stream's later work wait for the result, and return it.

        The host does not wait. A communication that fails later is reported by the next
        operation, and leaves the result undefined.

        Raises:
            HorovodInternalError: The communication has failed.
        """
        self.work.wait_on(self.memory.stream())
        for tensor in self.tensors:
            self.memory.keep(tensor)
        self.tensors = ()
        return self.work.value


class DeviceExecutor:
    """Runs a lane's device operations; it connects its device transport with the first one.

    Only the thread that drives the lane may call `execute` and `check`.

    Attributes:
        under_way: The start times and results of operations that the device may not have finished.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane, settings = lane, lane.settings
        self._through_host = settings.device_transport == "host"
        self._timeout = settings.stall_shutdown_time_seconds or _TIMEOUT_SECONDS
        settings = dataclasses.replace(settings, stall_shutdown_time_seconds=self._timeout)
        self._transport: DeviceTransport | None = None
        self._index: int | None = None
        self._stall = StallInspector(settings, self._describe)
        self.under_way: deque[tuple[float, DeviceResult]] = deque()
        self._seen_alive = 0.0

    @property
    def is_connected(self) -> bool:
        """True once there is a device transport: arrays in device memory have been exchanged."""
        return self._transport is not None

    def admit(self, operation: Operation, index: int) -> None:
        """Accept an operation; it fails, on all ranks, if it is for another device."""
        if self._index is None:
            self._index = index
        elif self._index != index:
            operation.failure = (
                f"{operation.name!r} lies on device {index}, and this rank's collectives are on "
                f"device {self._index}; move it there: one rank exchanges on one device"
            )

    def execute(self, operation: Operation, payloads: Sequence[bytes]) -> DeviceResult:
        """Send to the device what an operation does, on which all ranks have agreed; collective.

        Raises:
            HorovodInternalError: A rank cannot use its device, or communication failed.
        """
        memory = operation.memory
        assert memory is not None
        transport = self._connected(memory)
        while len(self.under_way) >= _MAX_UNDER_WAY:
            time.sleep(_POLL_SECONDS)
            self.check()
        execute = partial(operation.execute, transport, payloads)
        result = DeviceResult(
            transport.enqueue(execute, operation.ready), memory, operation.tensors
        )
        self.under_way.append((time.monotonic(), result))
        return result

    def check(self) -> None:
        """Remove the operations that the device has finished.

        Raises:
            HorovodInternalError: The communication has failed, a rank has ended, which NCCL does
                not report, or the device has taken as long as a rank may be waited for.
        """
        if self._transport is None:
            return
        self._transport.check()
        while self.under_way and self.under_way[0][1].work.done():
            self.under_way.popleft()
        if self.under_way:
            now = time.monotonic()
            self._stall.check(now - self.under_way[0][0])
            if now - max(self.under_way[0][0], self._seen_alive) > _ALIVE_SECONDS:
                self._lane.transport.check_alive()
                self._seen_alive = now

    def abort(self, reason: str) -> None:
        """End all operations under way; any thread may call it."""
        if self._transport is not None:
            with contextlib.suppress(HorovodInternalError):  # it always raises
                self._transport.abort(reason)

    def close(self) -> None:
        """Release the device transport; collective, and before the host transport is closed."""
        if self._transport is not None:
            self._transport.close()
        self.under_way.clear()

    def _connected(self, memory: DeviceMemory) -> DeviceTransport:
        if self._transport is None:
            from hvdlite.transport.registry import connect_device

            self._transport = connect_device(
                self._lane.transport,
                memory.index,
                memory.cuda,
                self._timeout,
                self._through_host,
            )
            self._transport.report = self._lane.report_device
        return self._transport

    def _describe(self) -> str:
        return f"work on device {self._index}"
