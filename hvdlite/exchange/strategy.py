"""What happens to a flat bucket of gradients on its way to the other ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from hvdlite import halves
from hvdlite.exchange.bucket import Bucket, Reduction
from hvdlite.reduction import ReduceOp, Scaling, is_floating
from hvdlite.transport import Transport
from hvdlite.transport.device import DeviceTransport


class Strategy(ABC):
    """A way to exchange a bucket: gradients in, averages out, on every rank the same bits."""

    #: What the strategy is called; compared across ranks.
    name: str
    #: Whether it works on device arrays, too; else these are exchanged by way of the host.
    on_device = False
    #: What it can compute; anything else is refused before it is tried.
    ops: tuple[ReduceOp, ...] = (ReduceOp.AVERAGE, ReduceOp.SUM)

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """What the elements of an array become that travels in another way than `exchange`.

        Raises:
            ValueError: they travel by `exchange` only.
        """
        raise ValueError(f"{self!r} is for allreduces and gradients; leave compression out")

    @abstractmethod
    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Write the reduction of all ranks' ``bucket.send`` into ``bucket.result``.

        It is collective, and leaves ``bucket.send`` as it is.
        """

    def exchange_on_device(
        self,
        send: Any,
        result: Any,
        dtype: np.dtype[Any],
        reduction: Reduction,
        transport: DeviceTransport,
    ) -> None:
        """Do what `exchange` does on device arrays, if the strategy is ``on_device``.

        Args:
            send: flat, of all the elements; bfloat16 as uint16. It is left as it is.
            result: where the reduction goes, likewise.
            dtype: what the elements are.
            reduction: sum or average; Adasum is for buckets on the host.
            transport: runs the collectives; this is called inside its ``enqueue``.
        """
        raise NotImplementedError(f"{self!r} does not work on device arrays")

    def __repr__(self) -> str:
        return f"Compression.{self.name}"


class Dense(Strategy):
    """Every gradient in its own type."""

    name = "none"
    on_device = True
    ops = (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM)

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """What they are."""
        return dtype

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Reduce in place in ``result`` where gradients are divided before the sum."""
        reduction, send = bucket.reduction, bucket.send
        if not reduction.before.is_identity:
            bucket.result[...] = bucket.send
            bucket.result[...] = reduction.before.apply(bucket.result)
            send = bucket.result
        bucket.reduce(transport, send, bucket.result, reduction.after(transport.size))

    def exchange_on_device(
        self,
        send: Any,
        result: Any,
        dtype: np.dtype[Any],
        reduction: Reduction,
        transport: DeviceTransport,
    ) -> None:
        """Do the same on the device."""
        if not reduction.before.is_identity:
            transport.scale(send, result, reduction.before, dtype)
            send = result
        transport.allreduce(send, result, ReduceOp.SUM, reduction.after(transport.size), dtype)


class Cast(Strategy):
    """Every gradient rounded to a 16-bit float, which halves the bytes of float32.

    The average is divided before it is rounded, so that the sum stays in range, and the
    sum is accumulated in float32. Types that are not wider floats are exchanged as they are.

    Args:
        name: of the strategy.
        dtype: the 16-bit type.
    """

    on_device = True
    ops = (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM)

    def __init__(self, name: str, dtype: Any) -> None:
        self.name = name
        self._dtype = np.dtype(dtype)
        self._dense = Dense()

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The 16-bit type, of wider floats."""
        return self._dtype if self._narrows(dtype) else dtype

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Round, sum, widen."""
        send, result = bucket.send, bucket.result
        if not self._narrows(send.dtype):
            self._dense.exchange(bucket, transport)
            return
        rounded = transport.empty(send.size, self._dtype)
        scaling = bucket.reduction.whole(transport.size)
        copy = np.empty(min(send.size, halves.PIECE), send.dtype)
        for piece in halves.pieces(send.size):
            gradients = copy[: piece.stop - piece.start]
            gradients[...] = send[piece]
            with np.errstate(over="ignore"):  # inf is what an overflow has to become
                halves.narrow(scaling.apply(gradients), rounded[piece])
        bucket.reduce(transport, rounded, rounded, Scaling())
        halves.widen(rounded, result)

    def exchange_on_device(
        self,
        send: Any,
        result: Any,
        dtype: np.dtype[Any],
        reduction: Reduction,
        transport: DeviceTransport,
    ) -> None:
        """Do the same on the device."""
        if not self._narrows(dtype):
            self._dense.exchange_on_device(send, result, dtype, reduction, transport)
            return
        rounded = transport.empty(send.size, self._dtype)
        transport.convert(send, rounded, reduction.whole(transport.size), dtype, self._dtype)
        transport.allreduce(rounded, rounded, ReduceOp.SUM, Scaling(), self._dtype)
        transport.convert(rounded, result, Scaling(), self._dtype, dtype)

    def _narrows(self, dtype: np.dtype[Any]) -> bool:
        return is_floating(dtype) and dtype.itemsize > self._dtype.itemsize
