"""One rank's batches of arrays and sequences."""

from __future__ import annotations

import doctest
import warnings

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.observe import status
from hvdlite.recipe import batches as module
from hvdlite.recipe import shard
from tests.harness import ranks


def test_example():
    assert doctest.testmod(module, extraglobs={"np": np}).failed == 0


def test_an_array_gives_arrays():
    data = np.arange(20.0).reshape(10, 2)
    batches = shard(data, 3, shuffle=False, rank=0, size=1)
    assert len(batches) == 4
    found = list(batches.epoch(0))
    assert [len(batch) for batch in found] == [3, 3, 2, 2]
    np.testing.assert_array_equal(np.concatenate(found), data)


def test_a_tuple_and_a_dict_keep_their_parts_together():
    x, y = np.arange(11), np.arange(11) * 10
    for first, second in shard((x, y), 2, rank=0, size=2):
        np.testing.assert_array_equal(first * 10, second)
    for batch in shard({"x": x, "y": {"z": y}}, 2, rank=1, size=2):
        np.testing.assert_array_equal(batch["x"] * 10, batch["y"]["z"])


def test_a_sequence_gives_lists():
    class Squares:
        def __len__(self):
            return 7

        def __getitem__(self, index):
            assert type(index) is int
            return index * index

    batches = shard(Squares(), 4, shuffle=False, rank=0, size=1)
    assert list(batches) == [[0, 1, 4, 9], [16, 25, 36]]
    found = list(shard((list("abcd"), np.arange(4)), 2, shuffle=False, rank=1, size=2))
    assert found[0][0] == ["c", "d"]
    assert found[0][1].tolist() == [2, 3]


def test_a_frame_is_indexed_by_position():
    class Frame:
        """A stand-in for pandas: brackets take labels, ``iloc`` takes positions."""

        shape, dtype = (4,), np.dtype(float)

        def __init__(self):
            self.iloc = np.arange(4.0)

        def __len__(self):
            return 4

        def __getitem__(self, label):
            raise KeyError(label)

    (batch,) = shard(Frame(), 4, shuffle=False, rank=0, size=1)
    assert batch.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_file_is_read_in_increasing_order():
    class File:
        """A stand-in for a data set of h5py."""

        shape, dtype, chunks = (40, 2), np.dtype(float), None
        data = np.arange(80.0).reshape(shape)

        def __len__(self):
            return 40

        def __getitem__(self, indices):
            if (np.diff(indices) <= 0).any():
                raise TypeError("Indexing elements must be in increasing order")
            return self.data[indices]

    found = zip(shard(File(), 8, rank=0, size=2), shard(File.data, 8, rank=0, size=2), strict=True)
    for batch, expected in found:
        np.testing.assert_array_equal(batch, expected)


def test_each_iteration_is_the_next_epoch():
    def epoch(found):
        return np.concatenate(list(found)).tolist()

    batches = shard(np.arange(50), 5, seed=3, rank=0, size=1)
    first, second = epoch(batches), epoch(batches)
    assert first != second
    assert (first, second) == (epoch(batches.epoch(0)), epoch(batches.epoch(1)))
    assert epoch(batches) == epoch(batches.epoch(2))
    batches.set_epoch(1)
    assert epoch(batches) == second


@ranks(1, 2, 3)
def test_a_look_at_the_first_batch_on_one_rank_leaves_the_epochs_alone():
    hvd.init()
    batches = shard(np.arange(23), 2)
    if hvd.rank() == 0:
        next(iter(batches))
    for epoch in range(2):
        if hvd.rank() == epoch:
            for _ in batches:
                break
        mine = np.concatenate(list(batches))
        np.testing.assert_array_equal(np.sort(hvd.allgather(mine)), np.arange(23))
        np.testing.assert_array_equal(mine, np.concatenate(list(batches.epoch(epoch))))


