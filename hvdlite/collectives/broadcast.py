"""Broadcast: every rank gets the root's array."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.base.arrays import as_array, as_bytes, check_out
from hvdlite.engine import Engine, Handle, Operation, Signature, runtime
from hvdlite.engine.device import DeviceArray, DeviceOperation
from hvdlite.engine.memory import Extent, extents_of
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.transport import Transport
from hvdlite.transport.gpu.base import DeviceTransport
from hvdlite.world import world


def broadcast(
    array: Any,
    root_rank: int,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return rank ``root_rank``'s array on all ranks.

    Args:
        array: Array whose shape and dtype are the same on all ranks.
        root_rank: The rank that sends, by its number among all ranks, also where a process set is
            given.
        name: Name that pairs this call with those of the other ranks; None pairs by order.
        process_set: The ranks that take part.

    Raises:
        ValueError: There is no such rank, a broadcast of this name is still in flight, or this
            rank is not in the process set.
        HorovodInternalError: The ranks disagree, or communication failed.
    """
    engine = runtime.engine(process_set)
    return engine.run(
        "broadcast", name, lambda name: describe_broadcast(engine, array, name, root_rank)
    )


def broadcast_async(
    array: Any,
    root_rank: int,
    name: str | None = None,
    out: Any = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `broadcast` and return a handle; do not touch the array until it is done.

    Args:
        out: Contiguous array for the result, which may be ``array``; None allocates one.
    """
    engine = runtime.engine(process_set)
    return engine.submit(
        "broadcast", name, lambda name: describe_broadcast(engine, array, name, root_rank, out)
    )


def describe_broadcast(
    engine: Engine, array: Any, name: str, root_rank: int, out: Any = None
) -> Operation:
    """Make the operation that `broadcast` submits to an engine."""
    root = checked_root(engine, root_rank)
    if isinstance(array, DeviceArray):
        return DeviceBroadcast(name, array, root, out)
    array = as_array(array)
    if out is not None:
        check_out(out, array)
    return Broadcast(name, array, root, out)


def checked_root(engine: Engine, root_rank: int) -> int:
    """Return the id of a broadcast's root; see `World.ids`.

    Raises:
        ValueError: It is no integer, or not among an engine's ranks.
    """
    ids = world.current().ids
    try:
        root = operator.index(root_rank)
    except TypeError:
        kind = type(root_rank).__name__
        raise ValueError(
            f"root_rank={root_rank!r} is of type {kind}; expected an integer, the number of a rank"
        ) from None
    if 0 <= root < len(ids) and ids[root] in engine.world.ids:
        return ids[root]
    ranks = tuple(world.current().numbers(engine.world.ids))
    whole = len(ranks) == len(ids)
    found = f"ranks are 0 to {len(ids) - 1}" if whole else f"the process set has {ranks}"
    raise ValueError(f"root_rank={root} is not a rank that takes part; {found}")


def _signature(
    dtype: np.dtype[Any], shape: tuple[int, ...], root: int, device: str = "cpu"
) -> Signature:
    return Signature(
        (
            ("the operation", "broadcast"),
            ("dtype", dtype.name),
            ("shape", tuple(shape)),
            ("root_rank", root),
            ("device", device),
        )
    )


class Broadcast(Operation):
    """A broadcast of a host array.

    Args:
        name: Name of the operation.
        array: Array of any shape, which is the same on all ranks.
        root: Id of the sender; see `World.ids`.
        out: Contiguous array of the same shape and dtype for the result, which may be the array
            itself; None allocates one.
    """

    def __init__(self, name: str, array: Any, root: int, out: Any = None) -> None:
        super().__init__(name, _signature(array.dtype, array.shape, root))
        self._array = array
        self.root = root
        # Broadcasts from one root may write to the same memory: a model has tied weights twice.
        self._writer = "broadcast", root
        self._given = out
        # Allocated before the ranks meet: a failure then concerns this rank alone.
        self._out = np.empty(array.shape, array.dtype) if out is None else out

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Any:
        root = transport.members.index(self.root)
        if self._out is not self._array and transport.rank == root:
            self._out[...] = self._array
        transport.broadcast(as_bytes(self._out.reshape(-1)), root)
        return self._out

    def extents(self) -> Sequence[Extent]:
        return extents_of(self._writer, self._array, self._given)


class DeviceBroadcast(DeviceOperation):
    """A broadcast of a device array; arguments as in `Broadcast`."""

    def __init__(
        self, name: str, array: DeviceArray, root: int, out: DeviceArray | None = None
    ) -> None:
        super().__init__(name, _signature(array.dtype, array.shape, root, "cuda"), array.memory)
        self._array = array
        self.root = root
        self._out = array.like(array.shape) if out is None else out
        self.tensors = (array.tensor, self._out.tensor)
        self.value = self._out.tensor
        self.follow(array.memory.stream())

    def exchange(self, transport: DeviceTransport) -> None:
        out, root = as_bytes(self._out.flat), transport.members.index(self.root)
        if self._out is not self._array and transport.rank == root:
            transport.copy(as_bytes(self._array.flat), out)
        transport.broadcast(out, root)
