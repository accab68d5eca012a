from __future__ import annotations

import math

import numpy as np
import pytest

from hvdlite.base.reduction import Average, Sum
from hvdlite.compression import Compression, Reduction, TopK
from tests.compression.ranks import SIZES, Ranks, gradients_of
from tests.compression.sparse_references import (
    DTYPES,
    SHAPES,
    Buckets,
    check_result,
    joined,
    keep,
    largest,
)
from tests.references import dtype_of

NAN, INF = np.nan, np.inf


def select(own, strategy, counts):
    """Return the part of a rank's gradients that it must send."""
    if strategy.per == "bucket":
        flat = joined(own)
        return keep(flat, largest(flat, counts(flat.size)))
    parts = [np.ravel(each).astype(np.float64) for each in own.values()]
    return np.concatenate([keep(part, largest(part, counts(part.size))) for part in parts])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [Average, Sum], ids=lambda op: op.name)
@pytest.mark.parametrize(
    ("strategy", "counts"),
    [
        (TopK(0.1), lambda size: -(-size // 10)),
        (TopK(0.1, per="tensor"), lambda size: -(-size // 10)),
        (TopK(count=5), lambda size: 5),
        (TopK(count=5, per="tensor"), lambda size: 5),
        (TopK(1.0), lambda size: size),
    ],
    ids=lambda value: str(value) if isinstance(value, TopK) else "count",
)
def test_the_sum_of_the_greatest(size, dtype, op, strategy, counts):
    for step in range(2):
        gradients = gradients_of(size, SHAPES, step, dtype_of(dtype))
        found = Ranks(size, strategy, Reduction(op)).step(gradients)
        sent = [select(own, strategy, counts) for own in gradients]
        check_result(found, sent, size if op is Average else 1, dtype)


@pytest.mark.parametrize(("dtype", "entry"), [(np.float32, 8), (np.float64, 12)])
def test_bytes(dtype, entry):
    rows = [np.arange(-500, 501).astype(dtype)] * 3
    assert Buckets(rows).count_bytes(TopK(0.01)) == [11 * entry] * 3


def test_infinities_are_sent_and_leave_nothing_behind():
    rows = [np.array([1, -INF, 2, INF], np.float32), np.array([1, INF, 3, 2], np.float32)]
    buckets = Buckets(rows, Reduction(Sum))
    np.testing.assert_array_equal(buckets.exchange(TopK(count=2)), [0, NAN, 3, INF])
    assert [bucket.unsent.tolist() for bucket in buckets.buckets] == [[1, 0, 2, 0], [1, 0, 0, 2]]


def test_of_each_tensor_what_no_rank_has_is_not_sent():
    ranks = Ranks(2, TopK(0.1, per="tensor"))
    gradients = gradients_of(2, SHAPES)
    for own in gradients:
        own["c"][...] = 0
    lengths = []
    for transport in ranks.simulation.transports:
        gather = transport.allgather
        transport.allgather = lambda piece, result, gather=gather: (
            lengths.append(piece.size),
            gather(piece, result),
        )
    ranks.step(gradients, absent=["c"])
    others = sum(math.ceil(each.size / 10) for name, each in gradients[0].items() if name != "c")
    assert lengths == [8 * others] * 2


def test_settings():
    assert TopK() == TopK(0.01) == Compression.TopK(ratio=0.01)
    assert TopK().name == "TopK(ratio=0.01)"
    assert TopK(count=3).name == "TopK(count=3)"
