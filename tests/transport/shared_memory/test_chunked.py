import random

import numpy as np
import pytest

from hvdlite.transport.shared_memory.chunked import cut, split

CASES = [
    ((0,), 3),
    ((1,), 3),
    ((3,), 3),
    ((7,), 3),
    ((6,), 3),
    ((2, 1), 3),
    ((2, 2, 2), 3),
    ((0, 3, 0, 3, 0), 3),
    ((0, 0), 1),
    ((1, 1, 1), 1),
    ((10, 0, 1, 5, 0), 4),
    ((), 4),
]


@pytest.mark.parametrize(("sizes", "room"), CASES)
def test_chunks_are_full_and_hold_everything_in_its_order(sizes, room):
    check(sizes, room)


def test_the_same_of_many_sizes():
    draw = random.Random(0)
    for _ in range(500):
        sizes = tuple(draw.choice((0, 1, 2, 5, 17)) for _ in range(draw.randrange(12)))
        check(sizes, draw.randrange(1, 20))


def check(sizes, room):
    whole = np.arange(sum(sizes))
    arrays = np.split(whole, np.cumsum(sizes)[:-1]) if sizes else []
    chunks = cut(sizes, room)
    assert [chunk.size for chunk in chunks] == [
        min(room, len(whole) - start) for start in range(0, len(whole), room)
    ]
    for number, chunk in enumerate(chunks):
        parts = chunk.parts(arrays)
        assert chunk.is_fused == (len(parts) > 1)
        together = np.concatenate(parts)
        assert together.tolist() == whole[number * room : (number + 1) * room].tolist()
        for part, piece in zip(parts, split(together, chunk.bounds), strict=True):
            assert part.tolist() == piece.tolist()
            assert np.shares_memory(part, whole) or not part.size


def test_the_first_chunk_does_not_depend_on_what_comes_after_those_that_are_in_it():
    """Ranks that have more operations pending than others bring the same."""
    few, more = cut((3, 4, 5), 10), cut((3, 4, 5, 6), 10)
    assert few[0] == more[0]
    assert few[0].bounds == (0, 3, 7, 10)
