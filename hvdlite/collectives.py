"""The collectives on numpy arrays and Python objects."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite import reduction, runtime, world
from hvdlite.arrays import as_array, check_out
from hvdlite.engine import Handle, Operation
from hvdlite.engine.device import DeviceArray
from hvdlite.engine.device_operations import DeviceAllgather, DeviceAllreduce, DeviceBroadcast
from hvdlite.engine.operations import Allgather, Allreduce, Barrier, Broadcast, BroadcastBytes
from hvdlite.exchange import Compression, Reduction, Strategy, check_strategy
from hvdlite.exchange.device import CompressedDeviceAllreduce
from hvdlite.exchange.operation import CompressedAllreduce
from hvdlite.reduction import ReduceOp


def allreduce(
    array: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: Strategy = Compression.none,
    out: Any = None,
) -> Any:
    """Reduce an array over all ranks and return the result, alike to the bit on all of them.

    The result is ``postscale * op(prescale * array)``; 16-bit floats are accumulated in
    float32, integers wrap.

    Args:
        array: any shape (alike on all ranks) and dtype: bool, integers, floats of 16 to 64
            bits, ``ml_dtypes.bfloat16``; complex for Sum and Average.
        average: deprecated; True is Average, False is Sum.
        name: pairs this call with those of the other ranks; None: by order.
        op: one of the six reductions; None is Average.
        prescale_factor: multiplies the array before the reduction.
        postscale_factor: multiplies the result.
        compression: how floats travel; all but ``Compression.none`` need Sum or Average.
        out: a contiguous array for the result, which may be ``array``; None: a new one.

    Returns:
        An array of the input's shape and dtype.

    Raises:
        ValueError: ``op`` and ``average`` contradict, the reduction has no meaning for the
            dtype or the compression, ``out`` does not fit, or an allreduce of this name is
            still on its way.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    # Numbered before anything can be refused: a refusal must not shift later names.
    name = name or runtime.engine().unnamed("allreduce")
    chosen = reduction.choose(average, op)
    operation = describe_allreduce(
        array, name, chosen, prescale_factor, postscale_factor, compression, out
    )
    return runtime.engine().named.run(operation)


def allreduce_async(
    array: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: Strategy = Compression.none,
    out: Any = None,
    handle: Handle | None = None,
) -> Handle:
    """Start `allreduce` and return a handle; leave the array alone until it is done.

    Args:
        handle: what to return; None: a new one.
    """
    engine = runtime.engine()
    name = name or engine.unnamed("allreduce")
    chosen = reduction.choose(average, op)
    operation = describe_allreduce(
        array, name, chosen, prescale_factor, postscale_factor, compression, out
    )
    return engine.named.submit(operation, handle=handle)


def describe_allreduce(
    array: Any,
    name: str,
    op: ReduceOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
    compression: Strategy = Compression.none,
    out: Any = None,
) -> Operation:
    """Make what `allreduce` submits, for those who do that themselves; arguments as there.

    Raises:
        ValueError: as `allreduce`, as far as this rank can tell alone.
    """
    on_device = isinstance(array, DeviceArray)
    if not on_device:
        array = as_array(array)
        if out is not None:
            check_out(out, array)
    reduction.check(op, array.dtype)
    if compression is Compression.none:
        kind = DeviceAllreduce if on_device else Allreduce
        return kind(name, array, op, float(prescale), float(postscale), out)
    check_strategy(compression)
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ValueError(
            f"compression needs op=hvd.Sum or hvd.Average, not {op.name.capitalize()}; "
            "leave compression out for the others"
        )
    compressed = CompressedDeviceAllreduce if on_device else CompressedAllreduce
    return compressed(
        name, array, compression, Reduction(op), float(prescale), float(postscale), out
    )


