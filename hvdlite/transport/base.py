"""What every transport can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from hvdlite.reduction import ReduceOp, Scaling

#: Bytes in the word that ranks compare before they run a collective.
WORD_SIZE = 16


class Patience(Protocol):
    """How to wait for ranks that have not come yet."""

    def pause(self, elapsed: float) -> None:
        """Sleep a little, ``elapsed`` seconds into a wait; raise to give the wait up."""


class Transport(ABC):
    """How bytes meet: the collectives of one communicator, on flat contiguous arrays.

    Every method is collective: all ranks call it, in the same order. Only `unanimous`
    waits for ranks that may come late; by the others every rank is already on its way.

    Attributes:
        rank: this process's rank in the communicator.
        size: the number of ranks.
    """

    rank: int
    size: int

    @abstractmethod
    def unanimous(self, word: bytes, patience: Patience) -> bool:
        """Wait for all ranks, and tell whether all came with the same word.

        Args:
            word: `WORD_SIZE` bytes.
            patience: asked between looks whether the other ranks have come.

        Returns:
            The same answer on every rank.

        Raises:
            HorovodInternalError: another rank has given up waiting; and what ``patience``
                raises.
        """

    def absent(self) -> list[int] | None:
        """While `unanimous` waits: the ranks that have not come; None: that is not known.

        Not collective. It may take a second, and raises as `unanimous` does.
        """
        return None

    @abstractmethod
    def leave(self) -> None:
        """Tell the other ranks that this one takes part in no collective any more.

        Not collective. Who waits for this rank in `unanimous`, or comes to it later, gets a
        HorovodInternalError there.
        """

    @abstractmethod
    def gather(self, message: bytes) -> list[bytes]:
        """Return every rank's (short) message, by rank."""

    @abstractmethod
    def allreduce(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        """Write ``scaling.apply(op over all ranks' send)`` into ``result``.

        Every rank gets the same bits. ``send`` is left as it is unless it is ``result``.
        ``op`` is SUM, MIN, MAX, PRODUCT or ADASUM.
        """

    @abstractmethod
    def alltoall(self, pieces: Sequence[Any], result: Sequence[Any]) -> None:
        """Send ``pieces[r]`` to every rank r, and receive ``result[r]`` from it.

        Pieces are flat contiguous byte arrays; some may be empty.
        """

    def allgather(self, piece: Any, result: Sequence[Any]) -> None:
        """Receive every rank r's piece in ``result[r]``."""
        self.alltoall([piece] * self.size, result)

    @abstractmethod
    def broadcast(self, array: Any, root: int) -> None:
        """Overwrite the flat byte array with rank ``root``'s."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the transport holds; no rank calls anything after it."""
