"""Allgather: every rank gets the ranks' arrays, one after the other."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from hvdlite.base.arrays import as_array, as_bytes, flat
from hvdlite.engine import Handle, Operation, Signature, runtime
from hvdlite.engine.device import DeviceArray, DeviceOperation
from hvdlite.engine.memory import Extent, extents_of
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.transport import Transport
from hvdlite.transport.gpu.base import DeviceTransport


def allgather(
    array: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the arrays of all ranks along axis 0, in the order of the ranks.

    Args:
        array: Array whose axes but the first are the same on all ranks; a scalar counts as one
            row.
        name: Name that pairs this call with those of the other ranks; None pairs by order.
        process_set: The ranks that take part.

    Returns:
        A new array, the same on all ranks.

    Raises:
        ValueError: An allgather of this name is still in flight, or this rank is not in the
            process set.
        HorovodInternalError: The ranks disagree, or communication failed.
    """
    return runtime.engine(process_set).run(
        "allgather", name, lambda name: describe_allgather(array, name)
    )


def allgather_async(
    array: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `allgather` and return a handle; do not touch the array until it is done."""
    return runtime.engine(process_set).submit(
        "allgather", name, lambda name: describe_allgather(array, name)
    )


def describe_allgather(array: Any, name: str, with_rows: bool = False) -> Operation:
    """Make the operation that `allgather` submits.

    Args:
        array: As in `allgather`.
        name: Name of the operation.
        with_rows: Whether the result is `Gathered`.
    """
    if isinstance(array, DeviceArray):
        return DeviceAllgather(name, array, with_rows)
    return Allgather(name, np.atleast_1d(as_array(array)), with_rows=with_rows)


class Gathered(NamedTuple):
    """The result of an allgather, with what it is made of.

    Attributes:
        whole: The rows of all ranks.
        rows: The number of rows of each.
        own: The place of this rank among them. It may have another number by now.
    """

    whole: Any
    rows: list[int]
    own: int

    @property
    def span(self) -> tuple[int, int]:
        """Where this rank's rows begin, and their number."""
        return sum(self.rows[: self.own]), self.rows[self.own]


def _signature(
    label: str, dtype: np.dtype[Any], shape: tuple[int, ...], device: str = "cpu"
) -> Signature:
    return Signature(
        (
            ("the operation", label),
            ("dtype", dtype.name),
            ("the shape after its first axis", tuple(shape[1:])),
            ("device", device),
        )
    )


class Allgather(Operation):
    """An allgather of host arrays.

    Args:
        name: Name of the operation.
        array: Array of at least one axis; all but the first are the same on all ranks.
        label: Kind of the operation, in messages.
        with_rows: Whether the result is `Gathered`.
        failure: Why this rank has no array.
    """

    def __init__(
        self,
        name: str,
        array: Any,
        label: str = "allgather",
        with_rows: bool = False,
        failure: str | None = None,
    ) -> None:
        signature = _signature(label, array.dtype, array.shape)
        super().__init__(name, signature, struct.pack("<q", len(array)), failure)
        self._array = array
        self._with_rows = with_rows

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Any:
        """Return the whole, alone or as `Gathered`."""
        rows = [struct.unpack("<q", payload)[0] for payload in payloads]
        shape = self._array.shape[1:]
        whole = np.empty((sum(rows), *shape), self._array.dtype)
        pieces = [as_bytes(flat(part)) for part in np.split(whole, np.cumsum(rows)[:-1])]
        transport.allgather(as_bytes(flat(self._array)), pieces)
        return Gathered(whole, rows, transport.rank) if self._with_rows else whole

    def extents(self) -> Sequence[Extent]:
        return extents_of(self, self._array)


class DeviceAllgather(DeviceOperation):
    """An allgather of device arrays; arguments as in `Allgather`, a scalar counts as one row."""

    def __init__(self, name: str, array: DeviceArray, with_rows: bool = False) -> None:
        rows, *self._row = array.shape or (1,)
        signature = _signature("allgather", array.dtype, (rows, *self._row), "cuda")
        super().__init__(name, signature, array.memory, struct.pack("<q", rows))
        self._array = array
        self._with_rows = with_rows
        self._stream = array.memory.stream()
        self.follow(self._stream)

    def prepare(self, payloads: Sequence[bytes], rank: int) -> None:
        """Allocate the whole, on the stream on which the operation was submitted."""
        rows = [struct.unpack("<q", payload)[0] for payload in payloads]
        with self.memory.on(self._stream):
            self._whole = self._array.like((sum(rows), *self._row))
        self.follow(self._stream)
        row = prod(self._row) * self._array.dtype.itemsize
        self._bounds = list(itertools.accumulate((row * count for count in rows), initial=0))
        self.tensors = (self._array.tensor, self._whole.tensor)
        whole = self._whole.tensor
        self.value = Gathered(whole, rows, rank) if self._with_rows else whole

    def exchange(self, transport: DeviceTransport) -> None:
        whole = as_bytes(self._whole.flat)
        pieces = [whole[start:stop] for start, stop in itertools.pairwise(self._bounds)]
        transport.allgather(as_bytes(self._array.flat), pieces)
