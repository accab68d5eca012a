from __future__ import annotations

import threading

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.world import mpi
from tests.harness import ranks

ALL = ranks(1, 2, 3, 4)
SEVERAL = ranks(2, 3, 4)
THREE = ranks(3)


def new_world():
    """A world in which there is no process set yet."""
    hvd.shutdown()
    hvd.init()


def halves():
    """The process sets of even and of odd ranks, and this rank's."""
    rank, size = hvd.rank(), hvd.size()
    even = hvd.add_process_set(range(0, size, 2))
    odd = hvd.add_process_set(hvd.ProcessSet(list(range(1, size, 2))[::-1]))
    return (even, odd) if rank % 2 == 0 else (odd, even)


@SEVERAL
def test_sets_are_numbered_and_know_their_ranks(size):
    new_world()
    even, odd = sorted(halves(), key=lambda chosen: chosen.process_set_id)
    assert (even.process_set_id, odd.process_set_id) == (1, 2)
    assert even.ranks == list(range(0, size, 2))
    assert odd.ranks == list(range(1, size, 2))
    mine, other = (even, odd) if hvd.rank() % 2 == 0 else (odd, even)
    assert mine.included()
    assert not other.included()
    assert mine.rank() == hvd.rank() // 2
    assert mine.size() == len(mine.ranks)
    assert other.size() == len(other.ranks)
    with pytest.raises(ValueError, match=f"rank {hvd.rank()} is not in"):
        other.rank()


@ALL
def test_the_set_of_all_ranks(size):
    new_world()
    everybody = hvd.global_process_set
    assert everybody.process_set_id == 0
    assert everybody.ranks == list(range(size))
    assert (everybody.size(), everybody.rank(), everybody.included()) == (size, hvd.rank(), True)
    assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=everybody) == [size]
    assert hvd.remove_process_set(everybody) is False


@SEVERAL
def test_collectives_of_the_members(size):
    new_world()
    mine, _ = halves()
    rank, members = hvd.rank(), mine.ranks
    own = np.arange(4.0) + rank
    expected = sum(np.arange(4.0) + member for member in members)
    for times in range(2):  # twice: lazy initialisation would show
        total = hvd.allreduce(own, op=hvd.Sum, process_set=mine, name=f"sum {times}")
        np.testing.assert_array_equal(total, expected)
        average = hvd.allreduce(own, process_set=mine)
        np.testing.assert_array_equal(average, expected / len(members))
        gathered = hvd.allgather(np.full(rank + 1, rank), process_set=mine)
        assert gathered.tolist() == [r for r in members for _ in range(r + 1)]
        for root in members:
            assert hvd.broadcast(np.array([rank]), root, process_set=mine) == [root]
            assert hvd.broadcast_object(f"rank {rank}", root, process_set=mine) == f"rank {root}"
        assert hvd.allgather_object(rank, process_set=mine) == members
        rows = np.repeat(np.array(members), 2) * 10 + rank
        received, splits = hvd.alltoall(rows, process_set=mine)
        assert received.tolist() == [10 * rank + r for r in members for _ in range(2)]
        assert splits.tolist() == [2] * len(members)
        scattered = hvd.reducescatter(np.full(len(members), rank), op=hvd.Sum, process_set=mine)
        assert scattered.tolist() == [sum(members)]
        assert hvd.grouped_allreduce([own, own[:1]], process_set=mine, op=hvd.Sum)[1] == [
            sum(members)
        ]
        hvd.barrier(process_set=mine)


@ranks(3, 4)
def test_sets_do_not_wait_for_each_other(size):
    new_world()
    mine, _ = halves()
    # As many as the rank's set has members: the sets run different numbers of operations.
    for number in range(3 * len(mine.ranks)):
        hvd.allreduce(np.ones(10), process_set=mine, name=f"step {number}")


