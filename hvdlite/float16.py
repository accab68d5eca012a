"""Conversion between 16-bit floats and float32 at the speed of vectorised integer arithmetic.

numpy converts float16 one number at a time: 1.6 ns to widen, 2.5 ns to narrow, and 3 to 60 ns
where numbers are subnormal, as small gradients are. In operations of whole arrays on the bits it
takes 0.3 ns and 1 ns, whatever the numbers, and the bits are those of numpy's conversion.

bfloat16 is left to ``ml_dtypes``, which takes 0.1 and 0.4 ns, or 1.7 on other processors.

Where a framework is there that has the processor's own instructions for it, which numpy does not
use, it converts, in 0.2 ns: see `use`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

#: Elements that are converted at a time. Fewer, and the interpreter is noticed: 2**14 take half as
#: long again; more, and they leave the caches for a gain of 5 %.
PIECE = 2**17
# Below, numpy's conversion is over before the first operations on arrays have been called.
_FEW = 2**12


def _constant(value: int | float, dtype: Any) -> Any:
    """Make an operand that numpy need not convert in every call, which takes as long again."""
    return np.array(value).astype(dtype)


# Of float16, and of its bits in their places in a float32.
_INFINITE, _NEGATIVE_INFINITE = 0x7C00, 0xFC00
_FRACTION_SHIFT = _constant(13, np.int32)
_SIGN_AND_MAGNITUDE = _constant(0x8FFFE000, np.int32)
_BIAS = _constant(2.0**112, np.float32)
_LAST_BIT_AND_SIGNS = _constant(0x90000001, np.int32)
_BELOW_HALF = _constant(0xFFF, np.int32)
_TOO_LARGE = _constant(2.0 ** (16 - 112), np.float32)
# At the scale of 2**-112 a sum is a multiple of 2**-136, and float32 holds multiples of 2**-149.
_LARGEST_DIVISOR = 2**13
_SUBNORMAL = 5e-324

# Of the upper halves of float32.
_HALF_WORD = _constant(16, np.uint32)
_SIGN = _constant(0x8000, np.uint16)
_EXPONENT = _constant(0x7F80, np.uint16)
_ROUNDING = _constant(13 << 7, np.uint16)
_EXPONENT_SHIFT = _constant(3, np.uint16)
_REBIAS = _constant(-126 << 10, np.uint16)
# An array, because numpy compares with a single number eight times more slowly.
_NORMAL = np.full(PIECE, 113 << 7, np.uint16)
_OVERFLOW = 143 << 7


# What converts in the place of numpy.
_convert: Callable[[Any, Any], None] | None = None


def use(convert: Callable[[Any, Any], None] | None) -> None:
    """Let a framework convert between float32 and 16-bit floats; the bits must stay the same.

    Args:
        convert: writes the first array's values into the second, which is of the same size; both
            flat, contiguous and writeable, one float32, one float16 or bfloat16. None: numpy's
            operations again.
    """
    global _convert
    _convert = convert


def _converted(values: Any, out: Any) -> bool:
    """Have the framework convert, if there is one, and if this pays."""
    if _convert is None or values.size < _FEW:
        return False
    if {values.dtype.itemsize, out.dtype.itemsize} != {2, 4}:
        return False
    if not (values.flags.carray and out.flags.carray):
        return False
    _convert(values, out)
    return True


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.total = np.empty(PIECE, np.float32)
        self.words = np.empty(PIECE, np.uint32)
        self.signs = np.empty(PIECE, np.uint16)
        self.exponents = np.empty(PIECE, np.uint16)


_scratch = _Scratch()


def pieces(size: int) -> Iterator[slice]:
    """Cut ``size`` elements into slices of `PIECE` at most."""
    for start in range(0, size, PIECE):
        yield slice(start, min(start + PIECE, size))


def scratch(size: int) -> Any:
    """Return a float32 array that this thread uses again and again.

    Args:
        size: elements; `PIECE` at most.
    """
    return _scratch.total[:size]


def widen(values: Any, out: Any = None) -> Any:
    """Convert 16-bit floats to float32, which holds all of them exactly.

    Args:
        values: flat, float16 or bfloat16; read only.
        out: of the same size; None: a new array. Other dtypes than these are converted by numpy.

    Returns:
        ``out``.
    """
    if out is None:
        out = np.empty(values.size, np.float32)
    if _converted(values, out):
        return out
    fast = values.dtype == np.float16 and out.dtype == np.float32 and values.size >= _FEW
    if not fast or _flushes_subnormals():
        np.copyto(out, values)
        return out
    for piece in pieces(values.size):
        _widen(values[piece], out[piece])
    return out


def accumulate(ufunc: np.ufunc, total: Any, values: Any) -> None:
    """Do ``ufunc(total, widened values)`` in place, without memory for all widened values.

    Args:
        ufunc: of two operands.
        total: flat, float32.
        values: of the same size, float16 or bfloat16; read only.
    """
    for piece in pieces(values.size):
        part = total[piece]
        ufunc(part, widen(values[piece], _scratch.words.view(np.float32)[: part.size]), out=part)


def narrow(values: Any, out: Any) -> None:
    """Round float32 to 16-bit floats: to the nearest, of two to the even one.

    What is out of range becomes infinite, NaN stays NaN.

    Args:
        values: flat, float32; read only.
        out: of the same size, float16 or bfloat16. Other dtypes than these are converted by numpy.
    """
    if _converted(values, out):
        return
    if out.dtype != np.float16 or values.dtype != np.float32 or values.size < _FEW:
        np.copyto(out, values, casting="unsafe")
        return
    for piece in pieces(values.size):
        _narrow(values[piece], out[piece])


def add_float16(parts: Sequence[Any], divisor: int, out: Any) -> bool:
    """Write a sum divided by a power of two, faster than by `widen`, `accumulate` and `narrow`.

    The bits of a float16, in their places in a float32, stand for its value times 2**-112, and
    are added as well at that scale: what is subnormal there is a multiple of 2**-24 * 2**-112,
    and exact. Rounding is one and the same shift for all numbers, subnormal or not.

    Args:
        parts: flat, float16, of the same size, `PIECE` at most; read only.
        divisor: of their sum, which is accumulated in float32 in the order given.
        out: float16; it may be one of the parts.

    Returns:
        False: left undone, because the way does not pay or fit: few or infinite numbers, NaN, a
        sum out of range, another divisor than a power of two, or one that would lose bits.
    """
    size = out.size
    divides_exactly = divisor & (divisor - 1) == 0 and divisor <= _LARGEST_DIVISOR
    if size < _FEW or not divides_exactly or _flushes_subnormals():
        return False
    if not all(map(_is_finite, parts)):
        return False
    total, other = _scratch.total[:size], _scratch.words[:size].view(np.float32)
    _place(parts[0], total)
    for part in parts[1:]:
        _place(part, other)
        np.add(total, other, out=total)
    if divisor > 1:
        np.multiply(total, np.float32(1.0 / divisor), out=total)
    if len(parts) > divisor and not _is_below(total, _TOO_LARGE):
        return False
    _round(total.view(np.int32), other.view(np.int32), out.view(np.uint16))
    return True


def _flushes_subnormals() -> bool:
    """Whether this thread's processor takes subnormal numbers for 0, as frameworks can have it."""
    return _SUBNORMAL * 2.0**100 == 0.0


