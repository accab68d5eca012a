"""The allreduce of one device array, by any strategy that works on devices."""

from __future__ import annotations

from typing import Any

from hvdlite.compression.parameter import Reduction
from hvdlite.compression.strategy import Strategy
from hvdlite.engine.device import DeviceArray
from hvdlite.engine.device_operations import DeviceAllreduce
from hvdlite.reduction import Scaling
from hvdlite.transport.gpu.base import DeviceTransport


class CompressedDeviceAllreduce(DeviceAllreduce):
    """An allreduce of a device array by a strategy.

    Args:
        name, array, prescale, postscale, out: as in `DeviceAllreduce`.
        strategy: how it travels.
        reduction: sum or average.
    """

    def __init__(
        self,
        name: str,
        array: DeviceArray,
        strategy: Strategy,
        reduction: Reduction,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: DeviceArray | None = None,
    ) -> None:
        super().__init__(name, array, reduction.op, prescale, postscale, out, strategy.name)
        self._strategy = strategy
        self._reduction = reduction

    def _reduce(self, transport: DeviceTransport, send: Any, out: Any) -> None:
        dtype = self._array.dtype
        self._strategy.exchange_on_device(send, out, dtype, self._reduction, transport)
        if self._factors[1] != 1.0:
            transport.scale(out, out, Scaling(self._factors[1]), dtype)
