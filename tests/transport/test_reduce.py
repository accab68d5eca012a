from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hvdlite.base.reduction import Max, Min, Product, Scaling, Sum
from hvdlite.transport.reduce import combine, reduce_into
from tests.references import cases, check_reduction, dtype_of, samples

OPS = (Sum, Min, Max, Product)


@pytest.fixture(autouse=True)
def numbers_may_overflow():
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize(("dtype", "op"), list(cases(OPS)))
def test_every_reduction_of_every_dtype(dtype, op, count):
    for size in (0, 1, 7, 1023):
        arrays = samples(count, dtype, size)
        for array in arrays:
            array.flags.writeable = False
        result = np.empty_like(arrays[0])
        reduce_into(result, arrays, op, Scaling())
        check_reduction(result, arrays, op)


@pytest.mark.parametrize(("dtype", "op"), list(cases(OPS)))
def test_the_result_may_be_the_first_part(dtype, op):
    for count in (1, 2, 3, 4):
        arrays = samples(count, dtype, 100)
        result = np.empty_like(arrays[0])
        reduce_into(result, arrays, op, Scaling())
        first = arrays[0].copy()
        reduce_into(first, [first, *arrays[1:]], op, Scaling())
        assert first.tobytes() == result.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_parts_are_added_in_their_order(dtype):
    arrays = [array * 10.0**power for power, array in enumerate(samples(4, dtype, 1000), -3)]
    arrays = [array.astype(dtype) for array in arrays]
    result = np.empty_like(arrays[0])
    reduce_into(result, arrays, Sum, Scaling())
    np.testing.assert_array_equal(result, ((arrays[0] + arrays[1]) + arrays[2]) + arrays[3])


def test_a_sum_of_float16_may_be_out_of_range_on_its_way():
    parts = [np.array([value], np.float16) for value in (65504, 65504, -65504)]
    result = np.empty(1, np.float16)
    reduce_into(result, parts, Sum, Scaling())
    assert result[0] == 65504
    reduce_into(result, parts[:2], Sum, Scaling(1.0, 2))
    assert result[0] == 65504


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_accumulated_in_float32(dtype):
    kind = dtype_of(dtype)
    result = np.empty(1, kind)
    # Each of the small ones is lost where a sum is rounded to 16 bits in between.
    small = float(ml_dtypes.finfo(kind).eps) / 4
    parts = [np.array([value], kind) for value in (1.0, *[small] * 8)]
    reduce_into(result, parts, Sum, Scaling())
    assert float(result[0]) == 1.0 + 8 * small
    assert combine(parts, Sum).dtype == np.float32


def test_scaling_leaves_the_parts_alone():
    for dtype, count in (("float32", 1), ("float32", 3), ("int32", 1), ("float16", 1)):
        parts = [np.full(5, 6).astype(dtype) for _ in range(count)]
        result = np.empty_like(parts[0])
        reduce_into(result, parts, Sum, Scaling(0.5, 1))
        assert result.tolist() == [3 * count] * 5
        assert all(part.tolist() == [6] * 5 for part in parts)
