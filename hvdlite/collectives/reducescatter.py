"""Reducescatter: every rank gets some rows of the reduction of all ranks' arrays."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from hvdlite.base import float16, reduction
from hvdlite.base.arrays import as_array, cut, flat, slice_bounds
from hvdlite.base.reduction import ReduceOp, Scaling, first_beyond, scale_integers, scales_integers
from hvdlite.collectives.allreduce import out_of_range
from hvdlite.compression import Compression, Strategy, check_strategy
from hvdlite.engine import Handle, Operation, Signature, runtime
from hvdlite.engine.device import DeviceArray, DeviceOperation
from hvdlite.engine.memory import Extent, extents_of
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.errors import GradientError, UnsupportedError
from hvdlite.observe import timeline
from hvdlite.transport import Transport
from hvdlite.transport.gpu.base import DeviceTransport


def reducescatter(
    array: Any,
    name: str | None = None,
    op: ReduceOp | int = ReduceOp.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: Strategy = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce an array over all ranks, and return this rank's rows of the result.

    Args:
        array: Array of at least one axis, whose shape and dtype are the same on all ranks. The
            first ranks get one row more where the rows cannot be divided evenly.
        name: Name that pairs this call with those of the other ranks; None pairs by order.
        op: Average, Sum, Min, Max or Product.
        prescale_factor: Factor for the array before the reduction.
        postscale_factor: Factor for the result.
        compression: Strategy for floats: ``Compression.none``, ``.fp16`` or ``.bf16``.
        process_set: The ranks that take part.

    Raises:
        ValueError: ``op`` is Adasum or has no meaning for the dtype or the compression, a
            reducescatter of this name is still in flight, or this rank is not in the process
            set.
        HorovodInternalError: The ranks disagree, or communication failed.
    """
    return runtime.engine(process_set).run(
        "reducescatter",
        name,
        lambda name: describe_reducescatter(
            array, name, op, prescale_factor, postscale_factor, compression
        ),
    )


