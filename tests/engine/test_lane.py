from __future__ import annotations

import contextlib
import itertools
import logging
import random
import threading
import time
import weakref

import numpy as np
import pytest

from hvdlite.base.reduction import Max, Sum
from hvdlite.base.settings import Settings
from hvdlite.collectives.allgather import Allgather
from hvdlite.collectives.allreduce import Allreduce
from hvdlite.collectives.broadcast import Broadcast
from hvdlite.engine import Handle, Lane, Operation, rounds, stall
from hvdlite.engine import lane as lane_module
from hvdlite.engine.operation import Barrier, Signature
from hvdlite.errors import HorovodInternalError, MismatchError
from hvdlite.observe import status
from hvdlite.transport.loopback import Loopback
from tests.simulation import Simulation, on_all_ranks


class Lanes:
    """The lanes of all ranks of a simulation."""

    def __init__(self, size, **settings):
        self.simulation = Simulation(size)
        self.lanes = [
            Lane("test", transport, Settings(**settings))
            for transport in self.simulation.transports
        ]

    def __getitem__(self, rank):
        return self.lanes[rank]

    def close(self, timeout=5.0):
        return on_all_ranks(lambda lane: lane.close(timeout), self.lanes)

    @contextlib.contextmanager
    def all_held(self):
        """Let operations be submitted on all ranks before the first round begins."""
        with contextlib.ExitStack() as stack:
            for rank in range(len(self.lanes)):
                stack.enter_context(self.simulation.holding(rank))
            yield


@pytest.fixture
def two():
    lanes = Lanes(2)
    yield lanes
    assert lanes.close() == [True, True]


def total(name, value, size=3, op=Sum):
    return Allreduce(name, np.full(size, value, np.float64), op)


def submit_again(lane, operation):
    """Submit an operation again as soon as it is no longer pending; its handle is in the list."""
    handles, remove = [], lane.queue.remove

    def remove_and_submit(operations):
        remove(operations)
        if not handles:
            handles.append(lane.submit(operation))

    lane.queue.remove = remove_and_submit
    return handles


def message_of(lane, operation):
    with pytest.raises(HorovodInternalError) as caught:
        lane.run(operation)
    return str(caught.value)


class Probe(Operation):
    """Does in ``execute`` what it is told to."""

    def __init__(self, name, action):
        super().__init__(name, Signature())
        self.action = action

    def execute(self, transport, payloads):
        return self.action()


