"""The device side of a lane: its device transport, and what that has under way."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from hvdlite.engine.device import DeviceMemory, DeviceOperation, DeviceResult
from hvdlite.engine.patience import WaitingPolicy
from hvdlite.errors import HorovodInternalError
from hvdlite.settings import Settings
from hvdlite.transport import Transport
from hvdlite.transport.gpu.base import DeviceTransport
from hvdlite.transport.gpu.connect import connect_device

# A few steps of a large model; further ahead the host does not run.
_MOST_UNDER_WAY = 256
_LOOK_SECONDS = 1e-3
# How often to look whether the ranks that the device may be waiting for are alive.
_ALIVE_SECONDS = 0.1
# What all ranks have enqueued ends in this time where nothing else is set, or a rank hangs.
_TIMEOUT_SECONDS = 600.0


class DeviceSide:
    """Runs a lane's device operations; made by every lane, connected when one is there.

    Only the thread that drives the lane may call `run` and `look`.

    Args:
        control: the lane's host transport.
        settings: times of reports and time-outs.

    Attributes:
        under_way: when it began and its result, of what the device may not have finished.
    """

    def __init__(self, control: Transport, settings: Settings) -> None:
        self._control = control
        self._timeout = settings.stall_shutdown_time_seconds or _TIMEOUT_SECONDS
        settings = dataclasses.replace(settings, stall_shutdown_time_seconds=self._timeout)
        self._transport: DeviceTransport | None = None
        self._index: int | None = None
        self._patience = WaitingPolicy(settings, self._describe)
        self.under_way: deque[tuple[float, DeviceResult]] = deque()
        self._seen_alive = 0.0

    def admit(self, operation: Any) -> None:
        """Take an operation; it fails, on all ranks, if it is for another device."""
        index = operation.memory.index
        if self._index is None:
            self._index = index
        elif self._index != index:
            operation.failure = (
                f"{operation.name!r} lies on device {index}, and this rank's collectives are on "
                f"device {self._index}; move it there: one rank exchanges on one device"
            )
        operation.side = self

    def run(self, operation: DeviceOperation, payloads: Sequence[bytes]) -> DeviceResult:
        """Send an operation to the device, in which all ranks have met; collective.

        Raises:
            HorovodInternalError: a rank cannot use its device, or communication failed.
        """
        transport = self._connected(operation.memory)
        while len(self.under_way) >= _MOST_UNDER_WAY:
            time.sleep(_LOOK_SECONDS)
            self.look()
        operation.prepare(payloads, transport.rank)
        work = transport.enqueue(lambda: operation.exchange(transport), operation.ready)
        result = DeviceResult(transport, work, operation.memory, operation.tensors, operation.value)
        self.under_way.append((time.monotonic(), result))
        return result

    def look(self) -> None:
        """Forget what the device has finished.

        Raises:
            HorovodInternalError: the communication has failed, a rank has ended, of which NCCL
                tells nothing, or the device has taken as long as a rank may be waited for.
        """
        if self._transport is None:
            return
        self._transport.check()
        while self.under_way and self.under_way[0][1].done():
            self.under_way.popleft()
        if self.under_way:
            now = time.monotonic()
            self._patience.check(now - self.under_way[0][0])
            if now - max(self.under_way[0][0], self._seen_alive) > _ALIVE_SECONDS:
                self._control.check_alive()
                self._seen_alive = now

    def abort(self, reason: str) -> None:
        """End what is under way; any thread may."""
        if self._transport is not None:
            with contextlib.suppress(HorovodInternalError):  # it always raises
                self._transport.abort(reason)

    def close(self) -> None:
        """Give back what the device transport holds; collective, and before the host's."""
        if self._transport is not None:
            self._transport.close()
        self.under_way.clear()

    def _connected(self, memory: DeviceMemory) -> DeviceTransport:
        if self._transport is None:
            self._transport = connect_device(
                self._control, memory.index, timeout=self._timeout, cuda=memory.cuda
            )
        return self._transport

    def _describe(self) -> str:
        return f"work on device {self._index}"
