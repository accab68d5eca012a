"""Helpers for numpy arrays: flat, contiguous, of known dtypes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np


def as_array(values: Any) -> Any:
    """Return a contiguous array in native byte order: the same one, if it is such an array."""
    if type(values) is not np.ndarray and isinstance(values, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask; send .filled(value), and .mask")
    array = np.asarray(values, order="C")
    if array.dtype.kind in "fiubc" and array.dtype.isnative:
        return array
    if array.dtype.hasobject or array.dtype.names is not None:
        raise ValueError(
            f"arrays of dtype {array.dtype} cannot be sent; use broadcast_object() or "
            "allgather_object()"
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def check_out(out: Any, array: Any) -> bool:
    """Return whether an array for a result is the memory of ``array``, though perhaps a view of it.

    Raises:
        ValueError: it has another shape or dtype, is not contiguous or is read-only; or it overlaps
            the array, the rest of which would be overwritten before it is sent.
    """
    fits = out is array or (
        isinstance(out, np.ndarray) and (out.dtype, out.shape) == (array.dtype, array.shape)
    )
    if not (fits and out.flags.c_contiguous and out.flags.writeable):
        found = describe(out) if isinstance(out, np.ndarray) else type(out).__name__
        raise ValueError(
            f"out must be a C-contiguous, writeable array {describe(array)}, as the input; "
            f"it is {found}"
        )
    if out is array or not np.may_share_memory(out, array):
        return out is array
    if address(out) != address(array):
        raise ValueError(
            "out overlaps the input, but does not begin with it; give the input itself, or an "
            "array of its own"
        )
    return True


def flat(array: Any) -> Any:
    """Return the elements as one contiguous 1-d array; a view if they lie so already."""
    return np.ascontiguousarray(array).reshape(-1)


def cut(array: Any, bounds: Sequence[int]) -> list[Any]:
    """Return the pieces of a flat array between successive bounds."""
    return [array[start:stop] for start, stop in itertools.pairwise(bounds)]


def set_first(array: Any, value: float) -> None:
    """Set the first entry of a contiguous array or tensor of floats; too large is infinite."""
    with np.errstate(over="ignore"):
        array.reshape(-1)[0] = value


def as_bytes(array: Any) -> Any:
    """View a flat contiguous array as bytes."""
    return array.view(np.uint8)


def address(array: Any) -> int:
    """Return the address of a contiguous array."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # four times as fast
    except (TypeError, ValueError):  # read-only, empty, or of a type that buffers do not know
        start: int = array.__array_interface__["data"][0]
        return start


def describe(array: Any) -> str:
    """Return the dtype and shape in the form ``float32[10, 4]``."""
    return f"{array.dtype.name}{list(array.shape)}"


def slice_bounds(length: int, parts: int) -> list[int]:
    """Return the bounds of ``parts`` slices of ``length`` elements; sizes differ by at most one."""
    base, longer = divmod(length, parts)
    return [part * base + min(part, longer) for part in range(parts + 1)]
