"""The engine: lanes over the transports of one world."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from hvdlite.engine.handle import Handle
from hvdlite.engine.lane import Lane
from hvdlite.engine.operation import Operation
from hvdlite.engine.persistent import Persistent
from hvdlite.interrupts import uninterrupted
from hvdlite.settings import Settings
from hvdlite.transport import connect
from hvdlite.world import World

__all__ = ["Engine", "Handle", "Lane", "Operation", "naming"]

_place: ContextVar[str | None] = ContextVar("place", default=None)


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Name an operation that has no name by its place in the program, as long as this lasts.

    For operations that each rank submits in an order of its own, as a graph does. Numbers in the
    order of submission would pair different operations.

    Args:
        place: unique among the operations in flight, and the same on all ranks.
    """
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


class Engine:
    """The lanes of a world; making and closing one are collective.

    Attributes:
        gradients: the lane of gradient buckets.
        named: the lane of everything that users submit by name.
        settings: as given, with ``overlap`` decided.
        persistent: what an adapter keeps of named calls.
        world: as given.
        joins: the handles of a join that has been begun.

    Args:
        MPI: the module ``mpi4py.MPI``.
        world: the ranks; each lane gets a transport of its own.
        settings: read at ``init()``.
        suffix: for the names of the lanes.
    """

    def __init__(
        self,
        MPI: Any,  # noqa: N803
        world: World,
        settings: Settings,
        suffix: str = "",
    ) -> None:
        self.world = world
        self.settings = dataclasses.replace(settings, overlap=_overlap(settings.overlap, world))
        transports = [connect(MPI, world, settings.shared_memory) for _ in range(2)]
        self.gradients, self.named = (
            Lane(name + suffix, transport, self.settings)
            for name, transport in zip(("gradients", "named"), transports, strict=True)
        )
        self.persistent: Persistent[Any] = Persistent(settings.cache_capacity)
        self.joins: list[Handle] = []
        self._counters: dict[str, Iterator[int]] = defaultdict(itertools.count)
        self._counting = threading.Lock()

    @property
    def rank(self) -> int:
        """This process's rank among the engine's."""
        return int(self.world.comm.rank)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self.world.comm.size)

    @uninterrupted  # until what follows, a submission
    def unnamed(self, kind: str) -> str:
        """The next name for an operation that the user gave none.

        Ranks pair unnamed operations by the order of their submission, or as `naming` says.
        """
        place = _place.get()
        if place is not None:
            return f"{kind}.{place}"
        with self._counting:
            return f"{kind}.noname.{next(self._counters[kind])}"

    def begin_close(self) -> None:
        """Take nothing more; what others wait for in vain fails there."""
        for lane in (self.gradients, self.named):
            lane.begin_close()

    def close(self, timeout: float | None = None) -> bool:
        """Close all lanes.

        Args:
            timeout: seconds; None: as the settings allow.

        Returns:
            Whether all ranks have closed them.
        """
        if timeout is None:
            timeout = self.settings.shutdown_timeout_seconds
        deadline = time.monotonic() + timeout
        self.begin_close()  # all of them first: others may wait for this rank in any
        lanes = (self.gradients, self.named)
        closed = [lane.close(max(deadline - time.monotonic(), 0.0)) for lane in lanes]
        return all(closed)


def _overlap(asked: str, world: World) -> str:
    """Whether buckets should leave before the backward pass is over.

    Where the ranks fill the cores, the exchange takes the core from the backward pass, and
    switching between the two comes on top. That is another matter where ranks wait for a
    network.
    """
    if asked != "auto":
        return asked
    spare = len(os.sched_getaffinity(0)) >= 2 * world.node.size
    return "1" if spare or world.node.size < world.comm.size else "0"
