"""The samples that a rank takes."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlite.recipe import Sharding

SIZES = (1, 2, 3, 4, 7)
BATCHES = (1, 2, 3, 5, 8)


def deal(samples, batch_size, size, epoch=0, **options):
    """The batches of all ranks: one list of arrays per rank."""
    return [
        Sharding(samples, batch_size, rank, size, **options).indices(epoch) for rank in range(size)
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch_size", BATCHES)
def test_every_sample_once_and_equal_steps(size, batch_size):
    for samples in range(size, 60):
        ranks = deal(samples, batch_size, size, epoch=3)
        steps = {len(batches) for batches in ranks}
        assert steps == {Sharding(samples, batch_size, 0, size).steps}
        together = np.concatenate([batch for batches in ranks for batch in batches])
        np.testing.assert_array_equal(np.sort(together), np.arange(samples))
        for step in zip(*ranks, strict=True):
            lengths = [len(batch) for batch in step]
            assert min(lengths) >= 1
            assert max(lengths) - min(lengths) <= 1
            assert batch_size == 1 or max(lengths) <= batch_size


@pytest.mark.parametrize(
    ("samples", "batch_size", "size", "expected"),
    [
        (12, 3, 2, (6, 6)),
        (16, 3, 2, (6, 6, 4)),  # a remainder of more than half a batch stays
        (15, 3, 2, (6, 6, 3)),  # and so does one of exactly half
        (14, 3, 2, (6, 4, 4)),  # a smaller one is shared with the batch before
        (13, 3, 2, (6, 4, 3)),
        (13, 2, 4, (8, 5)),
        (9, 2, 4, (5, 4)),
        (5, 8, 4, (5,)),  # no batch before
        (7, 1, 4, (7,)),  # two halves could not give each of 4 ranks a sample
        (11, 1, 4, (4, 7)),
        (4, 1, 4, (4,)),
        (5, 2, 1, (2, 2, 1)),
        (1, 8, 1, (1,)),
    ],
)
def test_global_batches(samples, batch_size, size, expected):
    sharding = Sharding(samples, batch_size, 0, size)
    assert sharding.global_batch_sizes == expected
    assert sharding.steps == len(expected)


@pytest.mark.parametrize("global_batch", [8, 12, 24])
def test_same_global_batch_is_the_same_samples_at_any_number_of_ranks(global_batch):
    for samples in range(global_batch, 5 * global_batch):
        alone = Sharding(samples, global_batch, 0, 1, seed=5).indices(epoch=2)
        for size in (2, 4):
            ranks = deal(samples, global_batch // size, size, epoch=2, seed=5)
            together = [np.concatenate(step) for step in zip(*ranks, strict=True)]
            assert len(together) == len(alone)
            for found, expected in zip(together, alone, strict=True):
                np.testing.assert_array_equal(found, expected)


def test_weights_make_the_mean_of_ranks_the_mean_of_samples():
    samples, size = 23, 4
    values = np.random.default_rng(0).normal(size=samples)
    shardings = [Sharding(samples, 3, rank, size) for rank in range(size)]
    for step in range(shardings[0].steps):
        batches = [sharding.indices(0)[step] for sharding in shardings]
        of_ranks = np.mean(
            [
                values[batch].mean() * sharding.weights[step]
                for batch, sharding in zip(batches, shardings, strict=True)
            ]
        )
        assert of_ranks == pytest.approx(values[np.concatenate(batches)].mean(), rel=1e-12)
    assert Sharding(24, 3, 1, 4).weights == (1.0, 1.0)


def test_epochs_and_seeds_reorder():
    def order(epoch, seed):
        return np.concatenate(Sharding(100, 10, 0, 1, seed=seed).indices(epoch)).tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(epoch, seed)) for epoch in range(3) for seed in range(3)}) == 9


def test_without_shuffle_the_order_is_that_of_the_data():
    rank_0, rank_1 = deal(10, 2, 2, epoch=4, shuffle=False)
    assert [batch.tolist() for batch in rank_0] == [[0, 1], [4, 5], [8]]
    assert [batch.tolist() for batch in rank_1] == [[2, 3], [6, 7], [9]]
    assert all(batch.dtype == np.int64 for batch in rank_0 + rank_1)


def test_fewer_samples_than_ranks():
    with pytest.raises(ValueError, match=r"rank 1: 3 samples .* 4 ranks.*at most 3 ranks"):
        Sharding(3, 2, 1, 4)
    ranks = deal(3, 2, 4, shuffle=False, allow_empty=True)
    assert [[batch.tolist() for batch in batches] for batches in ranks] == [
        [[0]],
        [[1]],
        [[2]],
        [[]],
    ]
    assert Sharding(3, 2, 3, 4, allow_empty=True).weights == (0.0,)
    assert deal(0, 2, 2, allow_empty=True) == [[], []]
    with pytest.raises(ValueError, match="0 samples"):
        Sharding(0, 2, 0, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"samples": -1}, "samples=-1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"size": 0}, "size=0"),
        ({"rank": 2}, "rank=2 is not below size=2"),
        ({"rank": -1}, "rank=-1"),
        ({"rank": None}, "give both"),
        ({"size": None}, "give both"),
        ({"seed": -3}, "seed=-3"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        Sharding(**{"samples": 10, "batch_size": 2, "rank": 0, "size": 2, **arguments})


def test_bad_epoch():
    with pytest.raises(ValueError, match="epoch=-1"):
        Sharding(10, 2, 0, 1).indices(-1)


def test_numpy_integers_are_integers():
    assert Sharding(np.int64(10), np.int32(2), np.int64(0), np.int64(2)).steps == 3


def rest(state, batch_size, size):
    """Deal the rest of an epoch to all ranks: one list of arrays per rank."""
    whole = [Sharding(state["samples"], batch_size, rank, size) for rank in range(size)]
    return [each.at(state).indices(state["epoch"]) for each in whole]


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_every_sample_once_after_stopping_at_any_step(before, after):
    for samples in range(4, 60, 5):
        sharding, ranks = Sharding(samples, 3, 0, before), deal(samples, 3, before, epoch=2)
        for step in range(sharding.steps):
            state = sharding.position(2, step)
            taken = [batch for batches in ranks for batch in batches[:step]]
            left = samples - sum(map(len, taken))
            assert state == {
                "epoch": 2,
                "done": samples - left,
                "samples": samples,
                "shuffle": True,
                "seed": 0,
            }
            if left < after:
                with pytest.raises(ValueError, match=f"has {left} left, which cannot give each"):
                    rest(state, 5, after)
                continue
            others = rest(state, 5, after)
            assert len({len(batches) for batches in others}) == 1
            assert all(len(batch) for batches in others for batch in batches)
            together = np.concatenate([*taken, *(batch for each in others for batch in each)])
            np.testing.assert_array_equal(np.sort(together), np.arange(samples))


@pytest.mark.parametrize("batch_size", BATCHES)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (3, 2), (4, 1), (4, 2), (4, 3)])
def test_the_ranks_that_are_left_share_the_same_global_batches(before, after, batch_size):
    for samples in range(before, 4 * before * batch_size + 1):
        old = Sharding(samples, batch_size, rank=0, size=before)
        new = [old.taken_over(rank, after) for rank in range(after)]
        assert all(each.global_batch_sizes == old.global_batch_sizes for each in new)
        shared = zip(*(each.indices(0) for each in new), strict=True)
        assert [[*np.concatenate(each)] for each in shared] == [[*b] for b in old.global_batches(0)]


def test_the_same_ranks_go_on_as_if_they_had_not_stopped():
    for samples in range(4, 60):
        sharding = Sharding(samples, 3, 1, 4)
        whole = sharding.indices(1)
        for step in range(sharding.steps):
            after = sharding.at(sharding.position(1, step))
            assert after.weights == sharding.weights[step:]
            for found, expected in zip(after.indices(1), whole[step:], strict=True):
                np.testing.assert_array_equal(found, expected)
            again = after.at(after.position(1, after.steps - 1))
            np.testing.assert_array_equal(again.indices(1)[0], whole[-1])


def test_nothing_is_left_after_the_last_step():
    for size in (1, 3):
        sharding = Sharding(10, 3, 0, size)
        state = sharding.position(4, sharding.steps)
        assert (state["epoch"], state["done"]) == (4, 10)
        rest = sharding.at(state)
        assert (rest.steps, rest.indices(4), rest.weights) == (0, [], ())
        within = sharding.at(sharding.position(4, 1))
        assert within.position(4, within.steps) == state


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (Sharding(11, 3, 0, 1), "samples=11, but the state is one of samples=10"),
        (Sharding(10, 3, 0, 1, seed=1), "seed=1, but the state is one of seed=0"),
        (Sharding(10, 3, 0, 1, shuffle=False), "shuffle=False, but the state is one of shuffle=Tr"),
    ],
)
def test_positions_in_other_data_are_refused(other, text):
    with pytest.raises(ValueError, match=text):
        other.at(Sharding(10, 3, 0, 1).position(0, 1))


def test_steps_and_numbers_of_samples_that_do_not_exist_are_refused():
    sharding = Sharding(10, 3, 0, 1)
    for step in (-1, sharding.steps + 1):
        with pytest.raises(ValueError, match=rf"step={step}: expected 0 to {sharding.steps}"):
            sharding.position(0, step)
    with pytest.raises(ValueError, match="done=11 is more than samples=10"):
        Sharding(10, 3, 0, 1, done=11)
    with pytest.raises(ValueError, match="done=-1 is not an integer of 0 or more"):
        Sharding(10, 3, 0, 1, done=-1)
