"""Conversion between 16-bit floats and float32 at the speed of vectorised integer arithmetic.

numpy converts float16 one number at a time. numpy 2.4 on an AMD EPYC takes 1.9 ns to widen and 3.2
to narrow one, and up to 10 and 150 ns for subnormal numbers, which small gradients are. Operations
of whole arrays on the bits take 0.5 and 1.4 ns for any number, with the bits of numpy's conversion.

bfloat16 is left to ``ml_dtypes``, which takes 0.1 and 0.5 ns there. A framework that uses the
processor's own instructions, as numpy does not, is faster still: see `use`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

#: Elements that are converted at a time. With fewer the interpreter takes its share (2**14 take
#: half as long again); with more they leave the caches, for a gain of 5 %.
PIECE = 2**17
# For fewer elements, numpy's conversion takes less time than the calls of operations on arrays.
_FEW = 2**12


def _constant(value: int | float, dtype: Any) -> Any:
    """Return an operand that numpy need not convert in every call, which takes as long again."""
    return np.array(value).astype(dtype)


# Of float16, and of its bits at their positions in a float32.
_INFINITE, _NEGATIVE_INFINITE = 0x7C00, 0xFC00
_FRACTION_SHIFT = _constant(13, np.int32)
_SIGN_AND_MAGNITUDE = _constant(0x8FFFE000, np.int32)
_BIAS = _constant(2.0**112, np.float32)
_SUBNORMAL = 5e-324

# Of the upper halves of float32.
_HALF_WORD = _constant(16, np.uint32)
_SIGN = _constant(0x8000, np.uint16)
_EXPONENT = _constant(0x7F80, np.uint16)
_ROUNDING = _constant(13 << 7, np.uint16)
_EXPONENT_SHIFT = _constant(3, np.uint16)
_REBIAS = _constant(-126 << 10, np.uint16)
# An array, because numpy takes eight times as long to compare with a single number.
_NORMAL = np.full(PIECE, 113 << 7, np.uint16)
_OVERFLOW = 143 << 7


# A framework's conversion, used instead of numpy's.
_convert: Callable[[Any, Any], None] | None = None


def use(convert: Callable[[Any, Any], None] | None) -> None:
    """Use a framework's conversion between float32 and 16-bit floats, with the same bits.

    Args:
        convert: writes the first array's values into the second, which has the same size; both are
            flat, contiguous and writeable, one float32, one float16 or bfloat16. None: use numpy's
            operations again.
    """
    global _convert
    _convert = convert


def _converted(values: Any, out: Any) -> bool:
    """Convert by the framework if there is one and it pays; return whether it was done."""
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
    """Return a float32 array of `PIECE` elements at most, which this thread reuses."""
    return _scratch.total[:size]


def widen(values: Any, out: Any = None) -> Any:
    """Convert 16-bit floats to float32, which holds all of them exactly.

    Args:
        values: flat, float16 or bfloat16; read only.
        out: of the same size; None: a new array. numpy converts dtypes other than these.
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
    """Do ``ufunc(total, widened values)`` in place, without memory for all widened values at once.

    Both are flat and of one size.
    """
    for piece in pieces(values.size):
        part = total[piece]
        ufunc(part, widen(values[piece], _scratch.words.view(np.float32)[: part.size]), out=part)


def narrow(values: Any, out: Any) -> None:
    """Round float32 to 16-bit floats: to the nearest, of two to the even one.

    Numbers out of range become infinite, NaN stays NaN.

    Args:
        values: flat, float32; read only.
        out: of the same size, float16 or bfloat16. numpy converts dtypes other than these.
    """
    if _converted(values, out):
        return
    if out.dtype != np.float16 or values.dtype != np.float32 or values.size < _FEW:
        np.copyto(out, values, casting="unsafe")
        return
    for piece in pieces(values.size):
        _narrow(values[piece], out[piece])


def _flushes_subnormals() -> bool:
    """Return whether this thread treats subnormal numbers as 0, as frameworks may set it."""
    return _SUBNORMAL * 2.0**100 == 0.0


def _is_finite(values: Any) -> bool:
    """Return whether no float16 is infinite or NaN."""
    greatest = np.maximum.reduce(values.view(np.int16))
    lowest = np.maximum.reduce(values.view(np.uint16))
    return bool(greatest < _INFINITE and lowest < _NEGATIVE_INFINITE)


def _widen(values: Any, out: Any) -> None:
    """Shift the bits to their positions, and correct the bias of the exponent by a multiplication.

    A subnormal float16 is a subnormal float32 before the multiplication, and a normal one after it.
    """
    if not _is_finite(values):
        np.copyto(out, values)
        return
    words = out.view(np.int32)
    np.copyto(words, values.view(np.int16))
    np.left_shift(words, _FRACTION_SHIFT, out=words)
    np.bitwise_and(words, _SIGN_AND_MAGNITUDE, out=words)
    np.multiply(out, _BIAS, out=out)


def _narrow(values: Any, out: Any) -> None:
    """Round by the addition of a power of two.

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

    # Added, because the significand may have been rounded up to the next power of two.
    np.left_shift(exponents, _EXPONENT_SHIFT, out=exponents)
    np.add(exponents, _REBIAS, out=exponents)
    np.bitwise_or(exponents, signs, out=exponents)
    np.add(result, exponents, out=result)
