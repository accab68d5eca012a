from __future__ import annotations

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.base.reduction import Average, Sum
from hvdlite.compression import Reduction, Threshold
from tests.compression.ranks import SIZES, Ranks, gradients_of
from tests.compression.sparse_references import DTYPES, SHAPES, Buckets, check_result, joined
from tests.harness import ranks
from tests.references import dtype_of


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [Average, Sum], ids=lambda op: op.name)
@pytest.mark.parametrize("value", [0.5, 2, 1e9])
def test_the_sum_of_what_reaches_it(size, dtype, op, value):
    gradients = gradients_of(size, SHAPES, dtype=dtype_of(dtype))
    found = Ranks(size, Threshold(value), Reduction(op)).step(gradients)
    own = [joined(each) for each in gradients]
    sent = [np.where(np.abs(each) >= value, each, 0) for each in own]
    check_result(found, sent, size if op is Average else 1, dtype)


def test_each_rank_sends_as_many_as_it_has():
    rows = [
        np.array([1, -1, 0.5, 0.99], np.float32),
        np.zeros(4, np.float32),
        np.array([-3, 0, 2, 7], np.float32),
    ]
    rows = [np.concatenate([row, np.zeros(40, np.float32)]) for row in rows]
    assert Buckets(rows).count_bytes(Threshold(1)) == [2 * 8, 0, 3 * 8]
    buckets = Buckets(rows, Reduction(Sum))
    assert buckets.exchange(Threshold(1)).tolist() == [-2, -1, 2, 7] + [0] * 40
    unsent = [bucket.unsent.tolist()[:4] for bucket in buckets.buckets]
    assert unsent == [np.float32([0, 0, 0.5, 0.99]).tolist(), [0] * 4, [0] * 4]


def test_nobody_sends_anything():
    buckets = Buckets([np.full(5, 0.5)] * 2)
    assert buckets.exchange(Threshold(1)).tolist() == [0] * 5
    assert buckets.buckets[1].unsent.tolist() == [0.5] * 5


@ranks(3)
def test_messages_of_different_lengths_between_processes():
    """Rank 0 has none to send; rank 1 has nearly all, which takes more than a chunk."""
    hvd.init()
    count = 300_000
    rows = [np.zeros(count), np.arange(count) - 7.0, np.arange(count) % 5.0]
    found = hvd.allreduce(
        rows[hvd.rank()].astype(np.float32), name="a", op=hvd.Sum, compression=Threshold(3)
    )
    expected = sum(np.where(np.abs(row) >= 3, row, 0) for row in rows)
    np.testing.assert_array_equal(found, expected)
