"""Scaled casts; `test_base.py` has those without a scale."""

from __future__ import annotations

import logging

import ml_dtypes
import numpy as np
import pytest

from hvdlite.base.reduction import Adasum, Average, Sum
from hvdlite.compression import Cast, Reduction
from tests.compression.ranks import SIZES, Ranks

LARGEST = {"fp16": 65504.0, "bf16": 3.3895313892515355e38}
EPSILON = {"fp16": 2.0**-11, "bf16": 2.0**-8}
KINDS = ["fp16", "bf16"]


def check_close(found, arrays, op, kind):
    """Compare with a sum that is rounded once before and once after."""
    total = np.sum(np.float64(arrays), axis=0)
    expected = total / len(arrays) if op is Average else total
    magnitude = np.abs(np.float64(arrays)).sum(axis=0)
    assert (np.abs(found - expected) <= 2 * EPSILON[kind] * magnitude).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", [Average, Sum], ids=lambda op: op.name)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-7, 1.0, 1e30])
def test_auto_keeps_everything_in_range(size, kind, op, magnitude):
    """Values of 1e-7 are subnormal in float16; values of 1e30 are out of range."""
    draw = np.random.default_rng(size).uniform(0.5, 1.0, (size, 37))
    arrays = (draw * magnitude).astype(np.float32)
    found = Ranks(size, Cast(kind, scale="auto"), Reduction(op)).step([{"a": a} for a in arrays])
    check_close(found["a"], arrays, op, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_auto_where_there_is_nothing_to_scale_by(kind):
    strategy = Cast(kind, scale="auto")
    zeros = Ranks(2, strategy).step([{"a": np.zeros(3, np.float32)}] * 2)
    assert not zeros["a"].any()
    infinite = np.array([np.inf, -np.inf, np.nan, 1.0], np.float32)
    found = Ranks(2, strategy).step([{"a": infinite}] * 2)["a"]
    np.testing.assert_array_equal(found, infinite)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_saves_what_would_underflow_or_overflow(kind):
    small = np.full(5, 2.0**-110, np.float32)
    scaled = Ranks(2, Cast(kind, scale=2.0**100)).step([{"a": small}] * 2)["a"]
    np.testing.assert_array_equal(scaled, small)
    large = np.full(5, 2.0**20, np.float32)
    scaled = Ranks(2, Cast(kind, scale=2.0**-10)).step([{"a": large}] * 2)["a"]
    np.testing.assert_array_equal(scaled, large)


def test_what_is_too_large_is_clipped_with_a_warning(caplog):
    values = np.array([1.0, 3e4, -7e4, np.inf], np.float32)
    with caplog.at_level(logging.WARNING, logger="hvdlite"):
        found = Ranks(1, Cast("fp16", scale=2.0)).step([{"layer": values}])["layer"]
    np.testing.assert_array_equal(found, [1.0, 3e4, -LARGEST["fp16"] / 2, LARGEST["fp16"] / 2])
    assert "2 of 4 values were too large for float16 times 2" in caplog.text
    assert "'layer'" in caplog.text
    caplog.clear()
    Ranks(1, Cast("fp16", scale=2.0)).step([{"layer": values[:2]}])
    assert not caplog.text


def test_float64_and_what_is_no_wider_float():
    for dtype in (np.float64, np.float16, ml_dtypes.bfloat16, np.int32):
        values = np.arange(5).astype(dtype)
        found = Ranks(2, Cast("bf16", scale="auto")).step([{"a": values}] * 2)["a"]
        assert found.dtype == values.dtype
        np.testing.assert_array_equal(found, values)


def test_scaled_casts_stay_on_the_host_and_do_not_combine():
    assert Cast("fp16").on_device
    assert Adasum in Cast("fp16").ops
    scaled = Cast("fp16", scale="auto")
    assert not scaled.on_device
    assert Adasum not in scaled.ops
    assert repr(scaled) == "Compression.Cast('fp16', scale='auto')"