@THREE
def test_members_submit_to_several_sets_in_any_order_from_threads():
    new_world()
    sets = [hvd.add_process_set(pair) for pair in ((0, 1), (0, 2), (1, 2))]
    mine = [each for each in sets if each.included()]
    results = {}

    def use(chosen, shift):
        for number in range(20):
            step = (number * shift) % 20
            handle = hvd.allreduce_async(
                np.full(50, step), name=f"step {step}", op=hvd.Sum, process_set=chosen
            )
            results[chosen.process_set_id, step] = handle

    threads = [
        threading.Thread(target=use, args=(chosen, (1, 3, 7)[(hvd.rank() + index) % 3]))
        for index, chosen in enumerate(mine)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (_, step), handle in results.items():
        assert hvd.synchronize(handle).tolist() == [2 * step] * 50
    assert len(results) == 40


@SEVERAL
def test_who_is_no_member_is_told_at_once(size):
    new_world()
    mine, other = halves()
    for call in (
        lambda: hvd.allreduce(np.ones(1), process_set=other),
        lambda: hvd.allgather(np.ones(1), process_set=other),
        lambda: hvd.broadcast(np.ones(1), other.ranks[0], process_set=other),
        lambda: hvd.alltoall(np.ones(size), process_set=other),
        lambda: hvd.reducescatter(np.ones(1), process_set=other),
        lambda: hvd.grouped_allreduce([np.ones(1)], process_set=other),
        lambda: hvd.join(process_set=other),
        lambda: hvd.barrier(process_set=other),
        lambda: hvd.broadcast_object(1, other.ranks[0], process_set=other),
    ):
        with pytest.raises(ValueError, match=f"rank {hvd.rank()} is not in ProcessSet"):
            call()
    outside = other.ranks[0]
    with pytest.raises(ValueError, match=f"root_rank={outside} is not a rank that takes part"):
        hvd.broadcast(np.ones(1), outside, process_set=mine)
    assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=mine) == [len(mine.ranks)]


@SEVERAL
def test_unknown_sets_are_refused(size):
    new_world()
    unregistered = hvd.ProcessSet([0])
    assert (unregistered.size(), unregistered.rank(), unregistered.included()) == (None,) * 3
    for unknown in (unregistered, 7, "0"):
        with pytest.raises(ValueError, match="is not a registered process set"):
            hvd.allreduce(np.ones(1), process_set=unknown)
    assert hvd.allreduce(np.ones(1), op=hvd.Sum) == [size]


@SEVERAL
def test_what_makes_no_set(size):
    new_world()
    hvd.add_process_set([0])
    for ranks_, message in (
        ([0], "has the same ranks"),
        (range(size), "has the same ranks"),
        (list(range(size))[::-1], "has the same ranks"),
        ([], "must name each of its ranks once"),
        ([0, 0], "must name each of its ranks once"),
        ([size], f"out of 0 to {size - 1}"),
        ([-1], "must name each of its ranks once"),
        ([0.5], r"a list of integers, the numbers of its ranks; found \[0.5\]"),
        (["0"], "a list of integers"),
        (0, "a list of integers"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.add_process_set(ranks_)
    kept = hvd.add_process_set([1])
    with pytest.raises(ValueError, match="registered already"):
        hvd.add_process_set(kept)
    assert kept.process_set_id == 2


@SEVERAL
def test_ranks_that_disagree_on_a_set(size):
    new_world()
    mine = [0] if hvd.rank() == 0 else [0, 1]
    if size == 2:
        mine = [0] if hvd.rank() == 0 else [1]
    with pytest.raises(hvd.HorovodInternalError, match="the ranks of the process set is"):
        hvd.add_process_set(mine)
    agreed = hvd.add_process_set([size - 1])
    assert agreed.process_set_id == 1
    if hvd.rank() == size - 1:
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=agreed) == [1]


@THREE
def test_messages_name_the_ranks_of_the_world():
    new_world()
    pair = hvd.add_process_set([1, 2])
    if pair.included():
        with pytest.raises(hvd.HorovodInternalError, match=r"shape is \(1,\) on rank 1, \(2,\) on"):
            hvd.allreduce(np.ones(hvd.rank()), name="odd", process_set=pair)
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=pair) == [2]


@SEVERAL
def test_a_rank_that_has_joined_cannot_register_a_set(size):
    new_world()
    if hvd.rank() == 0:
        with pytest.raises(hvd.HorovodInternalError, match=r"rank.* which called join\(\)"):
            hvd.add_process_set([0])
    hvd.join()
    assert hvd.add_process_set([0]).process_set_id == 1


