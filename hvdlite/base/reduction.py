"""The reductions, and the scaling of their arguments and results.

`Scaling` divides an average. The factors for gradients are from `Reduction.scalings`
(``compression/bucket.py``); the compression strategy applies them before the sum or after it.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from hvdlite.base import float16


class ReduceOp(IntEnum):
    """A reduction of all ranks' values; the first six numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
    BITWISE_AND = 6  # this one and the next two: of integers and booleans
    BITWISE_OR = 7
    BITWISE_XOR = 8

    __hash__ = int.__hash__  # Enum's is written in Python, and called with every operation


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

#: The element-wise reductions. An average is a sum that is divided afterwards.
UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BITWISE_AND: np.bitwise_and,
    ReduceOp.BITWISE_OR: np.bitwise_or,
    ReduceOp.BITWISE_XOR: np.bitwise_xor,
}
_BITWISE = ReduceOp.BITWISE_AND, ReduceOp.BITWISE_OR, ReduceOp.BITWISE_XOR


def choose(average: bool | None, op: ReduceOp | int | None) -> ReduceOp:
    """Resolve Horovod's two ways to name a reduction; neither means Average."""
    if average is not None:
        if op is not None:
            raise ValueError("give op= or average=, not both; average= is deprecated")
        warnings.warn(
            "average= is deprecated; use op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=_users_level(),
        )
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    if op is None:
        return ReduceOp.AVERAGE
    if type(op) is ReduceOp:
        return op
    if op in range(ReduceOp.BITWISE_AND):
        return ReduceOp(op)
    raise ValueError(
        f"op={op!r} is not a reduction; use hvd.Average, Sum, Adasum, Min, Max or Product"
    )


