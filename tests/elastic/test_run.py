"""Training that fails in the middle, and goes on."""

from __future__ import annotations

import logging
import logging.handlers
import time

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.collectives.allreduce import Allreduce
from hvdlite.elastic import HostUpdate, ObjectState
from hvdlite.engine import runtime
from hvdlite.errors import RankGoneError
from hvdlite.observe import status
from tests.harness import ranks, run_script

STEPS, FAILING_STEP = 10, 7


class Once:
    """Something that is done at one step of the first attempt."""

    def __init__(self, action):
        self._action = action

    def __call__(self, step):
        if step == FAILING_STEP and self._action is not None:
            action, self._action = self._action, None
            action()


def train(action, commit_every=3, state=None):
    """Train in float64 so that a repeated or a lost step is seen in the result."""
    happens = Once(action)
    calls = []

    @hvd.elastic.run
    def run(state):
        calls.append(state.step)
        while state.step < STEPS:
            gradient = hvd.allreduce(np.full(4, state.step + hvd.rank() + state.weight.sum()))
            happens(state.step)
            state.weight -= 0.05 * gradient
            state.step += 1
            if state.step % commit_every == 0:
                state.commit()
        return "done"

    if state is None:
        # Rank 0's weights count.
        state = ObjectState(step=0, weight=np.full(4, 1.0 + hvd.rank()))
    assert run(state) == "done"
    assert state.step == STEPS
    assert hvd.is_initialized()
    return state.weight.tolist(), calls


def expected(size):
    weight = np.ones(4)
    for step in range(STEPS):
        weight -= 0.05 * (step + (size - 1) / 2 + weight.sum())
    return pytest.approx(weight.tolist(), rel=1e-12)


def fail():
    raise hvd.HorovodInternalError("made up")


def break_lane():
    """Have the next operation of this rank raise between the meeting and the data."""
    original = Allreduce.execute

    def execute(self, *args):
        Allreduce.execute = original
        raise MemoryError("no room")

    Allreduce.execute = execute
    hvd.allreduce(np.ones(10**5), name="large")


def mismatch():
    hvd.allreduce(np.ones(2 + hvd.rank()), name="shapes")


def listen():
    """The records of the log from now on, which are not printed."""
    handler = logging.handlers.BufferingHandler(capacity=100)
    logging.getLogger("hvdlite").handlers[:] = [handler]
    return handler.buffer


@ranks(1, 2)
def test_the_state_may_be_given_by_its_name(size):
    hvd.init()

    @hvd.elastic.run
    def run(state, more):
        return state.step, more

    assert run(state=ObjectState(step=3), more=4) == (3, 4)


class TestFailures:
    @ranks(1, 2, 3)
    @pytest.mark.parametrize("commit_every", [3, 100])
    def test_one_rank_raises(self, commit_every, size):
        hvd.init()
        said = listen()
        before = runtime.engine()
        found, calls = train(fail if hvd.rank() == size - 1 else None, commit_every)
        assert found == expected(size)
        assert calls == [0, FAILING_STEP // commit_every * commit_every]
        assert runtime.engine() is not before
        assert len(said) == (hvd.rank() == 0)
        assert all(f"rank {size - 1}: made up" in record.getMessage() for record in said)

    @ranks(2)
    def test_an_epoch_that_begins_again_is_none_that_was_left(self):
        hvd.init()
        listen()
        batches, failures = hvd.shard(np.arange(16), batch_size=2), [fail]

        @hvd.elastic.run
        def run(state):
            for step, batch in enumerate(batches):
                hvd.allreduce(batch.astype(float), name="batch")
                status.count_step("a model")
                if step == 2 and failures:
                    failures.pop()()
            return step

        assert run(ObjectState()) == 3  # without a warning, which the tests make an error

    @ranks(2, 3)
    @pytest.mark.parametrize("action", [mismatch, break_lane])
    def test_an_error_that_all_ranks_get(self, action, size):
        hvd.init()
        listen()
        everybody = action is mismatch or hvd.rank() == 1
        everywhere = action if everybody else lambda: hvd.allreduce(np.ones(10**5), name="large")
        found, calls = train(everywhere)
        assert found == expected(size)
        assert calls == [0, 6]
        assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [size] * 3

    @ranks(2, 3)
    def test_several_failures_on_different_ranks(self, size):
        hvd.init()
        listen()
        left = [4, 4, 7, 9]  # the second attempt fails where the first did

        @hvd.elastic.run
        def run(state):
            while state.step < STEPS:
                hvd.barrier()
                if left and left[0] == state.step:
                    left.pop(0)
                    if hvd.rank() == len(left) % size:
                        fail()
                    hvd.barrier()
                state.step += 1
                state.commit()

        run(ObjectState(step=0))
        assert left == []

    @ranks(2, 3)
    def test_a_rank_that_fails_at_the_very_end_takes_the_others_along(self, size):
        hvd.init()
        listen()
        happens = Once(fail if hvd.rank() == 1 else None)
        calls = []

        @hvd.elastic.run
        def run(state):
            calls.append(1)
            hvd.barrier()
            happens(FAILING_STEP)
            return len(calls)

        assert run(ObjectState()) == 2

    @pytest.mark.slow
    @ranks(2, fresh=True, env={"HVDLITE_SHUTDOWN_TIMEOUT_SECONDS": "0.5"})
    def test_a_rank_that_computes_for_longer_than_shutdown_waits(self, size):
        hvd.init()
        listen()
        found, calls = train(fail if hvd.rank() == 0 else lambda: time.sleep(3))
        assert found == expected(size)
        assert calls == [0, 6]

    @ranks(2)
    def test_the_state_is_adapted_before_it_is_synchronised(self):
        hvd.init()
        listen()
        seen = []

        class Seen(ObjectState):
            def sync(self):
                seen.append("sync")
                super().sync()

            def restore(self):
                seen.append("restore")
                super().restore()

        state = Seen(step=0, weight=np.ones(4))
        state.register_reset_callbacks([lambda: seen.append(("called", hvd.size()))])
        train(fail, state=state)
        assert seen == ["sync", "restore", ("called", 2), "sync"]

    @ranks(2)
    def test_a_callback_may_fail_too(self):
        hvd.init()
        listen()
        once = Once(fail if hvd.rank() == 0 else hvd.barrier)
        state = ObjectState(step=0, weight=np.ones(4))
        state.register_reset_callbacks([lambda: once(FAILING_STEP)])
        train(fail, state=state)

    @ranks(3)
    def test_process_sets_are_there_again(self):
        hvd.shutdown()
        listen()
        hvd.init()
        pair = hvd.add_process_set([0, 2])
        train(fail if hvd.rank() == 0 else None)
        assert (pair.process_set_id, pair.ranks) == (1, [0, 2])
        if pair.included():
            assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=pair) == [2]
        hvd.remove_process_set(pair)

    @ranks(2)
    def test_a_list_of_ranks_stays_the_world(self):
        hvd.shutdown()
        listen()
        hvd.init([1, 0])
        number = hvd.rank()
        train(fail if number == 0 else None)
        assert hvd.rank() == number
        hvd.shutdown()


