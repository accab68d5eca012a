"""Allgather: every rank gets the ranks' arrays, one after the other."""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from hvdlite.base.arrays import as_bytes
from hvdlite.collectives.arrays import (
    ArrayOperation,
    checked_array,
    cut_rows,
    signature_of,
    value_of,
)
from hvdlite.engine import Handle, runtime
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.transport import Transport


def allgather(
    array: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the arrays of all ranks along axis 0, in the order of the ranks.

    Args:
        array: Array whose axes but the first are the same on all ranks; a scalar counts as one
            row.
        name, process_set: As for `hvdlite.allreduce`.

    Returns:
        A new array, the same on all ranks.

    Raises:
        ValueError: An allgather of this name is still in flight, or this rank is not in the
            process set.
        HorovodInternalError: The ranks disagree, or communication failed.
    """
    return runtime.engine(process_set).run(
        "allgather", name, lambda name: describe_allgather(array, name)
    )


def allgather_async(
    array: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `allgather` and return a handle; do not touch the array until it is done."""
    return runtime.engine(process_set).submit(
        "allgather", name, lambda name: describe_allgather(array, name)
    )


def describe_allgather(array: Any, name: str, with_rows: bool = False) -> Allgather:
    """Make the operation that `allgather` submits; its result is `Gathered` if ``with_rows``."""
    return Allgather(name, checked_array(array), with_rows=with_rows)


class Gathered(NamedTuple):
    """The result of an allgather, with what it is made of.

    Attributes:
        whole: The rows of all ranks.
        rows: The number of rows of each.
        own: The place of this rank among them. It may have another number by now.
    """

    whole: Any
    rows: list[int]
    own: int

    @property
    def span(self) -> tuple[int, int]:
        """Where this rank's rows begin, and their number."""
        return sum(self.rows[: self.own]), self.rows[self.own]


class Allgather(ArrayOperation):
    """An allgather.

    Args:
        with_rows: Whether the result is `Gathered`.
        failure: Why this rank has no array.
        out: Contiguous array for the result, which may have the array in its place; None: a new
            one.
        sizes: Given with it: the number of each rank's rows.
    """

    def __init__(
        self,
        name: str,
        array: Any,
        label: str = "allgather",
        with_rows: bool = False,
        failure: str | None = None,
        out: Any = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        rows, *row = array.shape or (1,)
        self._row = tuple(row)
        self._given, self._sizes = out, sizes
        entries: list[tuple[str, Hashable]] = [("the shape after its first axis", self._row)]
        if sizes is not None:
            entries.append(("the numbers of rows", tuple(sizes)))
        payload = struct.pack("<q", rows) if sizes is None else b""
        super().__init__(name, signature_of(label, array, *entries), array, payload, failure)
        self._with_rows = with_rows

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Any:
        rows = [*(self._sizes or (struct.unpack("<q", payload)[0] for payload in payloads))]
        whole = self._allocate(transport, (sum(rows), *self._row))
        transport.allgather(as_bytes(self._array.ravel()), cut_rows(whole, rows))
        value = value_of(whole)
        return Gathered(value, rows, transport.rank) if self._with_rows else value
