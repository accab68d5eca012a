"""Strategy: how a flat bucket of gradients travels to the other ranks, in its `exchange`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, ClassVar

import numpy as np

from hvdlite.base import float16
from hvdlite.base.reduction import ReduceOp, Scaling, is_floating
from hvdlite.compression.bucket import Bucket, Parameter
from hvdlite.transport import Transport
from hvdlite.transport.counting import CountingTransport, allreduce_bytes, count_exchange


class Strategy(ABC):
    """A way to exchange a bucket: gradients in, reduced gradients out, the same bits on every rank.

    A strategy is a value: it has settings, which ranks compare by its ``name``, and it keeps
    everything that it remembers from step to step in the bucket's ``state``. So one strategy may
    serve several models at once. It declares its capabilities here, and combinations that cannot
    work are refused when they are built.
    """

    #: Whether gradients are exchanged unchanged: all of them, in their own dtype.
    is_identity: ClassVar[bool] = False
    #: Whether it works on device arrays; otherwise they are exchanged through the host.
    on_device: ClassVar[bool] = False
    #: The reductions that it computes; all others are refused in advance.
    ops: tuple[ReduceOp, ...] = (ReduceOp.AVERAGE, ReduceOp.SUM)
    #: Whether it keeps state from step to step: arrays, or the number of the step.
    stateful: bool = False
    #: Whether it reports the part of a gradient that it has not sent (`Bucket.unsent`), which
    #: `ErrorFeedback` needs.
    tells_unsent: bool = False
    #: Whether all values arrive, except for rounding, so that it may carry weights, too.
    takes_weights: bool = False
    #: Whether a value's result is the same in whatever bucket it travels, and wherever in it.
    is_elementwise: bool = False

    @property
    def name(self) -> str:
        """Return the name, including settings; ranks compare it."""
        return repr(self).removeprefix("Compression.")

    def choose(self, parameter: Parameter) -> Strategy:
        """Return the strategy for a parameter's gradient: this one, or another.

        Only parameters of one strategy and dtype share a bucket. Dtypes other than floats are
        exchanged unchanged.
        """
        return self if is_floating(parameter.dtype) else DENSE

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype in which arrays travel in a reducescatter, or refuse that."""
        raise ValueError(f"{self!r} is for allreduces and gradients; leave compression out")

    @abstractmethod
    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Write the reduction of all ranks' ``bucket.send`` into ``bucket.result``; collective.

        It leaves ``bucket.send`` unchanged, unless that is ``bucket.result``. If ``bucket.unsent``
        is an array and the strategy `tells_unsent`, it writes there the part of ``send`` that is
        missing from the result: over all ranks, the sum (average) of ``send`` equals that of
        ``unsent`` plus the result. If it raises, only the result has changed, and is meaningless.

        Arrays are float32 or float64; `exchange_bucket` converts 16-bit floats. A strategy that is
        ``on_device`` gets `FlatArray`, too, of any floats, and leaves arithmetic to the transport.

        Raises:
            GradientError: on all ranks; a gradient cannot be exchanged by this strategy.
        """

    def __repr__(self) -> str:
        """Return the constructor's call, without arguments that have their default values."""
        if not is_dataclass(self):
            return f"{type(self).__name__}()"
        arguments = []
        for each in fields(self):
            value = getattr(self, each.name)
            if each.default is MISSING:
                arguments.append(repr(value))
            elif value != each.default:
                arguments.append(f"{each.name}={value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"


@dataclass(frozen=True, repr=False)
class Dense(Strategy):
    """Send gradients unchanged, in their own dtype."""

    is_identity = True
    on_device = True
    ops = (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM)
    tells_unsent = True
    takes_weights = True
    is_elementwise = True

    def choose(self, parameter: Parameter) -> Strategy:
        return self

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return dtype

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor and None, as Horovod's class does."""
        return tensor, None

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return the tensor."""
        return tensor

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Reduce, in place in ``result`` if gradients are divided before the sum."""
        send = bucket.send
        before, after = bucket.reduction.scalings(send.dtype, transport.size)
        if not before.is_identity:
            bucket.copy_zero_copy_parts()
            transport.scale(send, bucket.result, before)
            send = bucket.result
        bucket.reduce(transport, send, bucket.result, after)
        if bucket.unsent is not None:
            bucket.unsent[...] = 0

    def __repr__(self) -> str:
        return "Compression.none"


#: The strategy for everything that other strategies do not handle.
DENSE = Dense()


def check_op(strategy: Strategy, op: ReduceOp) -> None:
    """Refuse a reduction that a strategy does not compute."""
    if op not in strategy.ops:
        raise ValueError(
            f"{strategy!r} does not compute hvd.{op.name.capitalize()}; use one of "
            + ", ".join(f"hvd.{each.name.capitalize()}" for each in strategy.ops)
        )


def exchange_bucket(
    strategy: Strategy, bucket: Bucket, transport: Transport, weight: float | None = None
) -> None:
    """Exchange a bucket of any dtype, with a weight for this rank's gradients.

    Lossy strategies compute in float32 if gradients are 16-bit floats. The bytes that are sent are
    counted in ``bucket.sent``, and for `hvd.traffic`.

    Args:
        weight: multiplies ``bucket.send``; with 0 it counts as zeros, whatever its content. None
            on all ranks: there are no weights.
    """
    whole, send = bucket, bucket.send
    uncompressed = allreduce_bytes(send.nbytes, send.itemsize, transport.rank, transport.size)
    counting = None
    if not strategy.is_identity:
        transport = counting = CountingTransport(transport)
    if weight is not None or counting is not None:
        bucket.copy_zero_copy_parts()
    if weight is not None:
        if weight or not isinstance(send, np.ndarray):  # a device's are zeros then
            transport.scale(send, bucket.result, Scaling(weight))
        else:  # not 0 * gradients: the average of no samples is NaN
            bucket.result[...] = 0
        bucket = bucket.derive(bucket.result, bucket.result)
    dtype = bucket.send.dtype
    if not strategy.is_identity and dtype.itemsize == 2 and is_floating(dtype):
        narrow, size = bucket, bucket.send.size
        bucket = narrow.derive(float16.widen(narrow.send), np.empty(size, np.float32))
        strategy.exchange(bucket, transport)
        float16.narrow(bucket.result, narrow.result)
    else:
        strategy.exchange(bucket, transport)
    whole.sent = uncompressed if counting is None else counting.sent
    count_exchange(whole.sent, uncompressed)