class TestOrder:
    def test_opposite_orders(self, two):
        with two.all_held():
            first = [two[0].submit(total(name, 1)) for name in "abc"]
            second = [two[1].submit(total(name, 2)) for name in "cab"]
        for handle in first + second:
            assert handle.wait().tolist() == [3.0] * 3

    def test_the_usual_case_costs_one_meeting(self, two):
        on_all_ranks(lambda lane: [lane.run(Barrier(name)) for name in "abc"], two.lanes)
        assert two.simulation.calls == [["meet"] * 3] * 2

    def test_what_is_ready_everywhere_does_not_wait_for_what_is_not(self, two):
        with two.all_held():
            only_here = two[0].submit(total("only here", 1))
            handles = [lane.submit(total("a", 1)) for lane in two.lanes]
        for handle in handles:
            assert handle.wait().tolist() == [2.0] * 3
        assert not only_here.done()
        two[1].submit(total("only here", 5))
        assert only_here.wait().tolist() == [6.0] * 3

    def test_what_may_differ_may_be_submitted_in_any_order(self, two):
        with two.all_held():
            handles = [
                two[0].submit(Allgather("rows", np.zeros((2, 3)), with_rows=True)),
                two[1].submit(total("a", 1)),
                two[1].submit(Allgather("rows", np.ones((0, 3)), with_rows=True)),
                two[0].submit(total("a", 1)),
            ]
        for handle in (handles[0], handles[2]):
            whole, rows, _ = handle.wait()
            assert whole.tolist() == [[0.0] * 3] * 2
            assert rows == [2, 0]
        assert handles[1].wait().tolist() == [2.0] * 3

    def test_an_operation_that_has_ended_may_be_submitted_again(self, two):
        operations = [total("a", 1), total("a", 2)]
        for step in range(20):
            for operation in operations:
                operation._array += step
            expected = 3.0 + 2 * sum(range(step + 1))
            handles = [lane.submit(each) for lane, each in zip(two.lanes, operations, strict=True)]
            assert [handle.wait().tolist() for handle in handles] == [[expected] * 3] * 2
        assert not any(first is second for first, second in itertools.combinations(handles, 2))

    def test_submitted_again_before_the_end_is_told(self, two):
        """Somebody else may do so as soon as it is no longer pending."""
        operation = total("a", 1)
        again = submit_again(two[0], operation)
        first = two[0].submit(operation)
        assert two[1].run(total("a", 2)).tolist() == [3.0] * 3
        (result,) = on_all_ranks(Handle.wait, [first])
        assert result.tolist() == [3.0] * 3
        assert not again[0].done()
        two[1].run(total("a", 4))
        assert again[0].wait().tolist() == [5.0] * 3

    def test_so_is_one_that_fails(self, two):
        operation = total("a", 1)
        again = submit_again(two[0], operation)
        first = two[0].submit(operation)
        with pytest.raises(MismatchError):
            two[1].run(total("a", 2, size=4))
        with pytest.raises(MismatchError):
            on_all_ranks(Handle.wait, [first])
        two[1].run(total("a", 4))
        assert again[0].wait().tolist() == [5.0] * 3

    @pytest.mark.parametrize("seed", range(3))
    def test_many_operations_in_any_order_from_many_threads(self, seed):
        size, threads, count = 3, 3, 120
        lanes = Lanes(size)

        def submit(rank):
            order = list(range(count))
            random.Random(f"{seed} {rank}").shuffle(order)
            found = {}

            def part(thread):
                for number in order[thread::threads]:
                    found[number] = lanes[rank].submit(total(f"t{number}", number + rank))

            on_all_ranks(part, range(threads))
            return {number: handle.wait()[0] for number, handle in found.items()}

        for found in on_all_ranks(submit, range(size)):
            assert found == {number: 3.0 * number + 3.0 for number in range(count)}
        assert lanes.close() == [True] * size

    def test_run_from_many_threads_at_once(self, two):
        def run(place):
            rank, number = place
            return two[rank].run(total(f"t{number}", number))[0]

        places = list(itertools.product(range(2), range(8)))
        assert on_all_ranks(run, places) == [2.0 * number for _, number in places]


