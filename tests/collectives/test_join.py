from __future__ import annotations

import time

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.compression import Compression, ErrorFeedback, Parameter, Reduction
from hvdlite.engine import runtime
from hvdlite.gradients.buckets import GradientBuckets
from hvdlite.gradients.exchange import GradientExchange
from tests.harness import ranks

ALL = ranks(1, 2, 3, 4)
SEVERAL = ranks(2, 3, 4)


def new_world():
    hvd.shutdown()
    hvd.init()


def steps_of(rank):
    """Rank 0 has no step, rank 1 one, and so on."""
    return rank


@ALL
def test_joined_ranks_count_as_zeros(size):
    new_world()
    rank = hvd.rank()
    for step in range(steps_of(rank)):
        here = [r for r in range(size) if steps_of(r) > step]
        own = np.arange(5.0) + rank
        expected = sum(np.arange(5.0) + r for r in here)
        total = hvd.allreduce(own, op=hvd.Sum, name=f"sum {step}")
        np.testing.assert_array_equal(total, expected)
        average = hvd.allreduce(own, name=f"average {step}")
        np.testing.assert_allclose(average, expected / size)  # of all ranks
        smallest = hvd.allreduce(own + 1, op=hvd.Min, name=f"min {step}")
        np.testing.assert_array_equal(smallest, np.zeros(5))  # rank 0 has none
        float16s = hvd.allreduce(own, op=hvd.Sum, compression=Compression.fp16, name=f"16 {step}")
        np.testing.assert_allclose(float16s, expected)
        group = hvd.grouped_allreduce([own, np.int8([1])], op=hvd.Sum, name=f"group {step}")
        np.testing.assert_array_equal(group[0], expected)
        assert group[1].tolist() == [len(here)]
        large = hvd.allreduce(np.full(300_000, 1.0), op=hvd.Sum, name=f"large {step}")
        assert (large == len(here)).all()
        scaled = hvd.allreduce(own, op=hvd.Sum, prescale_factor=2.0, name=f"scaled {step}")
        np.testing.assert_array_equal(scaled, 2 * expected)
    assert hvd.join() == size - 1  # which had the most to do
    assert hvd.allreduce(np.ones(1), op=hvd.Sum) == [size]


@ALL
def test_calls_without_a_name_are_paired_anew_afterwards(size):
    new_world()
    for _ in range(3):
        for _ in range(steps_of(hvd.rank())):
            hvd.allreduce(np.ones(1))
            hvd.grouped_allreduce([np.ones(1)])
        hvd.join()
        assert hvd.allreduce(np.ones(1), op=hvd.Sum) == [size]
        assert hvd.grouped_allreduce([np.ones(1)], op=hvd.Sum) == [[size]]
        assert hvd.broadcast_object(hvd.rank(), size - 1) == size - 1


@SEVERAL
def test_the_rank_that_joins_last(size):
    new_world()
    for last in range(size):
        if hvd.rank() == last:
            time.sleep(0.2)
        assert hvd.join() == last


@SEVERAL
def test_what_was_submitted_before_a_join_is_no_matter_of_zeros(size):
    new_world()
    if hvd.rank() == 0:
        handles = [hvd.allreduce_async(np.ones(3), op=hvd.Sum, name=f"early {n}") for n in "ab"]
        last = hvd.join()
    else:
        time.sleep(0.1)
        handles = [hvd.allreduce_async(np.ones(3), op=hvd.Sum, name=f"early {n}") for n in "ba"]
        last = hvd.join()
    assert [handle.wait().tolist() for handle in handles] == [[size] * 3] * 2
    assert last in range(1, size)


@SEVERAL
def test_other_collectives_raise_where_they_are_called(size):
    new_world()
    if hvd.rank() != 0:
        for call in (
            lambda name: hvd.allgather(np.ones(1), name=name),
            lambda name: hvd.broadcast(np.ones(1), 1, name=name),
            lambda name: hvd.alltoall(np.ones(size), name=name),
            lambda name: hvd.reducescatter(np.ones(size), name=name),
            lambda name: hvd.grouped_allgather([np.ones(1)], name=name),
            lambda name: hvd.broadcast_object(1, 1, name=name),
            lambda name: hvd.allgather_object(1, name=name),
            lambda name: hvd.barrier(name=name),
        ):
            with pytest.raises(hvd.HorovodInternalError, match=r"rank 0, which called join\(\)"):
                call("refused")
            assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="works") == [size - 1]
    hvd.join()
    assert hvd.allgather(np.array([hvd.rank()])).tolist() == list(range(size))


