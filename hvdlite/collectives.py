"""The collectives on numpy arrays."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite import reduction, runtime, world
from hvdlite.arrays import as_array, check_out
from hvdlite.compression import Compression, Parameter, Reduction, Strategy, check_strategy
from hvdlite.compression.device import CompressedDeviceAllreduce
from hvdlite.compression.operation import CompressedAllreduce
from hvdlite.engine import Engine, Handle, Operation
from hvdlite.engine.device import DeviceArray
from hvdlite.engine.device_operations import DeviceAllgather, DeviceAllreduce, DeviceBroadcast
from hvdlite.engine.operations import Allgather, Allreduce, Barrier, Broadcast, Join
from hvdlite.errors import HorovodInternalError
from hvdlite.interrupts import uninterrupted
from hvdlite.process_sets import ProcessSet, global_process_set
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
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce an array over all ranks and return the result, alike to the bit on all of them.

    The result is ``postscale * op(prescale * array)``; 16-bit floats are accumulated in
    float32. Sums and products of integers wrap, as numpy's do. Their average is exact and cut
    towards zero. With factors, integers are computed in float64, and the result is cut towards
    zero.

    Args:
        array: any shape (alike on all ranks) and dtype: bool, integers, floats of 16 to 64
            bits, ``ml_dtypes.bfloat16``; complex for Sum and Average.
        average: deprecated; True is Average, False is Sum.
        name: pairs this call with those of the other ranks; None: by order.
        op: one of the six reductions; None is Average.
        prescale_factor: multiplies the array before the reduction.
        postscale_factor: multiplies the result.
        compression: how floats travel; all but ``Compression.none`` need Sum or Average. One that
            remembers nothing, or a class with ``compress(array)`` and ``decompress(array, ctx)``.
        out: a contiguous array for the result, which may be ``array``; None: a new one.
        process_set: the ranks that take part.

    Returns:
        An array of the input's shape and dtype.

    Raises:
        ValueError: ``op`` and ``average`` contradict, the reduction has no meaning for the
            dtype or the compression, a factor is not finite or beyond the integers' range,
            ``out`` does not fit, this rank is not in the process set, or an allreduce of this
            name is still on its way.
        GradientError: on all ranks; factors take an integer out of its type's range.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    engine = runtime.engine(process_set)
    # Numbered before anything can be refused: a refusal must not shift later names.
    name = name or engine.unnamed("allreduce")
    chosen = reduction.choose(average, op)
    operation = describe_allreduce(
        array, name, chosen, prescale_factor, postscale_factor, compression, out
    )
    return engine.named.run(operation)


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
    process_set: ProcessSet = global_process_set,
    handle: Handle | None = None,
) -> Handle:
    """Start `allreduce` and return a handle; leave the array alone until it is done.

    Args:
        handle: what to return; None: a new one.
    """
    engine = runtime.engine(process_set)
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
    prescale = reduction.check_factor("prescale_factor", prescale, array.dtype)
    postscale = reduction.check_factor("postscale_factor", postscale, array.dtype)
    kind = DeviceAllreduce if on_device else Allreduce
    if compression is Compression.none:
        return kind(name, array, op, prescale, postscale, out)
    compression = check_strategy(compression)
    if compression.stateful:
        raise ValueError(
            f"compression={compression!r} remembers something from step to step, which an "
            "allreduce by itself cannot; use it in a DistributedOptimizer or a "
            "DistributedGradientTape"
        )
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ValueError(
            f"compression needs op=hvd.Sum or hvd.Average, not {op.name.capitalize()}; "
            "leave compression out for the others"
        )
    if compression.choose(Parameter(name, array.shape, array.dtype)) == Compression.none:
        return kind(name, array, op, prescale, postscale, out)
    if reduction.scales_integers(array.dtype, prescale, postscale):
        raise ValueError(
            f"prescale_factor={prescale:g} and postscale_factor={postscale:g} cannot be applied to "
            f"{array.dtype.name} with compression={compression!r}; scale in compress() and "
            "decompress()"
        )
    compressed = CompressedDeviceAllreduce if on_device else CompressedAllreduce
    return compressed(name, array, compression, Reduction(op), prescale, postscale, out)


def allgather(
    array: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the arrays of all ranks along axis 0, in the order of the ranks.

    Args:
        array: all axes but the first alike on all ranks; a scalar counts as one row.
        name: pairs this call with those of the other ranks; None: by order.
        process_set: the ranks that take part.

    Returns:
        A new array, the same on all ranks.

    Raises:
        ValueError: an allgather of this name is still on its way, or this rank is not in the
            process set.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    engine = runtime.engine(process_set)
    name = name or engine.unnamed("allgather")
    return engine.named.run(describe_allgather(array, name))


def allgather_async(
    array: Any,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
    handle: Handle | None = None,
) -> Handle:
    """Start `allgather` and return a handle; leave the array alone until it is done.

    Args:
        handle: what to return; None: a new one.
    """
    engine = runtime.engine(process_set)
    name = name or engine.unnamed("allgather")
    return engine.named.submit(describe_allgather(array, name), handle=handle)


def allgather_rows_async(
    array: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `allgather`; the handle's result is the whole, and each rank's number of rows."""
    engine = runtime.engine(process_set)
    name = name or engine.unnamed("allgather")
    return engine.named.submit(describe_allgather(array, name, with_rows=True))


