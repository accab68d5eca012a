"""Reduction of several arrays into one, in the order given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite import halves
from hvdlite.reduction import UFUNCS, ReduceOp, Scaling, accumulator
from hvdlite.transport.chunks import split

# Elements that stay in a core's own cache from one pass over them to the next.
_BLOCK = 2**16


def reduce_into(result: Any, parts: Sequence[Any], op: ReduceOp, scaling: Scaling) -> None:
    """Write ``scaling.apply(op over the parts)`` into ``result``.

    16-bit floats are accumulated and scaled in float32. The parts are combined one after the
    other, so whoever reduces the same parts gets the same bits.

    Args:
        result: flat; it may be the first or the second of the parts.
        parts: arrays of the result's size and dtype.
        op: SUM, MIN, MAX or PRODUCT.
        scaling: applied once, at the end.
    """
    if accumulator(result.dtype) != result.dtype:
        for piece in halves.pieces(result.size):
            _reduce_halves(result[piece], [part[piece] for part in parts], op, scaling)
        return
    if len(parts) == 2 and scaling.is_identity:
        combine(parts, op, result)  # one pass
        return
    for start in range(0, result.size, _BLOCK):
        piece = slice(start, start + _BLOCK)
        out = result[piece]
        scaled = scaling.apply(combine([part[piece] for part in parts], op, out))
        if scaled is not out:
            out[...] = scaled


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
    if len(results) == 1:
        parts = list(parts)
        if position < 2:  # else it could be overwritten before it is read
            parts[position] = own[0]
        reduce_into(results[0], parts, op, scaling)
        return
    dtype = parts[0].dtype
    plain = dtype.kind != "b" and accumulator(dtype) == dtype
    if plain and len(parts) == 2 and scaling.is_identity:
        # One call for each, and no pass over memory more than it takes.
        theirs = split(parts[1 - position], bounds)
        first, second = (own, theirs) if position == 0 else (theirs, own)
        reduce = UFUNCS[op]
        for result, a, b in zip(results, first, second, strict=True):
            reduce(a, b, out=result)
        return
    total = np.empty(parts[0].size, dtype)
    reduce_into(total, parts, op, scaling)
    for result, piece in zip(results, split(total, bounds), strict=True):
        result[...] = piece


def combine(parts: Sequence[Any], op: ReduceOp, result: Any = None) -> Any:
    """Reduce parts in their accumulator's type, in ``result``, of that type, if it is given.

    A part alone is copied, and not to ``result`` if it is of that type itself.
    """
    dtype = parts[0].dtype
    ufunc = _logical(op) if dtype.kind == "b" else UFUNCS[op]
    if accumulator(dtype) != dtype:
        total = halves.widen(parts[0], result)
        for part in parts[1:]:
            halves.accumulate(ufunc, total, part)
        return total
    if len(parts) == 1:
        return parts[0].copy()
    total = ufunc(parts[0], parts[1], out=result)
    for part in parts[2:]:
        ufunc(total, part, out=total)
    return total


def _reduce_halves(result: Any, parts: Sequence[Any], op: ReduceOp, scaling: Scaling) -> None:
    is_sum = result.dtype == np.float16 and op is ReduceOp.SUM and scaling.factor == 1.0
    if is_sum and halves.add_float16(parts, scaling.divisor, result):
        return
    total = combine(parts, op, halves.scratch(result.size))
    halves.narrow(scaling.apply(total), result)


def _logical(op: ReduceOp) -> np.ufunc:
    return np.logical_or if op in (ReduceOp.SUM, ReduceOp.MAX) else np.logical_and
