from __future__ import annotations

import numpy as np
import pytest

from hvdlite.base.reduction import Average, Sum
from hvdlite.compression import RandomK, Reduction
from hvdlite.errors import MismatchError
from tests.compression.ranks import SIZES, Ranks, gradients_of
from tests.compression.sparse_references import DTYPES, SHAPES, Buckets, check_result, joined
from tests.references import dtype_of


def drawn(strategy, size=200, step=0):
    """Return the indices that are drawn, as the result shows them."""
    buckets = Buckets([np.arange(1.0, size + 1)])
    buckets.buckets[0].count = step
    return np.flatnonzero(buckets.exchange(strategy))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [Average, Sum], ids=lambda op: op.name)
@pytest.mark.parametrize(("ratio", "percent"), [(0.05, 5), (0.7, 70), (1.0, 100)])
def test_the_reduction_of_some_entries(size, dtype, op, ratio, percent):
    gradients = gradients_of(size, SHAPES, dtype=dtype_of(dtype))
    found = Ranks(size, RandomK(ratio), Reduction(op)).step(gradients)
    own = [joined(each) for each in gradients]
    # From one rank's ones, since sums may be 0.
    ones = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    indices = np.flatnonzero(joined(Ranks(1, RandomK(ratio)).step([ones])))
    assert indices.size == -(-own[0].size * percent // 100)
    sent = [np.where(np.isin(np.arange(each.size), indices), each, 0) for each in own]
    check_result(found, sent, size if op is Average else 1, dtype)


def test_entries_depend_on_the_step_the_seed_and_the_names_alone():
    first = drawn(RandomK(0.1))
    np.testing.assert_array_equal(first, drawn(RandomK(0.1)))
    assert first.tolist() != drawn(RandomK(0.1), step=1).tolist()
    assert first.tolist() != drawn(RandomK(0.1, seed=1)).tolist()
    values = np.arange(1.0, 202.0).astype(np.float32)
    by_name = [
        Ranks(1, RandomK(0.1)).step([{name: values}])[name].nonzero()[0].tolist() for name in "ab"
    ]
    assert by_name[0] != by_name[1]


@pytest.mark.parametrize("ratio", [0.05, 0.5, 0.8])
def test_all_entries_are_drawn_alike(ratio):
    """The number of times that an entry is drawn has a binomial distribution."""
    steps, size = 400, 60
    times = np.zeros(size)
    pairs = np.zeros((size, size))
    for step in range(steps):
        chosen = drawn(RandomK(ratio), size, step)
        assert chosen.size == round(ratio * size)
        times[chosen] += 1
        pairs[np.ix_(chosen, chosen)] += 1
    spread = np.sqrt(steps * ratio * (1 - ratio))
    assert np.abs(times - steps * ratio).max() < 4.5 * spread
    # Neighbours are drawn independently.
    together = ratio * (size * ratio - 1) / (size - 1)
    apart = np.sqrt(steps * together * (1 - together))
    assert np.abs(np.diag(pairs, 1) - steps * together).max() < 4.5 * apart


@pytest.mark.parametrize("op", [Average, Sum], ids=lambda op: op.name)
def test_unbiased(op):
    """11 of 41 entries are sent, times 41/11, since each is drawn in 11 of 41 steps."""
    rows = [np.arange(1.0, 42.0), -(np.arange(3.0, 44.0) ** 2)]
    buckets = Buckets(rows, Reduction(op))
    for bucket in buckets.buckets:
        bucket.unsent = None
    found = buckets.exchange(RandomK(0.25, unbiased=True))
    chosen = np.flatnonzero(found)
    assert chosen.size == 11
    expected = sum(rows)[chosen] * 41 / 11 / (2 if op is Average else 1)
    np.testing.assert_allclose(found[chosen], expected, 1e-12)


def test_a_rank_without_state_draws_with_the_others():
    buckets = Buckets([np.arange(1.0, 201.0), np.zeros(200)])
    buckets.buckets[0].state.count = 7  # the other one has joined
    for bucket in buckets.buckets:
        bucket.count = 7
    together = buckets.exchange(RandomK(0.1)).nonzero()[0]
    np.testing.assert_array_equal(together, drawn(RandomK(0.1), step=7))


def test_different_entries_on_another_rank_are_detected():
    buckets = Buckets([np.ones(200)] * 3)
    buckets.buckets[1].count = 1
    for rank, error in enumerate(buckets.errors(RandomK(0.1))):
        assert isinstance(error, MismatchError)
        assert f"rank {rank}: for the bucket of 'first', RandomK has drawn" in str(error)
        assert "on rank 1 than on rank 0" in str(error)


def test_no_index_travels():
    buckets = Buckets([np.ones(1000)] * 2)
    sizes = []
    for transport in buckets.simulation.transports:
        allreduce = transport.allreduce
        transport.allreduce = lambda send, *rest, reduce=allreduce: (
            sizes.append(send.nbytes),
            reduce(send, *rest),
        )
    assert buckets.count_bytes(RandomK(0.01)) == [40, 40]  # slices of the allreduce
    assert sizes == [80, 80]
