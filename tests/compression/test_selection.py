"""Search for the greatest entries, against a stable sort."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from hvdlite.compression import selection
from hvdlite.compression.selection import at_least, greatest, index_dtype
from tests.compression.sparse_references import largest

# Enough for an estimate, and more than a piece.
MANY = 140_007


def values_of(kind, size, dtype):
    generator = np.random.default_rng(size)
    normal = generator.standard_normal(size)
    made = {
        "normal": normal,
        "below one": generator.random(size) * 1e-3,
        "ties": generator.integers(-3, 4, size),
        "all equal": np.full(size, -0.25),
        "all zero": np.zeros(size) * np.sign(normal),
        "few": np.where(generator.random(size) < 0.003, normal, 0),
        "sorted": np.sort(normal),
        "falling": np.sort(np.abs(normal))[::-1],
        "infinite": np.where(np.abs(normal) > 2, np.copysign(np.inf, normal), normal),
        "subnormal": normal * np.finfo(dtype).smallest_subnormal * 4,
        "heavy": generator.standard_cauchy(size),
        # Only every 512th value is not 0.
        "column": np.where(np.arange(size) % 512 == 7, normal, 0),
        # Half of the wanted values lie above a plateau of all others.
        "plateau": np.where(np.arange(size) % 200 == 0, 2, 1) * np.sign(normal),
    }[kind]
    return np.ascontiguousarray(made).astype(dtype)


KINDS = [
    *("normal", "below one", "ties", "all equal", "all zero", "few", "sorted", "falling"),
    *("infinite", "subnormal", "heavy", "column", "plateau"),
]


def check(values, count):
    before = values.tobytes()
    found = greatest(values, count)
    assert values.tobytes() == before
    assert found.dtype == np.uint32
    np.testing.assert_array_equal(found, largest(values, count))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
class TestGreatest:
    def test_few(self, kind, dtype):
        for size in (0, 1, 2, 3, 1001):
            values = values_of(kind, size, dtype)
            for count in {1, 2, 10, max(size // 2, 1), max(size - 1, 1), size + 5}:
                check(values, count)

    def test_many(self, kind, dtype):
        check(values_of(kind, MANY, dtype), MANY // 100)


@pytest.mark.parametrize("count", [1, 2, 300, MANY // 4, MANY // 2, MANY - 1])
def test_any_number_of_many(count):
    check(values_of("normal", MANY, np.float32), count)


@pytest.mark.parametrize("estimate", [0.0, 2.0, 100.0])
@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_a_bad_estimate_makes_no_difference(monkeypatch, kind, estimate):
    bits = np.array([estimate], np.float32).view(np.int32)[0]
    monkeypatch.setattr(selection, "_estimate", lambda values, count: bits)
    check(values_of(kind, MANY, np.float32), 3000)


def test_the_estimate_leaves_few_candidates():
    values = values_of("normal", MANY, np.float32)
    above = np.count_nonzero(
        np.abs(values) > selection._estimate(values, 3000).reshape(1).view(np.float32)
    )
    assert 3000 <= above < 6000


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_at_least(kind, dtype):
    for size in (0, 1, 1001):
        values = values_of(kind, size, dtype)
        for threshold in (1e-4, 0.25, 1.0, 2, 3e300, 5e-324):
            expected = np.flatnonzero(np.abs(values.astype(np.float64)) >= threshold)
            np.testing.assert_array_equal(at_least(values, threshold), expected)


def test_a_threshold_is_not_rounded():
    """The float32 nearest to 0.1 is above it, and the one nearest to 0.7 below."""
    for threshold in (0.1, 0.7):
        nearest = np.float32(threshold)
        values = np.array([np.nextafter(nearest, np.float32(0)), nearest])
        expected = np.flatnonzero(values.astype(np.float64) >= threshold)
        np.testing.assert_array_equal(at_least(values, threshold), expected)


def test_indices_take_four_bytes_where_these_suffice():
    assert index_dtype(0) == index_dtype(2**32) == np.uint32
    assert index_dtype(2**32 + 1) == np.uint64


@pytest.mark.parametrize("kind", ["normal", "all equal", "few"])
def test_memory(kind):
    values = values_of(kind, 2**20, np.float32)
    tracemalloc.start()
    try:
        greatest(values, 2**20 // 100)
        assert tracemalloc.get_traced_memory()[1] < values.nbytes
    finally:
        tracemalloc.stop()
