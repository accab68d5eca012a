"""Reducescatter: every rank gets some rows of the reduction of all ranks' arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from hvdlite.base import reduction
from hvdlite.base.arrays import cut, slice_bounds
from hvdlite.base.reduction import ReduceOp, Scaling, scales_integers
from hvdlite.collectives.allreduce import reduce_scaled_integers
from hvdlite.collectives.arrays import ArrayOperation, checked_array, signature_of, value_of
from hvdlite.compression import Compression, Strategy, check_strategy
from hvdlite.engine import Handle, runtime
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.errors import UnsupportedError
from hvdlite.observe import timeline
from hvdlite.transport import Transport


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
        name, prescale_factor, postscale_factor, process_set: As for `hvdlite.allreduce`.
        op: Average, Sum, Min, Max or Product.
        compression: Strategy for floats: ``Compression.none``, ``.fp16`` or ``.bf16``.

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
    compression: Strategy = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `reducescatter` and return a handle; do not touch the array until it is done."""
    return runtime.engine(process_set).submit(
        "reducescatter",
        name,
        lambda name: describe_reducescatter(
            array, name, op, prescale_factor, postscale_factor, compression
        ),
    )


def describe_reducescatter(
    array: Any,
    name: str,
    op: ReduceOp | int,
    prescale: float = 1.0,
    postscale: float = 1.0,
    compression: Strategy = Compression.none,
) -> Reducescatter:
    """Make the operation that `reducescatter` submits; arguments and errors as there."""
    op = reduction.choose(None, op)
    array = checked_array(array)
    if not array.shape:
        raise ValueError("reducescatter needs an array of rows, found a scalar")
    if op is ReduceOp.ADASUM:
        raise UnsupportedError("Adasum is not defined for pieces of arrays; use allreduce")
    reduction.check(op, array.dtype)
    prescale = reduction.check_factor("prescale_factor", prescale, array.dtype)
    postscale = reduction.check_factor("postscale_factor", postscale, array.dtype)
    wire_dtype = check_strategy(compression).wire_dtype(array.dtype)
    return Reducescatter(name, array, op, prescale, postscale, wire_dtype)


class Reducescatter(ArrayOperation):
    """A reducescatter, by any reduction but Adasum.

    Args:
        wire_dtype: Float to which elements are rounded while they travel.
        out: Contiguous array for the result; None: a new one.
        sizes: Given with it: the number of rows for each rank; None: as even as possible.
    """

    def __init__(
        self,
        name: str,
        array: Any,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        wire_dtype: np.dtype[Any],
        out: Any = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self._given, self._sizes = out, sizes
        signature = signature_of(
            "reducescatter",
            array,
            ("shape", array.shape),
            ("op", op.name.capitalize()),
            ("prescale_factor", prescale),
            ("postscale_factor", postscale),
            ("the dtype that travels", wire_dtype.name),
            ("the numbers of rows", sizes and tuple(sizes)),
        )
        super().__init__(name, signature, array)
        self._op = op
        self._factors = prescale, postscale
        self._wire_dtype = wire_dtype

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Any:
        # An average is divided after the sum, but before it where a sum could leave the range of
        # the floats that travel.
        array, wire_dtype = self._array, self._wire_dtype
        rows, *row = array.shape
        bounds = slice_bounds(rows, transport.size)
        if self._sizes is not None:
            bounds = [0, *accumulate(self._sizes)]
        own = bounds[transport.rank + 1] - bounds[transport.rank]
        pieces = [bound * prod(row) for bound in bounds]
        result = self._allocate(transport, (own, *row))
        send, target = array.ravel(), result.ravel()
        narrows = wire_dtype != array.dtype
        divisor = transport.size if self._op is ReduceOp.AVERAGE else 1
        before = Scaling(self._factors[0], divisor if narrows else 1)
        after = Scaling(self._factors[1], 1 if narrows else divisor)
        if self.memory is None and scales_integers(array.dtype, *self._factors):
            whole = reduce_scaled_integers(self, transport, send, self._op, self._factors)
            target[...] = cut(whole, pieces)[transport.rank]
            return value_of(result)
        received = target
        if narrows:
            rounded = transport.scratch(send.size, wire_dtype)
            transport.convert(send, rounded, before)
            send, received = rounded, transport.scratch(target.size, wire_dtype)
        elif not before.is_identity:
            scaled = transport.scratch(send.size, array.dtype)
            transport.scale(send, scaled, before)
            send = scaled
        op = ReduceOp.SUM if self._op is ReduceOp.AVERAGE else self._op
        with timeline.span(self.lane, timeline.EXCHANGE):
            transport.reducescatter(
                cut(send, pieces), received, op, Scaling() if narrows else after
            )
        if narrows:
            transport.convert(received, target, after)
        return value_of(result)
