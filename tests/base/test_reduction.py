from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hvdlite.base import reduction
from hvdlite.base.reduction import Adasum, Average, Max, Min, Product, ReduceOp, Scaling, Sum
from tests.references import FLOATS, INTEGERS, cases, dtype_of, integer_mean


def test_the_numbers_are_horovods_and_neither_way_to_name_one_is_average():
    assert [Average, Sum, Adasum, Min, Max, Product] == [0, 1, 2, 3, 4, 5]
    assert reduction.choose(None, None) is Average
    for op in list(ReduceOp)[:6]:
        assert reduction.choose(None, op) is op
        assert reduction.choose(None, int(op)) is op
    for op in (6, -1, "Sum", 0.5):
        with pytest.raises(ValueError, match="is not a reduction"):
            reduction.choose(None, op)


@pytest.mark.parametrize(("average", "op"), [(True, Average), (False, Sum)])
def test_average_is_deprecated_and_works_without_op(average, op):
    with pytest.warns(DeprecationWarning, match=r"deprecated; use op=hvd\.Average or op=hvd\.Sum"):
        assert reduction.choose(average, None) is op
    with pytest.raises(ValueError, match="op= or average=, not both"):
        reduction.choose(average, Sum)


def test_a_reduction_has_a_meaning_for_a_dtype_or_is_refused():
    for dtype, op in cases():
        reduction.check(op, dtype_of(dtype))
    for dtypes, ops in (
        ((np.complex64, np.complex128), (Min, Max, Product, Adasum)),
        ((np.bool_,), (Average, Adasum)),
        ((np.int32, np.uint8), (Adasum,)),
    ):
        for dtype in dtypes:
            for op in ops:
                with pytest.raises(ValueError, match=f"{op.name.capitalize()} is not defined"):
                    reduction.check(op, np.dtype(dtype))
    for dtype in ("U4", "S4", "M8[s]", "m8[s]", "O", "V3"):
        with pytest.raises(ValueError, match="cannot be reduced"):
            reduction.check(Sum, np.dtype(dtype))


def test_16_bit_floats_are_accumulated_in_float32():
    for dtype in (np.float16, ml_dtypes.bfloat16):
        assert reduction.accumulator(np.dtype(dtype)) == np.float32
    for dtype in (np.float32, np.float64, np.int8, np.complex64, np.bool_):
        assert reduction.accumulator(np.dtype(dtype)) == dtype


class TestScaling:
    def test_the_identity_returns_its_argument(self):
        assert Scaling().is_identity
        values = np.arange(3)
        assert Scaling().apply(values) is values
        assert not Scaling(2.0).is_identity
        assert not Scaling(1.0, 2).is_identity

    @pytest.mark.parametrize("dtype", INTEGERS)
    def test_integers_are_divided_exactly_towards_zero_and_nothing_warns(self, dtype):
        limits = np.iinfo(dtype)
        middle = [value for value in (-8, -7, -6, -1, 0, 1, 6, 7, 8) if value >= limits.min]
        values = [limits.min, limits.min + 1, *middle, limits.max - 1, limits.max]
        for divisor in (2, 3, 4, 7, 1000):
            scaled = Scaling(1.0, divisor).apply(np.array(values, dtype))
            assert scaled.dtype == dtype
            assert scaled.tolist() == integer_mean(np.array(values, object), divisor).tolist()

    def test_a_factor_on_integers_works_in_float64(self):
        # In float32 the product would be a multiple of 16.
        values = np.array([300000007, -300000007, 7, -7])
        assert Scaling(0.5).apply(values).tolist() == [150000003, -150000003, 3, -3]
        assert Scaling(0.1, 3).apply(np.array([100, -100])).tolist() == [3, -3]
        assert Scaling(1.5).apply(np.array([3, 5], np.uint8)).tolist() == [4, 7]

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
    def test_16_bit_floats_are_scaled_in_float32(self, dtype):
        values = np.array([1.0, 3.0, 60000.0, 0.1], dtype)
        # A third rounded to 16 bits first would be off in the last place.
        scaled = Scaling(1 / 3).apply(values.copy())
        expected = (values.astype(np.float32) * np.float32(1 / 3)).astype(dtype)
        assert scaled.dtype == np.dtype(dtype)
        assert scaled.tobytes() == expected.tobytes()
        # The factor itself is beyond a float16.
        large = Scaling(1e6).apply(np.array([1e-3], np.float16))
        assert float(large[0]) == pytest.approx(1000, rel=1e-3)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_the_mean_of_equal_values_is_their_value(self, dtype):
        values = np.arange(1, 6).astype(dtype_of(dtype))
        for divisor in (3, 5, 7, 49):
            total = (values.astype(np.float64) * divisor).astype(dtype_of(dtype))
            np.testing.assert_array_equal(Scaling(1.0, divisor).apply(total), values)

    def test_complex_empty_and_0_dimensional_arrays(self):
        scaled = Scaling(0.5).apply(np.array([2 + 4j, -1j], np.complex64))
        assert scaled.dtype == np.complex64
        assert scaled.tolist() == [1 + 2j, -0.5j]
        for dtype in (np.int8, np.float16, np.float32):
            assert Scaling(0.5, 3).apply(np.empty(0, dtype)).size == 0
            assert Scaling(1.0, 3).apply(np.array(6, dtype)).tolist() == 2

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_writing_scaled_values_gives_the_same_bits(self, dtype):
        values = np.random.default_rng(0).standard_normal(1001).astype(dtype)
        for arguments in ((), (0.3,), (1.0, 4), (1.0, 3), (2.5, 3)):
            out, scaling = np.empty_like(values), Scaling(*arguments)
            scaling.write(values, out)
            assert out.tobytes() == scaling.apply(values.copy()).tobytes()
