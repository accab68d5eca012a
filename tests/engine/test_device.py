from __future__ import annotations

import itertools

import numpy as np
import pytest

from hvdlite.base.reduction import Adasum, Average, Max, Sum
from hvdlite.collectives.allgather import Allgather
from hvdlite.collectives.allreduce import Allreduce
from hvdlite.collectives.broadcast import Broadcast
from hvdlite.compression import Compression
from hvdlite.engine import lane as lanes
from hvdlite.engine.device import DeviceResult
from hvdlite.errors import HorovodInternalError, MismatchError
from tests.references import check_reduction, dtype_of, samples
from tests.simulation import on_all_ranks
from tests.transport.gpu.fake_memory import DeviceRanks

SIZES = pytest.mark.parametrize("size", [1, 2, 3])


@pytest.fixture
def connect():
    made = []

    def connect(size, **settings):
        ranks = DeviceRanks(size, **settings)
        made.append(ranks)
        return ranks

    yield connect
    for ranks in made:
        on_all_ranks(ranks.close, ranks.ranks)


def total(rank, name="x", value=None, size=5):
    """An allreduce of what a pending kernel writes."""
    value = rank.rank + 1.0 if value is None else value
    return Allreduce(name, rank.memory.lend(np.full(size, value, np.float32)), Sum)


def read(rank, handle):
    return rank.memory.read(handle.wait().take())


@pytest.mark.parametrize(("transport", "communicators"), [("auto", 2), ("host", 0)])
def test_the_setting_chooses_the_transport(connect, caplog, transport, communicators):
    ranks = connect(2, device_transport=transport)
    found = on_all_ranks(lambda rank: read(rank, rank.named.submit(total(rank))), ranks.ranks)
    assert [array.tolist() for array in found] == [[3.0] * 5] * 2
    assert len(ranks.node.communicators) == communicators
    assert caplog.records == []


@SIZES
def test_allreduce_of_every_kind_and_step_after_step(connect, size):
    ranks = connect(size)

    def reduce(rank):
        for step, dtype, op in itertools.product(
            range(2), ("float32", "bfloat16", "int16"), (Sum, Average, Max)
        ):
            arrays = samples(size, dtype, (3, 4), seed=step)
            array = rank.memory.lend(arrays[rank.rank])
            found = read(rank, rank.named.submit(Allreduce("x", array, op)))
            check_reduction(found, arrays, op)
            assert rank.memory.read(array.tensor).tobytes() == arrays[rank.rank].tobytes()

    on_all_ranks(reduce, ranks.ranks)


@SIZES
def test_in_place_and_with_factors(connect, size):
    def reduce(rank):
        array = rank.memory.lend(np.full(7, rank.rank + 1.0, np.float32))
        result = rank.named.run(Allreduce("x", array, Average, 2.0, 3.0, array))
        assert result.take() is array.tensor
        expected = np.float32(6.0 * (size + 1) / 2)
        np.testing.assert_allclose(rank.memory.read(array.tensor), expected, rtol=1e-6)

    on_all_ranks(reduce, connect(size).ranks)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int32"])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_compression_rounds_on_the_device_as_on_the_host(connect, name, dtype):
    strategy = getattr(Compression, name)
    narrow = dtype_of({"fp16": "float16", "bf16": "bfloat16"}[name])

    def reduce(rank):
        arrays = samples(3, dtype, 9)
        array = rank.memory.lend(arrays[rank.rank])
        factor = 1.0 if dtype == "int32" else 2.0
        operation = Allreduce("x", array, Sum, 1.0, factor, strategy=strategy)
        return arrays, read(rank, rank.named.submit(operation))

    for arrays, found in on_all_ranks(reduce, connect(3).ranks):
        if dtype in ("bfloat16", "int32"):  # not wider than what they would be rounded to
            factor = arrays[0].dtype.type(1 if dtype == "int32" else 2)
            check_reduction(found, [factor * array for array in arrays], Sum)
            continue
        # Rounded, summed in float32, rounded again, and only then doubled.
        rounded = [array.astype(np.float32).astype(narrow) for array in arrays]
        summed = sum((part.astype(np.float32) for part in rounded), np.float32(0)).astype(narrow)
        np.testing.assert_array_equal(found, 2 * summed.astype(arrays[0].dtype))


@SIZES
def test_allgather_of_uneven_rows(connect, size):
    def gather(rank):
        mine = rank.memory.lend(np.full((rank.rank, 2), rank.rank, np.int32))
        handle = rank.named.submit(Allgather("x", mine, with_rows=True))
        whole, rows, _ = handle.wait().take()
        assert rows == list(range(size))
        expected = [[r, r] for r in range(size) for _ in range(r)]
        assert rank.memory.read(whole).tolist() == expected

    on_all_ranks(gather, connect(size).ranks)


