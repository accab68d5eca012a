from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

from hvdlite.base.reduction import Max, Scaling, Sum
from hvdlite.errors import HorovodInternalError
from hvdlite.transport.gpu.base import DeviceTransport, Work
from hvdlite.transport.gpu.nccl import NCCLTransport
from hvdlite.transport.registry import connect_device
from tests.simulation import Simulation, on_all_ranks
from tests.transport.gpu import device_checks
from tests.transport.gpu.fake_cuda import FakeCuda, FakeNode
from tests.transport.gpu.fake_ranks import connect, node_of


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", device_checks.EVERYTHING, ids=lambda check: check.__name__)
def test_it_keeps_every_promise(check, size):
    ranks = connect(size)
    assert all(isinstance(rank.transport, NCCLTransport) for rank in ranks)
    on_all_ranks(check, ranks)
    on_all_ranks(lambda rank: rank.transport.close(), ranks)


# The connection


def test_every_rank_gets_the_id_of_rank_0():
    """The fake asserts that it is rank 0's."""
    communicators = node_of(connect(3)[0]).communicators
    assert sorted(communicators) == [0, 1, 2]
    assert all(made.stream is None for made in communicators.values())


@pytest.mark.parametrize(
    ("cudas", "reason"),
    [
        (lambda node: [FakeCuda(node), FakeCuda(node)], "ranks 0 and 1 share device 0"),
        (
            lambda node: [FakeCuda(node, "0"), FakeCuda(node, "1", version=0)],
            "rank 1 has no NCCL",
        ),
        (
            lambda node: [FakeCuda(node, "0"), FakeCuda(node, "1", version=22803)],
            "rank 1 has NCCL 22803, rank 0 has 22707",
        ),
        (
            lambda node: [FakeCuda(node, "0", refuses="id"), FakeCuda(node, "1")],
            "rank 0: NCCL made no id: no socket interface",
        ),
        (
            lambda node: [
                FakeCuda(node, "0", refuses="connect"),
                FakeCuda(node, "1", refuses="connect"),
            ],
            "rank 0: NCCL could not connect: unhandled system error",
        ),
    ],
    ids=["shared device", "missing on one", "other version", "no id", "no connection"],
)
def test_where_nccl_cannot_work_all_ranks_go_through_the_host(cudas, reason, caplog):
    ranks = connect(2, cudas)
    assert all(type(rank.transport) is DeviceTransport for rank in ranks)
    (record,) = caplog.records
    assert reason in record.getMessage()
    on_all_ranks(device_checks.broadcast, ranks)


def test_a_communicator_that_not_all_ranks_have_is_aborted(monkeypatch):
    """Rank 1 connects, and then something fails on it."""
    node = FakeNode()
    cudas = [FakeCuda(node, "0"), FakeCuda(node, "1")]
    connected = cudas[1].communicator

    def fail(*arguments):
        connected(*arguments)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(cudas[1], "communicator", fail)
    ranks = connect(2, lambda _: cudas)
    assert all(type(rank.transport) is DeviceTransport for rank in ranks)
    assert node.communicators[0].aborts == 1


def test_ranks_may_share_a_device_where_nccl_is_told_so(monkeypatch):
    def shared(version):
        return lambda node: [FakeCuda(node, version=version) for _ in range(2)]

    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert isinstance(connect(2, shared(23001))[0].transport, NCCLTransport)
    assert type(connect(2, shared(22907))[0].transport) is DeviceTransport


# The order of work


def _sum(rank, array, result):
    return lambda: rank.transport.allreduce(array, result, Sum, Scaling())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bool"])
def test_the_host_never_waits_for_the_device(dtype):
    """Everything is enqueued, and nothing of it has happened."""
    ranks = connect(2)
    node = node_of(ranks[0])
    stream, array = node.new_stream(), np.ones(9, dtype)
    node.launch(stream, lambda: array.fill(1))
    op = Max if dtype == "bool" else Sum

    def exchange(rank):
        ready = rank.transport.record(stream.ptr)
        work = rank.transport.enqueue(
            lambda: rank.transport.allreduce(array, np.empty_like(array), op, Scaling(0.5)),
            [ready],
        )
        work.wait_on(stream.ptr)

    for rank in ranks:  # one after the other: a rank that waited would wait for ever
        exchange(rank)
    assert node.executed == []


def test_arithmetic_takes_its_place_between_collectives():
    def exchange(rank):
        array = np.full(8, rank.rank + 1.0, np.float32)

        def twice():
            rank.transport.allreduce(array, array, Sum, Scaling())
            rank.transport._cuda.reduce(array, array, Sum, Scaling(10.0))
            rank.transport.allreduce(array, array, Sum, Scaling())

        rank.transport.enqueue(twice).wait()
        return array

    for array in on_all_ranks(exchange, connect(2)):
        assert (array == 60).all()


