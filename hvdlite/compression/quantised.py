"""What all strategies have in common that write every value in a few bits."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from hvdlite.compression.bucket import Bucket
from hvdlite.compression.codec import Codec, add_by_slices, add_gathered
from hvdlite.compression.messages import agree, find_not_finite
from hvdlite.compression.strategy import Strategy
from hvdlite.transport import Transport


class Quantised(Strategy):
    """Values by a `Codec`, added up after they have been decoded.

    Infinities and what is not a number are refused: they would spread to whatever shares their
    scale, and stay in residuals for ever.
    """

    tells_unsent = True
    #: Whether each rank adds up a slice and sends the sum, written anew, to the others, instead
    #: of everybody sending everything to everybody: less traffic with more than two ranks, and a
    #: second loss.
    by_slices: ClassVar[bool] = False

    @abstractmethod
    def codec(self, bucket: Bucket, rank: int) -> Codec:
        """Return what writes a bucket's values on a rank."""

    def parts(self, bucket: Bucket) -> Sequence[int]:
        """Where what is written by itself begins, and where the last of it ends."""
        return bounds_of(bucket, "bucket")

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Encode, send, decode, add."""
        agree(bucket, transport, find_not_finite(bucket, bucket.send))
        codec = self.codec(bucket, transport.rank)
        if self.by_slices:
            add_by_slices(codec, bucket, transport)
        else:
            add_gathered(codec, bucket, transport, self.parts(bucket))


def generator_of(bucket: Bucket, seed: int, *more: int) -> np.random.Generator:
    """Return random numbers that depend on the step and the bucket's parameters alone.

    Args:
        bucket: what they are for.
        seed: of the strategy.
        *more: what else they are to depend on, such as the rank.
    """
    names = "\n".join(parameter.name for parameter in bucket.parameters)
    return generator(seed, bucket.count, names, *more)


def generator(seed: int, count: int, name: str, *more: int) -> np.random.Generator:
    """Return random numbers that depend on nothing else than the arguments.

    Args:
        seed: of the strategy.
        count: of the exchanges before.
        name: what they are for.
        *more: what else they are to depend on.
    """
    entropy = [seed, count, zlib.crc32(name.encode()), *more]
    return np.random.Generator(np.random.SFC64(entropy))


def bounds_of(bucket: Bucket, per: str) -> Sequence[int]:
    """Return where each ``"tensor"`` begins, or the whole ``"bucket"``, and the end."""
    return bucket.bounds if per == "tensor" else [0, bucket.send.size]
