"""Strategies that send every value in 2 to 8 bits; `signs` has those of one or two bits."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from hvdlite.base.arguments import check_count
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.codec import Codec, add_by_slices, add_gathered, greatest_magnitude
from hvdlite.compression.messages import agree, find_not_finite
from hvdlite.compression.packing import pack, packed_size, unpack
from hvdlite.compression.strategy import Strategy
from hvdlite.transport import Transport

# Values in the largest block that can be asked for.
_LARGEST_BLOCK = 2**16
# The largest codes of QSGD, of 8-bit integers and of 8-bit floats.
_MOST_LEVELS = 127
_LARGEST_INTEGER = 127
_LARGEST_FLOAT8 = 448.0
_HALF_WORD = np.uint32(16)
_LOWER_HALF = np.uint32(0xFFFF)
# Codes of natural compression without the sign: 0, and this many powers of two.
_POWERS = 127
_SIGN = 0x80


class Quantized(Strategy, Codec):
    """Base of strategies that encode values in fewer bytes, and add them up after decoding.

    Infinities and NaN are refused: they would spread to all values that share their scale, and
    stay in residuals for ever.
    """

    tells_unsent = True
    #: Whether each rank adds up a slice and sends the sum, encoded again, to the others, instead
    #: of all ranks sending everything to all: less traffic with more than two ranks, and a second
    #: loss.
    by_slices: ClassVar[bool] = False
    #: Whether each ``"tensor"`` has a message of its own, or the whole ``"bucket"`` has one.
    per: str = "bucket"
    #: Seed of the random numbers that `write` takes; None: it takes none.
    seed: int | None = None

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        agree(bucket, transport, find_not_finite(bucket, bucket.send))
        random = None if self.seed is None else bucket.generator(self.seed, transport.rank)
        if self.by_slices:
            add_by_slices(self, bucket, transport, random)
        else:
            parts = bucket.bounds if self.per == "tensor" else [0, bucket.send.size]
            add_gathered(self, bucket, transport, parts, random)


def round_stochastically(values: Any, levels: int, generator: np.random.Generator) -> Any:
    """Round to integers: up with a probability of the fractional part, so that the mean is exact.

    Random numbers have 24 bits, so that the mean is the value to 2**-24.

    Args:
        values: flat; they are overwritten.
        levels: the greatest integer, 127 at most, and the negative of the least one. Values
            beyond are clipped to these.
        generator: of one random number for each value.

    Returns:
        The integers plus ``levels``, as uint8.
    """
    below = np.floor(values)
    values -= below
    below += generator.random(values.size, np.float32) < values
    np.clip(below, -levels, levels, out=below)
    below += levels
    return below.astype(np.uint8)


class Blockwise(Quantized):
    """Base of strategies whose codes are relative to a scale of each block, in the values' dtype.

    A message is that of its pieces, each of which has all scales first and then all codes. The
    values of a ``block`` share a scale.
    """

    @property
    def bits(self) -> int:
        """Return the number of bits of a code."""
        return 8

    def __post_init__(self) -> None:
        check_count("block", self.block, 1, _LARGEST_BLOCK)

    def body(self, count: int, dtype: np.dtype[Any]) -> int:
        return self._scales(count, dtype) + packed_size(count, self.bits)

    def write(self, values: Any, head: Any, out: Any, generator: Any) -> None:
        """Divide by the greatest magnitude of a block, so that nothing overflows or underflows."""
        starts = np.arange(0, values.size, self.block)
        ratios = np.abs(values)
        greatest = np.maximum.reduceat(ratios, starts)
        ratios[...] = values
        _by_block(np.divide, ratios, np.where(greatest == 0, 1, greatest), self.block)
        end = self._scales(values.size, values.dtype)
        scales = self.write_ratios(ratios, greatest, out[end:], generator)
        out[:end] = scales.view(np.uint8)

    def read(self, body: Any, head: Any, out: Any) -> None:
        end = self._scales(out.size, out.dtype)
        scales = np.frombuffer(body[:end].tobytes(), out.dtype)
        self.read_ratios(body[end:], out)
        _by_block(np.multiply, out, scales, self.block)

    @abstractmethod
    def write_ratios(self, ratios: Any, greatest: Any, out: Any, generator: Any) -> Any:
        """Write codes, and return the blocks' scales.

        Args:
            ratios: of the values to the greatest magnitude in their block; they may be changed.
            greatest: these magnitudes.
            out: receives the codes; flat, uint8.
        """

    @abstractmethod
    def read_ratios(self, codes: Any, out: Any) -> None:
        """Write the values of codes, relative to the scales."""

    def _scales(self, count: int, dtype: np.dtype[Any]) -> int:
        return -(-count // self.block) * dtype.itemsize


def _by_block(ufunc: np.ufunc, values: Any, scales: Any, block: int) -> None:
    """Compute ``ufunc(values, scale of their block)`` in place; the last block may be shorter."""
    whole = values.size // block
    rows, rest = values[: whole * block].reshape(whole, block), values[whole * block :]
    ufunc(rows, scales[:whole, None], out=rows)
    ufunc(rest, scales[whole:], out=rest)


@lru_cache
def _float8_codes() -> Any:
    """Return the codes of all floats whose lower half is 0."""
    floats = np.arange(2**16, dtype=np.uint32) << _HALF_WORD
    with np.errstate(all="ignore"):
        return floats.view(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


@lru_cache
def _float8_ratios() -> tuple[float, ...]:
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return tuple((values / _LARGEST_FLOAT8).tolist())


@dataclass(frozen=True, repr=False)
class Float8(Blockwise):
    """Send 8-bit floats (e4m3), with a scale for each block.

    Sign, 4 bits of exponent, 3 of fraction: Micikevicius et al. 2022, arXiv:2209.05433. Each block
    of values is scaled so that its greatest magnitude is the type's largest number, 448, and
    rounded to nearest, ties to even; a block of zeros stays zero. Values below 2**-19 of the
    greatest become 0.

    Args:
        block: the number of values that share a scale, which is as wide as they are (for 16-bit
            gradients: 32 bits).

    Raises:
        ValueError: ``block`` is out of range.
    """

    block: int = 256

    by_slices = True

    def write_ratios(self, ratios: Any, greatest: Any, out: Any, generator: Any) -> Any:
        """Look up codes by the upper half of a float32.

        The lower half matters only if it decides a tie, because it is not 0; this is recorded in
        the last bit of the upper half, which is below all bits that matter otherwise. It is ten
        times as fast as the conversion of ``ml_dtypes``.
        """
        ratios *= _LARGEST_FLOAT8
        words = ratios.astype(np.float32, copy=False).view(np.uint32)
        lower = words & _LOWER_HALF
        lower += _LOWER_HALF
        words |= lower
        words >>= _HALF_WORD
        np.take(_float8_codes(), words.astype(np.uint16), out=out, mode="clip")
        return greatest

    def read_ratios(self, codes: Any, out: Any) -> None:
        unpack(_float8_ratios(), codes, out)


@dataclass(frozen=True, repr=False)
class Blockwise8(Blockwise):
    """Send 8-bit integers, with a scale for each block.

    Dettmers et al. 2021, arXiv:2110.02861, with linear codes as in DeepSpeed: each value becomes
    one of 255 equally spaced ones, round(127 x / max|x|), ties to even; the greatest magnitude of
    a block is exact, and a block of zeros stays zero.

    Args:
        block: the number of values that share a scale, which is as wide as they are (for 16-bit
            gradients: 32 bits).

    Raises:
        ValueError: ``block`` is out of range.
    """

    block: int = 256

    by_slices = True

    def write_ratios(self, ratios: Any, greatest: Any, out: Any, generator: Any) -> Any:
        ratios *= _LARGEST_INTEGER
        np.rint(ratios, out=ratios)
        np.copyto(out.view(np.int8), ratios, casting="unsafe")
        return greatest

    def read_ratios(self, codes: Any, out: Any) -> None:
        """Divide: 127 is exactly 1."""
        np.copyto(out, codes.view(np.int8))
        out /= _LARGEST_INTEGER


@dataclass(frozen=True, repr=False)
class QSGD(Blockwise):
    """Send signs and multiples of a fraction of the block's norm, rounded stochastically.

    Alistarh et al. 2017, arXiv:1610.02132: ``|x| / norm`` is rounded up or down to one of the
    numbers 0, 1/levels, 2/levels, ..., 1, without bias: its mean is the value. Norms are Euclidean.
    Instead of the paper's Elias code each value takes 2 bits (1 level), 4 (up to 7 levels) or 8
    (up to 127). A norm that is out of the type's range leaves infinities or NaN in its block.

    Args:
        levels: above 0; 1, 7 and 127 make the most of the bits.
        block: the number of values that share a norm; the error grows with its square root. A
            norm is as wide as values are (for 16-bit gradients: 32 bits).
        seed: of the random numbers, which differ by rank, step and bucket.

    Raises:
        ValueError: an argument is out of range.
    """

    levels: int = 7
    block: int = 512
    seed: int = 0

    stateful = True

    def __post_init__(self) -> None:
        check_count("levels", self.levels, 1, _MOST_LEVELS)
        super().__post_init__()
        check_count("seed", self.seed, 0)

    @property
    def bits(self) -> int:
        return 2 if self.levels == 1 else 4 if self.levels <= 7 else 8

    def write_ratios(self, ratios: Any, greatest: Any, out: Any, generator: Any) -> Any:
        """Divide by the norm, too, and round."""
        starts = np.arange(0, ratios.size, self.block)
        norms = np.sqrt(np.add.reduceat(ratios * ratios, starts))
        _by_block(np.divide, ratios, np.where(norms == 0, 1, norms) / self.levels, self.block)
        pack(round_stochastically(ratios, self.levels, generator), self.bits, out)
        return greatest * norms

    def read_ratios(self, codes: Any, out: Any) -> None:
        unpack(_level_ratios(self.levels, self.bits), codes, out)


@lru_cache
def _level_ratios(levels: int, bits: int) -> tuple[float, ...]:
    return tuple((code - levels) / levels for code in range(2**bits))


@dataclass(frozen=True, repr=False)
class Natural(Quantized):
    """Send signs and powers of two, rounded stochastically, in 8 bits.

    Natural compression, Horváth et al. 2019, arXiv:1905.10988: a value between two powers of two
    becomes one of them, without bias: its mean is the value. Sums are compressed in the same way,
    as the paper does on the way back from its master.

    The paper sends the sign and the 8 bits of the exponent. Here a byte suffices, with 127 powers
    of two, the largest being the least that no value exceeds. Values that would become a smaller
    one become 0: less than 2**-126 of the greatest value, beside which they are invisible in a
    float32 (2**-24) or a float64 (2**-53). Unless gradients exceed 1, all powers of two that are
    normal numbers of float32 are available.

    Args:
        seed: of the random numbers, which differ by rank, step and bucket.

    Raises:
        ValueError: ``seed`` is negative.
    """

    seed: int = 0

    stateful = True
    by_slices = True

    def __post_init__(self) -> None:
        check_count("seed", self.seed, 0)

    def head(self, dtype: np.dtype[Any]) -> int:
        """Return 2: the head is the biased exponent of the largest power of two."""
        return 2

    def body(self, count: int, dtype: np.dtype[Any]) -> int:
        return count

    def measure(self, values: Any, head: Any) -> None:
        """Round the greatest magnitude up, unless that would be infinite."""
        fraction, exponent, word = _layout(values.dtype)
        greatest = greatest_magnitude(values)
        bits = int(np.array(greatest, values.dtype).view(word))
        top = (bits + (1 << fraction) - 1) >> fraction
        if np.isfinite(greatest):
            top = min(top, (1 << exponent) - 2)
        head[...] = np.array([top], np.uint16).view(np.uint8)

    def write(self, values: Any, head: Any, out: Any, generator: Any) -> None:
        """Add a random number to the fraction, whose carry rounds the exponent up."""
        fraction, exponent, word = _layout(values.dtype)
        added = generator.random(values.size, values.dtype)
        added *= 2**fraction
        bits = added.astype(word)
        bits += values.view(word)
        bits >>= fraction
        bits &= (2 << exponent) - 1
        np.take(_power_codes(head.view(np.uint16).item(), exponent), bits, out=out, mode="clip")

    def read(self, body: Any, head: Any, out: Any) -> None:
        _, exponent, _ = _layout(out.dtype)
        unpack(_powers(head.view(np.uint16).item(), exponent), body, out)


def _layout(dtype: np.dtype[Any]) -> tuple[int, int, np.dtype[Any]]:
    """Return a float's bits of fraction and of exponent, and the integer of its size."""
    info = np.finfo(dtype)
    return info.nmant, info.nexp, np.dtype(f"i{dtype.itemsize}")


@lru_cache
def _power_codes(top: int, bits: int) -> Any:
    """Return the codes of all signs and biased exponents of so many bits."""
    exponents = np.arange(1 << bits)
    codes = np.clip(exponents - (top - _POWERS), 0, _POWERS)
    codes[0] = 0
    return np.concatenate([codes, codes + _SIGN]).astype(np.uint8)


@lru_cache
def _powers(top: int, bits: int) -> tuple[float, ...]:
    infinite, bias = (1 << bits) - 1, (1 << bits - 1) - 1
    exponents = [code + top - _POWERS for code in range(_POWERS + 1)]
    powers = [math.inf if each >= infinite else math.ldexp(1.0, each - bias) for each in exponents]
    powers[0] = 0.0
    return (*powers, *(-power for power in powers))
