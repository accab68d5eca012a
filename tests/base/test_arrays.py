from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from hvdlite.base.arrays import address, as_array, as_bytes, check_out, describe, flat, slice_bounds


def test_as_array_is_contiguous_in_native_order_and_the_same_object_if_it_can_be():
    array = np.arange(6.0).reshape(2, 3)
    for same in (array, np.zeros(3, ml_dtypes.bfloat16)):
        assert as_array(same) is same
    for given, shape in (
        (array.T, (3, 2)),
        (array.astype(">f4"), (2, 3)),
        ([[1, 2], [3, 4]], (2, 2)),
        (2.5, ()),
        (np.float32(2.5), ()),
    ):
        found = as_array(given)
        assert found.shape == shape
        assert found.dtype.isnative
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, given)
    assert as_array(np.float32(2.5)).dtype == np.float32


def test_as_array_refuses_what_is_no_plain_array():
    for array in (np.array([None, "text"]), np.zeros(2, [("a", np.int32), ("b", np.int8)])):
        with pytest.raises(ValueError, match=r"broadcast_object\(\)"):
            as_array(array)
    with pytest.raises(ValueError):
        as_array([[1], [2, 3]])
    with pytest.raises(TypeError, match="would lose its mask"):
        as_array(np.ma.masked_array([1.0, 2.0], [0, 1]))


def test_check_out_takes_what_fits_and_refuses_what_would_lose_the_result():
    array = np.zeros((2, 3), np.float32)
    check_out(np.ones((2, 3), np.float32), array)
    check_out(array, array)
    check_out(np.ones((2, 3), np.float32), np.zeros((3, 2), np.float32).T)
    for out in (
        np.zeros((3, 2), np.float32),
        np.zeros((2, 3), np.float64),
        np.zeros((2, 3), ">f4"),
        np.zeros((3, 2), np.float32).T,
        np.broadcast_to(np.float32(0), (2, 3)),
        np.frombuffer(bytes(24), np.float32).reshape(2, 3),  # read-only
        [[0.0] * 3] * 2,
    ):
        with pytest.raises(ValueError, match=r"writeable array float32\[2, 3\]"):
            check_out(out, array)


def test_check_out_refuses_a_part_of_the_input_beside_another():
    """Its beginning would be overwritten before its end has left."""
    whole = np.zeros(9)
    check_out(whole[:8].reshape(8), whole[:8])
    check_out(whole[4:8], whole[:4])
    check_out(whole[3:3], whole[2:2])
    for start, stop in ((1, 9), (0, 8)):
        with pytest.raises(ValueError, match="out overlaps the input"):
            check_out(whole[start:stop], whole[1 - start : 9 - start])


def test_an_address_is_found_for_any_contiguous_array():
    read_only = np.arange(3)
    read_only.flags.writeable = False
    arrays = [np.ones((2, 3)), np.ones(()), np.ones(3, bool), read_only]
    arrays += [np.ones(5, ml_dtypes.bfloat16)[2:], np.ones(3, complex)]
    for array in arrays:
        assert address(array) == array.ctypes.data


def test_flat_is_a_view_where_it_can_be_as_bytes_covers_all_and_describe_names_it():
    array = np.arange(6).reshape(2, 3)
    assert np.shares_memory(flat(array), array)
    for each in (array, array.T, array[::-1], np.float64(3.0), np.zeros((0, 3))):
        assert flat(each).tolist() == np.ravel(each).tolist()
    assert as_bytes(np.zeros(3, ml_dtypes.bfloat16)).size == 6
    assert as_bytes(np.zeros(0, np.complex128)).size == 0
    assert describe(np.zeros((2, 3), np.float32)) == "float32[2, 3]"
    assert describe(np.zeros((), ml_dtypes.bfloat16)) == "bfloat16[]"


def test_slices_cover_everything_evenly_the_longer_ones_first():
    for parts in (1, 2, 3, 4, 7):
        for length in (0, 1, 2, 5, 7, 1023, 10**6):
            bounds = slice_bounds(length, parts)
            sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
            assert (bounds[0], bounds[-1], len(sizes)) == (0, length, parts)
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)
