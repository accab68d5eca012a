"""The collectives on lists of numpy arrays, which run as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdlite import reduction, runtime
from hvdlite.collectives import describe_allgather, describe_allreduce
from hvdlite.compression import Compression, Strategy
from hvdlite.engine import Engine, Handle, Operation
from hvdlite.engine.group import DeviceGroup, Group
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import ReduceOp
from hvdlite.scattering import describe_reducescatter


def grouped_allreduce(
    arrays: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: Strategy = Compression.none,
    outs: Sequence[Any] | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce several arrays over all ranks as one unit; see `hvdlite.allreduce`.

    None is reduced before every rank has submitted all, and if one is refused, all are.

    Args:
        arrays: of any shapes and dtypes, alike on all ranks.
        outs: for each the place of its result, as in `hvdlite.allreduce`; None: new arrays.

    Raises:
        ValueError, HorovodInternalError: as `hvdlite.allreduce`; there is no array.
    """
    handle = grouped_allreduce_async(
        arrays,
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        compression=compression,
        outs=outs,
        process_set=process_set,
        begin=False,
    )
    results: list[Any] = handle.wait()
    return results


def grouped_allreduce_async(
    arrays: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: Strategy = Compression.none,
    outs: Sequence[Any] | None = None,
    process_set: ProcessSet = global_process_set,
    handle: Handle | None = None,
    begin: bool = True,
) -> Handle:
    """Start `grouped_allreduce` and return one handle, whose result is a list.

    Args:
        handle: what to return; None: a new one.
        begin: whether it should start before somebody waits for it.
    """
    engine = runtime.engine(process_set)
    name = name or engine.unnamed("grouped_allreduce")
    chosen = reduction.choose(average, op)
    places = [None] * len(arrays) if outs is None else outs
    return _submit(
        engine,
        name,
        "grouped allreduce",
        list(zip(arrays, places, strict=True)),
        lambda member, pair: describe_allreduce(
            pair[0], member, chosen, prescale_factor, postscale_factor, compression, pair[1]
        ),
        handle,
        begin,
    )


def grouped_allgather(
    arrays: Sequence[Any],
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather several arrays as one unit; see `hvdlite.allgather` and `grouped_allreduce`."""
    results: list[Any] = grouped_allgather_async(
        arrays, name, process_set=process_set, begin=False
    ).wait()
    return results


def grouped_allgather_async(
    arrays: Sequence[Any],
    name: str | None = None,
    *,
    with_rows: bool = False,
    process_set: ProcessSet = global_process_set,
    handle: Handle | None = None,
    begin: bool = True,
) -> Handle:
    """Start `grouped_allgather` and return one handle, whose result is a list.

    Args:
        with_rows: whether each result has, beside the whole, each rank's number of rows.
        handle: what to return; None: a new one.
        begin: whether it should start before somebody waits for it.
    """
    engine = runtime.engine(process_set)
    name = name or engine.unnamed("grouped_allgather")
    return _submit(
        engine,
        name,
        "grouped allgather",
        arrays,
        lambda member, array: describe_allgather(array, member, with_rows),
        handle,
        begin,
    )


def grouped_reducescatter(
    arrays: Sequence[Any],
    name: str | None = None,
    op: ReduceOp | int = ReduceOp.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: Strategy = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Do `hvdlite.reducescatter` for several arrays as one unit; see `grouped_allreduce`."""
    results: list[Any] = grouped_reducescatter_async(
        arrays,
        name,
        op,
        prescale_factor,
        postscale_factor,
        compression=compression,
        process_set=process_set,
        begin=False,
    ).wait()
    return results


def grouped_reducescatter_async(
    arrays: Sequence[Any],
    name: str | None = None,
    op: ReduceOp | int = ReduceOp.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: Strategy = Compression.none,
    process_set: ProcessSet = global_process_set,
    handle: Handle | None = None,
    begin: bool = True,
) -> Handle:
    """Start `grouped_reducescatter` and return one handle, whose result is a list.

    Args:
        handle: what to return; None: a new one.
        begin: whether it should start before somebody waits for it.
    """
    engine = runtime.engine(process_set)
    name = name or engine.unnamed("grouped_reducescatter")
    chosen = reduction.choose(None, op)
    return _submit(
        engine,
        name,
        "grouped reducescatter",
        arrays,
        lambda member, array: describe_reducescatter(
            array, member, chosen, prescale_factor, postscale_factor, compression
        ),
        handle,
        begin,
    )


def _submit(
    engine: Engine,
    name: str,
    label: str,
    items: Sequence[Any],
    describe: Callable[[str, Any], Operation],
    handle: Handle | None,
    begin: bool,
) -> Handle:
    """Describe the members of a group, and submit it."""
    if not items:
        raise ValueError(f"a {label} needs one array at least; found none")
    operations: list[Any] = [
        describe(f"{name}.{number}", item) for number, item in enumerate(items)
    ]
    memories = {id(operation.memory): operation.memory for operation in operations}
    if len(memories) > 1:
        raise ValueError(
            f"the arrays of a {label} must lie on one device; found several, or the host besides"
        )
    (memory,) = memories.values()
    if memory is None:
        group: Operation = Group(name, label, operations)
    else:
        group = DeviceGroup(name, label, operations, memory)
    return engine.named.submit(group, begin, handle)
