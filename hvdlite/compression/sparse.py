"""Strategies that send some entries of a bucket, and leave the rest."""

from __future__ import annotations

import itertools
import math
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal

import numpy as np

from hvdlite.base import float16
from hvdlite.base.arguments import (
    check_choice,
    check_count,
    check_momentum,
    check_positive,
    check_ratio,
)
from hvdlite.base.reduction import ReduceOp, Scaling
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.codec import greatest_magnitude
from hvdlite.compression.messages import agree, find_not_finite, gather_messages
from hvdlite.compression.selection import at_least, greatest, index_dtype
from hvdlite.compression.strategy import Strategy
from hvdlite.errors import MismatchError, ranks_text
from hvdlite.transport import Transport

_RATIO = 0.01
_NO_ENTRIES = np.empty(0, np.uint32)
_VELOCITY, _ACCUMULATED = "velocity", "accumulated"


class Sparse(Strategy):
    """Base of strategies by which every rank sends entries of its own choice to all ranks.

    An entry takes its value and an index of four bytes, and goes to each other rank: of n ranks,
    n - 1 times; for too many entries, see `send_entries`. Infinities are sent; NaN is refused,
    since it is neither large nor small.
    """

    tells_unsent = True

    @abstractmethod
    def select(self, bucket: Bucket) -> Any:
        """Return the indices of the entries of ``bucket.send`` to be sent, in increasing order.

        It contains no NaN.
        """

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        bad = find_not_finite(bucket, bucket.send, infinite=False)
        indices = self.select(bucket) if bad < 0 else _NO_ENTRIES
        write_result = send_entries(bucket, transport, bucket.send, indices, bad)
        if bucket.unsent is not None:
            bucket.unsent[...] = bucket.send
            for piece in float16.pieces(indices.size):
                bucket.unsent[indices[piece]] = 0
        write_result()


@dataclass(frozen=True, repr=False)
class TopK(Sparse):
    """Send the entries of the greatest magnitude; of equal ones, those that come first.

    Use it with `ErrorFeedback`, or small gradients are never sent: Stich et al. 2018,
    arXiv:1809.07599; Aji and Heafield 2017, arXiv:1704.05021. It sends fewer bytes than a dense
    exchange of n ranks if fewer than one entry in n is sent.

    Args:
        ratio: fraction of all entries, above 0 and at most 1; rounded up, so at least one entry.
            One percent if neither it nor ``count`` is given.
        count: the number of entries, instead of a ratio; at least 1.
        per: ``"bucket"``: of all gradients that travel together; ``"tensor"``: of each gradient,
            however small its entries are beside those of others.

    Raises:
        ValueError: an argument is out of range, or both a ratio and a count are given.
    """

    ratio: float | None = None
    count: int | None = None
    per: Literal["bucket", "tensor"] = "bucket"

    def __post_init__(self) -> None:
        if self.ratio is not None and self.count is not None:
            raise ValueError(f"ratio={self.ratio!r} and count={self.count!r}; give one of them")
        check_choice("per", self.per, "bucket", "tensor")
        if self.count is not None:
            check_count("count", self.count)
        elif self.ratio is None:
            object.__setattr__(self, "ratio", _RATIO)
        else:
            check_ratio("ratio", self.ratio)

    def select(self, bucket: Bucket) -> Any:
        if self.per == "bucket":
            return greatest(bucket.send, self._count(bucket.send.size))
        counts = [self._count(parameter.size) for parameter in bucket.parameters]
        return greatest_of_each(bucket, bucket.send, counts)

    def _count(self, size: int) -> int:
        return part_of(size, self.ratio or _RATIO) if self.count is None else self.count


@dataclass(frozen=True, repr=False)
class Threshold(Sparse):
    """Send the entries whose magnitude reaches a threshold: many, few or none on a rank.

    Use it with `ErrorFeedback`, or small gradients are never sent: Strom 2015, "Scalable
    distributed DNN training using commodity GPU cloud computing".

    Args:
        value: the threshold, above 0. With error feedback it is compared with the sum of the
            gradient and the residual.

    Raises:
        ValueError: ``value`` is not a number above 0.
    """

    value: float

    def __post_init__(self) -> None:
        check_positive("value", self.value)

    def select(self, bucket: Bucket) -> Any:
        return at_least(bucket.send, self.value)


