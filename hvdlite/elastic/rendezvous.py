"""The meeting of ranks whose lanes have failed, and the new world that they form."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NoReturn

from hvdlite.elastic.gathering import Gathering
from hvdlite.elastic.recovery import Recovery
from hvdlite.elastic.spares import Message, Pool
from hvdlite.engine import runtime
from hvdlite.engine.process_sets import ProcessSet
from hvdlite.errors import RankGoneError, ranks_text
from hvdlite.world import parts, world

_MEET, _LEFT = 1, 2


class Rendezvous(Gathering):
    """A meeting of all ranks with a time limit, even if ranks have died.

    Args:
        pool: forms a world without ranks that have died, and with spares (``hvdliterun
            --elastic``); None: all ranks must come.
        first_tag: the first of the messages' tags; 0 on a communicator that `pool` has just formed.
    """

    def __init__(
        self,
        MPI: Any,  # noqa: N803
        comm: Any,
        timeout: float,
        pool: Pool | None = None,
        first_tag: int = 0,
    ) -> None:
        super().__init__(MPI, comm)
        self.pool = pool
        self._timeout = timeout
        self._meet_tag, self._left_tag = first_tag + _MEET, first_tag + _LEFT
        self._gone: str | None = None

    def exchange(self, message: Any) -> list[Any]:
        """Exchange messages with all ranks; return all messages by rank when all ranks have come.

        Where a pool forms worlds, ranks that have died bring None.

        Raises:
            RankGoneError: a rank has left or has not come in time, or has died, unless the others
                go on without it; the message says which.
        """
        deadline = time.monotonic() + self._timeout
        messages = self._exchange(message, deadline)
        if self.pool is None:
            # Else one whose time is up just now would leave others in a collective without it.
            self._exchange(None, deadline + self._timeout)
        return [messages.get(rank) for rank in range(self.comm.size)]

    def follow(self) -> None:
        """Go on with the world that the pool has formed, of those left and of spares."""
        assert self.pool is not None
        self.move(self.pool.world)
        self._meet_tag, self._left_tag = _MEET, _LEFT

    def leave(self, reason: str) -> None:
        """Tell all ranks that this one will not come any more, and why.

        If it leaves because another rank is gone, they learn of that rank.
        """
        reason = self._gone or f"rank {self.comm.rank} has left elastic training ({reason})"
        self.send(self._left_tag, reason)

    def close(self) -> None:
        """Free the communicator, unless it is the pool's; collective."""
        if self.pool is None:
            self.comm.Free()

    def _exchange(self, message: Any, deadline: float) -> dict[int, Any]:
        def watch(missing: Sequence[int]) -> None:
            self._check_dead()
            for rank in missing:
                if received := self.receive(rank, self._left_tag):
                    self._raise_gone(received[0])
            if time.monotonic() > deadline:
                self._raise_gone(
                    f"{ranks_text(missing)} did not come within {self._timeout:.0f} s "
                    "(HVDLITE_ELASTIC_TIMEOUT) to form the world again: it has ended, hangs or "
                    "still computes"
                )

        messages = self.meet(self._meet_tag, message, watch)
        self._check_dead()
        return messages

    def _check_dead(self) -> None:
        for rank, error in self.dead.items():
            if self.pool is None:
                self._raise_gone(f"rank {rank} has died ({error})")

    def _raise_gone(self, what: str) -> NoReturn:
        self._gone = what
        raise RankGoneError(
            f"rank {self.comm.rank}: {what}, and a world without it cannot be formed yet; see "
            "what ended it, start the job again, and load the last checkpoint"
        )


def reset(rendezvous: Rendezvous, message: Message | None) -> list[Message | None]:
    """End the world of this rank and form one with all ranks that were in it; collective.

    Every rank comes here in the end, because pending operations fail as soon as one rank has shut
    down. Only this function decides which ranks form the new world.

    Args:
        rendezvous: over the ranks of the old world.
        message: this rank's, without its number and the process sets; None: it has been a spare.

    Returns:
        The messages of all ranks, by rank; None for those that were spares.

    Raises:
        RankGoneError: a rank has died, has left, or does not come.
    """
    rank, added = 0, list[ProcessSet]()
    if world.is_initialized():
        rank, added = world.rank(), runtime.process_sets().added
    process_sets = [each for each in added if each.ranks]  # not those whose ranks have all died
    virtual_size = parts.current.keep()
    runtime.leave_world()
    messages = rendezvous.exchange(message)
    if rendezvous.pool is not None:
        sets = [each.ranks for each in process_sets]
        supervisor = Recovery(message and message._replace(rank=rank, sets=sets), again=True)
        try:
            runtime.start(None, process_sets, virtual_size, supervisor)
        finally:  # the communicator before may have been freed
            rendezvous.follow()
        return supervisor.messages
    runtime.init(rendezvous.comm, process_sets, virtual_size)
    return messages
