"""Collectives on host arrays that give every rank something else."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from hvdlite import float16, timeline
from hvdlite.arrays import as_bytes, flat
from hvdlite.engine.operation import Operation, Signature
from hvdlite.engine.operations import out_of_range, used
from hvdlite.engine.overlap import Extent
from hvdlite.errors import GradientError
from hvdlite.reduction import (
    ReduceOp,
    Scaling,
    first_beyond,
    scale_integers,
    scales_integers,
)
from hvdlite.transport import Transport
from hvdlite.transport.adasum import slice_bounds


def alltoall_signature(
    dtype: np.dtype[Any], shape: tuple[int, ...], device: str = "cpu"
) -> Signature:
    """What every alltoall has alike on all ranks."""
    return Signature(
        (
            ("the operation", "alltoall"),
            ("dtype", dtype.name),
            ("the shape after its first axis", tuple(shape[1:])),
            ("device", device),
        )
    )


def reducescatter_signature(
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    wire: np.dtype[Any],
    device: str = "cpu",
) -> Signature:
    """What every reducescatter has alike on all ranks."""
    return Signature(
        (
            ("the operation", "reducescatter"),
            ("dtype", dtype.name),
            ("shape", shape),
            ("op", op.name.capitalize()),
            ("prescale_factor", prescale),
            ("postscale_factor", postscale),
            ("the dtype that travels", wire.name),
            ("device", device),
        )
    )


def pack_splits(splits: Sequence[int]) -> bytes:
    """A rank's splits as the payload of an alltoall."""
    return struct.pack(f"<{len(splits)}q", *splits)


def received_splits(payloads: Sequence[bytes], rank: int) -> list[int]:
    """How many rows a rank gets from each, by the payloads of all."""
    return [struct.unpack_from("<q", payload, 8 * rank)[0] for payload in payloads]


def row_bounds(splits: Sequence[int], row: int) -> list[int]:
    """Where each rank's part begins, and the last one ends, in rows of ``row`` units."""
    return list(itertools.accumulate((count * row for count in splits), initial=0))


class Alltoall(Operation):
    """Send every rank some rows of an array, and receive some of its.

    Args:
        name: the operation's name.
        array: at least one axis; all but the first are alike on all ranks.
        splits: for each rank, how many of the rows it gets, in their order.
    """

    def __init__(self, name: str, array: Any, splits: Sequence[int]) -> None:
        signature = alltoall_signature(array.dtype, array.shape)
        super().__init__(name, signature, pack_splits(splits))
        self._array = array
        self._splits = splits
        self.nbytes = array.nbytes

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> tuple[Any, list[int]]:
        """Return what came, in the order of the ranks, and how many rows from each."""
        received = received_splits(payloads, transport.rank)
        shape = self._array.shape[1:]
        result = np.empty((sum(received), *shape), self._array.dtype)
        row = prod(shape) * self._array.itemsize
        with timeline.span(self.lane, timeline.EXCHANGE):
            transport.alltoall(
                _cut(as_bytes(flat(self._array)), row_bounds(self._splits, row)),
                _cut(as_bytes(flat(result)), row_bounds(received, row)),
            )
        return result, received

    def extents(self) -> Sequence[Extent]:
        """The array's memory."""
        return used(self, self._array)


class Reducescatter(Operation):
    """Reduce an array over all ranks, and give every rank some rows of the result.

    The first ranks get one row more where there are not as many for all.

    Args:
        name: the operation's name.
        array: at least one axis; alike on all ranks.
        op: SUM, AVERAGE, MIN, MAX or PRODUCT.
        prescale: factor before the reduction.
        postscale: factor after it.
        wire: the float to which elements are rounded while they travel; they are divided
            before, if they are averaged.
    """

    def __init__(
        self,
        name: str,
        array: Any,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        wire: np.dtype[Any],
    ) -> None:
        signature = reducescatter_signature(array.dtype, array.shape, op, prescale, postscale, wire)
        super().__init__(name, signature)
        self._array = array
        self._op = op
        self._factors = prescale, postscale
        self._wire = wire
        self.nbytes = array.nbytes

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Any:
        """Return this rank's rows of the reduced array.

        Raises:
            GradientError: on all ranks; factors take an integer out of its type's range.
        """
        before, after = scalings(self._op, self._factors, transport.size, self._narrows)
        send = flat(self._array)
        if scales_integers(self._array.dtype, *self._factors):
            send = scale_integers(send, before.factor)
            return self._reduce_scaled_integers(transport, send, after)
        if not before.is_identity:
            send = before.apply(send.copy())
        if self._narrows:
            rounded = np.empty(send.size, self._wire)
            float16.narrow(send, rounded)
            send = rounded
        if self._narrows:
            result = self._exchange(transport, send, Scaling())
            return after.apply(result.astype(self._array.dtype))
        return self._exchange(transport, send, after)

    def _exchange(self, transport: Transport, send: Any, scaling: Scaling) -> Any:
        """Return this rank's rows of the reduction of flat arrays."""
        rows, *shape = self._array.shape
        bounds = slice_bounds(rows, transport.size)
        own = bounds[transport.rank + 1] - bounds[transport.rank]
        result = np.empty((own, *shape), send.dtype)
        elements = [bound * prod(shape) for bound in bounds]
        op = ReduceOp.SUM if self._op is ReduceOp.AVERAGE else self._op
        with timeline.span(self.lane, timeline.EXCHANGE):
            transport.reducescatter(_cut(send, elements), result.reshape(-1), op, scaling)
        return result

    def _reduce_scaled_integers(self, transport: Transport, send: Any, after: Scaling) -> Any:
        """Reduce in float64, and let all ranks know of a result that does not fit."""
        dtype = self._array.dtype
        result = self._exchange(transport, send, Scaling())
        scaled = scale_integers(result, after.factor, after.divisor)
        beyond = np.array([first_beyond(scaled.reshape(-1), dtype) >= 0], np.float64)
        transport.allreduce(beyond, beyond, ReduceOp.MAX, Scaling())
        if beyond[0]:
            raise GradientError(out_of_range(self.name, None, dtype, self._factors))
        return scaled.astype(dtype)

    def extents(self) -> Sequence[Extent]:
        """The array's memory."""
        return used(self, self._array)

    @property
    def _narrows(self) -> bool:
        return bool(self._wire != self._array.dtype)


def scalings(
    op: ReduceOp, factors: tuple[float, float], size: int, narrows: bool
) -> tuple[Scaling, Scaling]:
    """What elements are multiplied with before the reduction and after it.

    An average is divided after the sum, but before where a sum could leave the range.

    Args:
        op: of the reduction.
        factors: of the user, before and after.
        size: the number of ranks.
        narrows: whether elements are rounded to fewer bits in between.
    """
    divisor = size if op is ReduceOp.AVERAGE else 1
    if narrows:
        return Scaling(factors[0], divisor), Scaling(factors[1])
    return Scaling(factors[0]), Scaling(factors[1], divisor)


def _cut(array: Any, bounds: Sequence[int]) -> list[Any]:
    return [array[start:stop] for start, stop in itertools.pairwise(bounds)]