def reducescatter_async(
    array: Any,
    name: str | None = None,
    op: ReduceOp | int = ReduceOp.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `reducescatter` and return a handle; do not touch the array until it is done."""
    return runtime.engine(process_set).submit(
        "reducescatter",
        name,
        lambda name: describe_reducescatter(array, name, op, prescale_factor, postscale_factor),
    )


def describe_reducescatter(
    array: Any,
    name: str,
    op: ReduceOp | int,
    prescale: float = 1.0,
    postscale: float = 1.0,
    compression: Strategy = Compression.none,
) -> Operation:
    """Make the operation that `reducescatter` submits; arguments and errors as there."""
    op = reduction.choose(None, op)
    on_device = isinstance(array, DeviceArray)
    if not on_device:
        array = as_array(array)
    if not array.shape:
        raise ValueError("reducescatter needs an array of rows, found a scalar")
    if op is ReduceOp.ADASUM:
        raise UnsupportedError("Adasum is not defined for pieces of arrays; use allreduce")
    reduction.check(op, array.dtype)
    kind = DeviceReducescatter if on_device else Reducescatter
    prescale = reduction.check_factor("prescale_factor", prescale, array.dtype)
    postscale = reduction.check_factor("postscale_factor", postscale, array.dtype)
    wire_dtype = check_strategy(compression).wire_dtype(array.dtype)
    return kind(name, array, op, prescale, postscale, wire_dtype)


def _signature(
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    wire_dtype: np.dtype[Any],
    device: str = "cpu",
) -> Signature:
    return Signature(
        (
            ("the operation", "reducescatter"),
            ("dtype", dtype.name),
            ("shape", shape),
            ("op", op.name.capitalize()),
            ("prescale_factor", prescale),
            ("postscale_factor", postscale),
            ("the dtype that travels", wire_dtype.name),
            ("device", device),
        )
    )


def _scalings(
    op: ReduceOp, factors: tuple[float, float], size: int, narrows: bool
) -> tuple[Scaling, Scaling]:
    """Return the scaling before the reduction and the one after it.

    An average is divided after the sum, but before it where a sum could leave the range.

    Args:
        op: The reduction.
        factors: The user's factors, before and after.
        size: Number of ranks.
        narrows: Whether elements are rounded to fewer bits in between.
    """
    divisor = size if op is ReduceOp.AVERAGE else 1
    if narrows:
        return Scaling(factors[0], divisor), Scaling(factors[1])
    return Scaling(factors[0]), Scaling(factors[1], divisor)


class Reducescatter(Operation):
    """A reducescatter of host arrays.

    Args:
        name: Name of the operation.
        array: Array of at least one axis, the same on all ranks.
        op: SUM, AVERAGE, MIN, MAX or PRODUCT.
        prescale: Factor before the reduction.
        postscale: Factor after it.
        wire_dtype: Float to which elements are rounded while they travel.
    """

    def __init__(
        self,
        name: str,
        array: Any,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        wire_dtype: np.dtype[Any],
    ) -> None:
        signature = _signature(array.dtype, array.shape, op, prescale, postscale, wire_dtype)
        super().__init__(name, signature)
        self._array = array
        self._op = op
        self._factors = prescale, postscale
        self._wire_dtype = wire_dtype
        self.nbytes = array.nbytes

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Any:
        """Return this rank's rows of the reduced array.

        Raises:
            GradientError: On all ranks; factors take an integer out of its type's range.
        """
        dtype, wire_dtype = self._array.dtype, self._wire_dtype
        narrows = wire_dtype != dtype
        before, after = _scalings(self._op, self._factors, transport.size, narrows)
        send = flat(self._array)
        if scales_integers(dtype, *self._factors):
            send = scale_integers(send, before.factor)
            return self._reduce_scaled_integers(transport, send, after)
        if not before.is_identity:
            send = before.apply(send.copy())
        if not narrows:
            return self._exchange(transport, send, after)
        rounded = np.empty(send.size, wire_dtype)
        float16.narrow(send, rounded)
        return after.apply(self._exchange(transport, rounded, Scaling()).astype(dtype))

    def _exchange(self, transport: Transport, send: Any, scaling: Scaling) -> Any:
        """Return this rank's rows of the reduction of flat arrays."""
        rows, *shape = self._array.shape
        bounds = slice_bounds(rows, transport.size)
        own = bounds[transport.rank + 1] - bounds[transport.rank]
        result = np.empty((own, *shape), send.dtype)
        pieces = cut(send, [bound * prod(shape) for bound in bounds])
        op = ReduceOp.SUM if self._op is ReduceOp.AVERAGE else self._op
        with timeline.span(self.lane, timeline.EXCHANGE):
            transport.reducescatter(pieces, result.reshape(-1), op, scaling)
        return result

    def _reduce_scaled_integers(self, transport: Transport, send: Any, after: Scaling) -> Any:
        """Reduce in float64, and tell all ranks of a result that does not fit."""
        dtype = self._array.dtype
        result = self._exchange(transport, send, Scaling())
        scaled = scale_integers(result, after.factor, after.divisor)
        beyond = np.array([first_beyond(scaled.reshape(-1), dtype) >= 0], np.float64)
        transport.allreduce(beyond, beyond, ReduceOp.MAX, Scaling())
        if beyond[0]:
            raise GradientError(out_of_range(self.name, None, dtype, self._factors))
        return scaled.astype(dtype)

    def extents(self) -> Sequence[Extent]:
        return extents_of(self, self._array)


class DeviceReducescatter(DeviceOperation):
    """A reducescatter of device arrays; arguments as in `Reducescatter`."""

    def __init__(
        self,
        name: str,
        array: DeviceArray,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        wire_dtype: np.dtype[Any],
    ) -> None:
        dtype, shape = array.dtype, array.shape
        signature = _signature(dtype, shape, op, prescale, postscale, wire_dtype, "cuda")
        super().__init__(name, signature, array.memory)
        self._array = array
        self._op = op
        self._factors = prescale, postscale
        self._wire_dtype = wire_dtype
        self.nbytes = array.nbytes
        self._stream = array.memory.stream()
        self.follow(self._stream)

    def prepare(self, payloads: Sequence[bytes], rank: int) -> None:
        """Allocate the result, on the stream on which the operation was submitted."""
        bounds = slice_bounds(self._array.shape[0], len(payloads))
        rows = bounds[rank + 1] - bounds[rank]
        with self.memory.on(self._stream):
            self._result = self._array.like((rows, *self._array.shape[1:]))
        self.follow(self._stream)
        self.tensors = (self._array.tensor, self._result.tensor)
        self.value = self._result.tensor

    def exchange(self, transport: DeviceTransport) -> None:
        dtype, wire_dtype = self._array.dtype, self._wire_dtype
        narrows = wire_dtype != dtype
        before, after = _scalings(self._op, self._factors, transport.size, narrows)
        send, result = self._array.flat, self._result.flat
        if narrows:
            rounded = transport.empty(send.size, wire_dtype)
            transport.convert(send, rounded, before, dtype, wire_dtype)
            send, reduced = rounded, transport.empty(result.size, wire_dtype)
        else:
            reduced = result
            if not before.is_identity:
                scaled = transport.empty(send.size, dtype)
                transport.scale(send, scaled, before, dtype)
                send = scaled
        bounds = slice_bounds(self._array.shape[0], transport.size)
        row = prod(self._array.shape[1:])
        pieces = cut(send, [bound * row for bound in bounds])
        op = ReduceOp.SUM if self._op is ReduceOp.AVERAGE else self._op
        with timeline.span(self.lane, timeline.EXCHANGE):
            direct = Scaling() if narrows else after
            transport.reducescatter(pieces, reduced, op, direct, wire_dtype)
        if narrows:
            transport.convert(reduced, result, after, wire_dtype, dtype)