class TestHosts:
    @ranks(1, 2, 3)
    @pytest.mark.parametrize("update", [HostUpdate.ADDED, HostUpdate.REMOVED])
    def test_an_interrupt_goes_on_where_it_was(self, update, size):
        hvd.init()
        calls = []

        class Seen(ObjectState):
            def sync(self):
                calls.append("sync")
                super().sync()

            def merge(self):
                calls.append("merge")

            def restore(self):
                calls.append("restore")

        state = Seen(step=0, weight=np.ones(4))
        state.register_reset_callbacks([lambda: calls.append("reset")])

        def look():
            if hvd.rank() == size - 1:
                state.on_hosts_updated(1, update)
            state.check_host_updates()

        found, begun = train(look, state=state)
        # Nothing of the step that was interrupted had been done.
        assert found == expected(size)
        assert begun == [0, FAILING_STEP]
        spread = "merge" if update == HostUpdate.REMOVED else "sync"
        assert calls == ["sync", "reset", spread]


class TestGivingUp:
    @ranks(2, settings={"HVDLITE_ELASTIC_RETRIES": "2"})
    def test_ranks_do_not_fail_for_ever(self, size):
        hvd.init()
        listen()
        calls = []

        @hvd.elastic.run
        def run(state):
            calls.append(state.step)
            state.step += 1
            if len(calls) in (2, 3):
                state.commit()  # so that it was not in vain
            if hvd.rank() == size - 1:
                fail()
            hvd.barrier()

        with pytest.raises(hvd.HorovodInternalError, match="failed 3 times in a row") as caught:
            run(ObjectState(step=0))
        assert calls == [0, 0, 1, 2, 2]
        assert f"rank {size - 1}: made up" in str(caught.value)
        assert "HVDLITE_ELASTIC_RETRIES=2" in str(caught.value)
        # It is in a world that works.
        assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [size]

    @ranks(3, fresh=True)
    def test_a_rank_that_has_left_is_named_by_all_others(self):
        hvd.init()
        listen()

        @hvd.elastic.run
        def run(state):
            hvd.barrier()
            if hvd.rank() == 1:
                raise KeyError("no such column")
            hvd.barrier()

        start = time.monotonic()
        if hvd.rank() == 1:
            with pytest.raises(KeyError):
                run(ObjectState())
            hvd.shutdown()
        else:
            said = rf"rank {hvd.rank()}: rank 1 has left elastic training \(KeyError: 'no such"
            with pytest.raises(RankGoneError, match=said):
                run(ObjectState())
        assert time.monotonic() - start < 20

    @pytest.mark.slow
    @ranks(
        3,
        fresh=True,
        timeout=240,
        env={"HVDLITE_ELASTIC_TIMEOUT": "1", "HVDLITE_SHUTDOWN_TIMEOUT_SECONDS": "0.5"},
    )
    def test_a_rank_that_does_not_come_in_time_is_named(self, size):
        hvd.init()
        listen()
        rank = hvd.rank()

        @hvd.elastic.run
        def run(state):
            hvd.barrier()
            if rank == 1:
                time.sleep(6)
            fail()

        with pytest.raises(RankGoneError) as caught:
            run(ObjectState())
        if rank != 1:
            assert f"rank {rank}: rank 1 did not come within 1 s" in str(caught.value)

    def test_a_job_whose_rank_leaves_ends_and_says_why(self):
        script = """
import numpy as np, hvdlite as hvd
hvd.init()
@hvd.elastic.run
def train(state):
    for step in range(10):
        hvd.allreduce(np.ones(3))
        if step == 5 and hvd.rank() == 1:
            raise SystemExit(3)
train(hvd.elastic.ObjectState())
"""
        done = run_script(script, np=3)
        assert done.returncode != 0
        assert "ends the job" in done.stderr
        assert "rank 1 has left elastic training (SystemExit: 3)" in done.stderr

    @ranks(2)
    def test_it_needs_init(self):
        hvd.shutdown()
        with pytest.raises(ValueError, match=r"call hvd\.init"):
            hvd.elastic.run(lambda state: None)(ObjectState())

    @ranks(2)
    def test_a_function_may_shut_down_itself(self):
        hvd.init()
        hvd.elastic.run(lambda state: hvd.shutdown())(ObjectState())
        assert not hvd.is_initialized()
