"""Barrier and comparison: operations that carry no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite.engine import runtime
from hvdlite.engine.operation import Barrier
from hvdlite.engine.process_sets import ProcessSet, global_process_set


def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    """Return when every rank has called it.

    Args:
        process_set, name: As for `hvdlite.allreduce`.
    """

    def describe(name: str) -> Barrier:
        # A plain name: no data goes astray, and ranks that take turns call from two places.
        return Barrier(str(name) if isinstance(name, str) else name)

    runtime.engine(process_set).run("barrier", name, describe)


def agree_on(
    name: str,
    entries: Sequence[Any] | Mapping[str, Any],
    process_set: ProcessSet = global_process_set,
) -> None:
    """Compare values across ranks.

    Args:
        name: Name of the values in messages, which pairs this call with those of the other ranks.
        entries: Values that must be equal on all ranks, compared by ``repr``; a mapping gives them
            labels for messages.

    Raises:
        HorovodInternalError: The ranks differ; the message names the first entry.
    """
    if not isinstance(entries, Mapping):
        entries = {f"entry {number}": entry for number, entry in enumerate(entries)}
    known = (*entries.items(), ("the number of entries", len(entries)))
    runtime.engine(process_set).named.run(Barrier(name, known))
