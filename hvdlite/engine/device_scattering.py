"""Collectives on device arrays that give every rank something else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from hvdlite import timeline
from hvdlite.arrays import as_bytes
from hvdlite.engine.device import DeviceArray, DeviceOperation
from hvdlite.engine.scattering import (
    alltoall_signature,
    pack_splits,
    received_splits,
    reducescatter_signature,
    row_bounds,
    scalings,
)
from hvdlite.reduction import ReduceOp, Scaling
from hvdlite.transport.adasum import slice_bounds
from hvdlite.transport.gpu.base import DeviceTransport


class DeviceAlltoall(DeviceOperation):
    """Send every rank some rows of a device array, and receive some of its.

    Args:
        name: the operation's name.
        array: at least one axis; all but the first are alike on all ranks.
        splits: for each rank, how many of the rows it gets, in their order.
    """

    def __init__(self, name: str, array: DeviceArray, splits: Sequence[int]) -> None:
        signature = alltoall_signature(array.dtype, array.shape, "cuda")
        super().__init__(name, signature, array.memory, pack_splits(splits))
        self._array = array
        self._splits = splits
        self._stream = array.memory.stream()
        self.nbytes = array.nbytes
        self.follow(self._stream)

    def prepare(self, payloads: Sequence[bytes], rank: int) -> None:
        """Allocate what comes, on the stream on which the operation was submitted."""
        self._received = received_splits(payloads, rank)
        with self.memory.on(self._stream):
            self._result = self._array.like((sum(self._received), *self._array.shape[1:]))
        self.follow(self._stream)
        self.tensors = (self._array.tensor, self._result.tensor)
        self.value = self._result.tensor, self._received

    def exchange(self, transport: DeviceTransport) -> None:
        """Send and receive the rows."""
        row = prod(self._array.shape[1:]) * self._array.dtype.itemsize
        with timeline.span(self.lane, timeline.EXCHANGE):
            transport.alltoall(
                _cut(as_bytes(self._array.flat), row_bounds(self._splits, row)),
                _cut(as_bytes(self._result.flat), row_bounds(self._received, row)),
            )


class DeviceReducescatter(DeviceOperation):
    """Reduce a device array over all ranks, and give every rank some rows of the result.

    Args:
        name, array, op, prescale, postscale, wire: as in `Reducescatter`.
    """

    def __init__(
        self,
        name: str,
        array: DeviceArray,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        wire: np.dtype[Any],
    ) -> None:
        signature = reducescatter_signature(
            array.dtype, array.shape, op, prescale, postscale, wire, "cuda"
        )
        super().__init__(name, signature, array.memory)
        self._array = array
        self._op = op
        self._factors = prescale, postscale
        self._wire = wire
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
        """Scale, round, reduce, widen, scale."""
        dtype, wire = self._array.dtype, self._wire
        narrows = wire != dtype
        before, after = scalings(self._op, self._factors, transport.size, narrows)
        send, result = self._array.flat, self._result.flat
        if narrows:
            rounded = transport.empty(send.size, wire)
            transport.convert(send, rounded, before, dtype, wire)
            send, reduced = rounded, transport.empty(result.size, wire)
        else:
            reduced = result
            if not before.is_identity:
                scaled = transport.empty(send.size, dtype)
                transport.scale(send, scaled, before, dtype)
                send = scaled
        bounds = slice_bounds(self._array.shape[0], transport.size)
        row = prod(self._array.shape[1:])
        pieces = _cut(send, [bound * row for bound in bounds])
        op = ReduceOp.SUM if self._op is ReduceOp.AVERAGE else self._op
        with timeline.span(self.lane, timeline.EXCHANGE):
            direct = Scaling() if narrows else after
            transport.reducescatter(pieces, reduced, op, direct, wire)
        if narrows:
            transport.convert(reduced, result, after, wire, dtype)


def _cut(array: Any, bounds: Sequence[int]) -> list[Any]:
    return [array[start:stop] for start, stop in itertools.pairwise(bounds)]
