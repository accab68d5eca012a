"""Broadcast: every rank gets the root's array."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from hvdlite.base.arrays import as_bytes
from hvdlite.collectives.arrays import (
    ArrayOperation,
    checked_array,
    empty_like,
    signature_of,
    value_of,
)
from hvdlite.engine import Engine, Handle, runtime
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.transport import Transport
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
        name, process_set: As for `hvdlite.allreduce`.

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
) -> Broadcast:
    """Make the operation that `broadcast` submits to an engine."""
    root = checked_root(engine, root_rank)
    return Broadcast(name, checked_array(array, out), root, out)


def checked_root(engine: Engine, root_rank: int) -> int:
    """Return the id of a broadcast's root, a member of the engine's world; see `World.ids`."""
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


class Broadcast(ArrayOperation):
    """A broadcast.

    Args:
        root: Id of the sender; see `World.ids`.
        out: Contiguous array of the same shape and dtype for the result, which may be the array
            itself; None allocates one.
    """

    def __init__(self, name: str, array: Any, root: int, out: Any = None) -> None:
        self.root = root
        self._given = out
        # Broadcasts from one root may write to the same memory: a model has tied weights twice.
        self._writer = "broadcast", root
        # Allocated before the ranks meet: a failure then concerns this rank alone.
        self._out = empty_like(array) if out is None else out
        entries = ("shape", array.shape), ("root_rank", root)
        signature = signature_of("broadcast", array, *entries)
        super().__init__(name, signature, array, out=self._out)

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Any:
        out, root = as_bytes(self._out.ravel()), transport.members.index(self.root)
        if self._out is not self._array and transport.rank == root:
            transport.copy(as_bytes(self._array.ravel()), out)
        transport.broadcast(out, root)
        return value_of(self._out)
