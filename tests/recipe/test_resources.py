"""A rank's share of cores and accelerators."""

from __future__ import annotations

import os

import pytest

import hvdlite as hvd
from hvdlite.recipe import resources
from hvdlite.recipe.resources import share_of_node
from tests.harness import ranks


def share(rank, *all_ranks):
    """The threads of one rank, given (node, cores) of all ranks."""
    everyone = [((node, frozenset(cores)), (node, ())) for node, cores in all_ranks]
    node, cores = all_ranks[rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources.world, "node_index", lambda: node)
        patch.setattr(os, "sched_getaffinity", lambda _: cores)
        patch.setattr(resources.collectives, "allgather_object", lambda own, name: everyone)
        return share_of_node([])[0]


def test_ranks_share_the_cores_of_their_node():
    eight = range(8)
    assert share(0, (0, eight)) == 8
    assert share(0, (0, eight), (0, eight)) == 4
    assert share(1, (0, eight), (0, eight), (0, eight)) == 2
    assert share(0, *[(0, range(2))] * 4) == 1


def test_ranks_of_other_nodes_do_not_count():
    assert share(0, (0, range(8)), (1, range(8))) == 8
    assert share(2, (0, range(8)), (0, range(8)), (1, range(6))) == 6


def test_bound_ranks_keep_their_own_cores():
    assert share(0, (0, range(4)), (0, range(4, 8))) == 4
    assert share(1, (0, range(4)), (0, range(8))) == 4
    assert share(0, (0, [0]), (0, [1])) == 1


@ranks(1, 2, 3)
def test_threads_of_this_machine():
    hvd.init()
    assert share_of_node([])[0] == max(1, len(os.sched_getaffinity(0)) // hvd.size())


@ranks(1, 2, 3)
def test_ranks_that_see_the_same_accelerators_take_one_each():
    hvd.init()
    assert share_of_node(["a", "b", "c"])[1] == hvd.rank()


@ranks(2, 3)
def test_ranks_that_were_given_their_own_take_it():
    hvd.init()
    assert share_of_node([f"accelerator {hvd.rank()}"])[1] == 0


@ranks(2, 3)
def test_too_few_accelerators_are_refused_on_all_ranks(size):
    hvd.init()
    with pytest.raises(ValueError, match=rf"rank 0: {size} rank\(s\) on its node share 1 acc"):
        share_of_node(["a"])
    assert hvd.allreduce(1, op=hvd.Sum) == size


@ranks(1, 2)
def test_no_accelerators_anywhere():
    hvd.init()
    assert share_of_node([])[1] is None


@ranks(2, 3)
def test_accelerators_on_some_ranks_only_are_refused_on_all():
    hvd.init()
    with pytest.raises(ValueError, match=r"rank 1: \d rank\(s\) on its node share 0 acc"):
        share_of_node(["a"] if hvd.rank() == 0 else [])
