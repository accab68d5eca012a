from __future__ import annotations

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.world import mpi, world
from tests.harness import ranks


@ranks(1, 2, 3, 4)
def test_one_node(size):
    hvd.init()
    assert hvd.size() == hvd.local_size() == size
    assert hvd.rank() == hvd.local_rank() == mpi.load().COMM_WORLD.rank
    assert (hvd.cross_rank(), hvd.cross_size(), world.node_index()) == (0, 1, 0)
    assert hvd.is_homogeneous()
    assert sorted(hvd.allgather_object(hvd.rank())) == list(range(size))


@ranks(1, 3, 4, settings={"HVDLITE_FORCE_LOCAL_SIZE": "2"})
def test_several_nodes_of_two(size):
    hvd.init()
    node, local = divmod(hvd.rank(), 2)
    peers = range(local, size, 2)  # of the same place on their nodes
    assert (hvd.local_rank(), hvd.local_size()) == (local, min(2, size - 2 * node))
    assert (hvd.cross_rank(), hvd.cross_size(), world.node_index()) == (node, len(peers), node)
    assert hvd.is_homogeneous() == (size != 3)
    assert world.current().nodes == tuple(rank // 2 for rank in range(size))
    assert hvd.allgather_object(hvd.local_rank()) == [rank % 2 for rank in range(size)]


@ranks(3)
def test_init_with_a_list_of_ranks():
    hvd.shutdown()
    me = mpi.load().COMM_WORLD.rank
    if me == 1:
        with pytest.raises(
            ValueError, match=r"init\(\[2, 0\]\) was called on rank 1, which is not"
        ):
            hvd.init([2, 0])
        assert not hvd.is_initialized()
    else:
        hvd.init([2, 0])
        # In the order of the list.
        assert (hvd.rank(), hvd.size()) == ({2: 0, 0: 1}[me], 2)
        assert hvd.allgather_object(me) == [2, 0]
        np.testing.assert_array_equal(hvd.allreduce(np.full(3, me), op=hvd.Sum), [2, 2, 2])
        hvd.shutdown()
    mpi.load().COMM_WORLD.Barrier()


@ranks(4)
def test_init_with_a_communicator():
    hvd.shutdown()
    everyone = mpi.load().COMM_WORLD
    half = everyone.Split(everyone.rank % 2, -everyone.rank)
    hvd.init(half)
    assert (hvd.rank(), hvd.size()) == (half.rank, 2)
    assert hvd.allgather_object(everyone.rank) == [2 + everyone.rank % 2, everyone.rank % 2]
    hvd.shutdown()
    # It was duplicated: the user's own still works, and was not freed.
    assert half.allreduce(1) == 2
    half.Free()


@ranks(2)
def test_a_wrong_list_and_what_is_neither_list_nor_communicator_are_refused():
    hvd.shutdown()
    for bad in ([], [0, 0], [0, 2], [-1, 0]):
        with pytest.raises(ValueError, match="must name each rank once, out of 0 to 1"):
            hvd.init(bad)
    for bad in ("01", 3, {0, 1}, object()):
        with pytest.raises(TypeError, match="a list of ranks or an mpi4py communicator"):
            hvd.init(bad)
    with pytest.raises(ValueError, match="COMM_NULL"):
        hvd.init(mpi.load().COMM_NULL)
    assert not hvd.is_initialized()
