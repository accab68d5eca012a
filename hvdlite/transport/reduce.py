"""Reduction of several arrays into one, in the order given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from hvdlite import float16
from hvdlite.reduction import (
    UFUNCS,
    ReduceOp,
    Scaling,
    accumulator,
    integer_mean,
    integer_sums,
)
from hvdlite.transport.shared_memory.chunks import split

#: Something to do that has been prepared: a function, and what it takes.
Call = tuple[Callable[..., object], tuple[Any, ...]]
#: Prepares the reduction of parts into a result, which may be the first or the second of them.
Reducer = Callable[[Any, Sequence[Any]], list[Call]]

# Elements that stay in a core's own cache from one pass over them to the next.
_BLOCK = 2**16


def reduce_into(result: Any, parts: Sequence[Any], op: ReduceOp, scaling: Scaling) -> None:
    """Write ``scaling.apply(op over the parts)`` into ``result``.

    16-bit floats are accumulated and scaled in float32; the mean of integers is exact, also where
    their sum is out of range. The parts are combined one after the
    other, so whoever reduces the same parts gets the same bits.

    Args:
        result: flat; it may be the first or the second of the parts.
        parts: arrays of the result's size and dtype.
        op: SUM, MIN, MAX or PRODUCT.
        scaling: applied once, at the end.
    """
    perform(reducer(result.dtype, op, scaling)(result, parts))


def perform(calls: Sequence[Call]) -> None:
    """Make calls, in their order."""
    for function, arguments in calls:
        function(*arguments)


def reducer(dtype: np.dtype[Any], op: ReduceOp, scaling: Scaling) -> Reducer:
    """Prepare `reduce_into` for many arrays of a dtype.

    Returns:
        Of a result and parts, makes the calls that reduce them, to be made once, in their order.
    """
    if accumulator(dtype) != dtype:
        return partial(_in_float32, op, scaling)
    if is_integer_mean(dtype, op, scaling):
        return partial(_in_wide_integers, scaling.divisor)
    return partial(_in_blocks, _ufunc(op, dtype), scaling, scaling.is_identity)


def is_integer_mean(dtype: np.dtype[Any], op: ReduceOp, scaling: Scaling) -> bool:
    """Return whether a reduction is a mean whose sum the integers' own type may not hold."""
    divides = scaling.divisor > 1 and scaling.factor == 1.0
    return divides and op is ReduceOp.SUM and dtype.kind in "iu"


def reduce_apart(
    results: Sequence[Any],
    own: Sequence[Any],
    parts: Sequence[Any],
    bounds: Sequence[int],
    position: int,
    op: ReduceOp,
    scaling: Scaling,
) -> None:
    """Do `reduce_into` for results that correspond to consecutive pieces of the parts.

    Args:
        results: flat arrays.
        own: what ``parts[position]`` has, in arrays like the results, or the results themselves.
        parts: arrays of the size of all results together.
        bounds: where each result begins in them, and where the last one ends.
        position: of one's own part.
        op: SUM, MIN, MAX or PRODUCT.
        scaling: applied once, at the end.
    """
    dtype = parts[0].dtype
    if len(parts) == 2 and scaling.is_identity and accumulator(dtype) == dtype:
        # One call for each, and no pass over memory more than it takes.
        theirs = split(parts[1 - position], bounds)
        first, second = (own, theirs) if position == 0 else (theirs, own)
        ufunc = _ufunc(op, dtype)
        for result, a, b in zip(results, first, second, strict=True):
            ufunc(a, b, result)
        return
    total = np.empty(parts[0].size, dtype)
    reduce_into(total, parts, op, scaling)
    for result, piece in zip(results, split(total, bounds), strict=True):
        result[...] = piece


def combine(parts: Sequence[Any], op: ReduceOp, total: Any = None) -> Any:
    """Reduce 16-bit floats to float32, in ``total`` if that is given."""
    total = float16.widen(parts[0], total)
    for part in parts[1:]:
        float16.accumulate(UFUNCS[op], total, part)
    return total


def _in_blocks(
    ufunc: Callable[[Any, Any, Any], object],
    scaling: Scaling,
    is_identity: bool,
    result: Any,
    parts: Sequence[Any],
) -> list[Call]:
    if is_identity and len(parts) == 2:
        return [(ufunc, (*parts, result))]  # one pass
    each: list[tuple[Any, Sequence[Any]]] = [(result, parts)]
    if result.size > _BLOCK:
        blocks = [slice(start, start + _BLOCK) for start in range(0, result.size, _BLOCK)]
        each = [(result[block], [part[block] for part in parts]) for block in blocks]
    calls: list[Call] = []
    for out, (total, *others) in each:
        for part in others:
            calls.append((ufunc, (total, part, out)))
            total = out
        if not is_identity or not others:
            calls.append((scaling.write, (total, out)))
    return calls


def _in_float32(op: ReduceOp, scaling: Scaling, result: Any, parts: Sequence[Any]) -> list[Call]:
    return [
        (_reduce_halves, (result[piece], [part[piece] for part in parts], op, scaling))
        for piece in float16.pieces(result.size)
    ]


def _in_wide_integers(divisor: int, result: Any, parts: Sequence[Any]) -> list[Call]:
    blocks = [slice(start, start + _BLOCK) for start in range(0, result.size, _BLOCK)]
    return [
        (_average_integers, (result[block], [part[block] for part in parts], divisor))
        for block in blocks
    ]


def _average_integers(result: Any, parts: Sequence[Any], divisor: int) -> None:
    result[...] = integer_mean(integer_sums(parts, divisor), divisor)


def _reduce_halves(result: Any, parts: Sequence[Any], op: ReduceOp, scaling: Scaling) -> None:
    is_sum = result.dtype == np.float16 and op is ReduceOp.SUM and scaling.factor == 1.0
    if is_sum and float16.add_float16(parts, scaling.divisor, result):
        return
    total = combine(parts, op, float16.scratch(result.size))
    float16.narrow(scaling.apply(total), result)


def _ufunc(op: ReduceOp, dtype: np.dtype[Any]) -> Callable[[Any, Any, Any], object]:
    """A ufunc of two operands and the output."""
    if dtype.kind == "b":
        return np.logical_or if op in (ReduceOp.SUM, ReduceOp.MAX) else np.logical_and
    if op in (ReduceOp.MIN, ReduceOp.MAX):  # which want the output by its name
        return _smaller if op is ReduceOp.MIN else _larger
    return UFUNCS[op]


def _smaller(a: Any, b: Any, out: Any) -> None:
    np.minimum(a, b, out=out)


def _larger(a: Any, b: Any, out: Any) -> None:
    np.maximum(a, b, out=out)