class TestThreads:
    def test_an_idle_lane_runs_in_the_callers_thread(self):
        lane = Lane("test", Loopback(), Settings())
        assert lane.run(Probe("a", threading.current_thread)) is threading.current_thread()
        assert lane.close(5.0)

    @pytest.mark.parametrize("waits", [True, False])
    def test_an_idle_lane_holds_no_arrays(self, waits):
        lane, array = Lane("test", Loopback(), Settings()), np.ones(3)
        handle = lane.submit(Allreduce("a", array, Sum), begin=not waits)
        while not waits and not handle.done():
            time.sleep(1e-3)
        result = handle.wait()
        gone = [weakref.ref(each) for each in (array, result)]
        del array, result, handle
        deadline = time.monotonic() + 5.0
        while any(each() is not None for each in gone) and time.monotonic() < deadline:
            time.sleep(1e-3)
        assert all(each() is None for each in gone)
        assert lane.close(1.0)

    def test_what_nobody_waits_for_runs_in_the_lanes_thread(self):
        lane = Lane("test", Loopback(), Settings())
        ran = threading.Event()
        handle = lane.submit(Probe("a", lambda: (ran.set(), threading.current_thread())[1]))
        assert ran.wait(5)
        assert handle.wait().name == "hvdlite-test"
        assert lane.close(5.0)

    def test_what_is_waited_for_runs_in_the_thread_that_waits(self):
        lane = Lane("test", Loopback(), Settings(cycle_time=1000.0))
        start = time.monotonic()
        handle = lane.submit(Probe("a", threading.current_thread))
        assert handle.wait() is threading.current_thread()
        assert time.monotonic() - start < 0.9  # before the lane's thread has turned to it
        assert lane.close(5.0)

    @pytest.mark.parametrize(
        ("quiet", "cycles"),
        [([1.0], 1), ([0.0, 1e-5, 1e-3], 3), ([0.0] * 20, 10)],
        ids=["one submission", "a burst", "a burst without end"],
    )
    def test_the_lanes_thread_stays_out_of_a_burst(self, quiet, cycles, monkeypatch):
        lane = Lane("test", Loopback(), Settings())
        pauses, times = [], iter(quiet)
        monkeypatch.setattr(lane.queue, "quiet", lambda: next(times))
        monkeypatch.setattr(time, "sleep", pauses.append)
        lane._let_more_come()
        monkeypatch.undo()
        assert pauses == [1e-3] * cycles
        assert lane.close(5.0)

    def test_how_long_the_queue_has_been_quiet(self, two):
        queue = two[0].queue
        assert queue.quiet() == float("inf")
        with two.all_held():
            handles = [lane.submit(total("a", 1)) for lane in two.lanes]
            time.sleep(0.02)
            assert queue.quiet() >= 0.02
            handles += [lane.submit(total("b", 1)) for lane in two.lanes]
            assert queue.quiet() < queue.waited()
        for handle in handles:
            handle.wait()

    def test_a_busy_lane_does_not_run_twice_at_once(self):
        lane = Lane("test", Loopback(), Settings())
        running, free = threading.Event(), threading.Event()

        def block():
            running.set()
            free.wait(5)

        handle = lane.submit(Probe("busy", block))
        assert running.wait(5)
        threading.Timer(0.05, free.set).start()
        thread = lane.run(Probe("a", threading.current_thread))
        assert handle.done()
        assert thread.name == "hvdlite-test"
        assert lane.close(5.0)

    def test_what_others_submit_while_one_runs_inline_is_served(self, two):
        inline = threading.Thread(target=two[0].run, args=(total("a", 1),), daemon=True)
        inline.start()
        handles = [lane.submit(total("b", 1)) for lane in two.lanes]
        assert handles[1].wait().tolist() == [2.0] * 3
        two[1].run(total("a", 1))
        inline.join(5)
        assert not inline.is_alive()
        assert handles[0].done()

    def test_an_idle_lane_meets_nobody(self, two):
        on_all_ranks(lambda lane: lane.run(total("a", 1)), two.lanes)
        before = [list(calls) for calls in two.simulation.calls]
        time.sleep(0.1)
        assert two.simulation.calls == before

    def test_a_handle_can_be_waited_for_in_any_thread(self, two):
        handles = [lane.submit(total("a", 1)) for lane in two.lanes]
        found = on_all_ranks(lambda _: handles[0].wait()[0], range(4))
        assert found == [2.0] * 4


