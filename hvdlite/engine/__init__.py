"""The engine: lanes over the transports of one world.

A lane (``lane.py``) queues operations and drives rounds (``rounds.py``). In a round the ranks
compare what they have pending and run what all have; where queues differ, ``agreement.py`` decides.
``calls.py`` finds the lines of the program that call unnamed collectives in different orders.

Collectives run in a thread that waits for a result, or else in the lane's. A rank has a thread for
each lane (one for gradients, one for all else, two more for each process set it is in), and one if
it writes a timeline (``observe/timeline.py``).
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from hvdlite.base.interrupts import deferred, leave, uninterrupted
from hvdlite.base.settings import Settings
from hvdlite.engine.calls import Calls, Place
from hvdlite.engine.handle import Handle, poll, synchronize
from hvdlite.engine.lane import Lane
from hvdlite.engine.operation import Operation, Signature
from hvdlite.engine.supervisor import Supervisor
from hvdlite.observe.status import Pending
from hvdlite.world.world import World

__all__ = [
    "Engine",
    "Handle",
    "Lane",
    "Operation",
    "Signature",
    "naming",
    "poll",
    "synchronize",
]

_place: ContextVar[str | Place | None] = ContextVar("place", default=None)


@contextmanager
def naming(place: str | Place) -> Iterator[None]:
    """Name unnamed operations by their place in the program while this context lasts.

    Use it for operations that ranks submit in different orders, as graphs do: numbers in the order
    of submission would pair different operations.

    Args:
        place: Name that is unique among the operations in flight, and the same on all ranks; or
            the place of the call, if operations are submitted elsewhere. They are numbered then.
    """
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


class Engine:
    """The lanes of a world; construction and closing are collective.

    Attributes:
        named: Lane of operations that users submit by name.
        settings: The settings, with ``overlap`` decided.
        joins: Handles of a join that has begun.
        calls: The calls without a name.

    Args:
        world: The ranks; each lane gets a transport of its own.
        supervisor: Decides what the lanes do when a rank has died; None: they break.
    """

    def __init__(
        self,
        MPI: Any,  # noqa: N803
        world: World,
        settings: Settings,
        suffix: str = "",
        supervisor: Supervisor | None = None,
    ) -> None:
        from hvdlite.transport import registry  # with all transports, which jobs alone need

        self.world = world
        self.supervisor = supervisor or Supervisor()
        self.settings = dataclasses.replace(settings, overlap=_overlap(settings.overlap, world))
        transports = [registry.connect(MPI, world, settings.shared_memory) for _ in range(2)]
        self.gradients, self.named = (
            Lane(name + suffix, transport, self.settings, self.supervisor)
            for name, transport in zip(("gradients", "named"), transports, strict=True)
        )
        self.joins: list[Handle] = []
        self.calls = Calls(self.named.queue.operations)

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        """Both lanes."""
        return self.gradients, self.named

    @property
    def rank(self) -> int:
        """This process's rank among the engine's."""
        return int(self.world.comm.rank)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self.world.comm.size)

    def run(self, kind: str, name: str | None, describe: Callable[[str], Operation]) -> Any:
        """Name an operation, describe it, submit it and wait for its result.

        The name is chosen before anything can be refused: an error on one rank must not shift the
        names of its later calls. No signal handler runs between the naming and the submission.

        Raises:
            ValueError: An operation of this name is still in flight, and as ``describe``.
            HorovodInternalError: The operation failed, on this rank or another.
        """
        try:
            handle = self._enqueue(kind, name, describe, False)
        finally:
            if deferred:
                leave()
        return handle.wait()

    def submit(
        self, kind: str, name: str | None, describe: Callable[[str], Operation], begin: bool = True
    ) -> Handle:
        """Submit an operation as `run` does, and return its handle without waiting.

        Args:
            begin: Whether the operation begins before somebody waits for it.
        """
        try:
            return self._enqueue(kind, name, describe, begin)
        finally:
            if deferred:
                leave()

    @uninterrupted
    def _enqueue(
        self, kind: str, name: str | None, describe: Callable[[str], Operation], begin: bool
    ) -> Handle:
        with self.supervisor.renumbering:
            return self.named.enqueue(describe(name or self.unnamed(kind)), begin)

    @uninterrupted  # until the submission that follows
    def unnamed(self, kind: str) -> str:
        """Return the next name for an operation that the user gave none.

        Ranks pair unnamed operations by the order of their submission, and compare where they were
        called, or do as `naming` says. Of a call with several operations, ``name + suffix`` is that
        of the first: it carries the place.
        """
        place = _place.get()
        if isinstance(place, str):
            return f"{kind}.{place}"
        return self.calls.name(kind, place)

    def pending(self) -> list[Pending]:
        """Return the operations of all lanes that have not ended."""
        return [*self.gradients.pending(), *self.named.pending()]

    def abandon(self) -> None:
        """End all lanes without notifying the other ranks, one of which has died."""
        for lane in self.lanes:
            lane.abandon()

    def begin_close(self) -> None:
        """Refuse new operations; those for which other ranks wait fail there."""
        for lane in self.lanes:
            lane.begin_close()

    def close(self, timeout: float | None = None) -> bool:
        """Close all lanes.

        Args:
            timeout: Seconds; None: as the settings allow.

        Returns:
            Whether all ranks have closed them.
        """
        if timeout is None:
            timeout = self.settings.shutdown_timeout_seconds
        deadline = time.monotonic() + timeout
        self.begin_close()  # both first: other ranks may wait for this one in either
        closed = [lane.close(max(deadline - time.monotonic(), 0.0)) for lane in self.lanes]
        return all(closed)


def _overlap(asked: str, world: World) -> str:
    """Return whether buckets should leave before the backward pass is over.

    If the ranks use all cores, the exchange competes with the backward pass, and thread switches
    add to its cost. Ranks that wait for a network leave their cores free.
    """
    if asked != "auto":
        return asked
    spare = len(os.sched_getaffinity(0)) >= 2 * world.node.size
    return "1" if spare or world.node.size < world.comm.size else "0"
