"""QSGD, TernGrad and natural compression against references in float64.

The papers say with what probability a value is rounded up; which of the random numbers mean up is
as in the code.
"""

from __future__ import annotations

import zlib
from functools import partial

import numpy as np
import pytest

from hvdlite.compression import QSGD, Bucket, Natural, Parameter, Reduction, TernGrad
from hvdlite.transport.loopback import Loopback
from tests.compression.ranks import SIZES, Ranks

COUNTS = [1, 2, 7, 8, 9, 1003]
DTYPES = [np.float32, np.float64]
MANY = 20000


def numbers(name, step, rank, seed=0):
    """Return the random numbers of one rank in one step."""
    entropy = [seed, step, zlib.crc32(name.encode()), rank]
    return np.random.Generator(np.random.SFC64(entropy))


def normal(size, count, dtype):
    """Return normally distributed arrays with magnitudes over four decades."""
    generator = np.random.default_rng([size, count])
    return [
        (generator.standard_normal(count) * 10.0 ** generator.integers(-3, 1, count)).astype(dtype)
        for _ in range(size)
    ]


def rounded(values, uniform):
    """Round down, or up with the probability of the fractional part."""
    below = np.floor(values)
    return below + (uniform < values - below)


def qsgd(values, uniform, levels, block):
    """Alistarh et al. 2017, equation 1 (with signs inside), for each block by itself."""
    result = np.zeros(values.size)
    for start in range(0, values.size, block):
        part = slice(start, start + block)
        norm = np.sqrt((values[part].astype(np.float64) ** 2).sum())
        if norm > 0:
            ratios = values[part] / norm * levels
            result[part] = norm / levels * rounded(ratios, uniform[part])
    return result


def tern_grad(values, uniform, clip):
    """Wen et al. 2017, equations 2 and 5, and section 3.2 (clipping)."""
    values = values.astype(np.float64)
    if clip is not None:
        limit = clip * np.sqrt((values**2).mean())
        values = np.where(np.abs(values) <= limit, values, np.sign(values) * limit)
    greatest = np.abs(values).max()
    return greatest * rounded(values / greatest, uniform)


def natural(values, uniform):
    """Horváth et al. 2019, definition 2."""
    values = values.astype(np.float64)
    magnitudes = np.abs(values)
    with np.errstate(divide="ignore"):
        below = np.where(values == 0, 0, 2.0 ** np.floor(np.log2(magnitudes)))
    up = np.where(values == 0, 0, magnitudes / np.where(below == 0, 1, below) - 1)
    return np.sign(values) * below * np.where(uniform >= 1 - up, 2, 1)


def check_gathered(strategy, reference, arrays, steps=2):
    """Compare the averages of the ranks' messages over several steps."""
    ranks = Ranks(len(arrays), strategy)
    for step in range(steps):
        found = ranks.step([{"a": array} for array in arrays])["a"]
        uniform = [
            numbers("a", step, rank, strategy.seed).random(array.size, np.float32)
            for rank, array in enumerate(arrays)
        ]
        coded = [reference(*pair) for pair in zip(arrays, uniform, strict=True)]
        scale = max(np.abs(each).max() for each in arrays)
        np.testing.assert_allclose(found / scale, sum(coded) / len(arrays) / scale, atol=1e-5)


