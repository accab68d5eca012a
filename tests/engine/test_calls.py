"""Calls without a name: where they were made is compared."""

from __future__ import annotations

import logging
import pickle
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from hvdlite.base.reduction import Sum
from hvdlite.base.settings import Settings
from hvdlite.collectives.allreduce import Allreduce
from hvdlite.collectives.broadcast import Broadcast
from hvdlite.engine import Lane, calls
from hvdlite.engine.calls import Calls
from hvdlite.errors import MismatchError
from tests.simulation import Simulation, on_all_ranks

LINE = r"test_calls\.py:\d+"


class Rank:
    """A rank of a simulation that names its calls as an engine does."""

    def __init__(self, number, simulation):
        self.number = number
        self.simulation = simulation
        self.lane = Lane("test", simulation.transports[number], Settings())
        self.name = partial(Calls(self.lane.queue.operations).name, "allreduce", None)

    def total(self, name, value):
        return self.lane.run(Allreduce(name, np.array([float(value)]), Sum))[0]

    def gathers(self):
        """Return how often the ranks have described their operations to each other."""
        return self.simulation.calls[self.number].count("gather")


def run(work, ranks):
    """Call a function on all ranks, as in their main threads."""

    def in_main_thread(rank):
        calls._thread.name = ""
        return work(rank)

    return on_all_ranks(in_main_thread, ranks)


@pytest.fixture(params=[2, 3])
def ranks(request, monkeypatch):
    monkeypatch.setattr(calls, "_is_left_out", OnlyThisFile())
    simulation = Simulation(request.param)
    ranks = [Rank(number, simulation) for number in range(request.param)]
    yield ranks
    assert on_all_ranks(lambda rank: rank.lane.close(5.0), ranks) == [True] * len(ranks)


class OnlyThisFile(dict):
    def get(self, file, default=None):
        return file != __file__


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "hvdlite")
    return lambda: [record.getMessage() for record in caplog.records]


# In another file than the program.
CALLS = """
def mean(rank, value):
    return rank.total(rank.name(), value)
"""
_others = {}
exec(compile(CALLS, "<hvdlite>", "exec"), _others)
mean = _others["mean"]


def loss(rank, value):
    return mean(rank, value)


def accuracy(rank, value):
    return mean(rank, value)


def fails(function, *arguments):
    with pytest.raises(MismatchError) as caught:
        function(*arguments)
    return str(caught.value)


def test_calls_at_one_place_are_compared_at_no_cost(ranks, warnings):
    def work(rank):
        return [loss(rank, step) for step in range(5)]

    for results in run(work, ranks):
        assert results == [step * len(ranks) for step in range(5)]
    assert ranks[0].gathers() == 0
    assert warnings() == []


def test_a_root_and_the_others_call_from_two_branches(ranks, warnings):
    """One warning names both lines; from then on the ranks agree as fast as at one place."""

    def work(rank):
        results = []
        for _ in range(5):
            if rank.number == 0:
                results.append(mean(rank, 1))
            else:
                results.append(mean(rank, 2))
            results.append(loss(rank, 1))
        return results

    size = len(ranks)
    for results in run(work, ranks):
        assert results == [1 + 2 * (size - 1), size] * 5
    others = "rank 1" if size == 2 else "ranks 1, 2"
    (message,) = warnings()
    found = re.search(f"calls at {LINE} on rank 0 and {LINE} on {others} are taken", message)
    assert found
    first, second = (int(number) for number in re.findall(r":(\d+) on", message))
    assert second == first + 2
    assert ranks[0].gathers() == 2  # of the first call: its description, and its places


def test_calls_that_cross_fail_on_all_ranks(ranks, warnings):
    def work(rank):
        first, second = (loss, accuracy) if rank.number == 0 else (accuracy, loss)
        first(rank, 1)
        message = fails(second, rank, 1)
        assert rank.total("named", 1) == len(ranks)
        return message

    (message,) = set(run(work, ranks))
    assert re.search(f"cross, {LINE} on rank 0 and {LINE} on rank 1, after {LINE} on", message)
    assert "name='loss'" in message
    assert len(warnings()) == 1


def test_calls_that_cross_fail_before_either_has_run(ranks):
    """Both are in flight."""

    def work(rank):
        def begin_loss():
            return rank.lane.submit(Allreduce(rank.name(), np.ones(1), Sum))

        def begin_accuracy():
            return rank.lane.submit(Allreduce(rank.name(), np.ones(1), Sum))

        order = [begin_loss, begin_accuracy]
        begun = [begin() for begin in (order if rank.number == 0 else reversed(order))]
        rank.lane.run(Allreduce("begun", np.ones(1), Sum))
        return [fails(handle.wait) for handle in begun]

    for messages in run(work, ranks):
        assert len(messages) == 2


@pytest.mark.parametrize("lines", [2, 3])
def test_a_call_that_one_rank_leaves_out_is_found_at_the_next_but_one(ranks, lines):
    metrics = [loss, accuracy, lambda rank, value: mean(rank, value)][:lines]

    def work(rank):
        made = [metric for step in range(3) for metric in metrics]
        if rank.number == 0:
            del made[lines + 1]
        for metric in made[: lines + 2]:
            metric(rank, 1)
        return fails(made[lines + 2], rank, 1)

    assert len(set(run(work, ranks))) == 1


