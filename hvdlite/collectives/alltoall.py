"""Alltoall: every rank sends each rank some rows of its array."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from hvdlite.collectives.arrays import (
    ArrayOperation,
    checked_array,
    cut_rows,
    signature_of,
    value_of,
)
from hvdlite.engine import Engine, Handle, Operation, runtime
from hvdlite.engine.device import DeviceResult
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.errors import MismatchError
from hvdlite.observe import timeline
from hvdlite.transport import Transport


def alltoall(
    array: Any,
    splits: Any = None,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> tuple[Any, Any]:
    """Send every rank some rows of an array, and receive some of theirs.

    Args:
        array: Array of at least one axis; all but the first are the same on all ranks.
        splits: Number of rows for each rank of the process set, in their order: integers that
            add up to the number of rows. None: the same number for all.
        name, process_set: As for `hvdlite.allreduce`.

    Returns:
        The received rows, in the order of the ranks they came from, and an int32 array of how
        many came from each rank that there was at the call; none from one that has died.

    Raises:
        ValueError: The splits do not fit, an alltoall of this name is still in flight, or this
            rank is not in the process set.
        HorovodInternalError: The ranks disagree, or communication failed.
    """
    rows, route = run_alltoall(array, splits, name, process_set)
    return rows, np.array(route.received, np.int32)


def alltoall_async(
    array: Any,
    splits: Any = None,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `alltoall` and return a handle, whose result is the rows and a list of numbers."""
    engine = runtime.engine(process_set)
    return engine.submit(
        "alltoall", name, lambda name: describe_alltoall(array, splits, name, engine)
    )


class Route(NamedTuple):
    """The way that the rows of an alltoall have taken, to send others back, as gradients do.

    Attributes:
        ids: Of the ranks that there were at the call; see `World.ids`.
        sent: The number of rows for each.
        received: The number of rows from each.
    """

    ids: Sequence[int]
    sent: Sequence[int]
    received: Sequence[int]


def run_alltoall(
    array: Any, splits: Any, name: str | None, process_set: ProcessSet, back: Route | None = None
) -> tuple[Any, Route]:
    """Do `alltoall`, and tell the route.

    Args:
        back: Send the rows back where those of this route came from, without ``splits``. The
            result has a row for each that was sent, of zeros if its receiver has died.
    """
    engine = runtime.engine(process_set)
    made: list[Alltoall] = []

    def describe(name: str) -> Operation:
        made.append(describe_alltoall(array, splits, name, engine, back))
        return made[0]

    result = engine.run("alltoall", name, describe)
    rows, received = result.take() if isinstance(result, DeviceResult) else result
    return rows, Route(made[0].ids, made[0].splits, received)


def describe_alltoall(
    array: Any, splits: Any, name: str, engine: Engine, back: Route | None = None
) -> Alltoall:
    """Make the operation that `alltoall` submits; arguments and errors as in `run_alltoall`.

    Its result is the received rows and a list of how many came from each rank.
    """
    array = checked_array(array)
    if not array.shape:
        raise ValueError("alltoall needs an array of rows, found a scalar")
    counts = _checked_splits(splits, array.shape[0], engine.size) if back is None else back.received
    ids, sent = (engine.world.ids, None) if back is None else back[:2]
    alltoall = Alltoall(name, array, counts, ids, sent)
    alltoall.go_on(engine.world.ids)
    return alltoall


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


class Alltoall(ArrayOperation):
    """An alltoall.

    Args:
        ids: For each of the splits the id of its rank; those that are no members have died.
        expected: For each of these ranks the number of rows in the result; None: as many as come.
        out: Contiguous array for the result, of as many rows as are expected; None: a new one. All
            ranks give one, or none does, and no other number of rows may come then.
    """

    def __init__(
        self,
        name: str,
        array: Any,
        splits: Sequence[int],
        ids: Sequence[int],
        expected: Sequence[int] | None = None,
        out: Any = None,
        label: str = "alltoall",
    ) -> None:
        self._given, self._sizes = out, None if out is None else expected
        entry = "the shape after its first axis", tuple(array.shape[1:])
        signature = signature_of(label, array, entry, ("memory for the result", out is not None))
        super().__init__(name, signature, array)
        self.splits = splits
        self.ids = ids
        self._expected = expected

    def go_on(self, members: Sequence[int]) -> None:
        """Send rows to the ranks that are left, and expect rows of them, alone."""
        super().go_on(members)
        self._places = [self.ids.index(member) for member in members]
        counts = [*(self.splits[place] for place in self._places), *(self._sizes or ())]
        self.payload = struct.pack(f"<{len(counts)}q", *counts)

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> tuple[Any, list[int]]:
        """Return the received rows, in the order of the places, and how many came from each."""
        received = [0] * len(self.splits)
        for place, payload in zip(self._places, payloads, strict=True):
            (received[place],) = struct.unpack_from("<q", payload, 8 * transport.rank)
        if self._given is not None:
            self._check(payloads)
        expected = received if self._expected is None else self._expected
        result = self._allocate(transport, (sum(expected), *self._array.shape[1:]))
        outgoing, incoming = cut_rows(self._array, self.splits), cut_rows(result, expected)
        for place, part in enumerate(incoming):
            if received[place] < expected[place]:  # the rank that was to send them has died
                part[...] = 0
        with timeline.span(self.lane, timeline.EXCHANGE):
            transport.alltoall(
                [outgoing[place] for place in self._places],
                [incoming[place] for place in self._places],
            )
        return value_of(result), received

    def _check(self, payloads: Sequence[bytes]) -> None:
        """Refuse on all ranks what some send and others do not expect."""
        size = len(payloads)
        counts = [struct.unpack(f"<{2 * size}q", payload) for payload in payloads]
        for (source, sent), (target, theirs) in product(enumerate(counts), repeat=2):
            if sent[target] != theirs[size + source]:
                raise MismatchError(
                    f"the ranks disagree on {self.title}: rank {self.ids[source]} sends "
                    f"{sent[target]} elements to rank {self.ids[target]}, which expects "
                    f"{theirs[size + source]}; pass tensors of matching sizes"
                )
