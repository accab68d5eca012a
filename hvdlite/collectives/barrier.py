"""Barrier, comparison and join: operations that carry no arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite import runtime
from hvdlite.engine import Engine
from hvdlite.engine.control import Barrier, Join
from hvdlite.errors import HorovodInternalError
from hvdlite.interrupts import uninterrupted
from hvdlite.process_sets import ProcessSet, global_process_set


def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    """Return when every rank has called it.

    Args:
        process_set: The ranks that take part.
        name: Name that pairs this call with those of the other ranks; None pairs by order.
    """
    runtime.engine(process_set).run("barrier", name, Barrier)


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
        process_set: The ranks that take part.

    Raises:
        HorovodInternalError: The ranks differ; the message names the first entry.
    """
    if not isinstance(entries, Mapping):
        entries = {f"entry {number}": entry for number, entry in enumerate(entries)}
    known = (*entries.items(), ("the number of entries", len(entries)))
    runtime.engine(process_set).named.run(Barrier(name, known))


def join(process_set: ProcessSet = global_process_set) -> int:
    """Declare that this rank has no more data, and wait until all ranks do so.

    Until then this rank takes part with zeros in the allreduces of the others, those of gradients
    included; averages still divide by the number of all ranks. Other collectives raise on the
    ranks that call them meanwhile.

    The weights of a rank that has joined do not change. Broadcast those of the returned rank
    afterwards, which has taken every step.

    If an exception from a signal handler ends the wait, this rank has joined all the same, and
    another call continues to wait.

    Args:
        process_set: The ranks that take part.

    Returns:
        The rank that joined last, the same on all.

    Raises:
        ValueError: This rank is not in the process set.
        HorovodInternalError: A rank has shut down without joining, or communication failed.
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
    if not engine.joins:  # else a signal handler has ended the wait for them
        lanes = (engine.gradients, engine.named)
        engine.joins.extend([lane.submit(Join("join()")) for lane in lanes])
