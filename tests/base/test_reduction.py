from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest

from hvdlite.base import reduction
from hvdlite.base.reduction import Adasum, Average, Max, Min, Product, ReduceOp, Scaling, Sum
from tests.references import cases, dtype_of


def test_the_numbers_are_horovods():
    assert [Average, Sum, Adasum, Min, Max, Product] == [0, 1, 2, 3, 4, 5]


class TestChoose:
    def test_neither_is_average(self):
        assert reduction.choose(None, None) is Average

    @pytest.mark.parametrize("op", list(ReduceOp)[:6])
    def test_op_may_be_its_number(self, op):
        assert reduction.choose(None, op) is op
        assert reduction.choose(None, int(op)) is op

    def test_average_is_deprecated_and_works(self):
        with pytest.warns(DeprecationWarning, match=r"use op=hvd\.Average or op=hvd\.Sum"):
            assert reduction.choose(True, None) is Average
        with pytest.warns(DeprecationWarning, match="deprecated"):
            assert reduction.choose(False, None) is Sum

    @pytest.mark.parametrize("average", [True, False])
    def test_both_are_refused(self, average):
        with pytest.raises(ValueError, match="op= or average=, not both"):
            reduction.choose(average, Sum)

    @pytest.mark.parametrize("op", [6, -1, "Sum", 0.5])
    def test_an_unknown_op_is_refused(self, op):
        with pytest.raises(ValueError, match="is not a reduction"):
            reduction.choose(None, op)


class TestCheck:
    def test_what_has_a_meaning_passes(self):
        for dtype, op in cases():
            reduction.check(op, dtype_of(dtype))

    @pytest.mark.parametrize(
        ("dtype", "ops"),
        [
            (np.complex64, (Min, Max, Product, Adasum)),
            (np.complex128, (Min, Max, Product, Adasum)),
            (np.bool_, (Average, Adasum)),
            (np.int32, (Adasum,)),
            (np.uint8, (Adasum,)),
        ],
    )
    def test_what_has_none_is_refused(self, dtype, ops):
        for op in ops:
            with pytest.raises(ValueError, match=f"{op.name.capitalize()} is not defined"):
                reduction.check(op, np.dtype(dtype))

    @pytest.mark.parametrize("dtype", ["U4", "S4", "M8[s]", "m8[s]", "O", "V3"])
    def test_what_is_no_number_is_refused(self, dtype):
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

    @pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
    @pytest.mark.parametrize("divisor", [2, 3, 4, 7, 1000])
    def test_signed_integers_are_divided_exactly_towards_zero(self, dtype, divisor):
        limits = np.iinfo(dtype)
        middle = [-8, -7, -6, -1, 0, 1, 6, 7, 8]
        values = [limits.min, limits.min + 1, *middle, limits.max - 1, limits.max]
        scaled = Scaling(1.0, divisor).apply(np.array(values, dtype))
        assert scaled.dtype == dtype
        expected = [abs(value) // divisor * (1 if value >= 0 else -1) for value in values]
        assert scaled.tolist() == expected

    @pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
    @pytest.mark.parametrize("divisor", [2, 3, 1000])
    def test_unsigned_integers_are_divided_exactly(self, dtype, divisor):
        values = [0, 1, 6, 7, 8, np.iinfo(dtype).max]
        scaled = Scaling(1.0, divisor).apply(np.array(values, dtype))
        assert scaled.dtype == dtype
        assert scaled.tolist() == [int(value) // divisor for value in values]

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
        assert float(Scaling(1e6).apply(np.array([1e-3], np.float16))[0]) == pytest.approx(
            1000, rel=1e-3
        )

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
    @pytest.mark.parametrize("divisor", [3, 5, 7, 49])
    def test_the_mean_of_equal_values_is_their_value(self, dtype, divisor):
        values = np.arange(1, 6).astype(dtype_of(dtype))
        total = (values.astype(np.float64) * divisor).astype(dtype_of(dtype))
        np.testing.assert_array_equal(Scaling(1.0, divisor).apply(total), values)

    def test_complex_numbers(self):
        values = np.array([2 + 4j, -1j], np.complex64)
        scaled = Scaling(0.5).apply(values)
        assert scaled.dtype == np.complex64
        assert scaled.tolist() == [1 + 2j, -0.5j]

    def test_empty_and_0_dimensional_arrays(self):
        for dtype in (np.int8, np.float16, np.float32):
            assert Scaling(0.5, 3).apply(np.empty(0, dtype)).size == 0
            assert Scaling(1.0, 3).apply(np.array(6, dtype)).tolist() == 2

    def test_nothing_warns(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Scaling(1.0, 2).apply(np.array([np.iinfo(np.int64).min]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "scaling", [Scaling(), Scaling(0.3), Scaling(1.0, 4), Scaling(1.0, 3), Scaling(2.5, 3)]
)
def test_writing_scaled_values_gives_the_same_bits(dtype, scaling):
    values = np.random.default_rng(0).standard_normal(1001).astype(dtype)
    out = np.empty_like(values)
    scaling.write(values, out)
    assert out.tobytes() == scaling.apply(values.copy()).tobytes()
