"""Low-rank approximation of matrices: PowerSGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from hvdlite.base import float16
from hvdlite.base.arguments import check_count, check_positive
from hvdlite.base.arrays import cut
from hvdlite.base.reduction import ReduceOp, is_floating
from hvdlite.compression.bucket import Bucket, Parameter
from hvdlite.compression.messages import agree, find_not_finite
from hvdlite.compression.strategy import DENSE, Strategy
from hvdlite.errors import GradientError
from hvdlite.transport import Transport

_FACTOR = "q"
# Of a vector, a remainder smaller than so many rounding errors is rounding.
_ROUNDING_ERRORS = 10


@dataclass(frozen=True, repr=False)
class PowerSGD(Strategy):
    """Send each matrix as two factors of low rank.

    Vogels, Karimireddy and Jaggi 2019, arXiv:1905.13727: one step of power iteration, which
    starts where the last one ended, finds factors P, of shape (rows, rank), and Q, of shape
    (columns, rank), whose product is near the best of that rank for the average of all ranks'
    gradients. P and Q are summed over the ranks, all of a bucket together.

    It needs error feedback, and is best started at a later step, after dense ones: the start
    iteration of other implementations is `WarmUp` here. ::

        compression = ErrorFeedback(WarmUp(PowerSGD(4), 1000))

    A tensor of more than two axes is a matrix with as many rows as its first axis has, which suits
    PyTorch's convolution kernels, or with as many columns as its last axis has, which suits
    TensorFlow's: whichever makes the factors smaller. All others are sent unchanged: biases, and
    matrices too small or narrow for it to pay.

    Args:
        rank: columns of the factors; at most the rows and columns of a matrix.
        min_compression: a matrix must have so many times as many numbers as its factors, or it is
            sent unchanged.
        warm_start: start each step from the last one's Q; otherwise from random numbers.
        seed: of random numbers, the same on all ranks.

    Raises:
        ValueError: an argument is out of range.
    """

    rank: int = 4
    min_compression: float = 2.0
    warm_start: bool = True
    seed: int = 0

    stateful = True
    tells_unsent = True

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        check_positive("min_compression", self.min_compression)
        check_count("seed", self.seed, 0)

    def choose(self, parameter: Parameter) -> Strategy:
        if len(parameter.shape) < 2 or not parameter.size or not is_floating(parameter.dtype):
            return DENSE
        rows, columns = _matrix_shape(parameter)
        factors = (rows + columns) * self._width(parameter)
        return DENSE if factors * self.min_compression > rows * columns else self

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Sum P, make its columns orthonormal, sum Q and multiply."""
        bad = find_not_finite(bucket, bucket.send)
        matrices = _matrices(bucket, bucket.send)
        # Values that are too large or not finite are refused below, where all ranks see them.
        with np.errstate(over="ignore", invalid="ignore"):
            starts = [self._start(bucket, position) for position in range(len(matrices))]
            products = [np.matmul(matrix, q) for matrix, q in zip(matrices, starts, strict=True)]
            sums = self._sum(bucket, transport, products, bad)
            lefts = [orthonormal(p).astype(p.dtype) for p in sums]
            products = [np.matmul(matrix.T, p) for matrix, p in zip(matrices, lefts, strict=True)]
            rights = self._sum(bucket, transport, products, bad)
        if bucket.unsent is not None:
            unsent = _matrices(bucket, bucket.unsent)
            for left, own, matrix, rest in zip(lefts, products, matrices, unsent, strict=True):
                np.matmul(left, own.T, out=rest)
                np.subtract(matrix, rest, out=rest)
        results = _matrices(bucket, bucket.result)
        for left, right, result in zip(lefts, rights, results, strict=True):
            multiply(left, right, result)
        if self.warm_start:
            for position in set(range(len(rights))) - set(bucket.absent):
                bucket.state.set(position, _FACTOR, rights[position].copy(), is_common=True)

    def _start(self, bucket: Bucket, position: int) -> Any:
        """Return the initial Q, of orthonormal columns, or random ones."""
        parameter, dtype = bucket.parameters[position], bucket.send.dtype
        shape = _matrix_shape(parameter)[1], self._width(parameter)
        kept = bucket.state.get(position, _FACTOR) if self.warm_start else None
        if kept is None or kept.shape != shape:
            kept = np.zeros(shape, dtype)
        start = orthonormal(kept)
        # A direction that is 0 would stay 0 for ever.
        lost = ~start.any(axis=0)
        if lost.any():
            draw = bucket.generator(self.seed, position=position)
            drawn = draw.standard_normal((int(np.count_nonzero(lost)), shape[0]))
            start[:, lost] = drawn.T / np.sqrt(shape[0])
        return start.astype(dtype)

    def _sum(self, bucket: Bucket, transport: Transport, factors: Sequence[Any], bad: int) -> Any:
        """Return the sums (averages) of all ranks' factors, from one allreduce."""
        ends = np.cumsum([0, *(factor.size for factor in factors)]).tolist()
        together = transport.empty(ends[-1], bucket.send.dtype)
        np.concatenate([factor.reshape(-1) for factor in factors], out=together)
        if bad >= 0:
            # So that all ranks learn of it without another message. Products may not: a library
            # may skip values that are multiplied by 0.
            together[...] = np.nan
        scaling = bucket.reduction.combined(transport.size)
        transport.allreduce(together, together, ReduceOp.SUM, scaling)
        parts = zip(cut(together, ends), factors, strict=True)
        sums = [part.reshape(factor.shape) for part, factor in parts]
        for position, each in enumerate(sums):
            if not np.isfinite(each).all():
                agree(bucket, transport, bad)
                raise GradientError(
                    f"rank {transport.members[transport.rank]}: the gradient of "
                    f"{bucket.parameters[position].name!r} is too large for {self.name}, which "
                    f"adds up products of its values in {each.dtype}; lower the learning rate or "
                    "clip the loss, or use Compression.none"
                )
        return sums

    def _width(self, parameter: Parameter) -> int:
        return min(self.rank, *_matrix_shape(parameter))


