"""Adasum: the adaptive sum of gradients (Maleki et al. 2020, arXiv:2006.02924)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdlite.base import float16
from hvdlite.base.arrays import slice_bounds
from hvdlite.base.reduction import ReduceOp, Scaling, accumulator

if TYPE_CHECKING:
    from hvdlite.transport.transport import Transport


def adasum(
    transport: Transport, send: Any, result: Any, scaling: Scaling, tensors: Sequence[int]
) -> None:
    """Write ``scaling.apply(the adaptive sum over all ranks' send)`` into ``result``.

    Each tensor in the array is combined by itself, as the paper does with layers: the share of
    two gradients that is kept depends on the angle between them, which differs from layer to
    layer.

    Args:
        send: flat floats.
        result: of the same size and dtype; it may be ``send``.
        tensors: the offset of each tensor in the array, and the end of the last one.
    """
    rows = transport.scatter_slices(send)
    begin = slice_bounds(send.size, transport.size)[transport.rank]
    mine = np.clip(np.asarray(tensors) - begin, 0, rows.shape[1])
    with np.errstate(over="ignore", invalid="ignore"):  # inf and nan go on as they are
        float16.narrow(scaling.apply(_combine_pairwise(transport, rows, mine)), rows[0])
    transport.gather_slices(rows[0], result)


def _combine_pairwise(transport: Transport, rows: Any, tensors: Any) -> Any:
    """Combine neighbours pairwise until one vector is left.

    A vector without a partner goes up unchanged, so any number of ranks will do. Each rank holds
    a slice of all vectors: the scalar products are summed over the ranks.
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
    """Return the scalar products a·b, a·a and b·b of each tensor's part, in rows."""
    products = np.zeros((3, len(tensors) - 1))
    for number in np.flatnonzero(np.diff(tensors)):
        piece = slice(tensors[number], tensors[number + 1])
        a, b = first[piece].astype(np.float64), second[piece].astype(np.float64)
        products[:, number] = a @ b, a @ a, b @ b
    return products


def _weights(dot: Any, squared_norm: Any, lengths: Any, wide: np.dtype[Any]) -> Any:
    """Return the share of a vector that is kept, for each of its elements."""
    nonzero = squared_norm > 0
    kept = 1.0 - dot / (2.0 * np.where(nonzero, squared_norm, 1.0))
    return np.repeat(np.where(nonzero, kept, 1.0).astype(wide), lengths)