def test_averages_of_powers_of_two_cost_no_second_pass():
    def average(rank):
        array = np.full(8, rank.rank, np.float32)
        rank.transport.enqueue(
            lambda: rank.transport.allreduce(array, array, Sum, Scaling(1.0, rank.size))
        ).wait()
        return array

    for size, passes in ((2, 0), (3, 3)):
        ranks = connect(size)
        for array in on_all_ranks(average, ranks):
            np.testing.assert_array_equal(array, np.float32((size - 1) / 2))
        assert node_of(ranks[0]).executed.count("reduce") == passes


# Failures


def test_an_asynchronous_error_is_raised_where_it_happens_and_aborts():
    ranks = connect(2)
    ours, theirs = (node_of(ranks[0]).communicators[rank] for rank in (0, 1))
    ours.async_error = "remote process exited"
    with pytest.raises(HorovodInternalError, match=r"rank 0: .*device 0 failed.*remote process"):
        ranks[0].transport.check()
    assert (ours.aborts, theirs.aborts) == (1, 0)
    ranks[1].transport.check()
    # It stays failed, with its first reason, and is aborted once.
    ours.async_error = "something else"
    for call in (ranks[0].transport.check, lambda: ranks[0].transport.enqueue(lambda: None)):
        with pytest.raises(HorovodInternalError, match="remote process"):
            call()
    assert ours.aborts == 1


def test_abort_is_idempotent():
    (rank,) = connect(1)
    for reason in ("first", "second"):
        with pytest.raises(HorovodInternalError, match="first"):
            rank.transport.abort(reason)
    assert node_of(rank).communicators[0].aborts == 1
    rank.transport.close()
    assert not node_of(rank).communicators[0].destroyed


def test_a_peer_that_does_not_come_is_an_error_in_time():
    """Rank 1 never calls; rank 0's device would wait for ever."""
    rank, _ = connect(2, timeout=0.1)
    array = np.ones(4, np.float32)
    work = rank.transport.enqueue(_sum(rank, array, array))
    assert not work.done()
    with pytest.raises(HorovodInternalError, match=r"nothing came for 0\.1 s; a rank has ended"):
        work.wait()
    assert node_of(rank).communicators[0].aborts == 1
    with pytest.raises(HorovodInternalError, match="nothing came"):
        work.done()  # the abort has ended it, and it must not pass for done


def test_work_that_an_abort_ended_does_not_pass_for_done():
    (rank,) = connect(1)

    class Aborted:
        @property
        def done(self):
            with pytest.raises(HorovodInternalError):
                rank.transport.abort("by another thread, at the worst moment")
            return True

    with pytest.raises(HorovodInternalError, match="worst moment"):
        Work(rank.transport, Aborted()).wait()


@pytest.mark.parametrize("call", ["allreduce", "alltoall", "allgather", "broadcast"])
def test_a_refused_call_names_the_rank_and_leaves_no_group_open(call):
    ranks = connect(2)
    transport = ranks[1].transport
    node_of(ranks[1]).communicators[1].call_error = "invalid usage"
    array = np.zeros(4, np.uint8)
    calls = {
        "allreduce": lambda: transport.allreduce(array, array, Sum, Scaling()),
        "alltoall": lambda: transport.alltoall([array, array], [array, array]),
        "allgather": lambda: transport.allgather(array, [array, array.copy()]),
        "broadcast": lambda: transport.broadcast(array, 0),
    }
    with pytest.raises(HorovodInternalError, match=r"rank 1: .*invalid usage"):
        transport.enqueue(calls[call])
    transport._cuda.nccl.groupStart()  # the fake asserts that no group is open
    transport._cuda.nccl.groupEnd()
    assert node_of(ranks[1]).communicators[1].aborts == 1


def test_adasum_through_the_host_gives_up_too():
    """The host waits for work on the device that a dead rank keeps from ending."""
    rank, _ = connect(2, timeout=0.05)
    array = np.ones(4, np.float32)
    rank.transport.enqueue(_sum(rank, array, array))
    with pytest.raises(HorovodInternalError, match=r"rank 0: .*nothing came"):
        rank.transport.enqueue(lambda: rank.transport.adasum(array, array, Scaling(), [0, 4]))
    assert node_of(rank).communicators[0].aborts == 1


