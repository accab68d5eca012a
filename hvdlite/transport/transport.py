"""Transport: the collectives of one set of ranks, and what all transports have in common.

A transport owns one communicator, or what stands for it. Its methods take flat contiguous arrays.
Ranks meet (`meet`), which may take long and is bounded by ``on_wait``; then they move data, by
calls that all of them make in the same order and soon.
"""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from hvdlite.base import float16
from hvdlite.base.arrays import as_bytes, cut, slice_bounds
from hvdlite.base.reduction import ReduceOp, Scaling
from hvdlite.observe import timeline
from hvdlite.transport.adasum import adasum
from hvdlite.transport.reduce import reduce_into
from hvdlite.world.world import World

#: Bytes of the smallest array that ranks reduce in each other's memory, see `Transport.announce`.
LEAST_ANNOUNCED = 2**16
#: Bytes of the largest array that is reduced together with others, see `allreduce_all`.
LARGEST_FUSED = 2**19
#: Bytes of the digests that ranks compare before they run a collective.
DIGEST_SIZE = 16
# Ranks that arrive together meet within this time. A rank that waits longer sleeps, because ranks
# often fill the cores and a spinning rank would take one from those it waits for.
_SPIN_SECONDS, _MAX_SLEEP = 100e-6, 1e-3

#: Called again and again during a wait, with the seconds waited so far; it may raise to end the
#: wait, or `hvdlite.base.interrupts.Interrupted` to suspend it, see `Transport.meet`.
OnWait = Callable[[float], None]


def back_off(elapsed: float) -> None:
    """Sleep between two looks at what is waited for; the wait ends at most an eighth late."""
    time.sleep(0 if elapsed < _SPIN_SECONDS else min(elapsed / 8, _MAX_SLEEP))


class NoRoomError(MemoryError):
    """`Transport.meet` cannot allocate what the data need; it has sent nothing yet."""


