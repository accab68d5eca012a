"""What every transport can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from hvdlite import timeline
from hvdlite.arrays import as_bytes
from hvdlite.reduction import ReduceOp, Scaling
from hvdlite.transport.reduce import reduce_into

#: Bytes of the largest array that is reduced together with others, see `allreduce_all`.
LARGEST_FUSED = 2**19
#: Bytes in the word that ranks compare before they run a collective.
WORD_SIZE = 16


class Patience(Protocol):
    """How long to wait for ranks that have not come yet."""

    def check(self, elapsed: float) -> None:
        """Take note of ``elapsed`` seconds of waiting; raise to give the wait up.

        `hvdlite.interrupts.Interrupted` only leaves it for now, see `Transport.meet`.
        """


class Transport(ABC):
    """How bytes meet: the collectives of one communicator, on flat contiguous arrays.

    Every method is collective unless it says otherwise: all ranks call it, in the same
    order. Only `meet` waits for ranks that may come late; by the others every rank is
    already on its way.

    Attributes:
        rank: this process's rank in the communicator.
        size: the number of ranks.
        most_words: how many words ranks can bring to a meeting.
        lane: whose transport it is, for the timeline.
        members: by what numbers messages call the ranks; others than 0, 1, ... in a process set.
    """

    rank: int
    size: int
    members: Sequence[int] = range(2**31)
    most_words: int = 1
    lane: str = ""

    @abstractmethod
    def meet(self, words: Sequence[bytes], patience: Patience, cargo: Sequence[Any] = ()) -> int:
        """Wait for all ranks, and tell how many of the first words all have brought alike.

        If ``patience`` raises `Interrupted`, this rank stays where the ranks meet. The next call,
        in any thread, has the same words and cargo, and goes on with the wait.

        Args:
            words: one at least, of `WORD_SIZE` bytes each. What exceeds ``most_words`` is
                not looked at.
            patience: told, while this rank waits, for how long.
            cargo: what the first words stand for, if those are reductions that may run
                together: flat arrays of one dtype. A transport that can bring them along
                saves a meeting. If any word is common, the next collective is an
                `allreduce_all` of the first of them.

        Returns:
            The length of the common prefix, the same on every rank.

        Raises:
            HorovodInternalError: another rank has given up waiting; and what ``patience``
                raises.
        """

    def absent(self) -> list[int] | None:
        """While `meet` waits: the members that have not come; None: that is not known.

        Not collective. It may take a second, and raises as `meet` does.
        """
        return None

    def check_alive(self) -> None:  # noqa: B027 - most transports cannot tell
        """Raise if a rank is known to have ended; not collective.

        Raises:
            RankGoneError: one has, and will come to no collective any more.
        """

    @abstractmethod
    def leave(self) -> None:
        """Tell the other ranks that this one takes part in no collective any more.

        Not collective. Who waits for this rank in `meet`, or comes to it later, gets a
        HorovodInternalError there.
        """

    def empty(self, size: int, dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised flat array that lies where this transport exchanges it best.

        Not collective. Only arrays that every rank has got in this way, for the same purpose,
        may be passed to a collective together.
        """
        return np.empty(size, dtype)

    def release(self, array: Any) -> None:  # noqa: B027 - nothing to do for ordinary memory
        """Say that an array from `empty` is passed to no collective any more.

        Not collective. Users may hold it for as long as they like. A child that the process forks
        has a copy of it, as of other memory.
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

    def allreduce_init(
        self, send: Any, result: Any, op: ReduceOp, scaling: Scaling
    ) -> Callable[[], None]:
        """Prepare an `allreduce` that may be made again and again; not collective.

        This is what persistent collectives are in MPI: all that does not depend on values is done
        only once.

        Returns:
            What makes the allreduce. Like MPI's it keeps the arrays.
        """
        return partial(self.allreduce, send, result, op, scaling)

    def unread(self, size: int) -> slice:
        """What no other rank reads of an array of ``size`` elements from `empty`.

        That is in an `allreduce` into another such array. Not collective.
        """
        return slice(0, 0)

    def allreduce_lent(
        self,
        send: Any,
        lent: Sequence[tuple[int, Any]],
        result: Any,
        op: ReduceOp,
        scaling: Scaling,
    ) -> None:
        """Do `allreduce` of an array of which parts lie elsewhere; to others it is the same call.

        Args:
            send: as there; it may be complete afterwards.
            lent: for each of these parts, which are `unread`, where it begins in ``send`` and a
                flat array like that. They do not overlap, and ascend.
            result: as there.
            op: likewise.
            scaling: likewise.
        """
        place(lent, send)
        self.allreduce(send, result, op, scaling)

    def allreduce_all(
        self, sends: Sequence[Any], results: Sequence[Any], op: ReduceOp, scaling: Scaling
    ) -> None:
        """Do `allreduce` for each pair of arrays, of one dtype; several of them as if one."""
        if len(sends) == 1:
            self.allreduce(sends[0], results[0], op, scaling)
            return
        bounds = np.cumsum([0, *(array.size for array in sends)]).tolist()
        together = np.empty(bounds[-1], sends[0].dtype)
        with timeline.span(self.lane, timeline.MEMCPY_IN_FUSION_BUFFER):
            np.concatenate(sends, out=together)
        self.allreduce(together, together, op, scaling)
        with timeline.span(self.lane, timeline.MEMCPY_OUT_FUSION_BUFFER):
            for result, start, stop in zip(results, bounds, bounds[1:], strict=False):
                result[...] = together[start:stop]

    @abstractmethod
    def alltoall(self, pieces: Sequence[Any], result: Sequence[Any]) -> None:
        """Send ``pieces[r]`` to every rank r, and receive ``result[r]`` from it.

        Pieces are flat contiguous byte arrays; some may be empty.
        """

    def reducescatter(
        self, pieces: Sequence[Any], result: Any, op: ReduceOp, scaling: Scaling
    ) -> None:
        """Write ``scaling.apply(op over all ranks' pieces[r])`` into ``result`` on every rank r.

        ``op`` is SUM, MIN, MAX or PRODUCT.
        """
        rows = np.empty((self.size, result.size), result.dtype)
        self.alltoall(list(map(as_bytes, pieces)), [as_bytes(row) for row in rows])
        reduce_into(result, list(rows), op, scaling)

    def allgather(self, piece: Any, result: Sequence[Any]) -> None:
        """Receive every rank r's piece in ``result[r]``."""
        self.alltoall([piece] * self.size, result)

    @abstractmethod
    def broadcast(self, array: Any, root: int) -> None:
        """Overwrite the flat byte array with rank ``root``'s."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the transport holds; no rank calls anything after it."""


def place(lent: Sequence[tuple[int, Any]], array: Any) -> None:
    """Copy parts to where they begin in an array."""
    for start, part in lent:
        array[start : start + part.size] = part


def common_prefix(brought: Sequence[Sequence[bytes]]) -> int:
    """How many of their first words all ranks have brought alike."""
    count = 0
    for words in zip(*brought, strict=False):
        if any(word != words[0] for word in words):
            break
        count += 1
    return count
