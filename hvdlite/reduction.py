"""The six reductions: what they are called and what they compute."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np

from hvdlite import halves


class ReduceOp(IntEnum):
    """How the values of all ranks become one; the numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5

    __hash__ = int.__hash__  # Enum's is written in Python, and asked for with every operation


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
}


def choose(average: bool | None, op: ReduceOp | int | None) -> ReduceOp:
    """Resolve Horovod's two ways to name a reduction; neither means Average.

    Raises:
        ValueError: both are given, or ``op`` is not one of the six.
    """
    if average is not None:
        if op is not None:
            raise ValueError("give op= or average=, not both; average= is deprecated")
        warnings.warn(
            "average= is deprecated; use op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=3,
        )
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    if op is None:
        return ReduceOp.AVERAGE
    if type(op) is ReduceOp:
        return op
    try:
        return ReduceOp(op)
    except ValueError:
        raise ValueError(
            f"op={op!r} is not a reduction; use hvd.Average, Sum, Adasum, Min, Max or Product"
        ) from None


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which values of ``dtype`` are added up and scaled.

    16-bit floats are accumulated in float32; every other type in itself.
    """
    if dtype.itemsize < 4 and is_floating(dtype):
        return np.dtype(np.float32)
    return dtype


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Whether ``dtype`` is a real float, bfloat16 included (which numpy calls kind V)."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


@lru_cache  # asked for every tensor that is reduced
def check(op: ReduceOp, dtype: np.dtype[Any]) -> None:
    """Refuse a reduction that has no meaning for ``dtype``.

    Raises:
        ValueError: e.g. the smallest of complex numbers, the average of booleans.
    """
    if dtype.kind not in "biufc" and dtype.name != "bfloat16":
        raise ValueError(
            f"arrays of dtype {dtype} cannot be reduced; use bool, integers, floats or complex"
        )
    refused = {
        "c": (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.ADASUM),
        "b": (ReduceOp.AVERAGE, ReduceOp.ADASUM),
        "i": (ReduceOp.ADASUM,),
        "u": (ReduceOp.ADASUM,),
    }
    if op in refused.get(dtype.kind, ()):
        raise ValueError(f"{op.name.capitalize()} is not defined for dtype {dtype}")


@dataclass(frozen=True)
class Scaling:
    """Multiplication by ``factor`` and division by ``divisor``, in the type fit for it.

    16-bit floats are scaled in float32. Integers are scaled in float64 and cut towards
    zero. A division alone is done as one: it is exact for every integer, and the mean of
    equal floats is their value.
    """

    factor: float = 1.0
    divisor: int = 1

    @property
    def is_identity(self) -> bool:
        """Whether there is nothing to do."""
        return self.factor == 1.0 and self.divisor == 1

    def apply(self, values: Any) -> Any:
        """Return ``values`` scaled, in their own dtype; the same array where it can be."""
        if self.is_identity:
            return values
        dtype = values.dtype
        if dtype.kind in "iub":
            return self._scale_integers(values).astype(dtype)
        if accumulator(dtype) != dtype:
            return self._scale_halves(values)
        self.write(values, values)
        return values

    def write(self, values: Any, out: Any) -> None:
        """Write the bits of `apply` into ``out``, for a type that is its own `accumulator`.

        Args:
            values: of such a type.
            out: of the same size and type; it may be ``values``.
        """
        dtype = values.dtype
        if self.is_identity:
            np.copyto(out, values)
        elif dtype.kind in "iub":
            out[...] = self._scale_integers(values)
        elif self.factor != 1.0:
            np.multiply(values, dtype.type(self.factor / self.divisor), out=out)
        elif dtype.kind == "f" and self.divisor & (self.divisor - 1) == 0:
            # The same bits as from the division, in less than half of its time.
            np.multiply(values, dtype.type(1.0 / self.divisor), out=out)
        else:
            np.divide(values, dtype.type(self.divisor), out=out)

    def _scale_halves(self, values: Any) -> Any:
        flat, result = values.reshape(-1), np.empty(values.size, values.dtype)
        for piece in halves.pieces(flat.size):
            wide = halves.widen(flat[piece], halves.scratch(piece.stop - piece.start))
            halves.narrow(self.apply(wide), result[piece])
        return result.reshape(values.shape)

    def _scale_integers(self, values: Any) -> Any:
        if self.factor == 1.0:
            # Wide enough for the divisor, too: there may be more ranks than an int8 can count.
            values = values.astype(np.uint64 if values.dtype.kind == "u" else np.int64, copy=False)
            return (values - np.fmod(values, self.divisor)) // self.divisor
        return np.trunc(values.astype(np.float64) * self.factor / self.divisor)
