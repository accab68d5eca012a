"""Values as fewer bytes, and two ways to add up over the ranks what is written so."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from hvdlite.exchange.bucket import Bucket
from hvdlite.exchange.messages import gather_messages
from hvdlite.reduction import ReduceOp
from hvdlite.transport import Transport
from hvdlite.transport.slices import slice_bounds


class Codec(ABC):
    """How floats are written as bytes; how many these are follows from the number of floats."""

    #: So many values are written together; only the last ones may be fewer.
    block: ClassVar[int] = 1

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Return how many bytes ``count`` values take."""

    @abstractmethod
    def encode(self, values: Any, out: Any) -> None:
        """Write finite values, flat, float32 or float64, into ``out``, flat, uint8."""

    @abstractmethod
    def decode(self, message: Any, out: Any) -> None:
        """Do the reverse: the same bits of ``out`` from the same bytes on every rank."""


def add_gathered(codec: Codec, bucket: Bucket, transport: Transport, parts: Sequence[int]) -> None:
    """Send everything to everybody, who adds it up in the order of the ranks.

    A rank sends its message to each other one: of n ranks n - 1 times its bytes. What is not sent
    is what the codec loses, and nothing else.

    Args:
        codec: of the messages.
        bucket: whose exchange this is, as `Strategy.exchange` has it.
        transport: of the ranks.
        parts: where that begins which the codec is to write by itself, and where the last ends.
    """
    pieces = list(itertools.pairwise(parts))
    ends = np.cumsum([0, *(codec.nbytes(stop - start) for start, stop in pieces)]).tolist()
    places = list(itertools.pairwise(ends))
    message = transport.empty(ends[-1], np.dtype(np.uint8))
    for (start, stop), (begin, end) in zip(pieces, places, strict=True):
        codec.encode(bucket.send[start:stop], message[begin:end])
    messages = gather_messages(transport, message, [ends[-1]] * transport.size)
    longest = max((stop - start for start, stop in pieces), default=0)
    scratch = np.empty(longest, bucket.send.dtype)
    scaling = bucket.reduction.whole(transport.size)
    for (start, stop), (begin, end) in zip(pieces, places, strict=True):
        decoded, result = scratch[: stop - start], bucket.result[start:stop]
        if bucket.unsent is not None:
            codec.decode(messages[transport.rank][begin:end], decoded)
            np.subtract(bucket.send[start:stop], decoded, out=bucket.unsent[start:stop])
        codec.decode(messages[0][begin:end], result)
        for other in messages[1:]:
            codec.decode(other[begin:end], decoded)
            np.add(result, decoded, out=result)
        scaling.apply(result)


def add_by_slices(codec: Codec, bucket: Bucket, transport: Transport) -> None:
    """Let rank r add up slice r of what all ranks have, and send the sum to everybody.

    It moves as many bytes as an allreduce of the messages, whatever the number of ranks, and
    writes sums in the codec's way once more. What that loses, the rank that added up keeps as
    unsent, multiplied by what an average divides by.

    Args:
        codec, bucket, transport: as in `add_gathered`.
    """
    rank, size = transport.rank, transport.size
    count = bucket.send.size
    blocks = -(-count // codec.block)
    bounds = [min(count, bound * codec.block) for bound in slice_bounds(blocks, size)]
    slices = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    lengths = [codec.nbytes(piece.stop - piece.start) for piece in slices]
    sent = [np.empty(length, np.uint8) for length in lengths]
    for piece, message in zip(slices, sent, strict=True):
        codec.encode(bucket.send[piece], message)
    received = np.empty((size, lengths[rank]), np.uint8)
    transport.alltoall(sent, list(received))

    mine = slices[rank]
    total = np.empty(mine.stop - mine.start, bucket.send.dtype)
    decoded = np.empty_like(total)
    codec.decode(received[0], total)
    for message in received[1:]:
        codec.decode(message, decoded)
        np.add(total, decoded, out=total)
    total = bucket.reduction.whole(size).apply(total)
    whole = np.empty(lengths[rank], np.uint8)
    codec.encode(total, whole)
    codec.decode(whole, decoded)
    np.subtract(total, decoded, out=decoded)  # what the sum loses
    wholes = gather_messages(transport, whole, lengths)
    if bucket.unsent is not None:
        for piece, message in zip(slices, sent, strict=True):
            own = np.empty(piece.stop - piece.start, bucket.send.dtype)
            codec.decode(message, own)
            np.subtract(bucket.send[piece], own, out=bucket.unsent[piece])
        if bucket.reduction.op is ReduceOp.AVERAGE:
            decoded *= size
        bucket.unsent[mine] += decoded
    for piece, message in zip(slices, wholes, strict=True):
        codec.decode(message, bucket.result[piece])
