"""The collectives on host arrays."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from hvdlite import timeline
from hvdlite.arrays import as_bytes, flat
from hvdlite.engine.operation import Operation, Signature
from hvdlite.engine.overlap import Extent, extent
from hvdlite.errors import GradientError
from hvdlite.reduction import (
    ReduceOp,
    Scaling,
    first_beyond,
    scale_integers,
    scales_integers,
)
from hvdlite.transport import Transport
from hvdlite.transport.base import LARGEST_FUSED


@lru_cache(4096)
def allreduce_signature(
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    compression: str,
    device: str = "cpu",
) -> Signature:
    """What every allreduce, however it travels, has alike on all ranks."""
    return Signature(
        (
            ("the operation", "allreduce"),
            ("dtype", dtype.name),
            ("shape", shape),
            ("op", op.name.capitalize()),
            ("prescale_factor", prescale),
            ("postscale_factor", postscale),
            ("compression", compression),
            ("device", device),
        )
    )


def allgather_signature(
    label: str, dtype: np.dtype[Any], shape: tuple[int, ...], device: str = "cpu"
) -> Signature:
    """What every allgather has alike on all ranks."""
    return Signature(
        (
            ("the operation", label),
            ("dtype", dtype.name),
            ("the shape after its first axis", tuple(shape[1:])),
            ("device", device),
        )
    )


def broadcast_signature(
    dtype: np.dtype[Any], shape: tuple[int, ...], root: int, device: str = "cpu"
) -> Signature:
    """What every broadcast of an array has alike on all ranks."""
    return Signature(
        (
            ("the operation", "broadcast"),
            ("dtype", dtype.name),
            ("shape", tuple(shape)),
            ("root_rank", root),
            ("device", device),
        )
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
        signature = allreduce_signature(array.dtype, array.shape, op, prescale, postscale, "none")
        super().__init__(name, signature)
        self._op = op
        self._prescale = prescale
        self._postscale = postscale
        self._array = array
        self._given = out
        self._out = _allocated(out, array)
        # Flat; that of an array which is not contiguous is a copy.
        self._send = array if array.ndim == 1 else array.reshape(-1)
        self._result = self._send if out is array else self._out.reshape(-1)
        self.nbytes = array.nbytes
        self._scales_integers = scales_integers(array.dtype, prescale, postscale)
        self._prepared: tuple[Transport | None, Callable[[], None]] = None, lambda: None

    stands_in = True
    _extents: Sequence[Extent] = ()

    def stand_in(self) -> Callable[[], Operation]:
        """What makes an allreduce of zeros."""
        array, factors = self._array, (self._prescale, self._postscale)
        return partial(_allreduce_zeros, self.name, array.shape, array.dtype, self._op, *factors)

    def extents(self) -> Sequence[Extent]:
        """The array's memory, and that of the result where the caller has given it."""
        if not self._extents:
            self._extents = used(self, self._send, self._given)
        return self._extents

    @property
    def fusion(self) -> Hashable | None:
        """Small arrays of one dtype that are reduced and scaled alike."""
        if self.nbytes > LARGEST_FUSED or self._op is ReduceOp.ADASUM or self._scales_integers:
            return None
        return self._send.dtype, self._op, self._prescale, self._postscale

    @property
    def cargo(self) -> Any:
        """The array, flat, unless it is scaled first or reduced in another way than others."""
        if self._prescale != 1.0 or self._op is ReduceOp.ADASUM or self._scales_integers:
            return None
        return self._send

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Any:
        """Return the reduced array, of the input's shape and dtype.

        Raises:
            GradientError: on all ranks; factors take an integer out of its type's range.
        """
        if self._scales_integers:
            return self._reduce_scaled_integers(transport)
        if self._prescale != 1.0:
            return self.execute_together((), transport)[0]
        where, reduce = self._prepared
        if where is not transport:  # it is the first time
            arrays = self._send, self._result
            reduce = transport.allreduce_init(*arrays, *self._reduction(transport))
            self._prepared = transport, reduce
        with timeline.span(self.lane, timeline.EXCHANGE):
            reduce()
        return self._out

    def execute_together(self, others: Sequence[Any], transport: Transport) -> list[Any]:
        """Reduce all arrays of a group, of which this is the first, at once."""
        group: list[Allreduce] = [self, *others]
        if self._prescale == 1.0:
            sends = [operation._send for operation in group]
        else:
            sends = [operation._scaled() for operation in group]
        results = [operation._result for operation in group]
        with timeline.span(self.lane, timeline.EXCHANGE):
            transport.allreduce_all(sends, results, *self._reduction(transport))
        return [operation._out for operation in group]

    def _reduce_scaled_integers(self, transport: Transport) -> Any:
        """Reduce in float64, so that all ranks see whether a result fits the integers' type."""
        wide = self._send.astype(np.float64)
        if self._prescale != 1.0:
            wide = scale_integers(wide, self._prescale)
        op, scaling = self._reduction(transport)
        with timeline.span(self.lane, timeline.EXCHANGE):
            transport.allreduce(wide, wide, op, Scaling())
        scaled = scale_integers(wide, scaling.factor, scaling.divisor)
        beyond = first_beyond(scaled, self._send.dtype)
        if beyond >= 0:
            factors = self._prescale, self._postscale
            raise GradientError(out_of_range(self.name, scaled[beyond], self._send.dtype, factors))
        self._result[...] = scaled
        return self._out

    def _reduction(self, transport: Transport) -> tuple[ReduceOp, Scaling]:
        return split_average(self._op, self._postscale, transport.size)

    def _scaled(self) -> Any:
        """What is to be reduced, with the factor that comes before."""
        if self._result is not self._send:
            self._result[...] = self._send  # its place is free until the reduction
        return Scaling(self._prescale).apply(self._result)


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
            allgather_signature(label, array.dtype, array.shape),
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

    def extents(self) -> Sequence[Extent]:
        """The array's memory."""
        return used(self, self._array)


