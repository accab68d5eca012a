"""The collectives on host arrays."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.arrays import as_bytes, flat
from hvdlite.engine.operation import Operation, Signature
from hvdlite.reduction import ReduceOp, Scaling
from hvdlite.transport import Transport


def allreduce_signature(
    array: Any, op: ReduceOp, prescale: float, postscale: float, compression: str
) -> Signature:
    """What every allreduce, however it travels, has alike on all ranks."""
    return (
        ("the operation", "allreduce"),
        ("dtype", array.dtype.name),
        ("shape", tuple(array.shape)),
        ("op", op.name.capitalize()),
        ("prescale_factor", prescale),
        ("postscale_factor", postscale),
        ("compression", compression),
    )


class Allreduce(Operation):
    """Reduce an array over all ranks.

    Args:
        name: the operation's name.
        array: any shape; it must not change until the operation has ended.
        op: one of the six reductions.
        prescale: factor before the reduction.
        postscale: factor after it.
        out: where the result goes; contiguous, of the array's shape and dtype; may be
            the array itself. None: a new array.
    """

    def __init__(
        self,
        name: str,
        array: Any,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: Any = None,
    ) -> None:
        super().__init__(name, allreduce_signature(array, op, prescale, postscale, "none"))
        self._array = array
        self._op = op
        self._prescale = Scaling(prescale)
        self._postscale = postscale
        self._out = _allocated(out, array)

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Any:
        """Return the reduced array, of the input's shape and dtype."""
        result = self._out.reshape(-1)
        if self._prescale.is_identity and self._array.flags.c_contiguous:
            send = result if self._array is self._out else self._array.reshape(-1)
        else:  # the result's place is free until the reduction: no copy of its own
            self._out[...] = self._array
            send = self._prescale.apply(result)
        average = self._op is ReduceOp.AVERAGE
        scaling = Scaling(self._postscale, transport.size if average else 1)
        transport.allreduce(send, result, ReduceOp.SUM if average else self._op, scaling)
        return self._out


class Allgather(Operation):
    """Concatenate the ranks' arrays along axis 0, whose length may differ.

    Args:
        name: the operation's name.
        array: at least one axis; all but the first are alike on all ranks.
        label: what the operation is called in messages.
        with_rows: whether the result has, beside the whole, the number of rows of each rank.
    """

    def __init__(
        self, name: str, array: Any, label: str = "allgather", with_rows: bool = False
    ) -> None:
        super().__init__(
            name,
            (
                ("the operation", label),
                ("dtype", array.dtype.name),
                ("the shape after its first axis", tuple(array.shape[1:])),
            ),
            payload=struct.pack("<q", len(array)),
        )
        self._array = array
        self._with_rows = with_rows

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Any:
        """Return the whole, or the whole and the number of rows of each rank."""
        rows = [struct.unpack("<q", payload)[0] for payload in payloads]
        shape = self._array.shape[1:]
        whole = np.empty((sum(rows), *shape), self._array.dtype)
        pieces = [as_bytes(flat(part)) for part in np.split(whole, np.cumsum(rows)[:-1])]
        transport.allgather(as_bytes(flat(self._array)), pieces)
        return (whole, rows) if self._with_rows else whole


class Broadcast(Operation):
    """Give every rank the root's array.

    Args:
        name: the operation's name.
        array: any shape, alike on all ranks.
        root: the rank whose values count.
        out: where the result goes; contiguous, of the array's shape and dtype; may be
            the array itself. None: a new array.
    """

    def __init__(self, name: str, array: Any, root: int, out: Any = None) -> None:
        super().__init__(
            name,
            (
                ("the operation", "broadcast"),
                ("dtype", array.dtype.name),
                ("shape", tuple(array.shape)),
                ("root_rank", root),
            ),
        )
        self._array = array
        self._root = root
        self._out = _allocated(out, array)

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Any:
        """Return the root's array."""
        if self._out is not self._array and transport.rank == self._root:
            self._out[...] = self._array
        transport.broadcast(as_bytes(self._out.reshape(-1)), self._root)
        return self._out


class BroadcastBytes(Operation):
    """Give every rank the root's bytes, whose number only the root knows.

    Args:
        name: the operation's name.
        content: on the root; ignored elsewhere.
        root: the rank whose bytes count.
        failure: why the root has none.
    """

    def __init__(self, name: str, content: bytes, root: int, failure: str | None = None) -> None:
        super().__init__(
            name,
            (("the operation", "broadcast of an object"), ("root_rank", root)),
            payload=struct.pack("<q", len(content)),
            failure=failure,
        )
        self._content = content
        self._root = root

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> bytes:
        """Return the root's bytes."""
        (length,) = struct.unpack("<q", payloads[self._root])
        buffer = np.empty(length, np.uint8)
        if transport.rank == self._root:
            buffer[...] = np.frombuffer(self._content, np.uint8)
        transport.broadcast(buffer, self._root)
        return buffer.tobytes()


class Barrier(Operation):
    """Wait until every rank is here; the round in which it is agreed on does that.

    Args:
        name: the operation's name.
        signature: what the ranks are to agree on besides.
    """

    def __init__(self, name: str, signature: Signature = ()) -> None:
        super().__init__(name, (("the operation", "barrier"), *signature))

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> None:
        """Do nothing more."""


def _allocated(out: Any, array: Any) -> Any:
    """A place for the result, made before the ranks meet: see `MPITransport`."""
    return np.empty(array.shape, array.dtype) if out is None else out