@SIZES
def test_broadcast_from_every_root(connect, size):
    def send(rank):
        for root in range(size):
            array = rank.memory.lend(np.full((2, 3), rank.rank, np.int64))
            result = rank.named.run(Broadcast("x", array, root))
            np.testing.assert_array_equal(rank.memory.read(result.take()), root)
            np.testing.assert_array_equal(rank.memory.read(array.tensor), rank.rank)
            rank.named.run(Broadcast("y", array, root, array)).take()
            np.testing.assert_array_equal(rank.memory.read(array.tensor), root)

    on_all_ranks(send, connect(size).ranks)


def test_adasum_goes_through_the_host(connect):
    def reduce(rank):
        arrays = samples(2, "float32", 9)
        operation = Allreduce("x", rank.memory.lend(arrays[rank.rank]), Adasum)
        check_reduction(read(rank, rank.named.submit(operation)), arrays, Adasum)

    on_all_ranks(reduce, connect(2).ranks)


class TestOrder:
    def test_without_the_event_the_collective_reads_what_was_there_before(self, connect):
        def reduce(rank):
            operation = total(rank)
            operation.ready.clear()  # the event
            result = rank.named.run(operation)
            while not result.work.done():
                pass
            return rank.memory.read(result.take())

        for found in on_all_ranks(reduce, connect(2).ranks):
            assert not (found == 3.0).any()

    def test_without_take_a_reader_sees_what_was_there_before(self, connect, monkeypatch):
        monkeypatch.setattr(lanes, "_WATCH_SECONDS", 100.0)

        def reduce(rank):
            operation = total(rank)
            rank.named.run(operation)
            return rank.memory.read(operation.tensors[1])

        for found in on_all_ranks(reduce, connect(2).ranks):
            assert not (found == 3.0).any()

    def test_the_host_does_not_wait_for_the_device(self, connect, monkeypatch):
        monkeypatch.setattr(lanes, "_WATCH_SECONDS", 100.0)
        ranks = connect(2)
        for rank in (0, 1):
            ranks.block(rank)
        results = on_all_ranks(lambda rank: rank.named.run(total(rank)).take(), ranks.ranks)
        assert len(results) == 2
        assert ranks.node.executed == []
        for rank in ranks.ranks:
            rank.named.devices.abort("the test is over")

    def test_what_is_in_use_lives_until_it_is_taken(self, connect):
        def reduce(rank):
            operation = total(rank)
            result = rank.named.run(operation)
            tensors = operation.tensors
            assert result.tensors == tensors
            result.take()
            assert result.tensors == ()
            assert rank.memory.kept == list(tensors)

        on_all_ranks(reduce, connect(2).ranks)

    def test_what_is_done_is_forgotten(self, connect):
        ranks = connect(2)

        def reduce(rank):
            for _ in range(5):
                read(rank, rank.named.submit(total(rank)))

        on_all_ranks(reduce, ranks.ranks)
        assert all(len(rank.named.devices.under_way) <= 1 for rank in ranks.ranks)

    def test_the_host_does_not_run_ahead_without_end(self, connect, monkeypatch):
        monkeypatch.setattr("hvdlite.engine.device._MAX_UNDER_WAY", 3)
        ranks = connect(2)

        def reduce(rank):
            for step in range(20):
                rank.named.submit(total(rank, f"x{step}"))
            handle = rank.named.submit(total(rank))
            assert len(rank.named.devices.under_way) <= 3
            return read(rank, handle)

        for found in on_all_ranks(reduce, ranks.ranks):
            np.testing.assert_array_equal(found, 3.0)


class TestDisagreement:
    def test_of_the_kind_of_device(self, connect):
        def reduce(rank):
            host = Allreduce("x", np.ones(5, np.float32), Sum)
            with pytest.raises(MismatchError, match="device is cuda on rank 0, cpu on rank 1"):
                rank.named.run(total(rank) if rank.rank == 0 else host)
            assert read(rank, rank.named.submit(total(rank))).tolist() == [3.0] * 5

        on_all_ranks(reduce, connect(2).ranks)

    def test_a_second_device_is_refused_on_all_ranks(self, connect):
        def reduce(rank):
            read(rank, rank.named.submit(total(rank)))
            operation = total(rank)
            if rank.rank == 1:
                rank.memory.index = 3
            with pytest.raises(HorovodInternalError, match=r"rank 1: 'x' lies on device 3"):
                rank.named.run(operation)
            rank.memory.index = 0
            assert read(rank, rank.named.submit(total(rank))).tolist() == [3.0] * 5

        on_all_ranks(reduce, connect(2).ranks)


