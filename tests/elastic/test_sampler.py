"""The elastic sampler: the samplers of all ranks, in one process."""

from __future__ import annotations

import collections
import itertools

import numpy as np
import pytest

pytest.importorskip("torch")

from torch.utils.data import DataLoader

from hvdlite.torch.elastic import ElasticSampler
from hvdlite.world import world


@pytest.fixture
def deal(monkeypatch):
    """Make the samplers of all ranks."""

    def make(samples, size, state=None, **kwargs):
        monkeypatch.setattr(world, "size", lambda: size)
        samplers = []
        for rank in range(size):
            monkeypatch.setattr(world, "rank", lambda rank=rank: rank)
            samplers.append(ElasticSampler(range(samples), **kwargs))
            if state is not None:
                samplers[-1].load_state_dict(state)
        return samplers

    return make


def merged(samplers):
    states = [sampler.state_dict() for sampler in samplers]
    processed = set().union(*(state["processed_indices"] for state in states))
    return {"epoch": states[0]["epoch"], "processed_indices": processed}


class TestShares:
    @pytest.mark.parametrize(
        ("samples", "size"), [*itertools.product([0, 1, 2, 7, 12], [1, 2, 3, 5])]
    )
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_every_sample_comes_and_no_more_than_equal_shares_need(
        self, deal, samples, size, shuffle
    ):
        samplers = deal(samples, size, shuffle=shuffle)
        share = -(-samples // size)
        assert [len(sampler) for sampler in samplers] == [share] * size
        assert [len(list(sampler)) for sampler in samplers] == [share] * size
        counts = collections.Counter(itertools.chain(*samplers))
        assert set(counts) == set(range(samples))
        if samples >= size:
            assert max(counts.values(), default=1) <= 2

    def test_without_shuffling_a_step_takes_what_comes_next(self, deal):
        assert [list(sampler) for sampler in deal(7, 3, shuffle=False)] == [
            [0, 3, 6],
            [1, 4, 0],
            [2, 5, 1],
        ]

    def test_a_step_depends_on_the_global_batch_and_not_on_the_number_of_ranks(self, deal):
        one, two = deal(24, 1)[0].indices, deal(24, 2)
        for start in range(0, 24, 8):
            of_two = [i for s in two for i in s.indices[start // 2 : start // 2 + 4]]
            assert sorted(of_two) == sorted(one[start : start + 8])

    def test_orders_differ_by_epoch_and_by_seed_and_are_repeated(self, deal):
        (sampler,) = deal(50, 1)
        first = list(sampler)
        sampler.set_epoch(1)
        second = list(sampler)
        assert sorted(first) == sorted(second) == list(range(50))
        assert first != second
        sampler.set_epoch(0)
        assert list(sampler) == first == list(deal(50, 1)[0])
        assert list(deal(50, 1, seed=1)[0]) != first


class TestProgress:
    def test_batches_are_recorded_as_a_loader_makes_them(self, deal):
        sampler = deal(11, 2)[1]
        batches = [batch.tolist() for batch in DataLoader(range(11), 4, sampler=sampler)]
        assert [len(batch) for batch in batches] == [4, 2]
        sampler.record_batch(1, 4)
        assert sampler.get_indices(1, 4) == batches[1]
        assert sampler.processed_indices == set(batches[1])
        sampler.record_indices(np.array(batches[0]))
        assert sampler.state_dict() == {"epoch": 0, "processed_indices": {*sampler.indices}}

    def test_the_state_is_a_copy_both_ways(self, deal):
        (sampler,) = deal(4, 1)
        state = sampler.state_dict()
        sampler.record_indices([1])
        assert state["processed_indices"] == set()
        sampler.load_state_dict(state)
        sampler.record_indices([2])
        assert state["processed_indices"] == set()

    def test_the_attributes_of_horovods_sampler(self, deal):
        done = {"epoch": 3, "processed_indices": {1, 4}}
        for rank, sampler in enumerate(deal(9, 3, done, seed=1)):
            assert (sampler.rank, sampler.num_replicas, sampler.epoch) == (rank, 3, 3)
            assert (sampler.num_samples, sampler.total_size) == (3, 9)  # of 7 samples
            sampler.record_indices([0])
            assert sampler.remaining_indices == [0, 2, 3, 5, 6, 7, 8]
            assert sampler.processed_indices == {0, 1, 4}

    def test_a_new_epoch_has_everything(self, deal):
        (sampler,) = deal(4, 1)
        sampler.record_batch(0, 3)
        sampler.reset()
        assert len(sampler) == 1
        sampler.set_epoch(1)
        assert len(sampler) == 4

    @pytest.mark.parametrize("sizes", [(3, 2, 4), (4, 1, 3), (1, 4, 2), (2, 2, 2), (5, 3, 2)])
    @pytest.mark.parametrize("samples", [24, 61])
    def test_what_was_processed_does_not_come_again_on_other_ranks(self, deal, sizes, samples):
        state, seen, done = None, collections.Counter(), set()
        for part, size in enumerate(sizes):
            samplers = deal(samples, size, state)
            steps = 3 if part < 2 else len(samplers[0])
            for sampler in samplers:
                assert done.isdisjoint(sampler)
                for step in range(steps):
                    seen.update(sampler.get_indices(step, 2))
                    sampler.record_batch(step, 2)
            state = merged(samplers)
            done = state["processed_indices"]
        assert set(seen) == done == set(range(samples))
        # Only the deal that ended the epoch may have been uneven.
        assert sum(seen.values()) - samples < max(sizes)
        assert all(len(sampler) == 0 for sampler in deal(samples, 3, state))
