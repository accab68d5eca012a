import numpy as np
import pytest

from hvdlite.transport.reduce import perform
from hvdlite.transport.shared_memory.chunked import load, slice_of


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
    perform(load(target, chunk, own))
    chunk[own] = -1
    assert target.tolist() == chunk.tolist()
