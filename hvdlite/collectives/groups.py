"""Groups: several operations of one family that begin, run and fail as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from hvdlite.base.reduction import ReduceOp
from hvdlite.collectives.allgather import describe_allgather
from hvdlite.collectives.allreduce import describe_allreduce
from hvdlite.collectives.reducescatter import describe_reducescatter
from hvdlite.compression import Compression, Strategy
from hvdlite.engine import Handle, Operation, Signature, runtime
from hvdlite.engine.memory import Extent
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.engine.rounds import fuse
from hvdlite.transport import Transport


def grouped_allreduce(
    arrays: Iterable[Any],
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

    No array is reduced before every rank has submitted all, and if one is refused, all are.

    Args:
        arrays: Arrays of any shapes and dtypes, the same on all ranks.
        outs: For each the place of its result, as in `hvdlite.allreduce`; None allocates them.

    Raises:
        ValueError, HorovodInternalError: As `hvdlite.allreduce`; there is no array.
    """
    options = op, prescale_factor, postscale_factor, compression
    pairs = _with_outs(arrays, outs)
    group = _group("grouped allreduce", pairs, _describe_pair, options, average)
    results: list[Any] = runtime.engine(process_set).run("grouped_allreduce", name, group)
    return results


def grouped_allreduce_async(
    arrays: Iterable[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: Strategy = Compression.none,
    outs: Sequence[Any] | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allreduce` and return one handle, whose result is a list."""
    options = op, prescale_factor, postscale_factor, compression
    pairs = _with_outs(arrays, outs)
    group = _group("grouped allreduce", pairs, _describe_pair, options, average)
    return runtime.engine(process_set).submit("grouped_allreduce", name, group)


def _with_outs(arrays: Iterable[Any], outs: Sequence[Any] | None) -> Iterator[tuple[Any, Any]]:
    listed = list(arrays)
    yield from zip(listed, [None] * len(listed) if outs is None else outs, strict=True)


def _describe_pair(
    pair: tuple[Any, Any], name: str, options: tuple[Any, Any, Any, Any], average: bool | None
) -> Operation:
    array, out = pair
    return describe_allreduce(array, name, *options, out, average)


def grouped_allgather(
    arrays: Iterable[Any],
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather several arrays as one unit; see `hvdlite.allgather` and `grouped_allreduce`."""
    group = _group("grouped allgather", arrays, describe_allgather)
    results: list[Any] = runtime.engine(process_set).run("grouped_allgather", name, group)
    return results


def grouped_allgather_async(
    arrays: Iterable[Any],
    name: str | None = None,
    *,
    with_rows: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allgather` and return one handle, whose result is a list.

    Args:
        with_rows: Whether each result is `hvdlite.collectives.allgather.Gathered`.
    """
    group = _group("grouped allgather", arrays, describe_allgather, with_rows)
    return runtime.engine(process_set).submit("grouped_allgather", name, group)


def grouped_reducescatter(
    arrays: Iterable[Any],
    name: str | None = None,
    op: ReduceOp | int = ReduceOp.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: Strategy = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Do `hvdlite.reducescatter` for several arrays as one unit; see `grouped_allreduce`."""
    options = op, prescale_factor, postscale_factor, compression
    group = _group("grouped reducescatter", arrays, describe_reducescatter, *options)
    results: list[Any] = runtime.engine(process_set).run("grouped_reducescatter", name, group)
    return results


def grouped_reducescatter_async(
    arrays: Iterable[Any],
    name: str | None = None,
    op: ReduceOp | int = ReduceOp.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: Strategy = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_reducescatter` and return one handle, whose result is a list."""
    options = op, prescale_factor, postscale_factor, compression
    group = _group("grouped reducescatter", arrays, describe_reducescatter, *options)
    return runtime.engine(process_set).submit("grouped_reducescatter", name, group)


def _group(
    label: str, arrays: Iterable[Any], describe: Callable[..., Operation], *options: Any
) -> Callable[[str], Group]:
    return lambda name: describe_group(
        label, name, arrays, lambda array, own: describe(array, own, *options)
    )


def describe_group(
    label: str, name: str, items: Iterable[Any], describe: Callable[[Any, str], Operation]
) -> Group:
    """Make one operation of several, called ``name.0``, ``name.1`` and so on.

    Args:
        items: One for each member, as ``describe`` takes it.
    """
    operations = [describe(item, f"{name}.{number}") for number, item in enumerate(items)]
    if not operations:
        raise ValueError(f"a {label} needs one array at least; found none")
    if len({id(operation.memory) for operation in operations}) > 1:
        raise ValueError(
            f"the arrays of a {label} must lie on one device; found several, or the host besides"
        )
    return Group(name, label, operations)


class Group(Operation):
    """Operations of one family, which begin and end together.

    None of them begins before every rank has submitted all, and if one is refused, all are.
    """

    may_use_memory_twice = True

    def __init__(self, name: str, label: str, operations: Sequence[Operation]) -> None:
        payload = b"".join(operation.payload for operation in operations)
        super().__init__(name, _signature(label, operations), payload)
        self._operations = list(operations)
        self.nbytes = sum(operation.nbytes for operation in operations)
        self.stands_in = all(operation.stands_in for operation in operations)
        self.memory = operations[0].memory
        self.ready = [event for operation in operations for event in operation.ready]

    @property
    def tensors(self) -> Sequence[Any]:  # type: ignore[override]
        """The tensors of all operations."""
        return [tensor for operation in self._operations for tensor in operation.tensors]

    def protect(self) -> None:
        for operation in self._operations:
            operation.protect()

    def restore(self) -> None:
        for operation in self._operations:
            operation.restore()

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> list[Any]:
        results: dict[int, Any] = {}
        known = _split(payloads, self._operations)
        for group in fuse(self._operations, math.inf):
            first, *others = group
            for operation in group:
                operation.lane = self.lane
            if others:
                found = first.execute_together(others, transport)
            else:
                found = [first.execute(transport, known[id(first)])]
            results.update(zip(map(id, group), found, strict=True))
        return [results[id(operation)] for operation in self._operations]

    def extents(self) -> Sequence[Extent]:
        return [extent for operation in self._operations for extent in operation.extents()]

    def stand_in(self) -> Callable[[], Operation]:
        label = self.signature[0][1]
        makers = [operation.stand_in() for operation in self._operations]
        return partial(_group_of, self.name, label, makers)


def _group_of(name: str, label: str, makers: Sequence[Callable[[], Operation]]) -> Group:
    return Group(name, label, [make() for make in makers])


def _signature(label: str, operations: Sequence[Operation]) -> Signature:
    """Return the label and, array by array, what must be equal on all ranks."""
    parts = [
        (f"{what} of array {number}", value)
        for number, operation in enumerate(operations)
        for what, value in operation.signature[1:]
    ]
    return Signature((("the operation", label), ("the number of arrays", len(operations)), *parts))


def _split(payloads: Sequence[bytes], operations: Sequence[Operation]) -> dict[int, list[bytes]]:
    """Return every rank's payload of each operation; those of one family have one length."""
    parts: dict[int, list[bytes]] = {}
    start = 0
    for operation in operations:
        stop = start + len(operation.payload)
        parts[id(operation)] = [payload[start:stop] for payload in payloads]
        start = stop
    return parts
