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
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite import float16
from hvdlite.reduction import ReduceOp, Scaling, accumulator
from hvdlite.transport.base import Transport
from hvdlite.transport.reduce import reduce_into


def allreduce(transport: Transport, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
    """Do what `Transport.allreduce` promises, with the transport's ``alltoall`` alone."""
    if op is ReduceOp.ADASUM:
        adasum(transport, send, result, scaling, [0, send.size])
        return
    bounds, rows = _deal(transport, send)
    reduce_into(rows[0], list(rows), op, scaling)
    transport.allgather(_bytes(rows[0]), _pieces(result, bounds))


def adasum(
    transport: Transport, send: Any, result: Any, scaling: Scaling, tensors: Sequence[int]
) -> None:
    """Write ``scaling.apply(the adaptive sum over all ranks' send)`` into ``result``.

    Maleki et al. 2020, arXiv:2006.02924. Each tensor in the array is combined by itself, as
    the paper does with layers: how much of two gradients is kept depends on the angle between
    them, which differs from layer to layer.

    Args:
        transport: of the ranks.
        send: flat floats.
        result: of the same size and dtype; it may be ``send``.
        scaling: applied at the end.
        tensors: where each tensor begins in the array, and where the last one ends.
    """
    bounds, rows = _deal(transport, send)
    mine = np.clip(np.asarray(tensors) - bounds[transport.rank], 0, rows.shape[1])
    with np.errstate(over="ignore", invalid="ignore"):  # inf and nan have to go on as they are
        float16.narrow(scaling.apply(_combine_pairwise(transport, rows, mine)), rows[0])
    transport.allgather(_bytes(rows[0]), _pieces(result, bounds))


def slice_bounds(length: int, parts: int) -> list[int]:
    """Cut ``length`` elements into ``parts`` slices whose sizes differ by at most one."""
    base, longer = divmod(length, parts)
    return [part * base + min(part, longer) for part in range(parts + 1)]


def _deal(transport: Transport, send: Any) -> tuple[list[int], Any]:
    """Where slices begin, and everybody's part of this rank's slice, by rank."""
    bounds = slice_bounds(send.size, transport.size)
    mine = bounds[transport.rank + 1] - bounds[transport.rank]
    rows = np.empty((transport.size, mine), send.dtype)
    transport.alltoall(_pieces(send, bounds), [_bytes(row) for row in rows])
    return bounds, rows


def _bytes(array: Any) -> Any:
    return array.view(np.uint8)


def _pieces(array: Any, bounds: list[int]) -> list[Any]:
    return [_bytes(array[start:stop]) for start, stop in itertools.pairwise(bounds)]


def _combine_pairwise(transport: Transport, rows: Any, tensors: Any) -> Any:
    """Combine neighbours pairwise until one vector is left.

    A vector without a partner goes up unchanged, so any number of ranks will do. Each
    rank holds a slice of all vectors: the scalar products are summed over the ranks.
    """
    wide = np.promote_types(accumulator(rows.dtype), np.float32)
    vectors = [row.astype(wide) for row in rows]
    lengths = np.diff(tensors)
    while len(vectors) > 1:
        pairs = list(zip(vectors[::2], vectors[1::2], strict=False))
        partial = np.array([_products(*pair, tensors) for pair in pairs]).ravel()
        products = np.empty_like(partial)
        transport.allreduce(partial, products, ReduceOp.SUM, Scaling())
        combined = [
            first * _weights(dot, norm1, lengths, wide)
            + second * _weights(dot, norm2, lengths, wide)
            for (first, second), (dot, norm1, norm2) in zip(
                pairs, products.reshape(len(pairs), 3, -1), strict=True
            )
        ]
        vectors = combined + vectors[2 * len(pairs) :]
    return vectors[0]


def _products(first: Any, second: Any, tensors: Any) -> Any:
    """The scalar products a·b, a·a and b·b of each tensor's part, in rows."""
    products = np.zeros((3, len(tensors) - 1))
    for number in np.flatnonzero(np.diff(tensors)):
        piece = slice(tensors[number], tensors[number + 1])
        a, b = first[piece].astype(np.float64), second[piece].astype(np.float64)
        products[:, number] = a @ b, a @ a, b @ b
    return products


def _weights(dot: Any, squared_norm: Any, lengths: Any, wide: np.dtype[Any]) -> Any:
    """How much of a vector is kept, for each of its elements."""
    there = squared_norm > 0
    kept = 1.0 - dot / (2.0 * np.where(there, squared_norm, 1.0))
    return np.repeat(np.where(there, kept, 1.0).astype(wide), lengths)
