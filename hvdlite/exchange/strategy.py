"""What happens to a flat bucket of gradients on its way to the other ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from hvdlite.exchange.bucket import Bucket
from hvdlite.reduction import ReduceOp, Scaling, is_floating
from hvdlite.transport import Transport


class Strategy(ABC):
    """A way to exchange a bucket: gradients in, averages out, on every rank the same bits."""

    #: What the strategy is called; compared across ranks.
    name: str

    @abstractmethod
    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Write the reduction of all ranks' ``bucket.send`` into ``bucket.result``.

        It is collective, and leaves ``bucket.send`` as it is.
        """

    def __repr__(self) -> str:
        return f"Compression.{self.name}"


class Dense(Strategy):
    """Every gradient in its own type."""

    name = "none"

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Reduce in place in ``result`` where gradients are divided before the sum."""
        reduction, send = bucket.reduction, bucket.send
        if not reduction.before.is_identity:
            bucket.result[...] = bucket.send
            bucket.result[...] = reduction.before.apply(bucket.result)
            send = bucket.result
        transport.allreduce(send, bucket.result, ReduceOp.SUM, reduction.after(transport.size))


class Cast(Strategy):
    """Every gradient rounded to a 16-bit float, which halves the bytes of float32.

    The average is divided before it is rounded, so that the sum stays in range, and the
    sum is accumulated in float32. Types that are not wider floats are exchanged as they are.

    Args:
        name: of the strategy.
        dtype: the 16-bit type.
    """

    def __init__(self, name: str, dtype: Any) -> None:
        self.name = name
        self._dtype = np.dtype(dtype)
        self._dense = Dense()

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Round, sum, widen."""
        dtype = bucket.send.dtype
        if not is_floating(dtype) or dtype.itemsize <= self._dtype.itemsize:
            self._dense.exchange(bucket, transport)
            return
        scaled = bucket.reduction.whole(transport.size).apply(bucket.send.copy())
        with np.errstate(over="ignore"):  # inf is what an overflow has to become
            rounded = scaled.astype(self._dtype)
        transport.allreduce(rounded, rounded, ReduceOp.SUM, Scaling())
        bucket.result[...] = rounded
