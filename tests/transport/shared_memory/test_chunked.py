import numpy as np
import pytest

from hvdlite.transport.reduce import perform
from hvdlite.transport.shared_memory.chunked import Chunk, cut, load, slice_of


@pytest.mark.parametrize("size", [0, 1, 5, 12, 13])
@pytest.mark.parametrize("owners", [1, 2, 3, 7])
def test_slices_follow_each_other(size, owners):
    whole = np.arange(size)
    parts = [whole[slice_of(rank, size, owners)] for rank in range(owners + 2)]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert max(part.size for part in parts[:owners]) <= -(-size // owners)
    assert not any(part.size for part in parts[owners:])


@pytest.mark.parametrize("owners", [0, 1, 2, 3])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_of_a_chunk_is_loaded_but_the_own_slice(rank, owners):
    chunk, target = np.arange(10), np.full(10, -1)
    own = slice_of(rank, 10, owners)
    perform(load(target, Chunk([chunk], [chunk], 10), own, ""))
    chunk[own] = -1
    assert target.tolist() == chunk.tolist()


SIZES = [[3], [0], [0, 0], [4, 4], [3, 1, 1], [5, 3, 5], [9, 1, 2, 8, 0], [1, 12, 1], [4, 0, 4, 1]]


@pytest.mark.parametrize("sizes", SIZES)
def test_chunks_hold_all_arrays_in_order(sizes):
    whole = np.arange(sum(sizes))
    arrays = np.split(whole, np.cumsum(sizes)[:-1])
    chunks = cut(arrays, [-array for array in arrays], 4)
    assert np.concatenate([part for chunk in chunks for part in chunk.sends]).tolist() == [*whole]
    for chunk in chunks:
        assert chunk.size == sum(part.size for part in chunk.sends) <= 4
        for send, result in zip(chunk.sends, chunk.results, strict=True):
            assert result.tolist() == (-send).tolist()
        slot = np.full(chunk.size, -1)
        perform(load(slot, chunk, slice(0, 0), ""))
        for send, part in zip(chunk.sends, chunk.split(slot), strict=True):
            assert part.tolist() == send.tolist()


@pytest.mark.parametrize("sizes", SIZES)
def test_ranks_with_different_lists_load_their_common_arrays_to_the_same_place(sizes):
    arrays = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    longest = cut(arrays, arrays, 4)[0]
    for count in range(1, len(arrays)):
        first = cut(arrays[:count], arrays[:count], 4)[0]
        assert first.size <= longest.size
        for mine, theirs in zip(first.sends, longest.sends, strict=False):
            assert mine.tolist() == theirs.tolist()
