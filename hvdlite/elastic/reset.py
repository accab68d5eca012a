"""How ranks form a world again after a failure, or when hosts have come or gone."""

from __future__ import annotations

from typing import Any

from hvdlite import runtime, world
from hvdlite.elastic.rendezvous import Rendezvous


def reset(rendezvous: Rendezvous, report: Any) -> list[Any]:
    """End the world of this rank and form one with all ranks that were in it; collective.

    Every rank comes here in the end: what the others wait for fails as soon as one of them
    has shut down. This is the one place that decides who is in the new world.

    Args:
        rendezvous: over the ranks of the old world.
        report: what the other ranks are told.

    Returns:
        The reports of all ranks, by rank.

    Raises:
        RankGoneError: a rank has died, has left, or does not come.
    """
    process_sets = runtime.process_sets().added if world.is_initialized() else []
    runtime.shutdown()
    reports = rendezvous.meet(report)
    runtime.init(rendezvous.comm, process_sets)
    return reports
