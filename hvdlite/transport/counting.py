"""The bytes that ranks send: a transport that counts those of another one, and their sum."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdlite.base.reduction import ReduceOp, Scaling
from hvdlite.transport.transport import DIGEST_SIZE, OnWait, Transport

_total = [0, 0]
_lock = threading.Lock()


class Traffic(NamedTuple):
    """The bytes that this process has sent since it began; see `traffic`.

    Attributes:
        sent: sent to other ranks, counted as `CountingTransport` does
        uncompressed: what would have been sent without compression
    """

    sent: int
    uncompressed: int


def traffic() -> Traffic:
    """Return how many bytes of gradients and of compressed arrays this process has sent.

    Not collective. The difference between two calls is what was sent in between::

        before = hvd.traffic()
        train_epoch()
        sent, uncompressed = (b - a for a, b in zip(before, hvd.traffic()))
        print(f"{sent / 1e6:.0f} MB sent, {sent / uncompressed:.0%} of the uncompressed gradients")

    An allreduce of n ranks counts as 2 (n - 1) / n of its array, which the best algorithms send,
    also in shared memory, where nothing is sent. Other collectives do not count. With virtual
    ranks, each virtual rank counts as a rank.
    """
    with _lock:
        return Traffic(*_total)


def count_exchange(sent: int, uncompressed: int) -> None:
    """Add an exchange to what `traffic` returns."""
    with _lock:
        _total[0] += sent
        _total[1] += uncompressed


def allreduce_bytes(nbytes: int, itemsize: int, rank: int, size: int) -> int:
    """Return the bytes that a rank of ``size`` sends in an allreduce of an array of ``nbytes``."""
    length = nbytes // itemsize
    own = length // size + (rank < length % size)  # the rank's slice
    return ((length - own) + (size - 1) * own) * itemsize


class CountingTransport(Transport):
    """Wraps a transport, and counts the bytes that this rank would send to others over a network.

    Each collective counts as the usual algorithm that moves the fewest bytes, whatever the
    transport itself does: in shared memory nothing is sent at all. Of n ranks, each sends

    - in an allreduce, 2 (n - 1) / n of the array: its share of each other rank's slice, then the
      sum of its own slice to all ranks,
    - in a reducescatter, the pieces for the others,
    - in an alltoall, the pieces for the others,
    - in an allgather, a gather or a meet, its piece, message or digests to each of the n - 1
      others,
    - in a broadcast, the array to the next rank, but for the last one before the root.

    The data of a meet are counted by the allreduce that they are for.

    Args:
        inner: the transport, which nothing else uses.

    Attributes:
        by_collective: bytes sent so far, by the collective's name. It may be cleared.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.rank, self.size, self.members = inner.rank, inner.size, inner.members
        self.max_digests = inner.max_digests
        self.by_collective: Counter[str] = Counter()

    @property
    def sent(self) -> int:
        """Return the sum over all collectives."""
        return self.by_collective.total()

    def meet(self, digests: Sequence[bytes], on_wait: OnWait, data: Sequence[Any] = ()) -> int:
        self._count_to_all("meet", DIGEST_SIZE * min(len(digests), self.max_digests))
        return self._inner.meet(digests, on_wait, data)

    def leave(self) -> None:
        self._inner.leave()

    def empty(self, size: int, dtype: np.dtype[Any]) -> Any:
        return self._inner.empty(size, dtype)

    def scale(self, source: Any, target: Any, scaling: Scaling) -> None:
        self._inner.scale(source, target, scaling)

    def convert(self, source: Any, target: Any, scaling: Scaling) -> None:
        self._inner.convert(source, target, scaling)

    def gather(self, message: bytes) -> list[bytes]:
        self._count_to_all("gather", len(message))
        return self._inner.gather(message)

    def allreduce(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        self._count_allreduce([send])
        self._inner.allreduce(send, result, op, scaling)

    def allreduce_all(
        self, sends: Sequence[Any], results: Sequence[Any], op: ReduceOp, scaling: Scaling
    ) -> None:
        self._count_allreduce(sends)
        self._inner.allreduce_all(sends, results, op, scaling)

    def alltoall(self, pieces: Sequence[Any], result: Sequence[Any]) -> None:
        self._count_pieces("alltoall", pieces)
        self._inner.alltoall(pieces, result)

    def reducescatter(
        self, pieces: Sequence[Any], result: Any, op: ReduceOp, scaling: Scaling
    ) -> None:
        self._count_pieces("reducescatter", pieces)
        self._inner.reducescatter(pieces, result, op, scaling)

    def allgather(self, piece: Any, result: Sequence[Any]) -> None:
        self._count_to_all("allgather", piece.nbytes)
        self._inner.allgather(piece, result)

    def broadcast(self, array: Any, root: int) -> None:
        is_last = self.rank == (root - 1) % self.size
        self.by_collective["broadcast"] += 0 if is_last else len(array)
        self._inner.broadcast(array, root)

    def close(self) -> None:
        self._inner.close()

    def _count_to_all(self, collective: str, nbytes: int) -> None:
        self.by_collective[collective] += (self.size - 1) * nbytes

    def _count_pieces(self, collective: str, pieces: Sequence[Any]) -> None:
        others = (piece.nbytes for rank, piece in enumerate(pieces) if rank != self.rank)
        self.by_collective[collective] += sum(others)

    def _count_allreduce(self, arrays: Sequence[Any]) -> None:
        nbytes = sum(array.nbytes for array in arrays)
        sent = allreduce_bytes(nbytes, arrays[0].itemsize, self.rank, self.size)
        self.by_collective["allreduce"] += sent
