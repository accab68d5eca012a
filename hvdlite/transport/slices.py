"""Allreduce by slices: rank r reduces slice r of everybody's array, in rank order.

Two phases, each an exchange of pieces: everybody's slice r goes to rank r, which reduces
it and sends the outcome to everybody. It moves as many bytes as a ring, does every sum in
the order of the ranks in a type of our choosing, and each slice is reduced once, so every
rank holds the same bits. It serves what MPI's own reductions cannot be trusted with:
16-bit floats (MPI has no such types), narrow integers (vectorised Open MPI saturates
them), booleans, and Adasum.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from hvdlite import halves
from hvdlite.reduction import ReduceOp, Scaling, accumulator
from hvdlite.transport.base import Transport
from hvdlite.transport.reduce import reduce_into


def allreduce(transport: Transport, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
    """Do what `Transport.allreduce` promises, with the transport's ``alltoall`` alone."""
    bounds = slice_bounds(send.size, transport.size)
    mine = bounds[transport.rank + 1] - bounds[transport.rank]
    rows = np.empty((transport.size, mine), send.dtype)
    transport.alltoall(_pieces(send, bounds), [_bytes(row) for row in rows])
    reduced = rows[0]
    if op is ReduceOp.ADASUM:
        halves.narrow(scaling.apply(_adasum(transport, rows)), reduced)
    else:
        reduce_into(reduced, list(rows), op, scaling)
    transport.allgather(_bytes(reduced), _pieces(result, bounds))


def slice_bounds(length: int, parts: int) -> list[int]:
    """Cut ``length`` elements into ``parts`` slices whose sizes differ by at most one."""
    base, longer = divmod(length, parts)
    return [part * base + min(part, longer) for part in range(parts + 1)]


def _bytes(array: Any) -> Any:
    return array.view(np.uint8)


def _pieces(array: Any, bounds: list[int]) -> list[Any]:
    return [_bytes(array[start:stop]) for start, stop in itertools.pairwise(bounds)]


def _adasum(transport: Transport, rows: Any) -> Any:
    """Combine neighbours pairwise until one vector is left (Maleki et al. 2020, 2006.02924).

    A vector without a partner goes up unchanged, so any number of ranks will do. Each
    rank holds a slice of all vectors: the scalar products are summed over the ranks.
    """
    wide = np.promote_types(accumulator(rows.dtype), np.float32)
    vectors = [row.astype(wide) for row in rows]
    while len(vectors) > 1:
        pairs = list(zip(vectors[::2], vectors[1::2], strict=False))
        partial = np.array(
            [_products(first, second) for first, second in pairs], np.float64
        ).ravel()
        products = np.empty_like(partial)
        transport.allreduce(partial, products, ReduceOp.SUM, Scaling())
        combined = [
            first * wide.type(_weight(dot, norm1)) + second * wide.type(_weight(dot, norm2))
            for (first, second), (dot, norm1, norm2) in zip(
                pairs, products.reshape(-1, 3), strict=True
            )
        ]
        vectors = combined + vectors[2 * len(pairs) :]
    return vectors[0]


def _products(first: Any, second: Any) -> tuple[float, float, float]:
    a, b = first.astype(np.float64), second.astype(np.float64)
    return float(a @ b), float(a @ a), float(b @ b)


def _weight(dot: float, squared_norm: float) -> float:
    return 1.0 - dot / (2.0 * squared_norm) if squared_norm > 0 else 1.0
