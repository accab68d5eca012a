from __future__ import annotations

import ctypes
import math
import os

import pytest

from hvdlite.transport.shared_memory import affinity, futex
from hvdlite.transport.shared_memory.affinity import CoreBalancer

pytestmark = pytest.mark.skipif(not futex.is_supported(), reason="needs Linux on x86-64")


class Machine:
    """A fake kernel: one thread, on a core of several."""

    def __init__(self, core, allowed):
        self.core = core
        self.allowed = set(allowed)
        self.asked = []

    def sched_getaffinity(self, pid):
        assert pid == 0
        return set(self.allowed)

    def sched_setaffinity(self, pid, allowed):
        assert pid == 0
        self.asked.append(set(allowed))
        self.allowed = set(allowed)
        if self.core not in allowed:
            self.core = min(allowed)


@pytest.fixture
def at(monkeypatch):
    """Return a function that puts this rank, the first, on a core, and others on theirs."""

    def put(core, others, allowed):
        machine = Machine(core, allowed)
        monkeypatch.setattr(affinity, "_current_core", lambda: machine.core)
        for name in ("sched_getaffinity", "sched_setaffinity"):
            monkeypatch.setattr(os, name, getattr(machine, name))
        words = [ctypes.c_uint32(0 if other is None else other + 1) for other in (None, *others)]
        return CoreBalancer(words, 0, sorted(allowed)), machine, words

    return put


@pytest.mark.parametrize(
    ("core", "others", "count", "to"),
    [
        (0, [0, 0, 1], 2, 1),
        (1, [1, 1, 0], 2, 0),
        (0, [0, 0, 0], 2, 1),
        (0, [0, 0, 1, 1, 2, 2], 4, 3),
        (2, [2, 2, 0, 1, 1], 3, 0),
    ],
)
def test_a_rank_moves_from_the_fullest_core_to_the_emptiest(at, core, others, count, to):
    balancer, machine, words = at(core, others, range(count))
    balancer.balance(1.0)
    assert machine.core == to
    assert words[0].value == to + 1
    assert machine.asked == [{to}, set(range(count))]  # it may run everywhere again


@pytest.mark.parametrize(
    ("core", "others", "count"),
    [
        (0, [0, 1, 1], 2),
        (0, [0, 1], 2),
        (0, [1, 1, 1], 2),  # others will move
        (0, [None, None, None], 2),
        (0, [0, 1, None], 2),  # may be on either
        (1, [0, 0, 1, 2, 2], 3),
        (0, [0, 1, 2], 3),  # one core has two in any case
    ],
)
def test_a_rank_stays_where_moving_would_not_help(at, core, others, count):
    balancer, machine, words = at(core, others, range(count))
    balancer.balance(1.0)
    assert (machine.core, machine.asked) == (core, [])
    assert words[0].value == core + 1


def test_ranks_that_look_one_after_the_other_stop_when_they_are_even(monkeypatch):
    words = [ctypes.c_uint32(1) for _ in range(7)]
    where = [0] * 7
    for rank in range(7):
        machine = Machine(where[rank], range(3))
        monkeypatch.setattr(affinity, "_current_core", lambda machine=machine: machine.core)
        for name in ("sched_getaffinity", "sched_setaffinity"):
            monkeypatch.setattr(os, name, getattr(machine, name))
        CoreBalancer(words, rank, range(3)).balance(1.0)
        where[rank] = machine.core
    assert sorted(where.count(core) for core in range(3)) == [2, 2, 3]


def test_a_rank_goes_only_where_it_may_run(at):
    balancer, machine, _ = at(0, [0, 0, 1], range(3))  # nobody is on core 2
    machine.allowed = {0, 1}
    balancer.balance(1.0)
    assert machine.core == 1
    assert machine.asked == [{1}, {0, 1}]


def test_a_rank_that_is_bound_to_its_core_stays(at):
    balancer, machine, _ = at(0, [0, 0, 1], range(2))
    machine.allowed = {0}
    balancer.balance(1.0)
    assert machine.asked == []


def test_it_looks_from_time_to_time_only(at):
    balancer, machine, words = at(0, [0, 1, 1], range(2))
    balancer.balance(1.0)
    words[2].value = 1
    balancer.balance(1.0 + 0.5e-3)
    assert machine.asked == []
    balancer.balance(1.0 + 2e-3)
    assert machine.core == 1


def test_who_is_moved_back_at_once_does_not_try_again_at_once(at):
    balancer, machine, _ = at(0, [0, 0, 1], range(2))
    for look in range(100):
        balancer.balance(1.0 + look * 1e-3)
        machine.core = 0
    assert len(machine.asked) / 2 <= 11


def test_where_it_is_not_allowed_nothing_happens_and_nothing_is_tried_again(at, monkeypatch):
    balancer, _, _ = at(0, [0, 0, 1], range(2))
    tried = []

    def refuse(pid, allowed):
        tried.append(allowed)
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    for look in range(100):
        balancer.balance(1.0 + look)
    assert len(tried) == 2  # there, and back


def test_without_the_system_call(at, monkeypatch):
    balancer, _, words = at(0, [0, 0, 1], range(2))
    monkeypatch.setattr(affinity, "_current_core", None)
    balancer = CoreBalancer(words, 0, range(2))
    balancer.publish()
    balancer.balance(math.inf)
    assert words[0].value == 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_real_thread():
    allowed = os.sched_getaffinity(0)
    moved = 0
    for _ in range(10):
        words = [ctypes.c_uint32() for _ in range(4)]
        balancer = CoreBalancer(words, 0, allowed)
        here = balancer.publish()
        for word in words[1:]:
            word.value = here + 1
        balancer.balance(1.0)
        moved += words[0].value - 1 != here
        assert os.sched_getaffinity(0) == allowed
    assert moved >= 5  # the kernel may have moved it, too, in between
