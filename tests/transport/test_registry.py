from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os

import numpy as np
import pytest

from hvdlite.base.reduction import Scaling, Sum
from hvdlite.transport.hierarchical import HierarchicalTransport
from hvdlite.transport.loopback import Loopback
from hvdlite.transport.mpi import MPITransport
from hvdlite.transport.registry import connect
from hvdlite.transport.shared_memory import futex
from hvdlite.transport.shared_memory.segment import Peer
from hvdlite.transport.shared_memory.transport import SharedMemoryTransport
from hvdlite.world import mpi
from hvdlite.world.world import World
from tests.harness import ranks
from tests.transport import checks
from tests.transport.worlds import connected

linux = pytest.mark.skipif(not futex.is_supported(), reason="needs Linux on x86-64")


@contextlib.contextmanager
def warnings_of(monkeypatch):
    messages = []
    log = logging.getLogger("hvdlite")
    with monkeypatch.context() as patch:
        patch.setattr(log, "warning", lambda text, *args: messages.append(text % args))
        yield messages


def refuse(*_, **__):
    raise OSError(errno.EPERM, "not permitted here")


def works(made):
    for check in (checks.meet, checks.gather, checks.broadcast, checks.arrays_of_its_own):
        check(made)


class TestChoice:
    @ranks(1, timeout=20)
    def test_a_rank_alone(self):
        with connected() as made:
            assert isinstance(made, Loopback)

    @linux
    @ranks(2, 3, 4, timeout=20)
    def test_one_node(self):
        with connected() as made:
            assert isinstance(made, SharedMemoryTransport)
            comm = mpi.load().COMM_WORLD
            assert (made.rank, made.size) == (comm.rank, comm.size)

    @linux
    @ranks(3, 4, timeout=20)
    def test_several_nodes(self):
        with connected(local_size=2) as made:
            assert isinstance(made, HierarchicalTransport)
            comm = mpi.load().COMM_WORLD
            assert (made.rank, made.size) == (comm.rank, comm.size)

    @ranks(2, 3, timeout=20)
    def test_one_rank_on_each_node(self):
        with connected(local_size=1) as made:
            assert isinstance(made, MPITransport)

    @ranks(2, 3, timeout=20)
    @pytest.mark.parametrize("local_size", [0, 2])
    def test_it_can_be_switched_off(self, local_size, monkeypatch):
        off = connected(local_size, shared_memory=False)
        with warnings_of(monkeypatch) as messages, off as made:
            assert isinstance(made, MPITransport)
        assert messages == []

    @linux
    @ranks(3, timeout=20)
    def test_ranks_in_another_order(self):
        MPI = mpi.load()
        turned = MPI.COMM_WORLD.Split(0, key=-MPI.COMM_WORLD.rank)
        world = World.split(MPI, turned)
        made = connect(MPI, world)
        assert isinstance(made, SharedMemoryTransport)
        assert made.rank == 2 - MPI.COMM_WORLD.rank
        works(made)
        made.close()
        world.free()


@linux
class TestFallback:
    @ranks(2, 3, timeout=30)
    @pytest.mark.parametrize("what", ["no segment", "no access", "no support"])
    @pytest.mark.parametrize("last", [False, True], ids=["rank 0", "last rank"])
    def test_what_one_rank_cannot_do_no_rank_does(self, monkeypatch, what, last):
        comm = mpi.load().COMM_WORLD
        guilty = comm.size - 1 if last else 0
        if comm.rank == guilty:
            if what == "no segment":
                monkeypatch.setattr(os, "memfd_create", refuse)
            elif what == "no access":
                monkeypatch.setattr(Peer, "_open", refuse)
            else:
                monkeypatch.setattr(futex, "is_supported", lambda: False)
        with warnings_of(monkeypatch) as messages, connected() as made:
            assert isinstance(made, MPITransport)
            works(made)
        assert len(messages) == (comm.rank == 0)
        for message in messages:
            assert f"rank {guilty} cannot share memory" in message
            assert ("not permitted here" in message) == (what != "no support")
            assert "HVDLITE_SHARED_MEMORY=0" in message

    @ranks(4, timeout=30)
    def test_one_rank_of_one_node_of_several(self, monkeypatch):
        if mpi.load().COMM_WORLD.rank == 3:
            monkeypatch.setattr(Peer, "_open", refuse)
        with warnings_of(monkeypatch) as messages, connected(local_size=2) as made:
            assert isinstance(made, MPITransport)
            works(made)
        assert len(messages) == (made.rank == 0)


class TestEnd:
    @ranks(4, timeout=60)
    @pytest.mark.parametrize("local_size", [0, 1, 3])
    def test_communicators_are_given_back(self, local_size, monkeypatch):
        """An MPI library has room for some thousands at most."""
        made, closed = [], []
        init, close = MPITransport.__init__, MPITransport.close
        monkeypatch.setattr(
            MPITransport, "__init__", lambda self, *args: made.append(self) or init(self, *args)
        )
        monkeypatch.setattr(MPITransport, "close", lambda self: closed.append(self) or close(self))
        with connected(local_size):
            pass
        assert set(map(id, made)) == set(map(id, closed))
        assert len(made) == len(closed)

    @ranks(2, 4, timeout=60)
    @pytest.mark.parametrize("local_size", [0, 3])
    def test_files_and_memory_are_given_back(self, local_size):
        def use():
            with connected(local_size) as made:
                array = made.empty(1000, np.dtype(np.float32))
                array[...] = 1
                made.allreduce(array, array, Sum, Scaling())
                assert array.sum() == 1000 * made.size

        def files():
            gc.collect()
            return len(os.listdir("/proc/self/fd"))

        for _ in range(3):
            use()
        before = files()
        for _ in range(10):
            use()
        assert files() <= before + 4