@dataclass(frozen=True, repr=False)
class RandomK(Strategy):
    """Send k random entries, resampled each step from a seed that all ranks share.

    All ranks draw the same entries, so that only values travel, and are added up on their way:
    ``ratio`` of the gradients' bytes. Stich et al. 2018, arXiv:1809.07599.

    Infinities and NaN are refused: entries that are not drawn would stay in residuals.

    Args:
        ratio: fraction of a bucket, above 0 and at most 1; rounded up, so at least one entry.
        seed: of the random numbers, 0 or above.
        unbiased: whether the entries sent are multiplied by n/k, for k of n entries: then their
            expectation is the gradient, and nothing remains for `ErrorFeedback`, which refuses it.

    Raises:
        ValueError: an argument is out of range.
    """

    ratio: float = 0.01
    seed: int = 0
    unbiased: bool = False

    stateful = True  # for the number of the step

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        check_count("seed", self.seed, 0)
        object.__setattr__(self, "tells_unsent", not self.unbiased)

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        size = bucket.send.size
        indices = _draw(bucket.generator(self.seed), size, part_of(size, self.ratio))
        checksum = zlib.crc32(indices)
        found = agree(bucket, transport, find_not_finite(bucket, bucket.send), checksum)
        _check_drawn(transport, bucket, found)
        scaling = bucket.reduction.combined(transport.size)
        if self.unbiased and size:
            scaling = replace(scaling, factor=size / indices.size)
        values = bucket.send[indices]
        if indices.size:
            transport.allreduce(values, values, ReduceOp.SUM, scaling)
        if bucket.unsent is not None:
            bucket.unsent[...] = bucket.send
            bucket.unsent[indices] = 0
        bucket.result[...] = 0
        bucket.result[indices] = values


@dataclass(frozen=True, repr=False)
class DeepGradientCompression(Strategy):
    """Send the greatest entries of each tensor's accumulated gradients, corrected for momentum.

    Lin et al. 2018, arXiv:1712.01887. Each rank has a velocity u and what it has not sent yet, v:
    ``u = momentum * u + gradient; v = v + u``; an entry of v that is sent becomes 0 in v and, with
    masking, in u. So late entries arrive with the momentum that they would have had.

    Momentum is applied here: the optimizer must have none of its own, for example SGD with
    ``momentum=0``. Entries that are not sent are kept here, too: `ErrorFeedback` refuses it.

    Infinities and NaN are refused: they would stay in the velocity.

    Args:
        ratio: fraction of each tensor that is sent, above 0 and at most 1; rounded up, so at
            least one entry.
        momentum: from 0 to below 1.
        clip_norm: the largest norm of the reduced gradient for which gradients are not clipped;
            above 0. Each rank clips its own contribution to the result (its gradient, for an
            average divided by the number of ranks n) to the norm ``clip_norm / sqrt(n)``, to which
            independent gradients amount. The norm is that of a bucket, and not of all gradients,
            which are not all there yet. None: nothing is clipped.
        warm_up_steps: the number of steps from ``warm_up_ratio`` to ``ratio``, each of which sends
            the same fraction less than the one before.
        warm_up_ratio: fraction of each tensor in the first step of the warm-up; at least
            ``ratio``.
        masking: whether the velocity of entries that are sent becomes 0.

    Raises:
        ValueError: an argument is out of range.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    clip_norm: float | None = None
    warm_up_steps: int = 0
    warm_up_ratio: float = 0.25
    masking: bool = True

    stateful = True

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        check_ratio("warm_up_ratio", self.warm_up_ratio)
        check_momentum("momentum", self.momentum)
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)
        check_count("warm_up_steps", self.warm_up_steps, 0)
        if self.warm_up_steps and self.warm_up_ratio < self.ratio:
            raise ValueError(
                f"warm_up_ratio={self.warm_up_ratio!r} is below ratio={self.ratio!r}; the first "
                "steps are to send more, not less"
            )

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Accumulate, send and remember, in this order: the exchange may fail."""
        send = bucket.send
        velocity = bucket.state.flat(_VELOCITY, send.dtype)
        accumulated = bucket.state.flat(_ACCUMULATED, send.dtype)
        factor = self._clipping(bucket, transport.size)
        total = np.zeros_like(send)
        for piece in _present(bucket):
            step = self._velocity(velocity[piece], send[piece], factor)
            np.add(accumulated[piece], step, out=total[piece])
        bad = find_not_finite(bucket, total)
        indices = self._select(bucket, total) if bad < 0 else _NO_ENTRIES
        write_result = send_entries(bucket, transport, total, indices, bad)
        for piece in _present(bucket):
            # Computed again, rather than kept in memory.
            velocity[piece] = self._velocity(velocity[piece], send[piece], factor)
            accumulated[piece] = total[piece]
        accumulated[indices] = 0
        if self.masking:
            velocity[indices] = 0
        write_result()

    def _velocity(self, velocity: Any, gradient: Any, factor: float) -> Any:
        moved = velocity * velocity.dtype.type(self.momentum)
        moved += gradient if factor == 1.0 else gradient * gradient.dtype.type(factor)
        return moved

    def _select(self, bucket: Bucket, total: Any) -> Any:
        ratio = self.ratio
        if bucket.count < self.warm_up_steps:
            fall = self.ratio / self.warm_up_ratio
            ratio = self.warm_up_ratio * float(fall ** (bucket.count / self.warm_up_steps))
        counts = [part_of(parameter.size, ratio) for parameter in bucket.parameters]
        return greatest_of_each(bucket, total, counts)

    def _clipping(self, bucket: Bucket, size: int) -> float:
        """Return the factor by which this rank's gradients are multiplied."""
        if self.clip_norm is None:
            return 1.0
        norm = _norm(bucket.send)
        if bucket.reduction.op is ReduceOp.AVERAGE:
            norm /= size
        # A norm that is not a number passes, too: a better message about it comes later.
        return min(1.0, self.clip_norm / math.sqrt(size) / (norm or 1.0))


