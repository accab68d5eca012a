from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from hvdlite.base.arrays import address, as_array, as_bytes, check_out, describe, flat, slice_bounds


def test_as_array_is_the_same_object_where_nothing_is_to_be_done():
    array = np.arange(6.0).reshape(2, 3)
    assert as_array(array) is array
    turned = as_array(array.T)
    assert turned.flags.c_contiguous
    assert (turned == array.T).all()
    narrow = np.zeros(3, ml_dtypes.bfloat16)
    assert as_array(narrow) is narrow


def test_as_array_takes_lists_and_scalars():
    assert as_array([[1, 2], [3, 4]]).shape == (2, 2)
    assert as_array(2.5).shape == ()
    assert as_array(np.float32(2.5)).dtype == np.float32


def test_as_array_turns_a_foreign_byte_order_around():
    foreign = np.array([1.0, 2.0, -3.0]).astype(">f4")
    array = as_array(foreign)
    assert array.dtype.isnative
    np.testing.assert_array_equal(array, [1.0, 2.0, -3.0])


@pytest.mark.parametrize(
    "array", [np.array([None, "text"]), np.zeros(2, [("a", np.int32), ("b", np.int8)])]
)
def test_as_array_refuses_objects_and_records(array):
    with pytest.raises(ValueError, match=r"broadcast_object\(\)"):
        as_array(array)


def test_as_array_refuses_a_ragged_list():
    with pytest.raises(ValueError):
        as_array([[1], [2, 3]])


def test_check_out_takes_what_fits():
    array = np.zeros((2, 3), np.float32)
    check_out(np.ones((2, 3), np.float32), array)
    check_out(array, array)
    check_out(np.ones((2, 3), np.float32), np.zeros((3, 2), np.float32).T)


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((3, 2), np.float32),
        np.zeros((2, 3), np.float64),
        np.zeros((2, 3), ">f4"),
        np.zeros((3, 2), np.float32).T,
        np.broadcast_to(np.float32(0), (2, 3)),
        [[0.0] * 3] * 2,
    ],
)
def test_check_out_refuses_what_would_lose_the_result(out):
    with pytest.raises(ValueError, match=r"writeable array float32\[2, 3\]"):
        check_out(out, np.zeros((2, 3), np.float32))


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


def test_flat_is_a_view_where_it_can_be():
    array = np.arange(6).reshape(2, 3)
    assert np.shares_memory(flat(array), array)
    np.testing.assert_array_equal(flat(array.T), [0, 3, 1, 4, 2, 5])
    np.testing.assert_array_equal(flat(array[::-1]), [3, 4, 5, 0, 1, 2])
    assert flat(np.float64(3.0)).shape == (1,)
    assert flat(np.zeros((0, 3))).shape == (0,)


def test_as_bytes_covers_every_byte():
    assert as_bytes(np.zeros(3, ml_dtypes.bfloat16)).size == 6
    assert as_bytes(np.zeros(0, np.complex128)).size == 0


def test_describe():
    assert describe(np.zeros((2, 3), np.float32)) == "float32[2, 3]"
    assert describe(np.zeros((), ml_dtypes.bfloat16)) == "bfloat16[]"


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_slices_cover_everything_evenly(parts):
    for length in (0, 1, 2, 5, 7, 1023, 10**6):
        bounds = slice_bounds(length, parts)
        sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
        assert bounds[0] == 0
        assert bounds[-1] == length
        assert len(sizes) == parts
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


def test_known_slices():
    assert slice_bounds(10, 4) == [0, 3, 6, 8, 10]
    assert slice_bounds(2, 4) == [0, 1, 2, 2, 2]
    assert slice_bounds(0, 3) == [0, 0, 0, 0]
