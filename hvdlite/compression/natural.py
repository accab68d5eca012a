"""Gradients as powers of two, at random."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hvdlite.arguments import check_count
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.codec import Codec, greatest_magnitude
from hvdlite.compression.packing import unpack
from hvdlite.compression.quantised import Quantised, generator_of

# Codes without the sign: 0, and this many powers of two.
_POWERS = 127
_SIGN = 0x80


@dataclass(frozen=True, repr=False)
class Natural(Quantised):
    """Every value as a power of two with its sign, rounded at random without bias, in 8 bits.

    Natural compression, Horváth et al. 2019, arXiv:1905.10988: a value between two powers of two
    becomes one of them, so that its mean is the value. Sums are compressed in the same way, as the
    paper does on the way back from its master.

    The paper sends the sign and the 8 bits of the exponent. Here a byte is enough, since there are
    127 powers of two only, the largest being the least that no value exceeds. What would have
    become a smaller one becomes 0: less than 2**-126 of the greatest value, next to which nothing
    is seen of it in a float32 (2**-24) or a float64 (2**-53). Unless gradients exceed 1, all
    powers of two that are normal numbers of float32 are there.

    Args:
        seed: of the random numbers, which are others on each rank, in each step and bucket.

    Raises:
        ValueError: ``seed`` is negative.
    """

    seed: int = 0

    stateful = True
    by_slices = True

    def __post_init__(self) -> None:
        check_count("seed", self.seed, 0)

    def codec(self, bucket: Bucket, rank: int) -> Codec:
        """One with the rank's random numbers."""
        return _PowerCodec(bucket.send.dtype, generator_of(bucket, self.seed, rank))


class _Layout(NamedTuple):
    """Of a float: the integer of as many bits, the bits of the fraction, those of the exponent."""

    word: type[np.signedinteger[Any]]
    fraction: int
    exponent: int

    @property
    def infinite(self) -> int:
        """The exponent of infinities, as it is written."""
        return (1 << self.exponent) - 1

    @property
    def bias(self) -> int:
        """The exponent of 1, as it is written."""
        return (1 << self.exponent - 1) - 1


_LAYOUTS = {4: _Layout(np.int32, 23, 8), 8: _Layout(np.int64, 52, 11)}


class _PowerCodec(Codec):
    """The head is the exponent, as it is written in a float, of the largest power of two."""

    head = 2

    def __init__(self, dtype: np.dtype[Any], generator: np.random.Generator) -> None:
        self._layout = _LAYOUTS[dtype.itemsize]
        self._dtype = dtype
        self._generator = generator

    def body(self, count: int) -> int:
        """One byte each."""
        return count

    def measure(self, values: Any, head: Any) -> None:
        """Round the greatest magnitude up, unless that would be infinite."""
        greatest = greatest_magnitude(values)
        bits = int(np.array(greatest, self._dtype).view(self._layout.word))
        top = (bits + (1 << self._layout.fraction) - 1) >> self._layout.fraction
        if np.isfinite(greatest):
            top = min(top, self._layout.infinite - 1)
        head[...] = np.array([top], np.uint16).view(np.uint8)

    def write(self, values: Any, head: Any, out: Any) -> None:
        """Add a random number to the fraction, whose carry is what rounds the exponent up."""
        word, fraction, exponent = self._layout
        added = self._generator.random(values.size, self._dtype)
        added *= 2**fraction
        bits = added.astype(word)
        bits += values.view(word)
        bits >>= fraction
        bits &= (2 << exponent) - 1
        np.take(_codes(_top(head), self._layout), bits, out=out, mode="clip")

    def read(self, body: Any, head: Any, out: Any) -> None:
        """Look up."""
        unpack(_powers(_top(head), self._layout), body, out)


def _top(head: Any) -> int:
    return int.from_bytes(head.tobytes(), sys.byteorder)


@lru_cache
def _codes(top: int, layout: _Layout) -> Any:
    """The codes of all signs and exponents, as they are written."""
    exponents = np.arange(1 << layout.exponent)
    codes = np.clip(exponents - (top - _POWERS), 0, _POWERS)
    codes[0] = 0
    return np.concatenate([codes, codes + _SIGN]).astype(np.uint8)


@lru_cache
def _powers(top: int, layout: _Layout) -> tuple[float, ...]:
    """What all codes stand for."""
    exponents = [code + top - _POWERS for code in range(_POWERS + 1)]
    powers = [
        math.inf if each >= layout.infinite else math.ldexp(1.0, each - layout.bias)
        for each in exponents
    ]
    powers[0] = 0.0
    return (*powers, *(-power for power in powers))