def test_an_error_of_the_device_ends_every_wait():
    """The failure stays: later calls would find the same."""
    rank, _ = connect(2)
    array = np.ones(4, np.float32)
    work = rank.transport.enqueue(_sum(rank, array, array))
    work._event.error = RuntimeError("cudaErrorIllegalAddress")
    with pytest.raises(HorovodInternalError, match=r"rank 0: .*cudaErrorIllegalAddress"):
        work.wait()
    assert node_of(rank).communicators[0].aborts == 1


@pytest.mark.parametrize("ends", [True, False], ids=["that ends", "that hangs"])
def test_an_abort_comes_after_a_call_in_flight(monkeypatch, ends):
    """An abort frees the communicator, but for a call that hangs: that one it ends."""
    monkeypatch.setattr("hvdlite.transport.gpu.nccl._CALL_SECONDS", 10.0 if ends else 0.05)
    rank, _ = connect(2)
    communicator = node_of(rank).communicators[0]
    entered, may_return = threading.Event(), threading.Event()
    aborts_when_the_call_ended = []

    def call(*arguments):
        entered.set()
        may_return.wait(10)
        aborts_when_the_call_ended.append(communicator.aborts)

    monkeypatch.setattr(communicator, "broadcast", call)
    array = np.ones(4, np.uint8)

    def broadcast():
        with contextlib.suppress(HorovodInternalError):
            rank.transport.enqueue(lambda: rank.transport.broadcast(array, 0))

    def abort():
        with contextlib.suppress(HorovodInternalError):
            rank.transport.abort("the peer has died")

    threads = [threading.Thread(target=target, daemon=True) for target in (broadcast, abort)]
    threads[0].start()
    assert entered.wait(10)
    rank.transport.check()  # does not wait for the call
    threads[1].start()
    if not ends:
        threads[1].join(10)
    may_return.set()
    for thread in threads:
        thread.join(10)
    assert aborts_when_the_call_ended == [0 if ends else 1]
    assert communicator.aborts == 1


def test_ranks_that_never_connect_go_through_the_host(monkeypatch, caplog):
    monkeypatch.setattr("hvdlite.transport.gpu.nccl._JOIN_SECONDS", 0.1)
    monkeypatch.setattr("tests.transport.gpu.fake_nccl.SECONDS", 0.05)
    node = FakeNode()
    cudas = [FakeCuda(node, "0", refuses="hang"), FakeCuda(node, "1", refuses="hang")]
    ranks = connect(2, lambda _: cudas)
    assert all(type(rank.transport) is DeviceTransport for rank in ranks)
    assert "rank 0: NCCL did not connect within 0.1 s" in caplog.text
    # Communicators that come about all the same are ended.
    monkeypatch.setattr("tests.transport.gpu.fake_nccl.SECONDS", 10.0)
    for cuda in cudas:
        cuda.released.set()
    with node.lock:
        assert node.lock.wait_for(
            lambda: [node.communicators[rank].aborts for rank in node.communicators] == [1, 1], 10
        )


def test_close_ends_the_communicator_once_the_device_is_done():
    def use_and_close(rank):
        array = np.ones(4, np.float32)
        rank.transport.enqueue(_sum(rank, array, array))
        rank.transport.close()
        rank.transport.close()
        with pytest.raises(HorovodInternalError, match="has been closed"):
            rank.transport.enqueue(lambda: None)
        return array

    ranks = connect(2)
    for array in on_all_ranks(use_and_close, ranks):
        assert (array == 2).all()
    assert all(made.destroyed for made in node_of(ranks[0]).communicators.values())


def test_close_aborts_what_does_not_end():
    rank, _ = connect(2, timeout=0.05)
    array = np.ones(4, np.float32)
    rank.transport.enqueue(_sum(rank, array, array))
    rank.transport.close()
    communicator = node_of(rank).communicators[0]
    assert (communicator.aborts, communicator.destroyed) == (1, False)


def test_all_ranks_learn_of_one_that_cannot_use_its_device(monkeypatch):
    node = FakeNode()
    cudas = [FakeCuda(node, "0"), FakeCuda(node, "1")]

    def fail(device):
        raise RuntimeError("invalid device ordinal")

    monkeypatch.setattr(cudas[1], "bus_id", fail)

    def refused(control):
        with pytest.raises(HorovodInternalError, match=r"rank 1 .*invalid device ordinal"):
            connect_device(control, 0, cudas[control.rank])

    on_all_ranks(refused, Simulation(2).transports)


def test_all_ranks_use_the_control_transport_in_the_same_way():
    simulation = Simulation(2)
    node = FakeNode()
    on_all_ranks(
        lambda control: connect_device(control, 0, FakeCuda(node, str(control.rank))),
        simulation.transports,
    )
    assert simulation.calls == [["gather", "broadcast", "gather"]] * 2