@THREE
def test_a_set_of_its_members_alone_is_unknown_to_the_others():
    new_world()
    if hvd.rank() < 2:
        assert hvd.add_process_set([0, 1], members_only=True).process_set_id == -1
    same = hvd.add_process_set([0, 1])
    other = hvd.add_process_set([0, 2])
    assert (same.process_set_id, other.process_set_id) == (1, 2)
    assert hvd.remove_process_set(other)


@SEVERAL
def test_removal(size):
    new_world()
    mine, other = halves()
    even = mine if hvd.rank() % 2 == 0 else other
    assert hvd.remove_process_set(even) is True
    assert even.process_set_id is None
    assert hvd.remove_process_set(even) is False
    with pytest.raises(ValueError, match="is not a registered process set"):
        hvd.allreduce(np.ones(1), process_set=even)
    again = hvd.add_process_set(even)
    assert again.process_set_id == 3
    if again.included():
        total = hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=again)
        assert total == [len(again.ranks)]


@SEVERAL
def test_sets_given_to_init(size):
    new_world()
    hvd.shutdown()
    first, whole = hvd.ProcessSet([0]), mpi.load().COMM_WORLD
    members = [0, 1] if size > 2 else []
    pair = None
    if whole.rank in members:
        pair = hvd.ProcessSet(whole.Create_group(whole.group.Incl(members)))
    elif members:
        pair = hvd.ProcessSet(members)
    hvd.init(process_sets=[first, *([pair] if pair else [])])
    assert first.process_set_id == 1
    if pair is not None:
        assert (pair.process_set_id, pair.ranks) == (2, [0, 1])
    hvd.shutdown()
    assert first.process_set_id is None
    hvd.init(process_sets="dynamic")
    assert hvd.add_process_set(first).process_set_id == 1
    hvd.shutdown()
    with pytest.raises(ValueError, match="has the same ranks"):
        hvd.init(process_sets=[[0], [0]])
    assert not hvd.is_initialized()
    with pytest.raises(hvd.HorovodInternalError, match="the ranks of the process set is"):
        hvd.init(process_sets=[[0] if whole.rank == 0 else [0, 1] if size > 2 else [1]])
    assert not hvd.is_initialized()
    for sets, message in (("static", 'nor "dynamic"'), ([5], "found 5"), ([["0"]], "found")):
        with pytest.raises(ValueError, match=message):
            hvd.init(process_sets=sets)
        assert not hvd.is_initialized()
    hvd.init()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum) == [size]


@SEVERAL
def test_communicators_that_divide_the_ranks(size):
    """The second of the three ways in Horovod's documentation."""
    hvd.shutdown()
    whole = mpi.load().COMM_WORLD
    for _ in range(2):
        parity = whole.rank % 2
        mine = hvd.ProcessSet(whole.Split(parity, whole.rank))
        hvd.init(whole, process_sets=[mine, [0, 1]] if size > 2 else [mine])
        members = list(range(parity, size, 2))
        assert mine.ranks == members
        assert mine.process_set_id == 1 + parity
        assert mine.rank() == members.index(hvd.rank())
        assert hvd.allreduce(hvd.rank(), op=hvd.Sum, process_set=mine) == sum(members)
        assert hvd.allgather_object(hvd.rank(), process_set=mine) == members
        hvd.shutdown()
    hvd.init()
    hvd.add_process_set([0])  # which one of the parts is; all ranks have to hear of it
    with pytest.raises(ValueError, match="has the same ranks"):
        hvd.add_process_set(hvd.ProcessSet(whole.Split(min(whole.rank, 1), whole.rank)))
    assert hvd.allreduce(1, op=hvd.Sum) == size


@ranks(4, settings={"HVDLITE_FORCE_LOCAL_SIZE": "2"})
def test_members_on_several_nodes():
    hvd.init()
    across = hvd.add_process_set([0, 3])
    uneven = hvd.add_process_set([0, 1, 2])
    within = hvd.add_process_set([2, 3])
    for chosen in (across, uneven, within):
        if chosen.included():
            values = np.arange(100_000.0) * (hvd.rank() + 1)
            total = hvd.allreduce(values, op=hvd.Sum, process_set=chosen)
            factor = sum(rank + 1 for rank in chosen.ranks)
            np.testing.assert_array_equal(total, np.arange(100_000.0) * factor)
