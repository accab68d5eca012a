"""Where ranks come together when their lanes have failed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NoReturn

from hvdlite.engine.agreement import ranks_text
from hvdlite.errors import RankGoneError

_MEET, _LEFT = 1, 2
_FIRST_PAUSE, _LONGEST_PAUSE = 1e-3, 20e-3


class Rendezvous:
    """A meeting point of ranks that ends in time, whatever has become of the others.

    It has a communicator of its own, made while all ranks live, and uses it for messages from
    rank to rank only: unlike a collective, they tell who has not come.

    Args:
        MPI: the module ``mpi4py.MPI``.
        comm: a communicator over all ranks, which the rendezvous owns.
        timeout: seconds to wait for the others.

    Attributes:
        comm: as given.
    """

    def __init__(self, MPI: Any, comm: Any, timeout: float) -> None:  # noqa: N803
        self.comm = comm
        self._mpi = MPI
        self._timeout = timeout
        self._sent: list[Any] = []
        self._gone: str | None = None

    def meet(self, message: Any) -> list[Any]:
        """Exchange messages with all ranks; return theirs, by rank, once all know that all came.

        Raises:
            RankGoneError: a rank has left or died, or has not come in time; the message says
                which.
        """
        deadline = time.monotonic() + self._timeout
        messages = self._exchange(message, deadline)
        # Else one whose time is up just now would leave others in a collective without it.
        self._exchange(None, deadline + self._timeout)
        return messages

    def leave(self, reason: str) -> None:
        """Tell all ranks that this one does not come any more, and why.

        Where it leaves because another one is gone, they hear of that one.
        """
        reason = self._gone or f"rank {self.comm.rank} has left elastic training ({reason})"
        for rank in self._others():
            try:
                self._sent.append(self.comm.isend(reason, rank, _LEFT))
            except self._mpi.Exception:  # to a rank that has died: nobody to tell
                continue

    def close(self) -> None:
        """Free the communicator; collective."""
        self.comm.Free()

    def _others(self) -> Iterator[int]:
        return (rank for rank in range(self.comm.size) if rank != self.comm.rank)

    def _exchange(self, message: Any, deadline: float) -> list[Any]:
        received: dict[int, Any] = {self.comm.rank: message}
        for rank in self._others():
            self._sent.append(self._try(rank, self.comm.isend, message, rank, _MEET))
        pause = _FIRST_PAUSE
        while missing := [rank for rank in self._others() if rank not in received]:
            for rank in missing:
                if self._try(rank, self.comm.iprobe, rank, _LEFT):
                    self._raise_gone(self.comm.recv(None, rank, _LEFT))
                if self._try(rank, self.comm.iprobe, rank, _MEET):
                    received[rank] = self.comm.recv(None, rank, _MEET)
                    pause = _FIRST_PAUSE
            if time.monotonic() > deadline:
                self._raise_gone(
                    f"{ranks_text(missing)} did not come within {self._timeout:.0f} s "
                    "(HVDLITE_ELASTIC_TIMEOUT) to form the world again: it has ended, hangs or "
                    "still computes"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return [received[rank] for rank in range(self.comm.size)]

    def _try(self, rank: int, call: Any, *args: Any) -> Any:
        """Call something that MPI refuses where the other rank has died."""
        try:
            return call(*args)
        except self._mpi.Exception as error:
            self._raise_gone(f"rank {rank} has died ({error})")

    def _raise_gone(self, what: str) -> NoReturn:
        self._gone = what
        raise RankGoneError(
            f"rank {self.comm.rank}: {what}, and a world without it cannot be formed yet; see "
            "what ended it, start the job again, and load the last checkpoint"
        )
