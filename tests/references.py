"""Inputs that every rank can make for all ranks, and what the collectives must make of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from hvdlite.base.reduction import Adasum, Average, Max, Min, Product, ReduceOp, Sum

INTEGERS = ["uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
DTYPES = [*INTEGERS, *FLOATS, *COMPLEX, "bool"]

_UFUNCS = {Sum: np.add, Average: np.add, Min: np.minimum, Max: np.maximum, Product: np.multiply}


BITWISE = {
    ReduceOp.BITWISE_AND: np.bitwise_and,
    ReduceOp.BITWISE_OR: np.bitwise_or,
    ReduceOp.BITWISE_XOR: np.bitwise_xor,
}


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def cases(ops: Sequence[ReduceOp] = tuple(ReduceOp)) -> Iterator[tuple[str, ReduceOp]]:
    """Every dtype with every reduction that has a meaning for it."""
    for dtype in DTYPES:
        for op in ops:
            is_exact = dtype in INTEGERS or dtype == "bool"
            refused = {"c": (Min, Max, Product, Adasum), "bool": (Average, Adasum)}
            integers = (Adasum,) if dtype in INTEGERS else ()
            if op in BITWISE and not is_exact:
                continue
            if op not in refused.get(dtype if is_exact else dtype[0], integers):
                yield dtype, op


def sample(rank: int, dtype: str, shape: Any, seed: int = 0) -> Any:
    """Return a rank's input: integers from their whole range, floats around 0."""
    generator = np.random.default_rng([seed, rank])
    kind = dtype_of(dtype)
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return generator.integers(limits.min, limits.max, shape, kind, endpoint=True)
    if kind.kind == "b":
        return generator.random(shape) < 0.5
    values = generator.standard_normal(shape)
    if kind.kind == "c":
        values = values + 1j * generator.standard_normal(shape)
    return np.asarray(values).astype(kind)


def samples(size: int, dtype: str, shape: Any, seed: int = 0) -> list[Any]:
    return [sample(rank, dtype, shape, seed) for rank in range(size)]


def adasum(vectors: Sequence[Any]) -> Any:
    """Maleki et al. 2020 (arXiv:2006.02924), equation 4, recursively, in float64."""
    if len(vectors) == 1:
        return vectors[0].astype(np.float64)
    half = 1 << (len(vectors) - 1).bit_length() - 1
    a, b = adasum(vectors[:half]), adasum(vectors[half:])
    dot = np.vdot(a, b)
    weight_a = 1 - dot / (2 * np.vdot(a, a)) if a.any() else 1
    weight_b = 1 - dot / (2 * np.vdot(b, b)) if b.any() else 1
    return weight_a * a + weight_b * b


def check_reduction(result: Any, arrays: Sequence[Any], op: ReduceOp) -> None:
    """Assert that a result is the reduction of the ranks' arrays."""
    first = arrays[0]
    assert result.dtype == first.dtype
    assert result.shape == first.shape
    if first.dtype.kind in "iub":
        np.testing.assert_array_equal(result, _exact(arrays, op))
        return
    wide = np.complex128 if first.dtype.kind == "c" else np.float64
    stack = np.stack([array.astype(wide) for array in arrays])
    if op is Adasum:
        expected = adasum([row.ravel() for row in stack]).reshape(first.shape)
        magnitude = np.abs(stack).sum(axis=0) + np.abs(expected).max(initial=0)
    else:
        expected = _UFUNCS[op].reduce(stack, axis=0)
        magnitude = np.abs(expected) if op is Product else np.abs(stack).sum(axis=0)
    if op is Average:
        expected = expected / len(arrays)
    if op in (Min, Max):
        np.testing.assert_array_equal(result.astype(wide), expected)
        return
    limits = ml_dtypes.finfo(first.dtype if first.dtype.kind != "c" else first.real.dtype)
    accumulated = max(1e-16, min(float(limits.eps), 2.0**-23 if limits.bits < 64 else 2.0**-52))
    bound = (
        float(limits.eps) * np.abs(expected)
        + 2 * len(arrays) * accumulated * magnitude
        + float(limits.smallest_subnormal)
    )
    assert (np.abs(result.astype(wide) - expected) <= bound).all()


def _exact(arrays: Sequence[Any], op: ReduceOp) -> Any:
    """Integers wrap; an average is exact, cut towards zero."""
    stack = np.stack(arrays)
    if op in BITWISE:
        return BITWISE[op].reduce(stack, axis=0)
    if stack.dtype.kind == "b":
        return {Sum: stack.any, Max: stack.any, Min: stack.all, Product: stack.all}[op](axis=0)
    with np.errstate(over="ignore"):
        total = _UFUNCS[op].reduce(stack, axis=0, dtype=stack.dtype)
    if op is not Average:
        return total
    sums = stack.astype(object).sum(axis=0)  # of Python's integers
    return integer_mean(sums, len(arrays)).astype(stack.dtype).reshape(total.shape)


def integer_mean(sums: Any, divisor: int) -> Any:
    """Divide Python's integers, cut towards zero."""
    cut = [abs(value) // divisor * (1 if value >= 0 else -1) for value in np.ravel(sums).tolist()]
    return np.array(cut, object)


class Digest:
    """A hash of results, to be compared between ranks and between runs."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, array: Any) -> None:
        self._hash.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def value(self) -> bytes:
        return self._hash.digest()
