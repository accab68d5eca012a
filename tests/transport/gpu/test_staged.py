from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from hvdlite.base.reduction import Adasum, Scaling, Sum
from hvdlite.transport.gpu.base import DeviceTransport
from tests.references import check_reduction, samples
from tests.simulation import Simulation, on_all_ranks
from tests.transport.gpu import device_checks, fake_ranks
from tests.transport.gpu.device_checks import Rank
from tests.transport.gpu.fake_cuda import FakeCuda, FakeNode
from tests.transport.gpu.fake_ranks import _download, _upload, node_of


def connect(size, chunk_bytes):
    node = FakeNode()
    return [
        Rank(
            DeviceTransport(FakeCuda(node), control, 0, chunk_bytes=chunk_bytes),
            control,
            _upload,
            _download,
        )
        for control in Simulation(size).transports
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("chunk_bytes", [16, 2**20])
@pytest.mark.parametrize("check", device_checks.EVERYTHING, ids=lambda check: check.__name__)
def test_it_keeps_every_promise(check, chunk_bytes, size):
    ranks = connect(size, chunk_bytes)
    on_all_ranks(check, ranks)
    on_all_ranks(lambda rank: rank.transport.close(), ranks)


@pytest.mark.parametrize("elements", [0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33])
def test_chunks_of_four_elements(elements):
    def reduce(rank):
        arrays = samples(2, "float32", elements)
        for op in (Sum, Adasum):
            result = device_checks.allreduce(rank, arrays[rank.rank], op)
            check_reduction(result, arrays, op)
        array = rank.upload(arrays[rank.rank].view(np.uint8))
        rank.run(lambda: rank.transport.broadcast(array, 1))
        np.testing.assert_array_equal(array.view(np.float32), arrays[1])

    on_all_ranks(reduce, connect(2, 16))


def test_no_more_than_two_chunks_lie_in_pinned_memory():
    def reduce(rank):
        array = np.ones(1000, np.float32)
        rank.run(lambda: rank.transport.allreduce(array, array, Sum, Scaling()))
        return array, [pinned.nbytes for pinned in rank.transport._cuda.pinned_arrays]

    for array, pinned in on_all_ranks(reduce, connect(2, 64)):
        assert (array == 2).all()
        assert pinned == [64, 64]


def test_the_next_chunk_is_on_its_way_while_the_host_exchanges_one():
    (rank,) = connect(1, 16)
    node, control = node_of(rank), rank.control
    pending = []
    exchange = control.allreduce

    def watch(*arguments):
        stream = node.streams[rank.transport.stream.ptr]
        pending.append([task.name for task in stream.queue].count("copy"))
        exchange(*arguments)

    control.allreduce = watch
    array = np.arange(12, dtype=np.float32)
    rank.run(lambda: rank.transport.allreduce(array, array, Sum, Scaling()))
    # The next one's copy to the host, and the copy back of the one before.
    assert pending == [1, 2, 1]
    np.testing.assert_array_equal(array, np.arange(12))


EACH = pytest.mark.parametrize("make", [partial(connect, chunk_bytes=64), fake_ranks.connect])


@EACH
def test_work_waits_for_the_data_and_readers_wait_for_the_work(make):
    def exchange(rank, *, forget):
        node = node_of(rank)
        stream = node.new_stream()
        array, result, seen = (np.zeros(100, np.float32) for _ in range(3))
        node.launch(stream, lambda: array.fill(rank.rank + 1.0))
        ready = [] if forget == "event" else [rank.transport.record(stream.ptr)]
        work = rank.transport.enqueue(
            lambda: rank.transport.allreduce(array, result, Sum, Scaling()), ready
        )
        if forget == "event":
            work.wait()  # the stream's own order would bring the data before
        if forget != "wait":
            work.wait_on(stream.ptr)
        node.launch(stream, lambda: np.copyto(seen, result))
        node.synchronize(stream)
        # Nothing but an event brings the last chunk back before it is looked at.
        return seen[-1]

    for forget, expected in ((None, 3), ("event", 0), ("wait", 0)):
        found = on_all_ranks(lambda rank: exchange(rank, forget=forget), make(2))  # noqa: B023
        assert found == [expected] * 2, forget


@pytest.mark.parametrize("collective", ["alltoall", "allgather"])
def test_pinned_memory_is_not_used_again_before_the_device_has_fetched_it(collective):
    """Several collectives are under way before anybody looks at the first."""

    def exchange(rank):
        pieces = [np.full(8, 10 * step + rank.rank, np.uint8) for step in range(3)]
        results = [[np.zeros(8, np.uint8) for _ in range(2)] for _ in range(3)]
        more = np.full(48, 99, np.uint8)

        def everything():
            for piece, result in zip(pieces, results, strict=True):
                if collective == "alltoall":
                    rank.transport.alltoall([piece, piece], result)
                else:
                    rank.transport.allgather(piece, result)
            rank.transport.broadcast(more, 0)

        rank.run(everything)
        return [[int(part[0]) for part in result] for result in results]

    assert on_all_ranks(exchange, connect(2, 16)) == [[[0, 1], [10, 11], [20, 21]]] * 2


@EACH
def test_a_collective_outside_of_enqueue_is_refused(make):
    (rank,) = make(1)
    array = np.zeros(4, np.uint8)
    calls = [
        lambda: rank.transport.allreduce(array, array, Sum, Scaling()),
        lambda: rank.transport.reducescatter([array], array, Sum, Scaling()),
        lambda: rank.transport.alltoall([array], [array]),
        lambda: rank.transport.allgather(array, [array]),
        lambda: rank.transport.broadcast(array, 0),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="outside of enqueue"):
            call()


def test_close_waits_for_the_last_copy():
    (rank,) = connect(1, 16)
    array, result = np.arange(9, dtype=np.float32), np.zeros(9, np.float32)
    rank.transport.enqueue(lambda: rank.transport.allreduce(array, result, Sum, Scaling()))
    assert result[-1] == 0
    rank.transport.close()
    rank.transport.close()
    np.testing.assert_array_equal(result, array)