class TestDisagreement:
    @pytest.mark.parametrize(
        ("other", "says"),
        [
            (total("a", 1, size=4), r"shape is \(3,\) on rank 0, \(4,\) on rank 1"),
            (total("a", 1, op=Max), r"op is Sum on rank 0, Max on rank 1"),
            (Barrier("a"), r"the operation is allreduce on rank 0, barrier on rank 1"),
        ],
    )
    def test_it_is_an_error_on_all_ranks_and_the_lane_goes_on(self, two, other, says):
        handles = [two[0].submit(total("a", 1)), two[1].submit(other)]
        for handle in handles:
            with pytest.raises(MismatchError, match=f"the ranks disagree on 'a': {says}"):
                handle.wait()
        found = on_all_ranks(lambda lane: lane.run(total("a", 1)), two.lanes)
        assert [array.tolist() for array in found] == [[2.0] * 3] * 2

    def test_kinds_may_share_a_name_in_any_order(self, two):
        with two.all_held():
            sums = [two[0].submit(total("loss", 1))]
            gathered = [lane.submit(Allgather("loss", np.arange(2))) for lane in two.lanes]
            sums.append(two[1].submit(total("loss", 2)))
            with pytest.raises(ValueError, match="rank 0: an operation named 'loss' is still on"):
                two[0].submit(total("loss", 1))
        assert [handle.wait().tolist() for handle in sums] == [[3.0] * 3] * 2
        assert [handle.wait().tolist() for handle in gathered] == [[0, 1, 0, 1]] * 2

    def test_it_leaves_other_operations_alone(self, two):
        with two.all_held():
            good = [two[0].submit(total("good", 1)), two[1].submit(total("good", 2))]
            bad = [two[0].submit(total("bad", 1)), two[1].submit(Broadcast("bad", np.ones(3), 0))]
            bad += [two[0].submit(total("worse", 1)), two[1].submit(total("worse", 1, op=Max))]
            late = [two[1].submit(total("late", 1)), two[0].submit(total("late", 1))]
        for handle in bad:
            with pytest.raises(MismatchError, match=f"disagree on '{handle.name}'"):
                handle.wait()
        for handle in good:
            assert handle.wait().tolist() == [3.0] * 3
        for handle in late:
            assert handle.wait().tolist() == [2.0] * 3

    def test_a_failure_on_one_rank_fails_on_all_and_the_lane_goes_on(self, two):
        operations = [total("a", 1), total("a", 1)]
        operations[1].failure = "the tensor is gone"
        handles = [lane.submit(op) for lane, op in zip(two.lanes, operations, strict=True)]
        for handle in handles:
            with pytest.raises(HorovodInternalError, match="rank 1: the tensor is gone"):
                handle.wait()
        assert on_all_ranks(lambda lane: lane.run(total("a", 1))[0], two.lanes) == [2.0, 2.0]

    def test_a_failure_on_all_ranks(self, two):
        def fail(lane):
            operation = total("a", 1)
            operation.failure = "the tensor is gone"
            with pytest.raises(HorovodInternalError, match="the tensor is gone"):
                lane.run(operation)

        on_all_ranks(fail, two.lanes)

    def test_a_name_in_use_is_refused_and_the_first_stays_valid(self, two):
        handle = two[0].submit(total("a", 1))
        for call in (two[0].submit, two[0].run):
            with pytest.raises(ValueError, match="rank 0: an operation named 'a' is still on"):
                call(total("a", 10))
        assert two[1].run(total("a", 2)).tolist() == [3.0] * 3
        assert handle.wait().tolist() == [3.0] * 3


