"""8-bit floats and integers against references in float64."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from hvdlite.base.reduction import Average, Sum
from hvdlite.compression import Blockwise8, Float8, Reduction
from tests.compression.ranks import SIZES, Ranks

COUNTS = [1, 2, 15, 16, 17, 1003]


def nearest_float8(values):
    """Round to e4m3: steps of 2**(e - 3), and of 2**-9 below 2**-6; ties to even."""
    exponents = np.floor(np.log2(np.maximum(np.abs(values), 2.0**-6)))
    steps = 2.0 ** (exponents - 3)
    return np.clip(np.rint(values / steps) * steps, -448, 448)


def nearest_integer(values):
    return np.rint(values)


def by_blocks(values, block, largest, nearest):
    """Scale each block to ``largest``, round, scale back; float64."""
    result = np.zeros(values.size)
    for start in range(0, values.size, block):
        part = values[start : start + block].astype(np.float64)
        scale = np.abs(part).max() / largest
        if scale > 0:
            result[start : start + block] = nearest(part / scale) * scale
    return result


KINDS = pytest.mark.parametrize(
    ("kind", "largest", "nearest"),
    [(Float8, 448, nearest_float8), (Blockwise8, 127, nearest_integer)],
    ids=["Float8", "Blockwise8"],
)


@KINDS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_rounded_summed_rounded(kind, largest, nearest, size, count):
    """Slices begin with a block, so that blocks are those of the whole bucket."""
    generator = np.random.default_rng([size, count])
    # Magnitudes over six decades include subnormal numbers of 8 bits.
    drawn = generator.standard_normal((size, count))
    drawn *= 10.0 ** generator.integers(-5, 1, (size, count))
    for dtype, op in itertools.product((np.float32, np.float64), (Average, Sum)):
        arrays = drawn.astype(dtype)
        found = Ranks(size, kind(16), Reduction(op)).step([{"a": array} for array in arrays])["a"]
        total = sum(by_blocks(array, 16, largest, nearest) for array in arrays)
        if op is Average:
            total /= size
        expected = by_blocks(total, 16, largest, nearest)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found / scale, expected / scale, atol=3e-7, err_msg=op.name)


@KINDS
def test_ranks_add_up_slices_alike_in_size(kind, largest, nearest):
    ranks = Ranks(3, kind(16))
    sent = ranks.record("alltoall")
    ranks.step([{"a": np.ones(100 * 16, np.float32)}] * 3)
    block = 4 + 16  # bytes
    lengths = [34 * block, 33 * block, 33 * block]
    assert [[piece.size for piece in pieces] for pieces, *_ in sent] == [lengths] * 3


@KINDS
def test_tensors_share_blocks_and_16_bit_floats_are_coded_in_float32(kind, largest, nearest):
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal(count).astype(np.float16) for count in (5, 20))
    found = Ranks(1, kind(16)).step([{"a": a, "b": b}])
    expected = by_blocks(np.concatenate([a, b]), 16, largest, nearest).astype(np.float16)
    np.testing.assert_allclose(np.concatenate([found["a"], found["b"]]), expected, 1e-3)


@KINDS
def test_the_greatest_of_a_block_is_exact(kind, largest, nearest):
    array = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    found = Ranks(1, kind(50)).step([{"a": array}])["a"].reshape(-1, 50)
    rows, place = np.arange(100), np.abs(array.reshape(-1, 50)).argmax(axis=1)
    np.testing.assert_array_equal(found[rows, place], array.reshape(-1, 50)[rows, place])


def test_rounding_is_that_of_ml_dtypes_ties_and_subnormals_included():
    """The scaling by 448 is exact here."""
    array = np.concatenate([np.arange(-(2**14), 2**14 + 1) / 2**14, np.arange(2**10) / 2**23])
    array = np.concatenate([[1.0], array]).astype(np.float32)
    scaled = array * np.float32(448)
    np.testing.assert_array_equal(scaled.astype(np.float64), array.astype(np.float64) * 448)
    expected = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / 448
    halfway = nearest_float8(scaled * (1 + 2.0**-20)) != nearest_float8(scaled * (1 - 2.0**-20))
    assert halfway.sum() > 20, "there are not enough ties"
    found = Ranks(1, Float8(2**16)).step([{"a": array}])["a"]
    np.testing.assert_allclose(found, expected, 1e-7)


def test_all_floats_of_8_bits_stay_as_they_are():
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    every = every[np.isfinite(every)]
    assert every.size == 254
    np.testing.assert_allclose(Ranks(1, Float8()).step([{"a": every}])["a"], every, 1e-7)


def test_a_tie_between_integers_goes_to_the_even_one():
    array = np.array([1.0, 0.5, -0.5], np.float32)  # 127, 63.5, -63.5
    found = Ranks(1, Blockwise8()).step([{"a": array}])["a"]
    np.testing.assert_allclose(found * 127, [127, 64, -64], 1e-6)