@ranks(3, 4)
def test_the_ranks_that_are_left_still_have_to_agree(size):
    new_world()
    if hvd.rank() != 0:
        with pytest.raises(hvd.HorovodInternalError, match=r"shape is \(1,\) on rank 1, \(2,\)"):
            hvd.allreduce(np.ones(min(hvd.rank(), 2)), name="odd")
        assert hvd.allreduce(np.ones(2), op=hvd.Sum, name="even").tolist() == [size - 1] * 2
    hvd.join()


@SEVERAL
def test_a_rank_that_shuts_down_without_joining(size):
    new_world()
    if hvd.rank() == 0:
        hvd.shutdown()
    else:
        with pytest.raises(hvd.HorovodInternalError, match="rank 0 shut down"):
            hvd.join()
        hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum) == [size]


@ranks(3)
def test_join_of_a_process_set():
    new_world()
    pair = hvd.add_process_set([0, 2])
    if hvd.rank() == 0:
        assert hvd.join(pair) == 2
    elif hvd.rank() == 2:
        assert hvd.allreduce(np.ones(2), op=hvd.Sum, process_set=pair).tolist() == [1, 1]
        assert hvd.join(pair) == 2
    assert hvd.allreduce(np.ones(1), op=hvd.Sum) == [3]


class TestGradients:
    PARAMETERS = tuple(
        Parameter(name, shape, np.dtype(kind))
        for name, shape, kind in (
            ("a", (3, 5), "f4"),
            ("b", (0,), "f4"),
            ("c", (400_000,), "f4"),
            ("d", (7,), "f2"),
        )
    )

    def exchange(self, kind=GradientExchange, strategy=Compression.none):
        return kind(runtime.engine(), "model", self.PARAMETERS, strategy, Reduction())

    def step(self, exchange, value, samples=None):
        exchange.begin()
        for number, parameter in reversed(list(enumerate(self.PARAMETERS))):
            exchange.buckets.slot(number)[...] = np.full(parameter.shape, value, np.float32)
            exchange.mark(number)
        assert exchange.finish(samples) == [True] * 4
        return [exchange.buckets.result_slot(number).copy() for number in range(4)]

    @SEVERAL
    @pytest.mark.parametrize("strategy", [Compression.none, Compression.fp16])
    def test_steps_of_ranks_that_have_more(self, size, strategy):
        new_world()
        rank = hvd.rank()
        exchange = self.exchange(strategy=strategy)
        for epoch in range(2):  # in the second, rank 0 comes to its first step
            for step in range(steps_of(rank) + epoch):
                here = [r for r in range(size) if steps_of(r) + epoch > step]
                for average in self.step(exchange, rank + 1.0):
                    np.testing.assert_allclose(
                        average, sum(r + 1.0 for r in here) / size, rtol=1e-3
                    )
            assert hvd.join() == size - 1
        plans = hvd.allgather_object(exchange.buckets.plan)
        assert plans == plans[:1] * size

    @SEVERAL
    def test_a_rank_that_comes_late_to_weighted_steps(self, size):
        new_world()
        rank = hvd.rank()
        exchange = self.exchange(strategy=ErrorFeedback(Compression.fp16))
        for epoch in range(2):  # in the second, rank 0 comes to its first step
            for step in range(steps_of(rank) + epoch):
                here = [r for r in range(size) if steps_of(r) + epoch > step]
                total = sum(r + 1 for r in here)
                for average in self.step(exchange, float(rank), samples=rank + 1):
                    np.testing.assert_allclose(
                        average, sum(r * (r + 1) for r in here) / total, rtol=5e-3
                    )
            assert hvd.join() == size - 1

    @SEVERAL
    def test_buckets_that_a_framework_orders(self, size):
        new_world()
        rank = hvd.rank()
        buckets = self.exchange(GradientBuckets)
        for step in range(steps_of(rank)):
            here = [r for r in range(size) if steps_of(r) > step]
            for index, members in enumerate(buckets.plan):
                gradients = {
                    n: np.full(self.PARAMETERS[n].shape, rank, np.float32) for n in members
                }
                buckets.start_bucket(index, gradients)
            for index in range(len(buckets.plan)):
                # A rank that has joined lacks no gradient that the others have.
                assert buckets.finish_bucket(index).all()
                result = buckets.all[index].arrays.result
                np.testing.assert_allclose(result, sum(here) / size, rtol=1e-3)
            buckets.compare()
        hvd.join()
