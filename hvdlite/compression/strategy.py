"""What happens to a flat bucket of gradients on its way to the other ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, ClassVar

import numpy as np

from hvdlite import float16
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.parameter import Parameter, Reduction
from hvdlite.reduction import ReduceOp, Scaling, is_floating
from hvdlite.transport import Transport
from hvdlite.transport.gpu.base import DeviceTransport


class Strategy(ABC):
    """A way to exchange a bucket: gradients in, averages out, on every rank the same bits.

    A strategy is a value: it has settings, which are compared across ranks by its ``name``, and
    whatever it remembers from step to step is in the bucket's ``state``. So one strategy may serve
    several models at once. What it demands is declared here, and what does not go together is
    refused when it is put together.
    """

    #: Whether it works on device arrays, too; else these are exchanged by way of the host.
    on_device: ClassVar[bool] = False
    #: What it can compute; anything else is refused before it is tried.
    ops: tuple[ReduceOp, ...] = (ReduceOp.AVERAGE, ReduceOp.SUM)
    #: Whether it keeps something from step to step: arrays, or the number of the step.
    stateful: bool = False
    #: Whether it tells what of a gradient it has not sent (`Bucket.unsent`), as `ErrorFeedback`
    #: needs it.
    tells_unsent: bool = False
    #: Whether all values arrive, but for their rounding, so that weights may travel by it, too.
    takes_weights: bool = False

    @property
    def name(self) -> str:
        """What it is called, settings included; compared across ranks."""
        return repr(self).removeprefix("Compression.")

    def choose(self, parameter: Parameter) -> Strategy:
        """Return the strategy by which a parameter's gradient travels: this one, or another.

        Only parameters of one strategy and dtype share a bucket. All but floats go as they are.
        """
        return self if is_floating(parameter.dtype) else DENSE

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """What the elements of an array become that travels in another way than `exchange`.

        Raises:
            ValueError: they travel by `exchange` only.
        """
        raise ValueError(f"{self!r} is for allreduces and gradients; leave compression out")

    @abstractmethod
    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Write the reduction of all ranks' ``bucket.send`` into ``bucket.result``.

        It is collective, and leaves ``bucket.send`` as it is, unless that is ``bucket.result``.
        Where ``bucket.unsent`` is an array and `tells_unsent`, it writes there
        what of ``send`` has no part in the result: over all ranks, the sum (average) of ``send``
        is that of ``unsent`` and the result. Nothing is written (but the result, which is of no
        account then) where it raises.

        Arrays are float32 or float64; `exchange_bucket` sees to that.

        Raises:
            GradientError: on all ranks alike; a gradient cannot be exchanged in this way.
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
        """The constructor's call, without arguments that have their default values."""
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
    """Every gradient in its own type."""

    on_device = True
    ops = (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM)
    tells_unsent = True
    takes_weights = True

    def choose(self, parameter: Parameter) -> Strategy:
        """This one."""
        return self

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """What they are."""
        return dtype

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return a tensor as it is, and None, as Horovod's class does."""
        return tensor, None

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return a tensor as it is."""
        return tensor

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Reduce in place in ``result`` where gradients are divided before the sum."""
        send = bucket.send
        before, after = bucket.reduction.around(send.dtype, transport.size)
        if not before.is_identity:
            bucket.complete()
            bucket.result[...] = bucket.send
            bucket.result[...] = before.apply(bucket.result)
            send = bucket.result
        bucket.reduce(transport, send, bucket.result, after)
        if bucket.unsent is not None:
            bucket.unsent[...] = 0

    def exchange_on_device(
        self,
        send: Any,
        result: Any,
        dtype: np.dtype[Any],
        reduction: Reduction,
        transport: DeviceTransport,
    ) -> None:
        """Do the same on the device."""
        before, after = reduction.around(dtype, transport.size)
        if not before.is_identity:
            transport.scale(send, result, before, dtype)
            send = result
        transport.allreduce(send, result, ReduceOp.SUM, after, dtype)

    def __repr__(self) -> str:
        return "Compression.none"


#: What all strategies leave to it that they do not take.
DENSE = Dense()


def check_op(strategy: Strategy, op: ReduceOp) -> None:
    """Refuse a reduction that a strategy does not compute.

    Raises:
        ValueError: naming those that it does.
    """
    if op not in strategy.ops:
        raise ValueError(
            f"{strategy!r} does not compute hvd.{op.name.capitalize()}; use one of "
            + ", ".join(f"hvd.{each.name.capitalize()}" for each in strategy.ops)
        )


def exchange_bucket(
    strategy: Strategy, bucket: Bucket, transport: Transport, weight: float = 1.0
) -> None:
    """Exchange a bucket of any dtype, with a weight of this rank's gradients.

    Strategies that lose something compute in float32 where gradients are 16-bit floats.

    Args:
        strategy: how.
        bucket: what.
        transport: of the ranks.
        weight: multiplies ``bucket.send``; with 0 it counts as zeros, whatever is in it.

    Raises:
        GradientError: as `Strategy.exchange`.
    """
    # Not by identity: where a rank has joined, another one's pickle comes here.
    if weight != 1.0 or strategy != DENSE:
        bucket.complete()
    if weight != 1.0:
        # The average of no samples is not a number.
        bucket.result[...] = bucket.send if weight else 0
        bucket.result[...] = Scaling(weight).apply(bucket.result)
        bucket = bucket.derive(bucket.result, bucket.result)
    dtype = bucket.send.dtype
    if is_floating(dtype) and dtype.itemsize == 2 and strategy != DENSE:
        narrow, size = bucket, bucket.send.size
        bucket = narrow.derive(float16.widen(narrow.send), np.empty(size, np.float32))
        strategy.exchange(bucket, transport)
        float16.narrow(bucket.result, narrow.result)
    else:
        strategy.exchange(bucket, transport)