class Broadcast(Operation):
    """Give every rank the root's array.

    Args:
        name: the operation's name.
        array: any shape, alike on all ranks.
        root: the member whose values count.
        out: where the result goes; contiguous, of the array's shape and dtype; may be
            the array itself. None: a new array.
    """

    def __init__(self, name: str, array: Any, root: int, out: Any = None) -> None:
        super().__init__(name, broadcast_signature(array.dtype, array.shape, root))
        self._array = array
        self._root = root
        self._given = out
        self._out = _allocated(out, array)

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Any:
        """Return the root's array."""
        root = transport.members.index(self._root)
        if self._out is not self._array and transport.rank == root:
            self._out[...] = self._array
        transport.broadcast(as_bytes(self._out.reshape(-1)), root)
        return self._out

    def extents(self) -> Sequence[Extent]:
        """The array's memory, and that of the result where the caller has given it."""
        return used(("broadcast", self._root), self._array, self._given)


class BroadcastBytes(Operation):
    """Give every rank the root's bytes, whose number only the root knows.

    Args:
        name: the operation's name.
        content: on the root; ignored elsewhere.
        root: the member whose bytes count.
        failure: why the root has none.
        entries: what the ranks are to agree on besides.
    """

    def __init__(
        self,
        name: str,
        content: bytes,
        root: int,
        failure: str | None = None,
        entries: Iterable[tuple[str, Any]] = (),
    ) -> None:
        super().__init__(
            name,
            Signature((("the operation", "broadcast of an object"), ("root_rank", root), *entries)),
            payload=struct.pack("<q", len(content)),
            failure=failure,
        )
        self._content = content
        self._root = root

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> bytes:
        """Return the root's bytes."""
        root = transport.members.index(self._root)
        (length,) = struct.unpack("<q", payloads[root]) if payloads[root] else (0,)
        buffer = np.empty(length, np.uint8)
        if transport.rank == root:
            buffer[...] = np.frombuffer(self._content, np.uint8)
        transport.broadcast(buffer, root)
        return buffer.tobytes()


class Barrier(Operation):
    """Wait until every rank is here; the round in which it is agreed on does that.

    Args:
        name: the operation's name.
        entries: what the ranks are to agree on besides.
    """

    def __init__(self, name: str, entries: Iterable[tuple[str, Any]] = ()) -> None:
        super().__init__(name, Signature((("the operation", "barrier"), *entries)))

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> None:
        """Do nothing more."""


class Join(Operation):
    """Wait until every rank has joined; until then this one takes part with zeros.

    Args:
        name: the operation's name.
    """

    patient = joins = True

    def __init__(self, name: str) -> None:
        super().__init__(name, Signature((("the operation", "join"),)))

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> int:
        """Return the number of the member that joined last."""
        waited = time.monotonic() - self.submitted
        messages = transport.gather(struct.pack("<d", waited))
        times = [struct.unpack("<d", message)[0] for message in messages]
        return transport.members[times.index(min(times))]


def out_of_range(name: str, value: Any, dtype: np.dtype[Any], factors: tuple[float, float]) -> str:
    """Describe a result that an integer type cannot hold."""
    found = "" if value is None else f"a result is {value:g}, "
    return (
        f"{name!r} with prescale_factor={factors[0]:g} and postscale_factor={factors[1]:g}: {found}"
        f"beyond the range of {dtype.name}; use smaller factors, or convert the values to a float"
    )


@lru_cache  # asked for with every allreduce
def split_average(op: ReduceOp, postscale: float, size: int) -> tuple[ReduceOp, Scaling]:
    """Return what transports compute of a reduction, and with what they scale the outcome."""
    if op is ReduceOp.AVERAGE:
        return ReduceOp.SUM, Scaling(postscale, size)
    return op, Scaling(postscale)


def _allreduce_zeros(
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    op: ReduceOp,
    prescale: float,
    postscale: float,
) -> Allreduce:
    zeros = np.zeros(shape, dtype)
    return Allreduce(name, zeros, op, prescale, postscale, out=zeros)


def used(writer: Hashable, array: Any, out: Any = None) -> list[Extent]:
    """The memory of an array, and of the place for the result (None: a new one)."""
    if out is None:
        return [extent(array)]
    own = extent(out, writer)
    other = extent(array)
    return [own] if other[:2] == own[:2] else [other, own]


def _allocated(out: Any, array: Any) -> Any:
    """A place for the result, made before the ranks meet: see `MPITransport`."""
    return np.empty(array.shape, array.dtype) if out is None else out
