"""Data of unknown length: every sample once, the same steps on all ranks, one end for all."""

from __future__ import annotations

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.recipe import Stream
from tests.harness import ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_every_sample_once_in_the_same_steps(size, batch_size):
    for samples in [*range(size, 4 * size * batch_size)]:
        found = [
            list(hvd.shard(iter(range(samples)), batch_size, shuffle=False, rank=r, size=size))
            for r in range(size)
        ]
        # By the definition: rank r has r, r + size, ... in batches, a lonely one with the last.
        own = [list(range(r, samples, size)) for r in range(size)]
        steps = -(-min(map(len, own)) // batch_size)
        for mine, batches in zip(own, found, strict=True):
            assert len(batches) == steps
            assert [item for batch in batches for item in batch] == mine
            assert {len(batch) for batch in batches[:-1]} <= {batch_size}
            assert 1 <= len(batches[-1]) <= batch_size + 1
        # Workers of a loader take batches by turns.
        stream = Stream(range(samples), batch_size, 0, size)
        parts = [list(stream.part(number, 3)) for number in range(3)]
        assert [parts[k % 3][k // 3] for k in range(steps)] == found[0]
        assert sum(map(len, parts)) == steps


def test_few_samples_and_bad_arguments():
    assert list(Stream(range(2), 3, 2, 3, allow_empty=True)) == []
    for rank in range(3):
        with pytest.raises(ValueError, match=r"2 samples cannot give each of 3 ranks one"):
            list(Stream(range(2), 3, rank, 3))
    with pytest.raises(ValueError, match="pass shuffle=False"):
        hvd.shard(iter("abc"), 2)
    with pytest.raises(ValueError, match="give both"):
        Stream("abc", 2, rank=0)
    with pytest.raises(ValueError, match="batch_size=0 is not an integer"):
        Stream("abc", batch_size=0)
    with pytest.raises(ValueError, match="rank=2 is not below size=2"):
        Stream("abc", batch_size=1, rank=2, size=2)


@ranks(1, 2, 3)
def test_lockstep():
    """Rank r has 5 + r items: all end after 5 steps, with an exchange in each."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for _ in range(2):
        sums = [
            float(hvd.allreduce(np.float64(item), op=hvd.Sum))
            for item in hvd.lockstep(range(10 * rank, 10 * rank + 5 + rank))
        ]
        tens = 10 * size * (size - 1) / 2
        assert sums == [tens + size * step for step in range(5)]
    assert list(hvd.lockstep([] if rank == size - 1 else [1, 2])) == []
    # Several at once, and one that all ranks leave early.
    pairs = zip(hvd.lockstep("abc"[: 3 - rank % 2]), hvd.lockstep("xyz"), strict=False)
    assert [*pairs][:2] == [("a", "x"), ("b", "y")]
    for _ in hvd.lockstep(range(9)):
        break
    assert hvd.allgather_object(rank) == list(range(size))


@ranks(2, 3)
def test_a_failure_of_the_data_ends_all_ranks():
    hvd.init()
    last = hvd.size() - 1

    def items():
        yield 1
        if hvd.rank() == last:
            raise OSError("disk")
        yield from range(9)

    steps = []
    expected = OSError if hvd.rank() == last else hvd.HorovodInternalError
    with pytest.raises(expected, match=f"disk|rank {last} has no next item"):
        steps.extend(hvd.allreduce(np.ones(1)) for _ in hvd.lockstep(items()))
    assert hvd.allgather_object(hvd.rank()) == list(range(last + 1))