def orthonormal(vectors: Any) -> Any:
    """Return columns made orthonormal, from left to right; columns that others span become 0.

    By Gram and Schmidt, done twice, which suffices (Giraud et al. 2005, Numerische Mathematik
    101). Not by a library, whose bits depend on the processor: all ranks must get the same ones.

    Args:
        vectors: columns of finite floats.

    Returns:
        float64 of the same shape. Columns that the ones before them span, to rounding, are 0.
    """
    tolerance = _ROUNDING_ERRORS * float(np.finfo(vectors.dtype).eps)
    rows = np.array(vectors.T, np.float64, order="C")
    for number, row in enumerate(rows):
        row /= np.max(np.abs(row), initial=0.0) or 1.0  # its square may be out of range
        before, length = rows[:number], _norm(row)
        for _ in range(2):
            row -= (before * (before * row).sum(axis=1, keepdims=True)).sum(axis=0)
        left = _norm(row)
        row *= 1.0 / left if left > tolerance * length else 0.0
    return rows.T


def _norm(row: Any) -> float:
    return float(np.sqrt((row * row).sum()))


def multiply(left: Any, right: Any, out: Any) -> None:
    """Write the product of ``left`` and the transpose of ``right`` into ``out``, piece by piece.

    Each number is computed one operation at a time, so that the bits are the same on every
    processor. In a library they would depend on the number of cores, and on whether it multiplies
    and adds at once.
    """
    columns = np.ascontiguousarray(right.T)
    height = max(1, float16.PIECE // out.shape[1])
    scratch = np.empty((min(height, out.shape[0]), out.shape[1]), out.dtype)
    for start in range(0, out.shape[0], height):
        rows = left[start : start + height]
        piece, product = out[start : start + height], scratch[: len(rows)]
        np.multiply(rows[:, :1], columns[0], out=piece)
        for number in range(1, len(columns)):
            np.multiply(rows[:, number : number + 1], columns[number], out=product)
            np.add(piece, product, out=piece)


def _matrix_shape(parameter: Parameter) -> tuple[int, int]:
    """Return the rows and columns of a tensor of two axes or more."""
    shape = parameter.shape
    by_first, by_last = (shape[0], prod(shape[1:])), (prod(shape[:-1]), shape[-1])
    return min(by_first, by_last, key=sum)


def _matrices(bucket: Bucket, array: Any) -> list[Any]:
    return [
        bucket.slot(array, position).reshape(_matrix_shape(parameter))
        for position, parameter in enumerate(bucket.parameters)
    ]