class Transport(ABC):
    """The collectives of one communicator, on flat contiguous arrays.

    Every method is collective unless its description says otherwise: all ranks call it, in the
    same order. Only `meet` waits for ranks that may be late; all ranks have met when the other
    collectives are called.

    Attributes:
        max_digests: the number of digests that ranks can compare in one `meet`.
        lane: the name of the lane that uses the transport, for the timeline.
        members: the ids of the ranks, for messages; see `World.ids`.
        confirms: whether the ranks `confirm` each outcome, so that they can continue without a rank
            that has died (`hvdlite.elastic.recovery`).
    """

    rank: int
    size: int
    members: Sequence[int] = range(2**31)
    max_digests: int = 1
    lane: str = ""
    title: str = ""
    confirms: bool = False

    @classmethod
    def connect(cls, MPI: Any, world: World, barrier: Any) -> Transport | None:  # noqa: N803
        """Return a transport for a world's ranks, or on all of them None if it does not suit them.

        Args:
            world: the ranks and their nodes; the transport makes communicators of its own.
            barrier: of the ranks of this node, in shared memory; None: they share none.
        """
        return None

    @abstractmethod
    def meet(self, digests: Sequence[bytes], on_wait: OnWait, data: Sequence[Any] = ()) -> int:
        """Wait for all ranks, and return how many leading digests are the same on all of them.

        If ``on_wait`` raises `Interrupted`, the digests stay sent. The next call, from any
        thread, passes the same digests and data and resumes the wait.

        Args:
            digests: at least one, of `DIGEST_SIZE` bytes each; those beyond ``max_digests`` are
                ignored.
            on_wait: called with the seconds waited so far, while this rank waits.
            data: the inputs of the operations that the first digests stand for, if those are
                reductions that may be fused: flat arrays of one dtype. A transport that can send
                them along with the digests saves a round trip. If any digest is common, the next
                collective is an `allreduce_all` of the first of these arrays.

        Returns:
            The length of the common prefix, the same on every rank.

        Raises:
            HorovodInternalError: another rank has given up waiting; and what ``on_wait`` raises.
            NoRoomError: there is no memory for the reduction of ``data``. The other ranks know
                nothing of this call: make another one in its place.
        """

    def announce(self, arrays: Sequence[tuple[Any, Any]]) -> bool:
        """Announce the arrays of the operations that the digests of the next `meet` stand for.

        A transport whose ranks reduce in each other's memory tells the others where they lie, which
        saves a round trip for each; another for all of them, as `complete` waits for the results.

        Args:
            arrays: send and result of the first of these operations, one after the other. If the
                digests are the same on all ranks, either all of them pass their arrays of one
                operation to `allreduce`, before the next `meet`, or none does.

        Returns:
            Whether the first two lie where other ranks can reduce them.
        """
        return False

    def complete(self) -> None:  # noqa: B027
        """Wait for the results of what was announced and reduced; `confirm` does so, too."""

    def absent(self) -> list[int] | None:
        """Return the members that have not arrived in the `meet` in progress; None if unknown.

        Not collective. It may take a second, and raises as `meet` does.
        """
        return None

    def check_alive(self) -> None:  # noqa: B027 - most transports cannot tell
        """Raise RankGoneError if a rank is known to have ended; not collective."""

    @abstractmethod
    def leave(self) -> None:
        """Announce that this rank takes part in no further collective; not collective itself.

        Ranks that wait for this one in `meet`, now or later, get a HorovodInternalError there.
        """

    def confirm(self) -> None:
        """Wait until every rank has the outcome of the last collective.

        If it returns on any rank, all ranks have arrived, even those that have died since.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot go on without a rank")

    def revoke(self) -> None:  # noqa: B027 - ranks that see each other need none
        """End the blocking calls of all ranks, now and later; not collective."""

    def empty(self, size: int, dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised flat array in the memory that this transport exchanges fastest.

        Not collective. A collective accepts such arrays only if every rank passes one that it got
        in this way for the same purpose.
        """
        return np.empty(size, dtype)

    def release(self, array: Any) -> None:  # noqa: B027 - nothing to do for ordinary memory
        """Declare that an array from `empty` will not be passed to a collective any more.

        Not collective. Users may hold the array as long as they like. A forked child gets a copy of
        it, as of other memory.
        """

    def reclaim(self, array: Any) -> None:  # noqa: B027 - as in `release`
        """Declare that a released array will be passed again, and that nobody else holds it.

        Not collective. Its elements are undefined from then on.
        """

    @abstractmethod
    def gather(self, message: bytes) -> list[bytes]:
        """Return every rank's (short) message, by rank."""

    def gather_objects(self, own: Any) -> list[Any]:
        """Return every rank's (small) object, by rank; they travel pickled."""
        return [*map(pickle.loads, self.gather(pickle.dumps(own)))]

    def allreduce(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        """Write ``scaling.apply(op over all ranks' send)`` into ``result``.

        Every rank gets the same bits. ``send`` is left as it is unless it is ``result``.
        ``op`` is SUM, MIN, MAX or PRODUCT.

        This implementation reduces slice r of all ranks' arrays on rank r, in the order of the
        ranks, and sends the result to all of them: as many bytes as a ring, in types of our
        choosing, and each element is reduced once, so that every rank holds the same bits.
        """
        rows = self.scatter_slices(send)
        reduce_into(rows[0], list(rows), op, scaling)
        self.gather_slices(rows[0], result)

    def adasum(self, send: Any, result: Any, scaling: Scaling, tensors: Sequence[int]) -> None:
        """Write the adaptive sum over all ranks into ``result``; see `adasum.adasum`."""
        adasum(self, send, result, scaling, tensors)

    def scratch(self, size: int, dtype: np.dtype[Any], exchanged: bool = False) -> Any:
        """Return an uninitialised flat array for one collective, perhaps as `empty` does."""
        return self.empty(size, dtype) if exchanged else np.empty(size, dtype)

    def copy(self, source: Any, target: Any) -> None:
        """Copy one array to another of as many bytes; not collective."""
        target[...] = source

    def scale(self, source: Any, target: Any, scaling: Scaling) -> None:
        """Write ``source``, scaled, into ``target``, which may be the same; not collective."""
        if target is not source:
            target[...] = source
        target[...] = scaling.apply(target)

    def convert(self, source: Any, target: Any, scaling: Scaling) -> None:
        """Write floats, scaled and then rounded to another type, into ``target``; not collective.

        An overflow becomes infinite.
        """
        if target.itemsize >= source.itemsize:
            float16.widen(source, target)
            scaling.apply(target)
            return
        for piece in float16.pieces(source.size):
            values = scaled = source[piece]
            if not scaling.is_identity:
                is_single = values.dtype == np.float32
                scaled = float16.scratch(values.size) if is_single else np.empty_like(values)
                scaling.write(values, scaled)
            with np.errstate(over="ignore"):
                float16.narrow(scaled, target[piece])

    def scatter_slices(self, array: Any) -> Any:
        """Return all ranks' values of slice r on rank r, one row for each rank."""
        pieces = cut(array, slice_bounds(array.size, self.size))
        length = pieces[self.rank].size
        rows = self.scratch(self.size * length, array.dtype).reshape(self.size, length)
        self.alltoall([*map(as_bytes, pieces)], [*map(as_bytes, rows)])
        return rows

    def gather_slices(self, own: Any, result: Any) -> None:
        """Write slice r, which rank r has, into every rank's ``result``."""
        pieces = cut(result, slice_bounds(result.size, self.size))
        self.allgather(as_bytes(own), [*map(as_bytes, pieces)])

    def allreduce_init(
        self, send: Any, result: Any, op: ReduceOp, scaling: Scaling
    ) -> Callable[[], None]:
        """Prepare an `allreduce` that is run many times; not collective.

        Like MPI's persistent collectives: whatever does not depend on the values is done once.

        Returns:
            A function that runs the allreduce. It keeps the arrays alive.
        """
        return partial(self.allreduce, send, result, op, scaling)

    def zero_copy_range(self, size: int) -> slice:
        """Return the range of an array of ``size`` elements from `empty` that no other rank reads.

        That is in an `allreduce` into another such array. Not collective.
        """
        return slice(0, 0)

    def allreduce_zero_copy(
        self,
        send: Any,
        parts: Sequence[tuple[int, Any]],
        result: Any,
        op: ReduceOp,
        scaling: Scaling,
    ) -> None:
        """Do an `allreduce` of an array, some parts of which are read where they lie.

        Other ranks may call `allreduce` at the same time: it is the same collective.

        Args:
            send: as in `allreduce`; the parts may have been copied into it afterwards.
            parts: pairs of an offset in ``send`` and the flat array that takes the place of the
                elements from there on. They lie within `zero_copy_range`, in ascending order, and
                do not overlap.
            result, op, scaling: as in `allreduce`.
        """
        copy_parts(parts, send)
        self.allreduce(send, result, op, scaling)

    def allreduce_all(
        self, sends: Sequence[Any], results: Sequence[Any], op: ReduceOp, scaling: Scaling
    ) -> None:
        """Do an `allreduce` for each pair of arrays, of one dtype; several are fused into one."""
        if len(sends) == 1:
            self.allreduce(sends[0], results[0], op, scaling)
            return
        bounds = np.cumsum([0, *(array.size for array in sends)]).tolist()
        together = self.scratch(bounds[-1], sends[0].dtype, exchanged=True)
        copy_in(sends, together, self.lane)
        self.allreduce_fused(together, op, scaling)
        copy_out(cut(together, bounds), results, self.lane)

    def allreduce_fused(self, array: Any, op: ReduceOp, scaling: Scaling) -> None:
        """Do an `allreduce` in place, of an array that fuses several."""
        self.allreduce(array, array, op, scaling)

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
        self.alltoall([*map(as_bytes, pieces)], [*map(as_bytes, rows)])
        reduce_into(result, list(rows), op, scaling)

    def allgather(self, piece: Any, result: Sequence[Any]) -> None:
        """Receive every rank r's piece in ``result[r]``."""
        self.alltoall([piece] * self.size, result)

    @abstractmethod
    def broadcast(self, array: Any, root: int) -> None:
        """Overwrite the flat byte array with rank ``root``'s."""

    @property
    def communicators(self) -> list[Any]:
        """The MPI communicators that the transport has made for itself.

        Where ranks have died, `close` is never called, and these are freed some time later.
        """
        return []

    @abstractmethod
    def close(self) -> None:
        """Free the resources of the transport; no rank calls anything after it."""


def copy_in(arrays: Sequence[Any], together: Any, lane: str) -> None:
    """Copy arrays into a flat one, one after the other."""
    with timeline.span(lane, timeline.MEMCPY_IN_FUSION_BUFFER):
        np.concatenate(arrays, out=together)


def copy_out(parts: Sequence[Any], results: Sequence[Any], lane: str) -> None:
    """Copy the parts of such an array to where each belongs."""
    with timeline.span(lane, timeline.MEMCPY_OUT_FUSION_BUFFER):
        for part, result in zip(parts, results, strict=True):
            result[...] = part


def copy_parts(parts: Sequence[tuple[int, Any]], array: Any) -> None:
    """Copy parts into an array, each to the offset that comes with it."""
    for start, part in parts:
        array[start : start + part.size] = part