def test_a_helper_that_calls_for_others_is_told_apart_by_its_callers(ranks, warnings):
    def work(rank):
        def first():
            return loss(rank, 1)

        def second():
            return loss(rank, 2)

        one, other = (first, second) if rank.number == 0 else (second, first)
        one()
        return fails(other)

    (message,) = set(run(work, ranks))
    assert re.search(f"cross, {LINE}, called at {LINE} on rank 0", message)


def test_branches_that_make_the_same_calls_in_another_order_cross(ranks):
    def work(rank):
        a, b = 1, 2
        if rank.number == 0:
            mean(rank, a)
            with pytest.raises(MismatchError, match="cross"):
                mean(rank, b)
        else:
            mean(rank, b)
            with pytest.raises(MismatchError, match="cross"):
                mean(rank, a)

    run(work, ranks)


def test_a_mismatch_says_where_the_calls_are(ranks):
    def work(rank):
        shape = 2 if rank.number == 0 else 3
        name = rank.name()
        with pytest.raises(MismatchError) as caught:
            rank.lane.run(Allreduce(name, np.ones(shape), Sum))
        return str(caught.value)

    (message,) = set(run(work, ranks))
    assert re.search(
        rf"'allreduce.noname.0', called without a name at {LINE} on ranks 0, 1", message
    )


def test_two_calls_in_one_line_are_told_apart(ranks, warnings):
    def work(rank):
        # fmt: off
        mean(rank, 1) if rank.number == 0 else mean(rank, 2)
        # fmt: on

    run(work, ranks)
    assert re.search(rf"{LINE} \(column \d+\) on rank 0", warnings()[0])


def test_a_root_that_changes_is_no_crossing(ranks):
    """Each rank is the root in turn, and calls from the root's branch."""

    def work(rank):
        results = []
        for _ in range(2):
            for root in range(len(ranks)):
                if rank.number == root:
                    operation = Broadcast(rank.name(), np.array([root]), root)
                else:
                    operation = Broadcast(rank.name(), np.array([-1]), root)
                results.append(rank.lane.run(operation)[0])
        return results

    for results in run(work, ranks):
        assert results == [*range(len(ranks))] * 2


def test_ranks_that_run_out_of_data_at_different_times_do_not_cross(ranks):
    def work(rank):
        results = []
        for epoch in range(2):
            for step in range(8):
                if step < 3 + (rank.number + epoch) % len(ranks):
                    results.append(mean(rank, 1))
                else:
                    results.append(mean(rank, 0))
        return results

    expected = [
        sum(step < 3 + (number + epoch) % len(ranks) for number in range(len(ranks)))
        for epoch in range(2)
        for step in range(8)
    ]
    for results in run(work, ranks):
        assert results == expected


def test_calls_of_two_threads_at_once_fail_on_all_ranks(ranks):
    """Also in the thread that goes on, on each rank perhaps another one.

    Each thread goes on until a call of its own fails, so that all ranks make as many calls.
    """
    first = threading.Barrier(len(ranks) * 2)

    def work(rank):
        def call():
            first.wait()
            while True:
                loss(rank, 1)

        with ThreadPoolExecutor(2) as pool:
            for thread in [pool.submit(call) for _ in range(2)]:
                with pytest.raises(MismatchError, match="threads call it at the same time"):
                    thread.result()

    run(work, ranks)


def test_threads_that_call_one_after_the_other_are_right_and_quiet(ranks, warnings):
    """Also where a rank has started another number of threads, and where a pool calls."""

    def work(rank):
        if rank.number == 0:
            threading.Thread(target=int).start()
        results = [loss(rank, 1)]
        for step in range(3):
            thread = threading.Thread(target=lambda step=step: results.append(loss(rank, step)))
            thread.start()
            thread.join()
        with ThreadPoolExecutor(2) as pool:
            results += [pool.submit(loss, rank, step).result() for step in range(5)]
        return [*results, loss(rank, 1)]

    for results in run(work, ranks):
        assert results == [len(ranks) * value for value in (1, 0, 1, 2, 0, 1, 2, 3, 4, 1)]
    assert warnings() == []


def test_threads_that_take_turns_in_another_order_cross(ranks):
    def work(rank):
        errors = []

        def call(turn):
            try:
                loss(rank, turn)
            except MismatchError as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=(n,), name=f"part {n}") for n in (0, 1)]
        for thread in threads if rank.number else reversed(threads):
            thread.start()
            thread.join()
        return errors

    for (error,) in run(work, ranks):
        assert "thread part 1) on rank 0" in str(error)


def test_lines_are_known_to_pythons_without_positions(ranks, monkeypatch):
    """Python 3.10 knows no columns."""
    monkeypatch.setattr(calls, "_position", lambda code, at: None)
    monkeypatch.setattr(calls, "_places", {})
    here, name = sys._getframe().f_lineno, ranks[0].name()
    assert name.place.lines[0] == ("test_calls.py", here, None)
    assert name.place.source == ""


def test_a_name_is_a_plain_string_for_others(ranks):
    name = ranks[0].name()
    assert type(pickle.loads(pickle.dumps(name))) is str
    assert (name + ": 1").whole is name
    assert type(f"{name}: 2") is str
