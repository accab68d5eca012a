from __future__ import annotations

import itertools

import pytest

from hvdlite.transport.adasum import slice_bounds


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