def send_entries(
    bucket: Bucket, transport: Transport, values: Any, indices: Any, bad: int
) -> Callable[[], None]:
    """Send entries to all ranks.

    Work is done in pieces, because numpy makes eight-byte indices of all that it is given. Entries
    are gathered, unless they take more bytes than the bucket has: then they are reduced among
    zeros, so that a strategy that sends nearly everything takes no more memory or traffic than a
    dense exchange.

    Args:
        values: flat, like ``bucket.send``.
        indices: of the entries that this rank sends, in increasing order.
        bad: the position of a parameter that this rank cannot send, or -1.

    Returns:
        A function that writes the reduction into ``bucket.result``, in the order of the ranks.
    """
    dtype, result = index_dtype(values.size), bucket.result
    length = indices.size * (dtype.itemsize + values.itemsize)
    lengths = agree(bucket, transport, bad, length)
    scaling = bucket.reduction.combined(len(lengths))
    if sum(lengths) < values.nbytes:
        # Not in the transport's memory: the length is this rank's own.
        message = np.empty(length, np.uint8)
        end = indices.size * values.itemsize
        own = message[:end].view(values.dtype)
        for piece in float16.pieces(indices.size):
            own[piece] = values[indices[piece]]
        message[end:].view(dtype)[:] = indices
        return partial(_add_up, gather_messages(transport, message, lengths), scaling, result)
    total = np.empty_like(values) if bucket.send is result else result
    total[...] = 0
    for piece in float16.pieces(indices.size):
        total[indices[piece]] = values[indices[piece]]
    transport.allreduce(total, total, ReduceOp.SUM, scaling)
    return partial(np.copyto, result, total)


def _add_up(messages: Sequence[Any], scaling: Scaling, result: Any) -> None:
    dtype = index_dtype(result.size)
    result[...] = 0
    for message in messages:
        count = message.size // (result.dtype.itemsize + dtype.itemsize)
        end = count * result.dtype.itemsize
        values, indices = message[:end].view(result.dtype), message[end:].view(dtype)
        for piece in float16.pieces(count):
            # No index occurs twice; this would add only one of the values.
            result[indices[piece]] += values[piece]
    scaling.apply(result)


def part_of(size: int, ratio: float) -> int:
    """Return the number of entries that a ratio of ``size`` is, rounded up.

    The ratio counts as the decimal number that it is written as: of 100 entries 0.07 are 7, and
    not 8 because of the last bit of a product.
    """
    return math.ceil(Fraction(repr(float(ratio))) * size)


def greatest_of_each(bucket: Bucket, values: Any, counts: Sequence[int]) -> Any:
    """Return the indices of the greatest of ``values`` in each parameter that is not absent.

    They are in increasing order; ``values`` is flat, like ``bucket.send``, without NaN.
    """
    dtype = index_dtype(values.size)
    found = [np.empty(0, dtype)]
    for position, (start, stop) in enumerate(itertools.pairwise(bucket.bounds)):
        if position not in bucket.absent:
            here = greatest(values[start:stop], counts[position])
            found.append(np.add(here, start, dtype=dtype))
    return np.concatenate(found)


def _draw(generator: np.random.Generator, size: int, count: int) -> Any:
    """Return ``count`` of ``size`` indices, each set equally likely, in increasing order.

    Indices are drawn until enough of them differ: those that are chosen or, if these are the
    majority, those that are left out.
    """
    fewer = min(count, size - count)
    drawn = np.zeros(size, np.bool_)
    missing = fewer
    while missing:
        drawn[generator.integers(size, size=missing)] = True
        missing = fewer - np.count_nonzero(drawn)
    return np.flatnonzero(drawn if fewer == count else ~drawn)


def _check_drawn(transport: Transport, bucket: Bucket, checksums: list[int]) -> None:
    """Compare the indices that ranks have drawn, since sums of different entries would be wrong."""
    others = [
        transport.members[rank]
        for rank, checksum in enumerate(checksums)
        if checksum != checksums[0]
    ]
    if others:
        raise MismatchError(
            f"rank {transport.members[transport.rank]}: for the bucket of "
            f"{bucket.parameters[0].name!r}, RandomK has drawn other entries on "
            f"{ranks_text(others)} than on rank {transport.members[0]}; install the same version "
            "of numpy on all ranks"
        )


def _present(bucket: Bucket) -> list[slice]:
    """Return pieces of the gradients that any rank has, each small enough for the cache."""
    return [
        slice(start + piece.start, start + piece.stop)
        for position, (start, stop) in enumerate(itertools.pairwise(bucket.bounds))
        if position not in bucket.absent
        for piece in float16.pieces(stop - start)
    ]


def _norm(values: Any) -> float:
    """Return the Euclidean norm, also if squares are out of range."""
    unit = float(greatest_magnitude(values))
    if not 0 < unit < np.inf:
        return unit
    squares = (
        np.add.reduce(np.square(values[piece] / unit), dtype=np.float64)
        for piece in float16.pieces(values.size)
    )
    return unit * math.sqrt(sum(squares))