@ranks(2)
def test_an_epoch_that_is_left_after_a_step_and_begun_again_is_told():
    hvd.init()
    batches, others = shard(np.arange(40), 4), shard(np.arange(40), 4)

    def warned(iterated, makes_step=True):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            next(iter(iterated))
        if makes_step:
            status.count_step("optimizer")
        return [str(each.message) for each in found]

    assert not warned(batches, makes_step=False)  # a look
    assert not warned(batches)
    assert not warned(others)
    assert not warned(batches)  # the batches of others came last
    found = warned(batches)
    assert len(found) == (hvd.rank() == 0)
    assert all("takes the same batches again: set_epoch(epoch + 1)" in each for each in found)
    batches.set_epoch(1)
    assert not warned(batches)


def test_the_content_of_data_is_known_in_part():
    class Subset(list):
        indices = np.array([3, 1, 2])

    x, y = np.arange(100.0), np.arange(100)
    same = shard((x, {"y": y}), 3, rank=0, size=1).content
    assert same == shard((x.copy(), {"y": y.copy()}), 3, rank=0, size=1).content
    assert all(np.array(same) != shard((x[::-1], {"y": y[::-1]}), 3, rank=0, size=1).content)
    assert module.checksum(Subset([0] * 3)) == module.checksum(np.array([3, 1, 2])) != 0
    for unknown in ([1, 2], np.array(["a", None]), range(3)):
        assert module.checksum(unknown) == 0


def test_who_counts_the_steps_goes_on_to_the_next_epoch_too():
    batches = shard(np.arange(20), 4, rank=0, size=1)
    for epoch in range(3):
        iterator = iter(batches)
        found = [next(iterator) for _ in range(len(batches))]
        np.testing.assert_array_equal(found, list(batches.epoch(epoch)))


def test_two_iterations_at_once_are_of_one_epoch():
    batches = shard(np.arange(20), 4, rank=0, size=1)
    for epoch in range(2):
        expected = np.array(list(batches.epoch(epoch)))
        for (first, second), own in zip(zip(batches, batches, strict=True), expected, strict=True):
            np.testing.assert_array_equal(first, own)
            np.testing.assert_array_equal(second, own)


def test_the_epoch_that_is_set_while_iterating_comes_next():
    batches = shard(np.arange(20), 4, rank=0, size=1)
    for step, _ in enumerate(batches):
        if step == 2:
            batches.set_epoch(7)
    np.testing.assert_array_equal(list(batches), list(batches.epoch(7)))
    np.testing.assert_array_equal(list(batches), list(batches.epoch(8)))


def test_lengths_that_disagree():
    with pytest.raises(ValueError, match=r"len\(data\[0\]\) = 3, len\(data\[1\]\['y'\]\) = 4"):
        shard((np.arange(3), {"y": np.arange(4)}), 1, rank=0, size=1)


@pytest.mark.parametrize("data", [5, "text", np.float32(1), np.zeros(())])
def test_what_is_no_data_set(data):
    with pytest.raises(TypeError, match="data is a"):
        shard(data, 1, rank=0, size=1)


@pytest.mark.parametrize("data", [(), {}])
def test_nothing_to_deal(data):
    with pytest.raises(ValueError, match="empty"):
        shard(data, 1, rank=0, size=1)


def test_before_init():
    if not hvd.is_initialized():
        with pytest.raises(ValueError, match="init"):
            shard(np.arange(5), 1)


@ranks(2)
def test_too_few_samples_for_the_world():
    hvd.init()
    with pytest.raises(ValueError, match=f"rank {hvd.rank()}: 1 samples"):
        shard(np.arange(1), 4)
    assert sum(map(len, shard(np.arange(1), 4, allow_empty=True))) == (hvd.rank() == 0)


