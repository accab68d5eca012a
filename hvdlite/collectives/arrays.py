"""The base of collectives on one array, on the host or on a device."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hvdlite.base.arrays import as_array, as_bytes, check_out, cut
from hvdlite.engine import Operation, Signature
from hvdlite.engine.device import DeviceArray
from hvdlite.engine.memory import Extent, extents_of
from hvdlite.transport import Transport

if TYPE_CHECKING:
    from hvdlite.transport.gpu.base import DeviceTransport


def signature_of(label: str, array: Any, *entries: tuple[str, Hashable]) -> Signature:
    """Return the signature of a collective on an array, with its dtype and device."""
    device = "cuda" if isinstance(array, DeviceArray) else "cpu"
    return _signature(label, array.dtype, device, entries)


@lru_cache(4096)
def _signature(
    label: str, dtype: np.dtype[Any], device: str, entries: tuple[tuple[str, Hashable], ...]
) -> Signature:
    first = ("the operation", label), ("dtype", dtype.name)
    return Signature((*first, *entries, ("device", device)))


def checked_array(array: Any, out: Any = None) -> Any:
    """Return the array of a call's argument: ``out`` if the result is to be there and fits."""
    if isinstance(array, DeviceArray):
        return array
    array = as_array(array)
    return out if out is not None and check_out(out, array) else array


def empty_like(array: Any) -> Any:
    """Return an uninitialised array of the same shape and dtype in the same memory."""
    if isinstance(array, DeviceArray):
        return array.like(array.shape)
    return np.empty(array.shape, array.dtype)


def cut_rows(array: Any, counts: Sequence[int]) -> list[Any]:
    """Return the bytes of the first ``counts[0]`` rows, of the next ``counts[1]``, and so on."""
    row = prod(array.shape[1:]) * array.dtype.itemsize
    return cut(as_bytes(array.ravel()), [0, *accumulate(row * count for count in counts)])


def value_of(array: Any) -> Any:
    """Return what users get for an array: a framework's tensor if it lies on a device."""
    return array.tensor if isinstance(array, DeviceArray) else array


class ArrayOperation(Operation):
    """A collective on an array of the host or a device, which must not change until it has ended.

    A device follows the stream that is the current one when the operation is made: it waits for the
    work that the stream has been given by then, and allocates results there.

    Args:
        out: The array that the result is written to, if there is one already.
    """

    #: Who writes to ``out``, see `Extent`; None: this operation.
    _writer: Hashable = None
    #: The caller's array for the result; None: the operation has allocated one.
    _given: Any = None
    #: Given with it: the number of each rank's rows; None: as the ranks' arrays have it.
    _sizes: Sequence[int] | None = None
    _extents: Sequence[Extent] | None = None

    def __init__(
        self,
        name: str,
        signature: Signature,
        array: Any,
        payload: bytes = b"",
        failure: str | None = None,
        out: Any = None,
    ) -> None:
        super().__init__(name, signature, payload, failure)
        self._array = array
        self.nbytes = array.nbytes
        if isinstance(array, DeviceArray):
            memory = self.memory = array.memory
            self._stream = memory.stream()
            # After the result has been allocated: others may be using its memory until now.
            self.ready = [memory.cuda.record(memory.index, self._stream)]
            self.tensors = [array.tensor] if out is None else [array.tensor, out.tensor]
            self._extents = ()

    def extents(self) -> Sequence[Extent]:
        if self._extents is None:
            self._extents = extents_of(self._writer or self, self._array, self._given)
        return self._extents

    def go_on(self, members: Sequence[int]) -> None:
        """Fail, too, if there is a size for each rank, and fewer ranks by now."""
        super().go_on(members)
        if self._sizes is not None and len(self._sizes) > len(members):
            self.failure = f"{self.title} was lost: a rank that has a part in it has died"

    def _allocate(self, transport: Transport, shape: tuple[int, ...]) -> Any:
        """Return an uninitialised array for the result, while the operation is executed."""
        if self.memory is None:
            given = self._given
            return np.empty(shape, self._array.dtype) if given is None else given.reshape(shape)
        device = cast("DeviceTransport", transport)
        with self.memory.on(self._stream):
            result = self._array.like(shape)
        # Earlier users of its memory did so before this point.
        device.hold(device.stream.ptr, device.record(self._stream))
        self.tensors = [self._array.tensor, result.tensor]
        return result
