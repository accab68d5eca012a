"""Objects that follow the ranks, on one rank that sees others die."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from hvdlite.recipe import shard
from hvdlite.world import membership, world


@pytest.fixture
def numbers(monkeypatch):
    """A process without members, and a function that gives it a rank and a number of ranks."""
    for name, empty in (("_members", {}), ("counts", defaultdict(int)), ("_missed", {})):
        monkeypatch.setattr(membership, name, empty)

    def enter(rank, size):
        comm = SimpleNamespace(rank=rank, size=size)
        monkeypatch.setattr(world, "_current", SimpleNamespace(comm=comm))

    enter(2, 3)
    return enter


def make():
    return shard(np.arange(12), 2, shuffle=False)


def die(numbers, others):
    """Rank 0 of three dies; another rank has come to these positions."""
    with membership.lock:
        here = membership.positions()
        numbers(1, 2)
        membership.renumber([others, here], 1, 2)


def as_lists(batches):
    return [batch.tolist() for batch in batches]


def test_an_object_waits_for_the_end_of_a_recovery(numbers):
    made = []
    with membership.lock:
        here = membership.positions()
        thread = threading.Thread(target=lambda: made.append(make()))
        thread.start()
        thread.join(0.2)  # time enough to come in, if it could
        assert membership.positions() == here == {}
        numbers(1, 2)
        membership.renumber([{}, here], 1, 2)
    thread.join()
    # No rank had it before: it is one of the new world, although its sharding may be older.
    assert as_lists(made[0]) == [[2, 3], [6, 7], [10, 11]]


def test_an_object_that_other_ranks_made_before_a_death_changes_as_theirs_do(numbers):
    key = (12, 2, False, 0)
    first = make()
    assert next(iter(first)).tolist() == [4, 5]
    # Another rank has taken a batch of the second one, and has made a third one.
    die(numbers, {(key, 0): (0, 1), (key, 1): (0, 1), (key, 2): (0, 0)})
    second, third, fourth = make(), make(), make()
    assert as_lists(second) == [[4, 5], [9, 10, 11]]
    assert as_lists(third) == [[3, 4, 5], [9, 10, 11]]
    assert as_lists(fourth) == [[2, 3], [6, 7], [10, 11]]


def test_the_ranks_that_are_left_share_what_a_position_leaves(numbers):
    """From its first step on, although the death was as many steps after the epoch's start."""
    batches = make()
    next(iter(batches))
    die(numbers, {((12, 2, False, 0), 0): (0, 1)})
    batches.load_state_dict(batches.state_dict())
    assert as_lists(batches) == [[9, 10, 11]]
    assert as_lists(batches) == [[3, 4, 5], [9, 10, 11]]
