"""Codecs that encode values in fewer bytes, and two ways to sum encoded values over the ranks."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdlite.base.arrays import slice_bounds
from hvdlite.base.reduction import ReduceOp, Scaling
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.messages import gather_messages
from hvdlite.transport import Transport


class Codec(ABC):
    """An encoding of floats as bytes, whose number follows from the number of floats.

    A message has a head, about all values, and a body, which is written and read in pieces that
    stay in the cache.
    """

    #: Values that are encoded together; only the last block may have fewer.
    block: int = 1
    #: Values per piece, about. With fewer, the interpreter's overhead shows; with more, temporary
    #: arrays become so large that the system clears new pages for each, which takes longer than
    #: most arithmetic.
    piece: int = 2**15

    def head(self, dtype: np.dtype[Any]) -> int:
        """Return the number of bytes of the head for values of a dtype."""
        return 0

    @abstractmethod
    def body(self, count: int, dtype: np.dtype[Any]) -> int:
        """Return the number of bytes for ``count`` values, without the head.

        Multiples of both the block and 8 values follow each other without a gap.
        """

    def measure(self, values: Any, head: Any) -> None:
        """Write the head for all ``values`` into ``head``, flat, uint8."""
        head[...] = 0  # of no bytes

    @abstractmethod
    def write(self, values: Any, head: Any, out: Any, generator: Any) -> None:
        """Encode a piece of finite values, flat, float32 or float64, into ``out``, flat, uint8."""

    @abstractmethod
    def read(self, body: Any, head: Any, out: Any) -> None:
        """Decode: the same bits of ``out`` from the same bytes on every rank."""

    def nbytes(self, count: int, dtype: np.dtype[Any]) -> int:
        """Return the number of bytes of the message for ``count`` values of a dtype."""
        return self.head(dtype) + self.body(count, dtype)

    def pieces(self, count: int) -> Iterator[slice]:
        """Yield the slices of ``count`` values, piece by piece."""
        unit = math.lcm(self.block, 8)
        length = max(self.piece // unit, 1) * unit
        for start in range(0, count, length):
            yield slice(start, min(start + length, count))

    def encode(self, values: Any, out: Any, generator: Any = None) -> None:
        """Write the message for finite values, flat, float32 or float64, into ``out``."""
        head, body = self._split(out, values.dtype)
        self.measure(values, head)
        for piece in self.pieces(values.size):
            self.write(values[piece], head, self._part(body, piece, values.dtype), generator)

    def decode_piece(self, message: Any, piece: slice, out: Any) -> None:
        """Write the values of one of the `pieces` of a message into ``out``."""
        head, body = self._split(message, out.dtype)
        self.read(self._part(body, piece, out.dtype), head, out)

    def _split(self, message: Any, dtype: np.dtype[Any]) -> tuple[Any, Any]:
        head = self.head(dtype)
        return message[:head], message[head:]

    def _part(self, body: Any, piece: slice, dtype: np.dtype[Any]) -> Any:
        return body[self.body(piece.start, dtype) : self.body(piece.stop, dtype)]


def add_gathered(
    codec: Codec, bucket: Bucket, transport: Transport, parts: Sequence[int], generator: Any
) -> None:
    """Send everything to all ranks, each of which adds it up in the order of the ranks.

    A rank sends its message to each other one: of n ranks n - 1 times its bytes. Only the loss of
    the codec is unsent.

    Args:
        parts: the offset of each part that has a message of its own, and the end of the last one.
    """
    pieces = [slice(*bounds) for bounds in itertools.pairwise(parts)]
    lengths = [codec.nbytes(piece.stop - piece.start, bucket.send.dtype) for piece in pieces]
    ends = np.cumsum([0, *lengths]).tolist()
    places = [slice(*bounds) for bounds in itertools.pairwise(ends)]
    message = transport.empty(ends[-1], np.dtype(np.uint8))
    for piece, place in zip(pieces, places, strict=True):
        codec.encode(bucket.send[piece], message[place], generator)
    messages = gather_messages(transport, message, [ends[-1]] * transport.size)
    scaling = bucket.reduction.combined(transport.size)
    for piece, place in zip(pieces, places, strict=True):
        if bucket.unsent is not None:
            _subtract(codec, message[place], bucket.send[piece], bucket.unsent[piece])
        _add_up(codec, [each[place] for each in messages], scaling, bucket.result[piece])


def add_by_slices(
    codec: Codec, bucket: Bucket, transport: Transport, generator: Any = None
) -> None:
    """Let rank r add up slice r of all ranks' values, and send the sum to all ranks.

    It moves as many bytes as an allreduce of the messages, whatever the number of ranks, but
    encodes the sums once more. The loss of that is unsent on the rank that added up, multiplied by
    the divisor of an average.
    """
    rank, size = transport.rank, transport.size
    count = bucket.send.size
    blocks = -(-count // codec.block)
    bounds = [min(count, bound * codec.block) for bound in slice_bounds(blocks, size)]
    slices = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    lengths = [codec.nbytes(piece.stop - piece.start, bucket.send.dtype) for piece in slices]
    sent = [np.empty(length, np.uint8) for length in lengths]
    for piece, message in zip(slices, sent, strict=True):
        codec.encode(bucket.send[piece], message, generator)
    received = np.empty((size, lengths[rank]), np.uint8)
    transport.alltoall(sent, list(received))
    if bucket.unsent is not None:
        # The result's memory is free until the end.
        for piece, message in zip(slices, sent, strict=True):
            _subtract(codec, message, bucket.send[piece], bucket.result[piece])
    del sent, message

    mine = slices[rank]
    total = np.empty(mine.stop - mine.start, bucket.send.dtype)
    _add_up(codec, list(received), bucket.reduction.combined(size), total)
    del received
    whole = np.empty(lengths[rank], np.uint8)
    codec.encode(total, whole, generator)
    wholes = gather_messages(transport, whole, lengths)
    if bucket.unsent is not None:
        _subtract(codec, whole, total, total)
        if bucket.reduction.op is ReduceOp.AVERAGE:
            total *= size
        bucket.unsent[...] = bucket.result
        bucket.unsent[mine] += total
    for piece, message in zip(slices, wholes, strict=True):
        _add_up(codec, [message], Scaling(), bucket.result[piece])


def greatest_magnitude(values: Any) -> Any:
    """Return the greatest magnitude, or 0 if there are no values, without a temporary array."""
    return abs(max(values.max(initial=0), -values.min(initial=0)))


def _add_up(codec: Codec, messages: Sequence[Any], scaling: Scaling, out: Any) -> None:
    for piece in codec.pieces(out.size):
        total = out[piece]
        codec.decode_piece(messages[0], piece, total)
        decoded = np.empty_like(total)
        for message in messages[1:]:
            codec.decode_piece(message, piece, decoded)
            np.add(total, decoded, out=total)
        scaling.apply(total)


def _subtract(codec: Codec, message: Any, values: Any, out: Any) -> None:
    """Write ``values`` minus a decoded message into ``out``, which may be ``values``."""
    for piece in codec.pieces(values.size):
        decoded = np.empty(piece.stop - piece.start, values.dtype)
        codec.decode_piece(message, piece, decoded)
        np.subtract(values[piece], decoded, out=out[piece])