class TestPosition:
    """Training goes on in the middle of an epoch."""

    @staticmethod
    def batches():
        return shard(np.arange(20), 3, seed=2, rank=0, size=1)

    @pytest.mark.parametrize("stop", range(1, 8))
    def test_the_rest_of_an_epoch_and_then_whole_ones(self, stop):
        whole = [[batch.tolist() for batch in self.batches().epoch(epoch)] for epoch in range(3)]
        batches = self.batches()
        list(batches)
        for step, _ in enumerate(batches, start=1):
            if step == stop:
                break
        state, again = batches.state_dict(), self.batches()
        again.load_state_dict(state)
        again.set_epoch(1)  # as loops do that set every epoch
        assert len(again) == len(whole[1]) - stop
        assert [batch.tolist() for batch in again] == whole[1][stop:]
        assert len(again) == len(whole[2])
        assert [batch.tolist() for batch in again] == whole[2]
        assert [batch.tolist() for batch in again.epoch(1)] == whole[1]

    def test_within_the_rest_of_an_epoch(self):
        whole = [batch.tolist() for batch in self.batches()]
        batches = self.batches()
        for taken in range(len(whole)):
            state = batches.state_dict()
            assert state["done"] == sum(map(len, whole[:taken]))
            batches = self.batches()
            batches.load_state_dict(state)
            iterator = iter(batches)
            assert next(iterator).tolist() == whole[taken]
        state = batches.state_dict()
        assert (state["epoch"], state["done"]) == (0, 20)  # a loop may be at its last batch
        assert list(iterator) == []
        state = batches.state_dict()
        assert (state["epoch"], state["done"]) == (1, 0)
        batches = self.batches()
        batches.load_state_dict(state)
        assert [batch.tolist() for batch in batches] == [
            batch.tolist() for batch in self.batches().epoch(1)
        ]

    @pytest.mark.parametrize("sets_epoch", [False, True])
    @pytest.mark.parametrize("is_after_loop", [False, True])
    def test_a_script_that_starts_again_trains_on_each_sample_once(self, sets_epoch, is_after_loop):
        """Stop after each number of batches, in the loop or after it, and start again."""

        def train(batches, epoch, stop):
            while epoch < 3:
                if sets_epoch:
                    batches.set_epoch(epoch)
                for batch in batches:
                    seen.extend(batch.tolist())
                    if not is_after_loop and len(seen) >= stop:
                        return batches.state_dict(), epoch
                epoch += 1
                if is_after_loop and len(seen) >= stop:
                    return batches.state_dict(), epoch
            return None

        for stop in range(1, 61):
            seen = []
            state, epoch = train(self.batches(), 0, stop)
            again = self.batches()
            again.load_state_dict(state)
            assert train(again, epoch, 1000) is None
            assert len(seen) == 60
            assert [sorted(seen[n : n + 20]) for n in (0, 20, 40)] == [[*range(20)]] * 3

    def test_steps_behind_what_was_prefetched(self):
        batches, sizes = self.batches(), [3, 3, 3, 3, 3, 3, 2]
        for epoch in range(2):
            for prefetched in range(1, 8):
                batches.set_epoch(9)
                batches.set_epoch(epoch)
                iterator = iter(batches)
                for _ in range(prefetched):
                    next(iterator)
                for step in range(1, prefetched + 1):
                    state = batches.state_dict(step)
                    done = sum(sizes[:step])
                    assert (state["epoch"], state["done"]) == (epoch, done)

    def test_steps_that_an_iteration_does_not_have_are_refused(self):
        batches = self.batches()
        with pytest.raises(ValueError, match="step=0: expected at least 1"):
            batches.state_dict(0)
        with pytest.raises(ValueError, match="step=8: expected 0 to 7"):
            batches.state_dict(8)

    @ranks(1)
    def test_a_state_survives_a_checkpoint(self, tmp_path):
        hvd.init()
        batches = self.batches()
        next(iter(batches))
        saved = hvd.checkpoint(tmp_path / "state.npz")
        saved.save(batches.state_dict())
        assert saved.load() == batches.state_dict()