class TestFailure:
    def test_an_exception_ends_the_lane_and_all_that_is_pending(self):
        simulation = Simulation(1)
        lane = Lane("test", simulation.transports[0], Settings())

        def fail():
            raise KeyError("lost")

        with simulation.holding(0):
            handles = [lane.submit(Probe(name, fail)) for name in ("a", "b")]
        for name, handle in zip(("a", "b"), handles, strict=True):
            with pytest.raises(
                HorovodInternalError, match=rf"rank 0: '{name}' failed: KeyError\('lost'\)"
            ) as caught:
                handle.wait()
            assert isinstance(caught.value.__cause__, KeyError)
        for call in (lane.submit, lane.run):
            with pytest.raises(
                HorovodInternalError, match=r"'c' cannot be submitted: .*KeyError\('lost'\)"
            ):
                call(Probe("c", fail))
        assert not lane.close(0.1)

    def test_in_the_callers_thread_it_is_the_same_error(self):
        lane = Lane("test", Loopback(), Settings())
        with pytest.raises(HorovodInternalError, match="rank 0: 'a' failed: ZeroDivisionError"):
            lane.run(Probe("a", lambda: 1 / 0))

    @pytest.mark.parametrize("waits", [True, False])
    def test_an_operation_that_waits_for_another_of_its_lane(self, waits):
        """It would wait forever, in whatever thread it runs."""
        lane = Lane("test", Loopback(), Settings())
        handle = lane.submit(Probe("outer", lambda: lane.run(Barrier("inner"))))
        while not waits and not handle.done():
            time.sleep(1e-3)
        with pytest.raises(HorovodInternalError, match="'inner' was called from within another"):
            handle.wait()
        assert not lane.close(0.1)

    def test_the_other_ranks_are_told_that_a_rank_has_failed(self):
        lanes = Lanes(3)
        started = threading.Event()

        def fail():
            assert started.wait(5)
            raise MemoryError("no room")

        # On the others the operation is over; they wait for the next one, or come to it later.
        handle = lanes[0].submit(Probe("a", fail))
        waiting = [lanes[rank].submit(Probe("a", lambda: None)) for rank in (1, 2)]
        waiting.append(lanes[1].submit(total("b", 1)))
        started.set()
        with pytest.raises(HorovodInternalError, match="rank 0: 'a' failed: MemoryError"):
            handle.wait()
        assert waiting[0].wait() is waiting[1].wait() is None
        with pytest.raises(HorovodInternalError, match="'b' failed: rank 0 has ended"):
            waiting[2].wait()
        with pytest.raises(HorovodInternalError, match=r"'c' failed: rank [01] has ended"):
            lanes[2].run(total("c", 1))

    def test_an_interrupt_is_the_callers(self):
        lane = Lane("test", Loopback(), Settings())

        def interrupt():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            lane.run(Probe("a", interrupt))
        with pytest.raises(HorovodInternalError, match=r"'b' cannot be .*KeyboardInterrupt\(\)"):
            lane.run(total("b", 1))

    def test_an_interrupt_of_a_wait_fails_what_else_is_pending(self, monkeypatch):
        lanes = Lanes(2)
        waiting = threading.Event()

        def interrupt(elapsed):
            waiting.set()
            if len(lanes[0].queue.operations) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(lanes[0].stall, "check", interrupt)
        handles = []

        def submit():
            assert waiting.wait(5)
            handles.append(lanes[0].submit(total("b", 1)))

        other = threading.Thread(target=submit, daemon=True)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            lanes[0].run(total("a", 1))
        other.join(5)
        with pytest.raises(HorovodInternalError, match=r"'b' failed: KeyboardInterrupt\(\)"):
            handles[0].wait()

    def test_numbers_that_overflow_are_no_failure(self):
        lane = Lane("test", Loopback(), Settings())
        with np.errstate(all="raise"):
            array = np.full(2, 60000, np.float16)
            assert np.isinf(lane.run(Allreduce("a", array, Sum, postscale=2.0))).all()
        assert lane.close(5.0)


