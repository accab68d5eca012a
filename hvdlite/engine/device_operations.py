"""The collectives on device arrays."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from math import prod

from hvdlite import timeline
from hvdlite.arrays import as_bytes
from hvdlite.engine.device import DeviceArray, DeviceOperation
from hvdlite.engine.operations import (
    allgather_signature,
    allreduce_signature,
    broadcast_signature,
    split_average,
)
from hvdlite.reduction import ReduceOp, Scaling
from hvdlite.transport.gpu.base import DeviceTransport


class DeviceAllreduce(DeviceOperation):
    """Reduce a device array over all ranks.

    Args:
        name: the operation's name.
        array: of this rank; it must not change until the result has been taken.
        op: one of the six reductions.
        prescale: factor before the reduction.
        postscale: factor after it.
        out: where the result goes; may be the array itself. None: a new one.
        compression: the name of the strategy, for the signature.
    """

    def __init__(
        self,
        name: str,
        array: DeviceArray,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: DeviceArray | None = None,
        compression: str = "none",
    ) -> None:
        signature = allreduce_signature(
            array.dtype, array.shape, op, prescale, postscale, compression, "cuda"
        )
        super().__init__(name, signature, array.memory)
        self._array = array
        self._op = op
        self._factors = prescale, postscale
        self._out = array.like(array.shape) if out is None else out
        self.nbytes = array.nbytes
        self.tensors = (array.tensor, self._out.tensor)
        self.value = self._out.tensor
        # After the result has been allocated: others may be using its memory until now.
        self.follow(array.memory.stream())

    def exchange(self, transport: DeviceTransport) -> None:
        """Scale, reduce, scale."""
        dtype, out = self._array.dtype, self._out.flat
        send = self._array.flat
        if self._factors[0] != 1.0:
            transport.scale(send, out, Scaling(self._factors[0]), dtype)
            send = out
        with timeline.span(self.lane, timeline.EXCHANGE):
            self._reduce(transport, send, out)

    def _reduce(self, transport: DeviceTransport, send: object, out: object) -> None:
        op, scaling = split_average(self._op, self._factors[1], transport.size)
        transport.allreduce(send, out, op, scaling, self._array.dtype)


class DeviceAllgather(DeviceOperation):
    """Concatenate the ranks' device arrays along axis 0, whose length may differ.

    Args:
        name: the operation's name.
        array: all axes but the first are alike on all ranks; a scalar counts as one row.
        with_rows: whether the result has, beside the whole, the number of rows of each rank.
    """

    def __init__(self, name: str, array: DeviceArray, with_rows: bool = False) -> None:
        rows, *self._row = array.shape or (1,)
        signature = allgather_signature("allgather", array.dtype, (rows, *self._row), "cuda")
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
        self.value = (self._whole.tensor, rows) if self._with_rows else self._whole.tensor

    def exchange(self, transport: DeviceTransport) -> None:
        """Receive every rank's rows where they belong."""
        whole = as_bytes(self._whole.flat)
        pieces = [whole[start:stop] for start, stop in itertools.pairwise(self._bounds)]
        transport.allgather(as_bytes(self._array.flat), pieces)


class DeviceBroadcast(DeviceOperation):
    """Give every rank the root's device array.

    Args:
        name: the operation's name.
        array: any shape, alike on all ranks.
        root: the member whose values count.
        out: where the result goes; may be the array itself. None: a new one.
    """

    def __init__(
        self, name: str, array: DeviceArray, root: int, out: DeviceArray | None = None
    ) -> None:
        signature = broadcast_signature(array.dtype, array.shape, root, "cuda")
        super().__init__(name, signature, array.memory)
        self._array = array
        self._root = root
        self._out = array.like(array.shape) if out is None else out
        self.tensors = (array.tensor, self._out.tensor)
        self.value = self._out.tensor
        self.follow(array.memory.stream())

    def exchange(self, transport: DeviceTransport) -> None:
        """Send the root's array."""
        out, root = as_bytes(self._out.flat), transport.members.index(self._root)
        if self._out is not self._array and transport.rank == root:
            transport.copy(as_bytes(self._array.flat), out)
        transport.broadcast(out, root)