def describe_allgather(array: Any, name: str, with_rows: bool = False) -> Operation:
    """Make what `allgather` submits; with each rank's number of rows in the result, or not."""
    if isinstance(array, DeviceArray):
        return DeviceAllgather(name, array, with_rows)
    return Allgather(name, np.atleast_1d(as_array(array)), with_rows=with_rows)


def broadcast(
    array: Any,
    root_rank: int,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return rank ``root_rank``'s array on all ranks.

    Args:
        array: shape and dtype alike on all ranks.
        root_rank: the rank whose values count, by its number among all ranks, also where a
            process set is given.
        name: pairs this call with those of the other ranks; None: by order.
        process_set: the ranks that take part.

    Raises:
        ValueError: there is no such rank, a broadcast of this name is still on its way, or this
            rank is not in the process set.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    engine = runtime.engine(process_set)
    operation = _broadcast(engine, array, root_rank, name)
    return engine.named.run(operation)


def broadcast_async(
    array: Any,
    root_rank: int,
    name: str | None = None,
    out: Any = None,
    *,
    process_set: ProcessSet = global_process_set,
    handle: Handle | None = None,
) -> Handle:
    """Start `broadcast` and return a handle; leave the array alone until it is done.

    Args:
        handle: what to return; None: a new one.
    """
    engine = runtime.engine(process_set)
    operation = _broadcast(engine, array, root_rank, name, out)
    return engine.named.submit(operation, handle=handle)


def _broadcast(
    engine: Engine, array: Any, root_rank: int, name: str | None, out: Any = None
) -> Operation:
    name = name or engine.unnamed("broadcast")
    root = checked_root(engine, root_rank)
    if isinstance(array, DeviceArray):
        return DeviceBroadcast(name, array, root, out)
    array = as_array(array)
    if out is not None:
        check_out(out, array)
    return Broadcast(name, array, root, out)


def checked_root(engine: Engine, root_rank: int) -> int:
    """Return the root of a broadcast.

    Raises:
        ValueError: it is no integer, or not among an engine's ranks.
    """
    ranks = engine.world.ranks
    try:
        root = operator.index(root_rank)
    except TypeError:
        kind = type(root_rank).__name__
        raise ValueError(
            f"root_rank={root_rank!r} is of type {kind}; expected an integer, the number of a rank"
        ) from None
    if root not in ranks:
        whole = ranks == tuple(range(world.size()))
        found = f"ranks are 0 to {world.size() - 1}" if whole else f"the process set has {ranks}"
        raise ValueError(f"root_rank={root} is not a rank that takes part; {found}")
    return root


def join(process_set: ProcessSet = global_process_set) -> int:
    """Tell that this rank has no more data, and wait until all ranks do so.

    Until then this rank takes part with zeros in the allreduces of the others, those of gradients
    included; averages go on dividing by the number of all ranks. Other collectives raise on the
    ranks that call them meanwhile.

    The weights of a rank that has joined stay what they were. Afterwards broadcast those of the
    rank that is returned, which has taken every step.

    If an exception from a signal's handler ends the wait, this rank has joined all the same, and
    another call goes on waiting.

    Args:
        process_set: the ranks that take part.

    Returns:
        The rank that joined last, the same on all.

    Raises:
        ValueError: this rank is not in the process set.
        HorovodInternalError: a rank has shut down without joining, or communication failed.
    """
    engine = runtime.engine(process_set)
    _submit_joins(engine)
    try:
        last: int = [handle.wait() for handle in engine.joins][-1]
    except HorovodInternalError:
        engine.joins.clear()
        raise
    engine.joins.clear()
    return last


@uninterrupted
def _submit_joins(engine: Engine) -> None:
    if not engine.joins:  # else a signal's handler has ended the wait for them
        lanes = (engine.gradients, engine.named)
        engine.joins.extend([lane.submit(Join("join()")) for lane in lanes])


def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    """Return when every rank has called it.

    Args:
        process_set: the ranks that take part.
        name: pairs this call with those of the other ranks; None: by order.
    """
    engine = runtime.engine(process_set)
    engine.named.run(Barrier(name or engine.unnamed("barrier")))


def agree_on(
    name: str,
    entries: Sequence[Any] | Mapping[str, Any],
    process_set: ProcessSet = global_process_set,
) -> None:
    """Compare something across ranks.

    Args:
        name: what it is, for messages; pairs this call with those of the other ranks.
        entries: what must be equal on all ranks, if they are to have labels in messages by
            these; compared by ``repr``.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: the ranks differ; the message names the first entry.
    """
    if not isinstance(entries, Mapping):
        entries = {f"entry {number}": entry for number, entry in enumerate(entries)}
    known = (*entries.items(), ("the number of entries", len(entries)))
    runtime.engine(process_set).named.run(Barrier(name, known))


def poll(handle: Handle) -> bool:
    """Whether the operation behind a handle has ended."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for the operation behind a handle, and return its result."""
    return handle.wait()