class TestClose:
    def test_all_ranks_together(self):
        for size in (1, 2, 3):
            assert Lanes(size).close() == [True] * size

    def test_nothing_is_taken_afterwards(self):
        lanes = Lanes(2)
        lanes.close()
        for lane in lanes.lanes:
            for call in (lane.submit, lane.run):
                with pytest.raises(HorovodInternalError, match=r"'a' cannot .* has been shut down"):
                    call(total("a", 1))

    def test_it_waits_for_what_is_on_its_way(self):
        lanes = Lanes(2)
        with lanes.all_held():
            handles = [lane.submit(total("a", 1)) for lane in lanes.lanes]
            closing = [
                threading.Thread(target=lane.close, args=(5.0,), daemon=True)
                for lane in lanes.lanes
            ]
            for thread in closing:
                thread.start()
        for handle in handles:
            assert handle.wait().tolist() == [2.0] * 3

    def test_who_waits_is_told_who_has_shut_down(self):
        lanes = Lanes(3)
        waiting = [lanes[rank].submit(total("a", 1)) for rank in (0, 2)]
        closing = threading.Thread(target=lanes[1].close, args=(5.0,), daemon=True)
        closing.start()
        for handle in waiting:
            with pytest.raises(HorovodInternalError, match="rank 1 shut down without submitting"):
                handle.wait()
        # From now on it is refused, instead of waiting for a rank that is gone.
        with pytest.raises(HorovodInternalError, match="rank 1 shut down already"):
            lanes[0].run(total("b", 1))
        assert on_all_ranks(lambda rank: lanes[rank].close(5.0), (0, 2)) == [True, True]
        closing.join(5)
        assert lanes[1].rounds.closed

    def test_what_a_closing_rank_still_waits_for_can_arrive(self):
        lanes = Lanes(2)
        handle = lanes[0].submit(total("a", 1))
        closing = threading.Thread(target=lanes[0].close, args=(5.0,), daemon=True)
        closing.start()
        time.sleep(0.02)
        assert lanes[1].run(total("a", 2)).tolist() == [3.0] * 3
        assert handle.wait().tolist() == [3.0] * 3
        assert lanes[1].close(5.0)

    def test_what_nobody_else_submits_fails_when_all_close(self):
        lanes = Lanes(2)
        handle = lanes[0].submit(total("a", 1))
        assert lanes.close() == [True, True]
        with pytest.raises(HorovodInternalError, match="rank 1 shut down without submitting 'a'"):
            handle.wait()

    @pytest.mark.parametrize("busy", [False, True])
    def test_it_leaves_without_ranks_that_do_not_come(self, busy):
        lanes = Lanes(2)
        handle = lanes[0].submit(total("a", 1)) if busy else None
        start = time.monotonic()
        assert not lanes[0].close(0.1)
        assert time.monotonic() - start < 1.0
        if handle:
            with pytest.raises(
                HorovodInternalError, match="rank 0: 'a' failed: shut down while waiting"
            ):
                handle.wait()


