"""The collectives on numpy arrays that give every rank something else."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdlite import reduction, runtime
from hvdlite.arrays import as_array
from hvdlite.compression import Compression, Strategy, check_strategy
from hvdlite.engine import Handle, Operation
from hvdlite.engine.device import DeviceArray
from hvdlite.engine.device_scattering import DeviceAlltoall, DeviceReducescatter
from hvdlite.engine.scattering import Alltoall, Reducescatter
from hvdlite.errors import UnsupportedError
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import ReduceOp


def alltoall(
    array: Any,
    splits: Any = None,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> tuple[Any, Any]:
    """Send every rank some rows of an array, and receive some of theirs.

    Args:
        array: at least one axis; all but the first alike on all ranks.
        splits: for each rank of the process set how many rows it gets, in their order: integers
            that add up to the number of rows. None: the same number for all.
        name: pairs this call with those of the other ranks; None: by order.
        process_set: the ranks that take part.

    Returns:
        The rows that came, in the order of the ranks they came from, and an int32 array of how
        many came from each.

    Raises:
        ValueError: the splits do not fit, an alltoall of this name is still on its way, or this
            rank is not in the process set.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    engine = runtime.engine(process_set)
    name = name or engine.unnamed("alltoall")
    whole, received = engine.named.run(describe_alltoall(array, splits, name, engine.size))
    return whole, np.array(received, np.int32)


def alltoall_async(
    array: Any,
    splits: Any = None,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
    handle: Handle | None = None,
) -> Handle:
    """Start `alltoall` and return a handle, whose result is the rows and a list of numbers.

    Args:
        handle: what to return; None: a new one.
    """
    engine = runtime.engine(process_set)
    name = name or engine.unnamed("alltoall")
    operation = describe_alltoall(array, splits, name, engine.size)
    return engine.named.submit(operation, handle=handle)


def describe_alltoall(array: Any, splits: Any, name: str, size: int) -> Operation:
    """Make what `alltoall` submits on ``size`` ranks; arguments and errors as there."""
    on_device = isinstance(array, DeviceArray)
    if not on_device:
        array = as_array(array)
    if not array.shape:
        raise ValueError("alltoall needs an array of rows, found a scalar")
    counts = _checked_splits(splits, array.shape[0], size)
    return DeviceAlltoall(name, array, counts) if on_device else Alltoall(name, array, counts)


def _checked_splits(splits: Any, rows: int, size: int) -> list[int]:
    if splits is None:
        if rows % size:
            raise ValueError(
                f"{rows} rows cannot be dealt evenly to {size} ranks; pass splits, one for each"
            )
        return [rows // size] * size
    try:
        given = np.asarray(splits)
    except ValueError:  # a list of lists that differ in length
        given = np.empty(0, object)
    if given.ndim != 1 or given.size != size or (given.dtype.kind not in "iu" and given.size):
        raise ValueError(
            f"splits must be {size} integers, one for each rank that takes part; found {splits!r}"
        )
    counts: list[int] = given.tolist()
    if min(counts) < 0 or sum(counts) != rows:
        raise ValueError(
            f"splits must not be negative and add up to the {rows} rows; found {counts}"
        )
    return counts


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
        array: at least one axis; shape and dtype alike on all ranks. The first ranks get one
            row more where there are not as many for all.
        name: pairs this call with those of the other ranks; None: by order.
        op: Average, Sum, Min, Max or Product.
        prescale_factor: multiplies the array before the reduction.
        postscale_factor: multiplies the result.
        compression: how floats travel: ``Compression.none``, ``.fp16`` or ``.bf16``.
        process_set: the ranks that take part.

    Raises:
        ValueError: ``op`` is Adasum or has no meaning for the dtype or the compression, a
            reducescatter of this name is still on its way, or this rank is not in the process
            set.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    engine = runtime.engine(process_set)
    name = name or engine.unnamed("reducescatter")
    operation = describe_reducescatter(
        array, name, reduction.choose(None, op), prescale_factor, postscale_factor, compression
    )
    return engine.named.run(operation)


def reducescatter_async(
    array: Any,
    name: str | None = None,
    op: ReduceOp | int = ReduceOp.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    process_set: ProcessSet = global_process_set,
    handle: Handle | None = None,
) -> Handle:
    """Start `reducescatter` and return a handle; leave the array alone until it is done.

    Args:
        handle: what to return; None: a new one.
    """
    engine = runtime.engine(process_set)
    name = name or engine.unnamed("reducescatter")
    operation = describe_reducescatter(
        array, name, reduction.choose(None, op), prescale_factor, postscale_factor
    )
    return engine.named.submit(operation, handle=handle)


def describe_reducescatter(
    array: Any,
    name: str,
    op: ReduceOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
    compression: Strategy = Compression.none,
) -> Operation:
    """Make what `reducescatter` submits; arguments and errors as there."""
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
    wire = check_strategy(compression).wire_dtype(array.dtype)
    return kind(name, array, op, prescale, postscale, wire)
