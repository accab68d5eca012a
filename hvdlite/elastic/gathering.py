"""Gathering: messages by which ranks meet although any of them may have died.

Unlike a collective, it knows which ranks are missing, and its waits can be ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from hvdlite.transport.mpi import has_ended

_FIRST_PAUSE, _MAX_PAUSE = 0.2e-3, 5e-3


class Gathering:
    """Messages between the ranks of a communicator that was made while all of them lived.

    Each has a tag, a number by which it is received.

    Args:
        comm: A communicator for these messages alone.

    Attributes:
        dead: The ranks that MPI has reported as dead when they were addressed, and the errors.
    """

    def __init__(self, MPI: Any, comm: Any) -> None:  # noqa: N803
        self.comm = comm
        self.dead: dict[int, Exception] = {}
        self._mpi = MPI
        self._sent: list[Any] = []

    def move(self, comm: Any) -> None:
        """Use another communicator from now on."""
        self.comm = comm
        self.dead.clear()

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self.comm.size) if rank != self.comm.rank]

    def send(self, tag: int, content: Any = None, ranks: Iterable[int] | None = None) -> None:
        """Send a message to some ranks, by default all others, without waiting for them."""
        # A request that is never tested keeps its communicator, and its number, for ever.
        self._sent = [each for each in self._sent if not has_ended(self._mpi, each)]
        for rank in self.others if ranks is None else ranks:
            self._sent.append(self._ask(rank, self.comm.isend, content, rank, tag))

    def receive(self, rank: int, tag: int) -> tuple[Any] | None:
        """Return a rank's message, in a tuple; None: nothing has arrived, or the rank is `dead`."""
        if not self._ask(rank, self.comm.iprobe, rank, tag):
            return None
        content = self._ask(rank, self.comm.recv, None, rank, tag)
        return None if rank in self.dead else (content,)

    def meet(
        self, tag: int, content: Any, on_wait: Callable[[list[int]], object]
    ) -> dict[int, Any]:
        """Exchange a message with all ranks; return each one's, without those that are `dead`.

        Args:
            on_wait: Called repeatedly with the missing ranks; it may raise to end the wait.
        """
        self.send(tag, content)
        found = {self.comm.rank: content}
        missing, pause = self.others, _FIRST_PAUSE
        while True:
            for rank in missing:
                if received := self.receive(rank, tag):
                    found[rank] = received[0]
            missing = [rank for rank in missing if rank not in found and rank not in self.dead]
            if not missing:
                return found
            on_wait(missing)
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)

    def _ask(self, rank: int, call: Callable[..., Any], *args: Any) -> Any:
        """Return what an MPI call returns; None if the other rank is dead."""
        if rank in self.dead:
            return None
        try:
            return call(*args)
        except self._mpi.Exception as error:
            self.dead[rank] = error
            return None