class TestFailures:
    def test_an_asynchronous_error_on_one_rank_ends_all(self, connect):
        ranks = connect(2)
        on_all_ranks(lambda rank: read(rank, rank.named.submit(total(rank))), ranks.ranks)
        communicators = ranks.node.communicators
        ranks.block(0)

        def fail(rank):
            rank.named.run(total(rank, "unfinished")).take()
            if rank.rank == 0:
                communicators[0].async_error = "remote process exited"
            match = "remote process exited" if rank.rank == 0 else "rank 0 has ended"
            with pytest.raises(HorovodInternalError, match=match):
                rank.named.run(total(rank, "after it"))
            with pytest.raises(HorovodInternalError, match="an earlier failure"):
                rank.named.run(total(rank))

        on_all_ranks(fail, ranks.ranks)
        assert [communicators[rank].aborts for rank in (0, 1)] == [1, 1]

    def test_an_idle_lane_notices_it_too(self, connect):
        """The program may be waiting for the device, and submit nothing any more."""
        ranks = connect(2)
        ranks.block(1)
        on_all_ranks(lambda rank: rank.named.run(total(rank)), ranks.ranks)
        ours = ranks.node.communicators[0]
        ours.async_error = "the network is down"
        with ranks.node.lock:
            assert ranks.node.lock.wait_for(lambda: ours.aborted, 10)

    def test_a_device_that_hangs_is_an_error_in_time(self, connect):
        ranks = connect(2, stall_shutdown_time_seconds=0.3)
        ranks.block(1)

        def reduce(rank):
            rank.named.run(total(rank))
            with ranks.node.lock:
                aborted = ranks.node.communicators[rank.rank]
                assert ranks.node.lock.wait_for(lambda: aborted.aborted, 10)
            with pytest.raises(HorovodInternalError, match=r"work on device 0|has ended"):
                rank.named.run(total(rank))

        on_all_ranks(reduce, ranks.ranks)

    def test_a_rank_that_has_ended_ends_the_device_s_wait(self, connect):
        """NCCL tells nothing of it, and no rank waits for it on the host."""
        ranks = connect(2)
        ranks.block(1)
        on_all_ranks(lambda rank: rank.named.run(total(rank)), ranks.ranks)
        ours = ranks.node.communicators[0]
        ranks.simulations[1].leave(1)
        with ranks.node.lock:
            assert ranks.node.lock.wait_for(lambda: ours.aborted, 10)
        with pytest.raises(HorovodInternalError, match="rank 1 has ended"):
            ranks.ranks[0].named.run(total(ranks.ranks[0]))

    def test_a_device_s_wait_has_a_limit_where_none_is_set(self, connect, monkeypatch):
        monkeypatch.setattr("hvdlite.engine.device._TIMEOUT_SECONDS", 0.3)
        ranks = connect(2)
        assert ranks.settings.stall_shutdown_time_seconds == 0
        ranks.block(1)
        on_all_ranks(lambda rank: rank.named.run(total(rank)), ranks.ranks)
        aborted = ranks.node.communicators
        with ranks.node.lock:
            assert ranks.node.lock.wait_for(lambda: aborted[0].aborted and aborted[1].aborted, 10)

    def test_the_others_are_told_before_the_device_is_stopped(self, connect, monkeypatch):
        ranks = connect(1)
        (rank,) = ranks.ranks
        read(rank, rank.named.submit(total(rank)))
        told, communicator = [], ranks.node.communicators[0]
        transport = ranks.simulations[1].transports[0]
        monkeypatch.setattr(transport, "leave", lambda: told.append(communicator.aborts))
        monkeypatch.setattr(transport, "meet", lambda *_: 1 / 0)
        with pytest.raises(HorovodInternalError, match="ZeroDivisionError"):
            rank.named.run(total(rank))
        assert (told, communicator.aborts) == ([0], 1)


def test_closing_ends_the_device_s_communicator_before_the_host_s(connect, monkeypatch):
    ranks = connect(2)
    on_all_ranks(lambda rank: read(rank, rank.named.submit(total(rank))), ranks.ranks)
    destroyed = []
    for rank, transport in enumerate(ranks.simulations[1].transports):
        communicator = ranks.node.communicators[rank]
        monkeypatch.setattr(
            transport, "close", lambda made=communicator: destroyed.append(made.destroyed)
        )
    on_all_ranks(ranks.close, ranks.ranks)
    assert destroyed == [True, True]


def test_a_lane_without_device_operations_never_connects(connect):
    ranks = connect(2)
    on_all_ranks(lambda rank: rank.named.run(Allreduce("x", np.ones(2), Sum)).tolist(), ranks.ranks)
    assert ranks.node.communicators == {}
    assert ranks.simulations[1].calls[0].count("gather") == 0


def test_a_result_is_the_same_for_all_who_take_it(connect):
    def reduce(rank):
        result = rank.named.run(total(rank))
        assert isinstance(result, DeviceResult)
        assert result.take() is result.take()

    on_all_ranks(reduce, connect(2).ranks)
