"""A side channel on which waiting ranks tell each other that they are alive.

For MPI, it finds the ranks that are missing from a collective; on one node `Barrier._failure` does
(``shared_memory/barrier.py``). ``engine/supervisor.py`` decides what a rank's death leads to.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.errors import RankGoneError

_GONE = -1
# Seconds to wait for the other ranks' answers; a waiting rank answers within milliseconds.
_ANSWER_SECONDS = 0.5


class Liveness:
    """Finds out which ranks are missing in a collective that others wait in.

    A collective cannot tell which ranks have not entered it. So a rank that has waited for long
    announces itself to all others; those that wait in the same round answer, and the ranks that
    do not answer are missing. Nothing is sent as long as no rank waits for long.

    Args:
        comm: a communicator over all ranks, which this object owns.
    """

    def __init__(self, MPI: Any, comm: Any, members: Sequence[int]) -> None:  # noqa: N803
        self.comm = comm
        self._members = members
        self._any_source = MPI.ANY_SOURCE
        self._status = MPI.Status
        self._round = 0
        self._announced = False
        self._left = False
        self._here: set[int] = set()
        self._sent: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Begin a round; their numbers are the same on all ranks."""
        self._round += 1
        self._announced = False
        self._here = {self.comm.rank}

    def listen(self) -> None:
        """Receive what other ranks have sent, and answer.

        Raises:
            RankGoneError: a rank has left for good.
        """
        status = self._status()
        while self.comm.Iprobe(self._any_source, status=status):
            received = np.empty(1, np.int64)
            source = status.Get_source()
            self.comm.Recv(received, source)
            if received[0] == _GONE:
                self._left = True  # that rank has notified all others already
                raise RankGoneError(
                    f"rank {self._members[source]} has ended while this rank waits for it; see "
                    "what ended it"
                )
            if received[0] == self._round:  # not left over from an earlier one
                self._here.add(source)
        if len(self._here) > 1:
            self._announce()

    def absent(self) -> list[int]:
        """Announce this rank, wait for answers, and return the members that do not answer."""
        self._announce()
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline:
            self.listen()
            time.sleep(5e-3)
        return [member for rank, member in enumerate(self._members) if rank not in self._here]

    def leave(self) -> None:
        """Tell the others, once, that this rank takes part in no further round."""
        if not self._left:
            self._left = True
            self._send(_GONE)

    def close(self) -> None:
        """Free the communicator; collective."""
        self.comm.Free()

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            self._send(self._round)

    def _send(self, value: int) -> None:
        self._sent = [(request, buffer) for request, buffer in self._sent if not request.Test()]
        buffer = np.array([value], np.int64)
        for rank in range(self.comm.size):
            if rank != self.comm.rank:
                self._sent.append((self.comm.Isend(buffer, rank), buffer))