def _is_finite(values: Any) -> bool:
    """Whether no float16 is infinite or NaN."""
    greatest = np.maximum.reduce(values.view(np.int16))
    lowest = np.maximum.reduce(values.view(np.uint16))
    return bool(greatest < _INFINITE and lowest < _NEGATIVE_INFINITE)


def _is_below(values: Any, limit: Any) -> bool:
    return bool(np.maximum.reduce(values) < limit and np.minimum.reduce(values) > -limit)


def _place(values: Any, out: Any) -> None:
    """Put the bits of finite float16 where float32 has them."""
    words = out.view(np.int32)
    np.copyto(words, values.view(np.int16))
    np.left_shift(words, _FRACTION_SHIFT, out=words)
    np.bitwise_and(words, _SIGN_AND_MAGNITUDE, out=words)


def _widen(values: Any, out: Any) -> None:
    """Correct the bias of the placed bits' exponent by a multiplication.

    A subnormal float16 is a subnormal float32 before, and a normal one after it.
    """
    if _is_finite(values):
        _place(values, out)
        np.multiply(out, _BIAS, out=out)
    else:
        np.copyto(out, values)


def _round(words: Any, last: Any, out: Any) -> None:
    """Round numbers at the scale of placed bits to float16.

    Half of the last place is added, less its last bit where the number is even. What is shifted
    for that has copies of the sign on top: two of them, added too, carry the sign from bit 31 to
    bit 28, which is that of a placed float16's.
    """
    np.right_shift(words, _FRACTION_SHIFT, out=last)
    np.bitwise_and(last, _LAST_BIT_AND_SIGNS, out=last)
    np.add(words, last, out=words)
    np.add(words, _BELOW_HALF, out=words)
    np.right_shift(words, _FRACTION_SHIFT, out=words)
    np.copyto(out, words, casting="unsafe")


def _narrow(values: Any, out: Any) -> None:
    """Let the addition of a power of two do the rounding.

    The last bit of 2**(e+13) in float32 is worth as much as the last bit of a float16 with
    exponent e. Added to a number of that exponent and sign, it leaves the rounded significand
    in the sum's last bits. For subnormal numbers e is that of the smallest normal one.
    Exponents and signs are worked on in 16 bits, which is twice as fast as in 32.
    """
    size = values.size
    words = _scratch.words[:size]
    signs, exponents = _scratch.signs[:size], _scratch.exponents[:size]
    result = out.view(np.uint16)

    np.right_shift(values.view(np.uint32), _HALF_WORD, out=words)
    np.copyto(signs, words, casting="unsafe")
    np.bitwise_and(signs, _EXPONENT, out=exponents)
    if np.maximum.reduce(exponents) >= _OVERFLOW:  # infinite or NaN, too
        np.copyto(out, values, casting="unsafe")
        return
    np.bitwise_and(signs, _SIGN, out=signs)
    np.maximum(exponents, _NORMAL[:size], out=exponents)
    np.add(exponents, _ROUNDING, out=exponents)

    np.bitwise_or(exponents, signs, out=result)
    np.copyto(words, result)
    np.left_shift(words, _HALF_WORD, out=words)
    sums = words.view(np.float32)
    np.add(sums, values, out=sums)
    np.copyto(result, words, casting="unsafe")

    # The significand may have been rounded up to the next power of two: hence sums, not bits.
    np.left_shift(exponents, _EXPONENT_SHIFT, out=exponents)
    np.add(exponents, _REBIAS, out=exponents)
    np.bitwise_or(exponents, signs, out=exponents)
    np.add(result, exponents, out=result)