def allgather(array: Any, name: str | None = None) -> Any:
    """Concatenate the arrays of all ranks along axis 0, in the order of the ranks.

    Args:
        array: all axes but the first alike on all ranks; a scalar counts as one row.
        name: pairs this call with those of the other ranks; None: by order.

    Returns:
        A new array, the same on all ranks.

    Raises:
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    return runtime.engine().named.run(_allgather(array, name))


def allgather_async(array: Any, name: str | None = None, *, handle: Handle | None = None) -> Handle:
    """Start `allgather` and return a handle; leave the array alone until it is done.

    Args:
        handle: what to return; None: a new one.
    """
    return runtime.engine().named.submit(_allgather(array, name), handle=handle)


def allgather_rows_async(array: Any, name: str | None = None) -> Handle:
    """Start `allgather`; the handle's result is the whole, and each rank's number of rows."""
    return runtime.engine().named.submit(_allgather(array, name, with_rows=True))


def _allgather(array: Any, name: str | None, with_rows: bool = False) -> Operation:
    name = name or runtime.engine().unnamed("allgather")
    if isinstance(array, DeviceArray):
        return DeviceAllgather(name, array, with_rows)
    return Allgather(name, np.atleast_1d(as_array(array)), with_rows=with_rows)


def broadcast(array: Any, root_rank: int, name: str | None = None) -> Any:
    """Return rank ``root_rank``'s array on all ranks.

    Args:
        array: shape and dtype alike on all ranks.
        root_rank: the rank whose values count.
        name: pairs this call with those of the other ranks; None: by order.

    Raises:
        ValueError: there is no such rank.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    return runtime.engine().named.run(_broadcast(array, root_rank, name))


def broadcast_async(
    array: Any,
    root_rank: int,
    name: str | None = None,
    out: Any = None,
    *,
    handle: Handle | None = None,
) -> Handle:
    """Start `broadcast` and return a handle; leave the array alone until it is done.

    Args:
        handle: what to return; None: a new one.
    """
    operation = _broadcast(array, root_rank, name, out)
    return runtime.engine().named.submit(operation, handle=handle)


def _broadcast(array: Any, root_rank: int, name: str | None, out: Any = None) -> Operation:
    name = name or runtime.engine().unnamed("broadcast")
    if isinstance(array, DeviceArray):
        return DeviceBroadcast(name, array, _checked_root(root_rank), out)
    array = as_array(array)
    if out is not None:
        check_out(out, array)
    return Broadcast(name, array, _checked_root(root_rank), out)


def _checked_root(root_rank: int) -> int:
    root = operator.index(root_rank)
    if not 0 <= root < world.size():
        raise ValueError(f"root_rank={root} is not a rank; ranks are 0 to {world.size() - 1}")
    return root


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return rank ``root_rank``'s object on all ranks.

    Args:
        obj: anything that pickle takes; ignored on the other ranks.
        root_rank: the rank whose object counts.
        name: pairs this call with those of the other ranks; None: by order.

    Raises:
        ValueError: there is no such rank.
        HorovodInternalError: the object cannot be pickled (on all ranks), the ranks
            disagree, or communication failed.
    """
    name = name or runtime.engine().unnamed("broadcast_object")
    root = _checked_root(root_rank)
    content, failure = _pickled(obj) if world.rank() == root else (b"", None)
    received = runtime.engine().named.run(BroadcastBytes(name, content, root, failure))
    return obj if world.rank() == root else pickle.loads(received)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, by rank.

    Args:
        obj: anything that pickle takes.
        name: pairs this call with those of the other ranks; None: by order.

    Raises:
        HorovodInternalError: an object cannot be pickled (on all ranks), the ranks
            disagree, or communication failed.
    """
    name = name or runtime.engine().unnamed("allgather_object")
    content, failure = _pickled(obj)
    flat = np.frombuffer(content, np.uint8)
    operation = Allgather(name, flat, "allgather of objects", with_rows=True)
    operation.failure = failure
    whole, lengths = runtime.engine().named.run(operation)
    ends = np.cumsum(lengths)
    return [
        pickle.loads(whole[end - length : end].tobytes())
        for end, length in zip(ends, lengths, strict=True)
    ]


def _pickled(obj: Any) -> tuple[bytes, str | None]:
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), None
    except Exception as error:
        return b"", f"the {type(obj).__name__} cannot be pickled: {error}"


def barrier(name: str | None = None) -> None:
    """Return when every rank has called it."""
    runtime.engine().named.run(Barrier(name or runtime.engine().unnamed("barrier")))


def agree_on(name: str, entries: Sequence[Any]) -> None:
    """Compare something across ranks.

    Args:
        name: what it is, for messages; pairs this call with those of the other ranks.
        entries: what must be equal on all ranks; compared by ``repr``.

    Raises:
        HorovodInternalError: the ranks differ; the message names the first entry.
    """
    numbered = [(f"entry {number}", entry) for number, entry in enumerate(entries)]
    runtime.engine().named.run(Barrier(name, (*numbered, ("the number of entries", len(entries)))))


def poll(handle: Handle) -> bool:
    """Whether the operation behind a handle has ended."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for the operation behind a handle, and return its result."""
    return handle.wait()
