from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hvdlite.base.reduction import Adasum, Average, Sum
from hvdlite.compression import (
    Bucket,
    Compression,
    Parameter,
    Reduction,
    check_strategy,
    exchange_bucket,
)
from tests.compression.ranks import SIZES, Ranks
from tests.references import adasum, check_reduction, dtype_of, samples
from tests.simulation import Simulation

REDUCTIONS = [Reduction(Sum), Reduction(Average), Reduction(Average, 4.0)]


def exchange(strategy, arrays, reduction):
    """Return the result, which is equal on all ranks."""
    return Ranks(len(arrays), strategy, reduction).step([{"a": array} for array in arrays])["a"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=repr)
def test_none_is_exact_to_the_type(size, reduction):
    for dtype in ("float16", "bfloat16", "float32", "float64", "complex64"):
        arrays = samples(size, dtype, (3, 5))
        check_reduction(exchange(Compression.none, arrays, reduction), arrays, reduction.op)
    for reduced, op in ((Reduction(Sum), Sum), (Reduction(Average), Average)):
        integers = samples(size, "int32", (7,))
        check_reduction(exchange(Compression.none, integers, reduced), integers, op)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=repr)
@pytest.mark.parametrize(("name", "kind"), [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_a_cast_rounds_the_divided_values_sums_in_float32_and_rounds_once_more(
    size, reduction, name, kind
):
    for dtype in ("float32", "float64"):
        arrays = samples(size, dtype, (6, 7))
        divisor = size if reduction.op is Average else 1
        total = np.zeros((6, 7), np.float32)
        for array in arrays:
            total += (array / array.dtype.type(divisor)).astype(kind).astype(np.float32)
        found = exchange(getattr(Compression, name), arrays, reduction)
        np.testing.assert_array_equal(found, total.astype(kind).astype(dtype))


def test_an_average_stays_in_range_where_its_sum_does_not():
    arrays = [np.full(3, 60000, np.float32)] * 4
    assert exchange(Compression.fp16, arrays, Reduction(Average)).tolist() == [60000.0] * 3
    float16s = [array.astype(np.float16) for array in arrays]
    for reduction in REDUCTIONS[1:]:
        assert exchange(Compression.none, float16s, reduction).tolist() == [60000.0] * 3


def test_what_is_out_of_range_becomes_infinite_and_nan_stays():
    arrays = [np.array([1e6, -1e6, np.nan, 1.0], np.float32)] * 2
    found = exchange(Compression.fp16, arrays, Reduction(Average))
    np.testing.assert_array_equal(found, [np.inf, -np.inf, np.nan, 1.0])


def test_a_class_of_the_users_own_gets_the_type_that_there_is():
    """16-bit floats are widened; 16-bit integers are not, since floats have no room for them."""
    seen = []

    class Seen:
        @staticmethod
        def compress(tensor):
            seen.append(tensor.dtype)
            return tensor, None

        @staticmethod
        def decompress(tensor, context):
            return tensor

    for dtype, expected in (("int16", "int16"), ("float16", "float32")):
        array = np.full(5, 20_000).astype(dtype)
        bucket = Bucket([Parameter("a", (5,), array.dtype)], Reduction(Sum))
        bucket.send[...] = array
        exchange_bucket(check_strategy(Seen), bucket, Simulation(1).transports[0])
        np.testing.assert_array_equal(bucket.result, array)
        assert bucket.result.dtype == array.dtype
        assert seen.pop() == expected


@pytest.mark.parametrize("other", [None, "fp16", np.float16, Compression, dtype_of("bfloat16")])
def test_what_is_no_strategy_is_refused(other):
    with pytest.raises(TypeError, match=r"use hvd\.Compression\.none, \.fp16 or \.bf16"):
        check_strategy(other)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_adasum_combines_each_tensor_by_itself(size, name):
    """The angle between two gradients, which differs by tensor, decides how much is kept."""
    shapes = [(3, 4), (), (0, 2), (7,), (1,), (5, 1)]
    tensors = [samples(size, "float64", shape, seed) for seed, shape in enumerate(shapes)]
    tensors[3][0][:] = 0  # a rank without a gradient
    tensors[5] = [row * 10.0**rank for rank, row in enumerate(tensors[5])]
    gradients = [{str(n): rows[rank] for n, rows in enumerate(tensors)} for rank in range(size)]
    results = Ranks(size, getattr(Compression, name), Reduction(Adasum)).step(gradients)
    tolerance = {"none": 1e-12, "fp16": 5e-3, "bf16": 5e-2}[name]
    for number, rows in enumerate(tensors):
        expected = adasum([row.ravel() for row in rows]).reshape(shapes[number])
        scale = max(np.abs(row).max(initial=1e-300) for row in rows)
        found = results[str(number)]
        np.testing.assert_allclose(found / scale, expected / scale, tolerance, tolerance)


def test_adasum_sums_what_is_orthogonal_and_averages_what_is_parallel():
    """Maleki et al. 2020, figure 2; in one bucket, and again for three ranks."""
    a, b = np.array([3.0, 0.0]), np.array([0.0, 5.0])
    assert exchange(Compression.none, [a, b], Reduction(Adasum)).tolist() == [3.0, 5.0]
    assert exchange(Compression.none, [a, a], Reduction(Adasum)).tolist() == [3.0, 0.0]
    assert exchange(Compression.none, [a, a, b], Reduction(Adasum)).tolist() == [3.0, 5.0]


def test_adasum_of_what_is_out_of_range_is_not_a_number_and_no_warning():
    arrays = [np.array([np.inf, 1.0]), np.array([2.0, 1.0])]
    assert np.isnan(exchange(Compression.none, arrays, Reduction(Adasum))).any()
