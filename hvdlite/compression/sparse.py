"""What all strategies have in common that send some entries of a bucket, and leave the rest."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from hvdlite import float16
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.messages import agree, find_not_finite, gather_messages
from hvdlite.compression.selection import greatest, index_dtype
from hvdlite.compression.strategy import Strategy
from hvdlite.reduction import ReduceOp
from hvdlite.transport import Transport


class Sparse(Strategy):
    """Every rank sends entries of its own choice to all others, who add them up.

    An entry takes its value and an index of four bytes, and goes to each other rank: of n ranks,
    n - 1 times; where they are too many for that, see `Entries`. Infinities are sent as they are;
    what is not a number is refused, since it is neither large nor small.
    """

    tells_unsent = True

    @abstractmethod
    def select(self, bucket: Bucket) -> Any:
        """Return the indices of the entries of ``bucket.send`` to be sent, in increasing order.

        There is no NaN in it.
        """

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Select, send, add."""
        bad = find_not_finite(bucket, bucket.send, infinite=False)
        indices = self.select(bucket) if bad < 0 else no_entries()
        entries = Entries(bucket, transport, bucket.send, indices, bad)
        if bucket.unsent is not None:
            bucket.unsent[...] = bucket.send
            for piece in float16.pieces(indices.size):
                bucket.unsent[indices[piece]] = 0
        entries.add_up()


def part_of(size: int, ratio: float) -> int:
    """Return how many of ``size`` entries a ratio is, rounded up.

    The ratio counts as the decimal number that it is written as: of 100 entries 0.07 are 7, and
    not 8 because of the last bit of a product.
    """
    return math.ceil(Fraction(repr(float(ratio))) * size)


def no_entries() -> Any:
    """Indices of none."""
    return np.empty(0, np.uint32)


def greatest_of_each(bucket: Bucket, values: Any, counts: Sequence[int]) -> Any:
    """Find the greatest entries of each parameter, of which any rank has a gradient.

    Args:
        bucket: whose parameters.
        values: flat, like ``bucket.send``, without NaN.
        counts: how many of each parameter.

    Returns:
        Their indices in ``values``, in increasing order.
    """
    dtype = index_dtype(values.size)
    found = [np.empty(0, dtype)]
    for position, (start, stop) in enumerate(itertools.pairwise(bucket.bounds)):
        if position not in bucket.absent:
            here = greatest(values[start:stop], counts[position])
            found.append(np.add(here, start, dtype=dtype))
    return np.concatenate(found)


class Entries:
    """The entries that all ranks have sent, to be added up.

    Pieces are worked on, because numpy makes indices of eight bytes of all that it is given. They
    are gathered, unless they take more bytes than the bucket has: then they are reduced among
    zeros, so that a strategy that sends nearly everything takes no more memory, or traffic, than a
    dense exchange.

    Args:
        bucket: whose entries.
        transport: of the ranks.
        values: flat, like ``bucket.send``.
        indices: of those that this rank sends, in increasing order.
        bad: the position of a parameter that this rank cannot send, or -1.

    Raises:
        GradientError: on all ranks, if there is such a parameter on any.
    """

    def __init__(
        self, bucket: Bucket, transport: Transport, values: Any, indices: Any, bad: int
    ) -> None:
        self._bucket = bucket
        self._messages: list[Any] = []
        self._sum: Any = None
        dtype = index_dtype(values.size)
        length = indices.size * (dtype.itemsize + values.itemsize)
        lengths = agree(bucket, transport, bad, length)
        self._scaling = bucket.reduction.whole(len(lengths))
        if sum(lengths) < values.nbytes:
            # Not where the transport would like it: the length is this rank's own.
            message = np.empty(length, np.uint8)
            end = indices.size * values.itemsize
            own = message[:end].view(values.dtype)
            for piece in float16.pieces(indices.size):
                own[piece] = values[indices[piece]]
            message[end:].view(dtype)[:] = indices
            self._messages = gather_messages(transport, message, lengths)
            return
        self._sum = np.empty_like(values) if bucket.send is bucket.result else bucket.result
        self._sum[...] = 0
        for piece in float16.pieces(indices.size):
            self._sum[indices[piece]] = values[indices[piece]]
        transport.allreduce(self._sum, self._sum, ReduceOp.SUM, self._scaling)

    def add_up(self) -> None:
        """Write the reduction into ``bucket.result``, in the order of the ranks."""
        result = self._bucket.result
        if self._sum is not None:
            if self._sum is not result:
                result[...] = self._sum
            return
        dtype = index_dtype(result.size)
        result[...] = 0
        for message in self._messages:
            count = message.size // (result.dtype.itemsize + dtype.itemsize)
            end = count * result.dtype.itemsize
            values, indices = message[:end].view(result.dtype), message[end:].view(dtype)
            for piece in float16.pieces(count):
                # No index comes twice, which this would add up but once.
                result[indices[piece]] += values[piece]
        self._scaling.apply(result)