class TestQSGD:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("count", COUNTS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_multiples_of_a_part_of_the_norm(self, size, count, dtype):
        for levels, block in ((1, 16), (4, 7), (7, 512), (100, 16)):
            reference = partial(qsgd, levels=levels, block=block)
            arrays = normal(size, count, dtype)
            check_gathered(QSGD(levels, block, seed=3), reference, arrays)

    def test_more_values_than_are_coded_at_a_time(self):
        arrays = normal(2, 2**15 + 11, np.float32)
        for levels, block in ((7, 512), (4, 7), (1, 2**15 + 1), (100, 2**16)):
            reference = partial(qsgd, levels=levels, block=block)
            check_gathered(QSGD(levels, block), reference, arrays)

    @pytest.mark.parametrize("levels", [1, 4, 7, 127])
    def test_the_mean_is_the_value(self, levels):
        values = np.array([3.0, -2.0, 0.5, -0.1, 1e-3, 0.0, -1.0, 4.0], np.float32)
        check_mean(QSGD(levels, 8), values, np.linalg.norm(values) / levels / 2)

    def test_a_value_alone_is_its_norm(self):
        for value in (5.0, -5.0, 1e-30, 3e30):
            array = np.array([value, 0, 0, 0], np.float32)
            for levels in (1, 4, 7, 127):
                for step in range(4):
                    found = alone(QSGD(levels, 4), array, step)
                    np.testing.assert_allclose(found, array, 1e-6)


class TestTernGrad:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("count", COUNTS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_all_or_nothing(self, size, count, dtype):
        for clip in (None, 2.5, 0.5):
            arrays = normal(size, count, dtype)
            check_gathered(TernGrad(clip, seed=5), partial(tern_grad, clip=clip), arrays)

    def test_more_values_than_are_coded_at_a_time(self):
        arrays = normal(2, 2**16 + 11, np.float32)
        check_gathered(TernGrad(), partial(tern_grad, clip=2.5), arrays)

    def test_each_tensor_has_its_scale_or_the_bucket_has_one(self):
        arrays = {"a": np.full(4, 0.5, np.float32), "b": np.full((2, 2), -8.0, np.float32)}
        found = Ranks(1, TernGrad()).step([arrays])
        assert found["a"].tolist() == [0.5] * 4
        assert found["b"].tolist() == [[-8.0] * 2] * 2
        found = Ranks(1, TernGrad(None, "bucket")).step([arrays])
        assert set(found["a"].tolist()) <= {0.0, 8.0}
        assert found["b"].tolist() == [[-8.0] * 2] * 2

    def test_the_mean_is_the_value(self):
        values = np.array([3.0, -2.0, 0.5, -0.1, 1e-3, 0.0, -1.0, 4.0], np.float32)
        check_mean(TernGrad(None), values, 4.0 / 2)

    def test_the_mean_is_the_clipped_value(self):
        values = np.array([1.0, -1.0, 0.5, -0.5, 0.0, 0.0, 10.0, 0.0], np.float32)
        limit = 2 * np.sqrt((values.astype(np.float64) ** 2).mean())
        check_mean(TernGrad(2.0), values, limit / 2, np.clip(values, -limit, limit))

    def test_one_value_and_equal_values_are_not_clipped(self):
        for array in (np.array([3.0], np.float32), np.full(9, -3.0, np.float32)):
            np.testing.assert_array_equal(alone(TernGrad(), array, 0), array)


class TestNatural:
    @pytest.mark.parametrize("count", [*COUNTS, 2**15 + 11])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_power_of_two_above_or_below(self, count, dtype):
        (array,) = normal(1, count, dtype)
        array[1::5] = 0
        for step in range(2):
            uniform = numbers("a", step, 0).random(count, dtype)
            np.testing.assert_array_equal(alone(Natural(), array, step), natural(array, uniform))

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("count", [1, 9, 1003])
    def test_sums_are_rounded_once_more(self, size, count):
        """The rank that adds up a slice uses the numbers after those for the gradients."""
        arrays = normal(size, count, np.float32)
        found = Ranks(size, Natural()).step([{"a": array} for array in arrays])["a"]
        generators = [numbers("a", 0, rank) for rank in range(size)]
        coded = [
            natural(array, generator.random(count, np.float32))
            for array, generator in zip(arrays, generators, strict=True)
        ]
        average = (sum(coded) / size).astype(np.float32)
        expected, start = np.zeros(count), 0
        for rank, generator in enumerate(generators):
            stop = start + count // size + (rank < count % size)
            uniform = generator.random(stop - start, np.float32)
            expected[start:stop] = natural(average[start:stop], uniform)
            start = stop
        # Sums in float32 are near powers of two where those in float64 are on them.
        assert (found == expected).mean() > 0.99
        np.testing.assert_allclose(found, expected, 1.01)

    def test_the_mean_is_the_value(self):
        values = np.array([3.0, -2.7, 0.5, -0.1, 1e-3, 0.0, -1.0, 1e30], np.float32)
        check_mean(Natural(), values, np.abs(values) / 2)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_all_powers_of_two_of_normal_numbers_up_to_1(self, dtype):
        powers = 2.0 ** np.arange(-126, 1)
        array = np.concatenate([powers, -powers]).astype(dtype)
        np.testing.assert_array_equal(alone(Natural(), array, 0), array)

    def test_the_range_goes_with_the_greatest(self):
        array = np.array([2.0**300, 2.0**174, 2.0**173, -(2.0**170), 0.0])
        assert alone(Natural(), array, 0).tolist() == [2.0**300, 2.0**174, 0.0, 0.0, 0.0]
        tiny = np.array([2.0**-900, -(2.0**-1022)])
        assert alone(Natural(), tiny, 0).tolist() == tiny.tolist()

    def test_the_largest_float_is_not_rounded_to_infinity(self):
        array = np.full(50, np.finfo(np.float32).max)
        assert (alone(Natural(), array, 0) == 2.0**127).all()


def alone(strategy, array, step):
    """Return the result of an array on a single rank."""
    bucket = Bucket([Parameter("a", array.shape, array.dtype)], Reduction())
    bucket.send[...], bucket.count = array, step
    with np.errstate(all="ignore"):  # as the engine has it
        strategy.exchange(bucket, Loopback())
    return bucket.result.astype(np.float64)


def check_mean(strategy, values, deviation, expected=None):
    """Compare the mean of many roundings, over the bucket and over steps, within 5 deviations.

    Args:
        deviation: the greatest standard deviation that a rounded value can have.
    """
    total, steps = np.zeros(values.size), 4
    tiled = np.tile(values, MANY // steps)
    for step in range(steps):
        total += alone(strategy, tiled, step).reshape(-1, values.size).sum(axis=0)
    mean = total / MANY
    expected = values if expected is None else expected
    bound = 5 * np.broadcast_to(deviation, values.shape) / np.sqrt(MANY)
    assert (np.abs(mean - expected) <= bound + 1e-6 * np.abs(expected)).all(), (mean, expected)
