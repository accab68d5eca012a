"""Reduction of several host arrays into one, in the order given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from hvdlite.base import float16
from hvdlite.base.reduction import (
    UFUNCS,
    ReduceOp,
    Scaling,
    accumulator,
    integer_mean,
    integer_sums,
)

#: A prepared function call: the function and its arguments.
Call = tuple[Callable[..., object], tuple[Any, ...]]
#: Prepares the reduction of parts into a result, which may be the first or the second of them.
PreparedReduction = Callable[[Any, Sequence[Any]], list[Call]]

# Elements that stay in a core's own cache from one pass over them to the next.
_BLOCK = 2**16


def reduce_into(result: Any, parts: Sequence[Any], op: ReduceOp, scaling: Scaling) -> None:
    """Write ``scaling.apply(op over the parts)`` into ``result``.

    16-bit floats are accumulated and scaled in float32; the mean of integers is exact, even where
    their sum is out of range. The parts are combined in their order, so whoever reduces the same
    parts gets the same bits.

    Args:
        result: flat; it may be the first or the second of the parts.
        parts: arrays of the result's size and dtype.
        op: SUM, MIN, MAX or PRODUCT.
        scaling: applied once, at the end.
    """
    for function, arguments in prepare_reduction(result.dtype, op, scaling)(result, parts):
        function(*arguments)


def perform(calls: Sequence[Call]) -> None:
    """Make prepared calls, in their order."""
    for function, arguments in calls:
        function(*arguments)


@lru_cache  # a program reduces the same way step after step
def prepare_reduction(dtype: np.dtype[Any], op: ReduceOp, scaling: Scaling) -> PreparedReduction:
    """Prepare `reduce_into` for many arrays of a dtype.

    Returns:
        A function that takes a result and parts, and returns the calls that reduce them, to be made
        once, in their order.
    """
    if accumulator(dtype) != dtype:
        return partial(_in_pieces, _reduce_float16, op, scaling)
    if is_integer_mean(dtype, op, scaling):
        return partial(_in_pieces, _average_integers, op, scaling)
    return partial(_in_blocks, binary(op, dtype), scaling.write, scaling.is_identity)


def is_integer_mean(dtype: np.dtype[Any], op: ReduceOp, scaling: Scaling) -> bool:
    """Return whether a reduction is a mean whose sum the integers' own type may not hold."""
    divides = scaling.divisor > 1 and scaling.factor == 1.0
    return divides and op is ReduceOp.SUM and dtype.kind in "iu"


def combine(parts: Sequence[Any], op: ReduceOp, total: Any = None) -> Any:
    """Reduce 16-bit floats to float32, in ``total`` if that is given."""
    total = float16.widen(parts[0], total)
    for part in parts[1:]:
        float16.accumulate(UFUNCS[op], total, part)
    return total


def binary(op: ReduceOp, dtype: np.dtype[Any]) -> Callable[[Any, Any, Any], object]:
    """Return the function that combines two arrays of a dtype and writes into a third."""
    if dtype.kind == "b" and op < ReduceOp.BITWISE_AND:
        return np.logical_or if op in (ReduceOp.SUM, ReduceOp.MAX) else np.logical_and
    # numpy deprecates a positional output of minimum and maximum.
    return {ReduceOp.MIN: _minimum, ReduceOp.MAX: _maximum}.get(op, UFUNCS[op])


def _minimum(a: Any, b: Any, out: Any) -> None:
    np.minimum(a, b, out=out)


def _maximum(a: Any, b: Any, out: Any) -> None:
    np.maximum(a, b, out=out)


def _in_blocks(
    function: Callable[[Any, Any, Any], object],
    scale: Callable[[Any, Any], None],
    is_identity: bool,
    result: Any,
    parts: Sequence[Any],
) -> list[Call]:
    if is_identity and len(parts) == 2:
        return [(function, (*parts, result))]  # one pass
    calls: list[Call] = []
    first, *others = parts
    for start in range(0, result.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        out, total = result[block], first[block]
        for part in others:
            calls.append((function, (total, part[block], out)))
            total = out
        if not is_identity or not others:
            calls.append((scale, (total, out)))
    return calls


def _in_pieces(
    reduce: Callable[..., None], op: ReduceOp, scaling: Scaling, result: Any, parts: Sequence[Any]
) -> list[Call]:
    return [
        (reduce, (result[piece], [part[piece] for part in parts], op, scaling))
        for piece in float16.pieces(result.size)
    ]


def _reduce_float16(result: Any, parts: Sequence[Any], op: ReduceOp, scaling: Scaling) -> None:
    total = combine(parts, op, float16.scratch(result.size))
    float16.narrow(scaling.apply(total), result)


def _average_integers(result: Any, parts: Sequence[Any], op: ReduceOp, scaling: Scaling) -> None:
    result[...] = integer_mean(integer_sums(parts, scaling.divisor), scaling.divisor)