class TestStall:
    def test_a_rank_that_has_submitted_nothing(self, caplog):
        lanes = Lanes(2, stall_check_time_seconds=0.1)
        with caplog.at_level(logging.WARNING, "hvdlite"):
            handle = lanes[0].submit(total("loss", 1))
            time.sleep(0.35)
            lanes[1].run(total("loss", 1))
            handle.wait()
        assert 2 <= len(caplog.messages) <= 3
        for message in caplog.messages:
            assert "waited 0 s for rank 1 in 'loss'; do all ranks run the same" in message
        lanes.close()

    def test_ranks_that_wait_for_different_operations(self, caplog):
        lanes = Lanes(3, stall_check_time_seconds=0.1)
        with caplog.at_level(logging.WARNING, "hvdlite"):
            handles = [lanes[rank].submit(total(name, 1)) for rank, name in enumerate("aab")]
            time.sleep(0.35)
            handles.append(lanes[2].submit(total("a", 1)))
            handles += [lanes[rank].submit(total("b", 1)) for rank in (0, 1)]
            for handle in handles:
                assert handle.wait().tolist() == [3.0] * 3
        assert 3 <= len(caplog.messages) <= 9
        for rank in range(3):
            assert any(message.startswith(f"rank {rank}: waited") for message in caplog.messages)
        for message in caplog.messages:
            assert "'a' (missing on rank 2), 'b' (missing on ranks 0, 1)" in message
        lanes.close()

    def test_ranks_that_wait_in_different_lanes_say_so_early(self, caplog, monkeypatch):
        """Long before the ordinary report; the last rank ends its loop before the others."""
        size, last = 3, 2
        monkeypatch.setattr(lane_module, "_ELSEWHERE_SECONDS", 0.1)
        monkeypatch.setattr(rounds, "ASTRAY_SECONDS", 0.3)
        monkeypatch.setattr(stall, "_LOOK_SECONDS", 0.05)
        monkeypatch.setattr(status, "steps", lambda: 0)  # of other tests in this process
        both = [Lanes(size, stall_shutdown_time_seconds=2.0) for _ in range(2)]
        gradients, named = both
        for rank in range(size):
            pair = [lanes[rank] for lanes in both]
            for lane in pair:
                lane.all_lanes = lambda pair=pair: pair

        def step(rank):
            gradients[rank].run(total("step", 1))
            if rank == last:
                return message_of(named[rank], total("objects", 1))
            return message_of(gradients[rank], total("step", 1))

        with caplog.at_level(logging.WARNING, "hvdlite"):
            errors = on_all_ranks(step, range(size))
        reports = [
            "'step' (missing on rank 2); rank 2 is in 'objects', after 'step'; do all",
            "'objects' (missing on ranks 0, 1); ranks 0, 1 are in 'step'",
        ]
        for report in reports:
            assert any(report in message for message in caplog.messages), caplog.messages
        assert len(caplog.messages) == size
        for error in errors[:-1]:
            assert "missing on rank 2; rank 2 is in 'objects', after 'step'" in error
        assert "missing on ranks 0, 1" in errors[-1]
        # Communication goes on.
        assert on_all_ranks(lambda rank: gradients[rank].run(total("a", 1))[0], range(size))
        for lanes in both:
            assert lanes.close() == [True] * size

    def test_lanes_that_take_part_without_an_operation_do_not_close(self, monkeypatch):
        lanes = Lanes(2)
        for rank in range(2):
            lanes[rank].ask()
        time.sleep(0.1)
        for _ in range(3):
            on_all_ranks(lambda rank: lanes[rank].run(total("a", 1)), range(2))
            lanes[0].ask()
        assert lanes.close() == [True, True]

    def test_nobody_is_warned_without_need(self, caplog):
        lanes = Lanes(2, stall_check_time_seconds=0.5)
        with caplog.at_level(logging.WARNING, "hvdlite"):
            for step in range(20):
                handle = lanes[0].submit(total(f"t{step}", 1))
                time.sleep(0.04)
                lanes[1].run(total(f"t{step}", 1))
                handle.wait()
        assert caplog.messages == []
        lanes.close()

    def test_reports_can_be_switched_off(self, caplog):
        lanes = Lanes(2, stall_check_time_seconds=0.05, stall_check_disable=True)
        with caplog.at_level(logging.WARNING, "hvdlite"):
            lanes[0].submit(total("a", 1))
            lanes[1].submit(total("b", 1))
            time.sleep(0.2)
        assert caplog.messages == []
        lanes.close()

    def test_an_operation_that_may_wait_is_neither_reported_nor_given_up(self, caplog):
        lanes = Lanes(2, stall_check_time_seconds=0.05, stall_shutdown_time_seconds=0.1)
        late, early = (Probe("join", lambda: "joined") for _ in range(2))
        late.stall_exempt = early.stall_exempt = True
        with caplog.at_level(logging.WARNING, "hvdlite"):
            handle = lanes[0].submit(early)
            time.sleep(0.3)
            assert lanes[1].run(late) == handle.wait() == "joined"
        assert caplog.messages == []
        assert lanes.close() == [True, True]

    def test_the_wait_for_a_rank_that_has_submitted_nothing_ends(self):
        lanes = Lanes(2, stall_shutdown_time_seconds=0.2)
        start = time.monotonic()
        with pytest.raises(HorovodInternalError, match="waited 0 s for rank 1 in 'a'"):
            lanes[0].run(total("a", 1))
        assert 0.2 <= time.monotonic() - start < 5.0

    def test_the_wait_for_a_rank_that_waits_for_something_else_ends(self):
        # Long enough for a busy machine, which may let one of two threads rest for half a second.
        lanes = Lanes(2, stall_shutdown_time_seconds=2.0)
        with lanes.all_held():  # no rank waits for one without any
            handles = [lanes[0].submit(total("a", 1)), lanes[1].submit(total("b", 1))]
        for handle, other in zip(handles, (1, 0), strict=True):
            with pytest.raises(HorovodInternalError, match=f"still missing on rank {other}"):
                handle.wait()
        # The ranks agree that they differ, so the lane goes on.
        assert on_all_ranks(lambda lane: lane.run(total("c", 1))[0], lanes.lanes) == [2.0, 2.0]
        assert lanes.close() == [True, True]
