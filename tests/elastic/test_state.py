import pickle
import threading

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.elastic import HostUpdate, ObjectState, State
from tests.harness import ranks


class TestObjectState:
    def test_what_was_saved_comes_back_whatever_has_been_done_to_it(self):
        state = ObjectState(epoch=1, weights=np.ones(3), nested={"list": [1]})
        state.weights += 1
        state.nested["list"].append(2)
        state.save()
        for _ in range(2):  # what is restored is no alias of what is kept
            state.epoch = 7
            state.weights += 5
            state.nested["list"].append(3)
            state.restore()
            assert state.epoch == 1
            assert state.weights.tolist() == [2.0] * 3
            assert state.nested == {"list": [1, 2]}

    def test_the_first_values_are_kept_from_the_beginning(self):
        state = ObjectState(epoch=4)
        state.epoch = 5
        state.restore()
        assert state.epoch == 4

    def test_attributes_that_share_an_object_still_do_when_they_come_back(self):
        shared = [1]
        state = ObjectState(one=shared, other=[shared])
        state.restore()
        assert state.other[0] is state.one is not shared

    def test_what_cannot_be_copied_is_named(self):
        with pytest.raises(
            TypeError, match=r"'lock' of ObjectState cannot be copied \(TypeError: "
        ):
            ObjectState(epoch=1, lock=threading.Lock())
        state = ObjectState(batches=())
        state.batches = iter(each for each in ())
        with pytest.raises(TypeError, match=r"'batches' .* iterators outside"):
            state.save()

    def test_another_process_goes_on_from_a_dump(self):
        dump = pickle.dumps(ObjectState(epoch=4, weights=np.ones(3)).dump())
        state = ObjectState(epoch=0, weights=None)
        state.load(pickle.loads(dump))
        state.epoch = 9
        state.restore()
        assert (state.epoch, state.weights.tolist()) == (4, [1.0] * 3)

    def test_a_state_without_a_dump_cannot_go_on_elsewhere(self):
        class Own(State):
            save = restore = sync = lambda self: None

        with pytest.raises(hvd.HorovodInternalError, match=r"Own cannot go on .* dump\(\)"):
            Own().dump()

    @pytest.mark.parametrize("name", ["commit", "commits", "sync"])
    def test_names_that_are_taken_are_refused_and_shardings(self, name):
        with pytest.raises(ValueError, match=f"'{name}' is a part of ObjectState"):
            ObjectState(**{name: 1})
        with pytest.raises(ValueError, match="'data' is a Sharding, which has its rank's number"):
            ObjectState(data=hvd.Sharding(8, 2, 0, 1))

    @ranks(1, 2, 3)
    def test_sync_gives_rank_0s_values_and_keeps_them(self, size):
        hvd.init()
        state = ObjectState(epoch=hvd.rank(), values=[hvd.rank()])
        state.values.append("set later")
        state.sync()
        assert (state.epoch, state.values) == (0, [0, "set later"])
        state.epoch = 9
        state.restore()
        assert (state.epoch, state.values) == (0, [0, "set later"])

    def test_sync_goes_through_a_given_function(self):
        asked = []
        state = ObjectState(lambda value: asked.append(value) or {"epoch": 5}, lambda: 0, epoch=1)
        state.sync()
        assert asked == [{"epoch": 1}]
        assert state.epoch == 5


@ranks(1, 2, 3)
def test_a_state_leaves_each_rank_its_part_of_the_data():
    hvd.init()
    batches = hvd.shard(np.arange(24), batch_size=1, shuffle=False)
    state = ObjectState(batches=batches, epoch=0)
    iterator = iter(batches)
    next(iterator)
    state.save()
    next(iterator)
    for change in (state.restore, state.sync, state.merge):
        change()
        assert state.batches is batches
        taken = hvd.allgather(np.concatenate(list(batches)))
        assert sorted(taken) == list(range(hvd.size(), 24))
        batches.load_state_dict({**batches.state_dict(), "epoch": 0, "done": hvd.size()})


class Counting(State):
    def __init__(self):
        super().__init__()
        self.calls = []

    def save(self):
        self.calls.append("save")

    def restore(self):
        self.calls.append("restore")

    def sync(self):
        self.calls.append("sync")

    def reset(self):
        self.calls.append("reset")


class TestState:
    def test_on_reset_adapts_and_then_calls_back(self):
        state = Counting()
        state.register_reset_callbacks([lambda: state.calls.append("first")])
        state.register_reset_callbacks([lambda: state.calls.append("second")])
        state.on_reset()
        assert state.calls == ["reset", "first", "second"]

    @ranks(1, 2, 3)
    def test_all_are_interrupted_when_one_is_told(self, size):
        hvd.init()
        last = hvd.rank() == size - 1
        told = (HostUpdate.REMOVED, HostUpdate.ADDED, HostUpdate.REMOVED | HostUpdate.ADDED)
        state = Counting()
        for time, update in enumerate(told, 1):
            state.check_host_updates()
            if last:
                thread = threading.Thread(target=state.on_hosts_updated, args=(time, int(update)))
                thread.start()
                thread.join()
            with pytest.raises(hvd.HostsUpdatedInterrupt) as caught:
                state.check_host_updates()
            assert caught.value.skip_sync == (update == HostUpdate.REMOVED)
        if last:  # no news
            state.on_hosts_updated(3, HostUpdate.ADDED)
        state.check_host_updates()
        if last:
            state.on_hosts_updated(4, HostUpdate.ADDED)
        state.on_reset()
        state.check_host_updates()

    @ranks(2)
    def test_different_news_on_different_ranks_come_together(self):
        hvd.init()
        state = Counting()
        news = (HostUpdate.REMOVED, HostUpdate.ADDED)
        state.on_hosts_updated(1.5 + hvd.rank(), news[hvd.rank()])
        with pytest.raises(hvd.HostsUpdatedInterrupt) as caught:
            state.check_host_updates()
        assert not caught.value.skip_sync

    @ranks(2)
    def test_a_commit_is_kept_with_an_interrupt_and_not_with_a_failure(self):
        hvd.init()
        state = Counting()
        state.commit()
        state.on_hosts_updated(1, HostUpdate.ADDED)
        with pytest.raises(hvd.HostsUpdatedInterrupt):
            state.commit()
        assert (state.calls, state.commits) == (["save", "save"], 2)
        if hvd.rank() == 0:
            with pytest.raises(hvd.HorovodInternalError, match="rank 1 shut down"):
                state.commit()
        hvd.shutdown()
        assert (state.calls, state.commits) == (["save", "save"], 2)