def _users_level() -> int:
    """Return the ``stacklevel`` of the first line outside of hvdlite, for a warning of a caller."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith("hvdlite."):
        level, frame = level + 1, frame.f_back
    return level


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which values of ``dtype`` are added up and scaled.

    16-bit floats are accumulated in float32; every other type in itself.
    """
    if dtype.itemsize < 4 and is_floating(dtype):
        return np.dtype(np.float32)
    return dtype


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Return whether ``dtype`` is a real float, bfloat16 included (numpy's kind V)."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


@lru_cache  # called for every tensor that is reduced
def check(op: ReduceOp, dtype: np.dtype[Any]) -> None:
    """Refuse a reduction that has no meaning for ``dtype``."""
    if dtype.kind not in "biufc" and dtype.name != "bfloat16":
        raise ValueError(
            f"arrays of dtype {dtype} cannot be reduced; use bool, integers, floats or complex"
        )
    refused = {
        "c": (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.ADASUM, *_BITWISE),
        "f": _BITWISE,
        "V": _BITWISE,  # bfloat16
        "b": (ReduceOp.AVERAGE, ReduceOp.ADASUM),
        "i": (ReduceOp.ADASUM,),
        "u": (ReduceOp.ADASUM,),
    }
    if op in refused.get(dtype.kind, ()):
        raise ValueError(f"{op.name.capitalize()} is not defined for dtype {dtype}")


@dataclass(frozen=True)
class Scaling:
    """Multiplication by ``factor`` and division by ``divisor``, in a suitable type.

    16-bit floats are scaled in float32. Integers are scaled in float64 and cut towards
    zero. A division alone is done as one: it is exact for every integer, and the mean of
    equal floats is their value. The mean of integers whose sum does not fit their type takes
    `integer_sums` and `integer_mean`.
    """

    factor: float = 1.0
    divisor: int = 1

    @cached_property
    def is_identity(self) -> bool:
        """Tell whether values stay unchanged."""
        return self.factor == 1.0 and self.divisor == 1

    def apply(self, values: Any) -> Any:
        """Return scaled ``values``, in their own dtype; in the same array if possible."""
        if self.is_identity:
            return values
        dtype = values.dtype
        if dtype.kind in "iub":
            return self._scale_integers(values).astype(dtype)
        if accumulator(dtype) != dtype:
            return self._scale_float16(values)
        self.write(values, values)
        return values

    def write(self, values: Any, out: Any) -> None:
        """Write the result of `apply` into ``out``, for a type that is its own `accumulator`.

        ``out`` has the size and the type of ``values``, and may be the same array.
        """
        dtype = values.dtype
        if self.is_identity:
            np.copyto(out, values)
        elif dtype.kind in "iub":
            out[...] = self._scale_integers(values)
        elif self.factor != 1.0:
            np.multiply(values, dtype.type(self.factor / self.divisor), out=out)
        elif dtype.kind == "f" and self.divisor & (self.divisor - 1) == 0:
            # The same bits as a division, in less than half of its time.
            np.multiply(values, dtype.type(1.0 / self.divisor), out=out)
        else:
            np.divide(values, dtype.type(self.divisor), out=out)

    def _scale_float16(self, values: Any) -> Any:
        flat, result = values.reshape(-1), np.empty(values.size, values.dtype)
        for piece in float16.pieces(flat.size):
            wide = float16.widen(flat[piece], float16.scratch(piece.stop - piece.start))
            float16.narrow(self.apply(wide), result[piece])
        return result.reshape(values.shape)

    def _scale_integers(self, values: Any) -> Any:
        if self.factor == 1.0:
            # Wide enough for the divisor, too: there may be more ranks than fit an int8.
            values = values.astype(np.uint64 if values.dtype.kind == "u" else np.int64, copy=False)
            return (values - np.fmod(values, self.divisor)) // self.divisor
        return scale_integers(values, self.factor, self.divisor)


def check_factor(name: str, factor: Any, dtype: np.dtype[Any]) -> float:
    """Return a factor as a float, if values of ``dtype`` can be multiplied by it."""
    if type(factor) is float and factor == 1.0:
        return factor
    try:
        number = None if isinstance(factor, str | bytes) else float(factor)
    except (TypeError, ValueError):
        number = None
    if number is None or not math.isfinite(number):
        raise ValueError(f"{name}={factor!r} is not a finite number; use one such as 0.5")
    if dtype.kind in "iu" and abs(number) > 2.0 ** _value_bits(dtype):
        raise ValueError(
            f"{name}={factor!r} takes integers beyond the range of {dtype.name}; use a smaller "
            "factor, or convert the values to a float"
        )
    return number


def scales_integers(dtype: np.dtype[Any], prescale: float, postscale: float) -> bool:
    """Return whether integers are multiplied, which is computed in float64."""
    return (prescale != 1.0 or postscale != 1.0) and dtype.kind in "iu"


def scale_integers(values: Any, factor: float, divisor: int = 1) -> Any:
    """Return ``values * factor / divisor`` in float64, cut towards zero."""
    wide = values.astype(np.float64)
    wide *= factor
    wide /= divisor
    return np.trunc(wide, out=wide)


def first_beyond(values: Any, dtype: np.dtype[Any]) -> int:
    """Return the index of the first float64 that an integer type cannot hold, or -1."""
    end = 2.0 ** _value_bits(dtype)
    fits = (values >= (-end if dtype.kind == "i" else 0.0)) & (values < end)
    return -1 if fits.all() else int(np.argmin(fits))  # a NaN does not fit, either


def _value_bits(dtype: np.dtype[Any]) -> int:
    """Return the bits of an integer type without its sign."""
    return 8 * dtype.itemsize - (dtype.kind == "i")


def integer_sums(parts: Sequence[Any], divisor: int) -> list[Any]:
    """Add up integers so that their mean is exact, although their sum may not fit their type.

    Integers of up to 32 bits are added up in int64. Those of 64 bits are split into multiples
    of the divisor and what remains: the sums of both fit, if the divisor is the number of all
    ranks. The results may be added to those of other parts before `integer_mean`.
    """
    if parts[0].dtype.itemsize < 8:
        total = parts[0].astype(np.int64)
        for part in parts[1:]:
            total += part
        return [total]
    multiples, remains = np.zeros_like(parts[0]), np.zeros_like(parts[0])
    by = parts[0].dtype.type(divisor)
    for part in parts:
        quotient = part // by  # rounded down, so that what remains is not negative
        multiples += quotient
        remains += part - quotient * by
    return [multiples, remains]


def integer_mean(sums: Sequence[Any], divisor: int) -> Any:
    """Return the mean, cut towards zero, from the `integer_sums` over all ranks."""
    if len(sums) == 1:
        return Scaling(1.0, divisor).apply(sums[0])
    multiples, remains = sums
    by = multiples.dtype.type(divisor)
    mean = multiples + remains // by
    if mean.dtype.kind == "i":
        mean += (mean < 0) & (remains % by != 0)
    return mean
