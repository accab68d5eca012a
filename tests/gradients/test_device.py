"""The exchange of gradients in the memory of fake devices; most ranks are threads."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.base.reduction import Average, Sum
from hvdlite.collectives.allreduce import Allreduce
from hvdlite.compression import Compression, Parameter, Reduction
from hvdlite.engine import lane as lanes
from hvdlite.engine import runtime
from hvdlite.errors import HorovodInternalError, MismatchError
from hvdlite.gradients.device import DeviceGradientBucket
from hvdlite.gradients.exchange import GradientExchange
from hvdlite.gradients.replicas import ReplicaCheck, weight_label
from tests.gradients.test_gradients import SHAPES, gradient
from tests.harness import ranks
from tests.references import check_reduction, dtype_of
from tests.simulation import on_all_ranks
from tests.transport.gpu.fake_cuda import FakeCuda, FakeNode
from tests.transport.gpu.fake_memory import Blocked, DeviceRanks, FakeMemory

SIZES = pytest.mark.parametrize("size", [1, 2, 3])


@pytest.fixture
def connect():
    made = []

    def connect(size, **settings):
        job = DeviceRanks(size, fusion_threshold=80, first_bucket_size=20, **settings)
        made.append(job)
        return job

    yield connect
    for job in made:
        on_all_ranks(job.close, job.ranks)


def exchange(rank, strategy=Compression.none, reduction=None, dtypes=("float32",), memory=True):
    parameters = [
        Parameter(f"p{n}", SHAPES[n % len(SHAPES)], dtype_of(dtypes[n % len(dtypes)]))
        for n in range(12)
    ]
    return GradientExchange(
        rank,
        "model",
        parameters,
        strategy,
        reduction or Reduction(),
        memory=rank.memory if memory else None,
    )


def mark_all(rank, made, step, numbers=None):
    """Let pending kernels write gradients, in an order that differs from rank to rank."""
    order = list(range(len(made.buckets.parameters)) if numbers is None else numbers)
    random.Random(10 * step + rank.rank).shuffle(order)
    for number in order:
        made.buckets.slot(number)[...] = gradient(made, number, step, rank.rank)
        made.mark(number)


def check(rank, made, step, size, op=Average):
    for number in range(len(made.buckets.parameters)):
        found = rank.memory.read(made.buckets.result_slot(number))
        check_reduction(found, [gradient(made, number, step, r) for r in range(size)], op)


@SIZES
@pytest.mark.parametrize("predivide", [1.0, 3.0])
def test_averages_step_after_step(connect, size, predivide):
    def train(rank):
        reduction = Reduction(Average, predivide)
        dtypes = ["float32", "bfloat16", "float64"] if predivide == 1.0 else ["float32", "int32"]
        made = exchange(rank, reduction=reduction, dtypes=dtypes)
        assert len(made.buckets.plan) > 3
        for step in range(4):
            made.begin()
            mark_all(rank, made, step)
            assert made.finish() == [True] * 12
            check(rank, made, step, size)
            for number in range(12):
                mine = gradient(made, number, step, rank.rank)
                assert rank.memory.read(made.buckets.slot(number)).tobytes() == mine.tobytes()

    on_all_ranks(train, connect(size).ranks)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_compression(connect, name):
    def train(rank):
        kind = dtype_of({"fp16": "float16", "bf16": "bfloat16"}[name])
        made = exchange(rank, getattr(Compression, name))
        for step in range(2):
            mark_all(rank, made, step)
            made.finish()
            for number in range(12):
                total = np.zeros(made.buckets.parameters[number].shape, np.float32)
                for r in range(3):
                    part = gradient(made, number, step, r) / np.float32(3)
                    total += part.astype(kind).astype(np.float32)
                expected = total.astype(kind).astype(np.float32)
                found = rank.memory.read(made.buckets.result_slot(number))
                np.testing.assert_array_equal(found, expected)

    on_all_ranks(train, connect(3).ranks)


def test_gradients_that_some_or_all_ranks_lack(connect):
    def train(rank):
        made = exchange(rank, reduction=Reduction(Sum))
        for step in range(3):
            made.begin()
            mark_all(rank, made, step, [n for n in range(11) if n % 2 == rank.rank or n < 4])
            assert made.finish() == [True] * 11 + [False]
            for number in range(11):
                found = rank.memory.read(made.buckets.result_slot(number))
                have = (0, 1) if number < 4 else (number % 2,)
                check_reduction(found, [gradient(made, number, step, r) for r in have], Sum)

    on_all_ranks(train, connect(2).ranks)


def test_a_planted_fault(connect):
    """The ranks are threads here, so it comes to the one that is first."""

    def train(rank):
        made = exchange(rank)
        for step in range(2):
            mark_all(rank, made, step)
            made.finish()
            averages = [rank.memory.read(made.buckets.result_slot(n)) for n in range(12)]
            bad = sum(int(np.isinf(average).sum()) for average in averages)
            assert bad == (step == 0)

    rehearsal = pytest.importorskip("hvdlite.tools.rehearsal")
    job = connect(2)
    rehearsal.plant({rehearsal.VARIABLE: "corrupt:value=inf"}, 0, 1)
    try:
        on_all_ranks(train, job.ranks)
    finally:
        rehearsal.plant({}, 0, 1)


def test_gradients_from_several_streams(connect):
    """The last one to come to a bucket must not speak for the streams of the others."""

    def train(rank):
        made = exchange(rank)
        streams = [rank.memory.node.new_stream().ptr for _ in range(3)]
        for step in range(3):
            made.begin()
            for number in range(12):
                with rank.memory.on(streams[number % 3]):
                    mark_all(rank, made, step, [number])
            made.finish()
            check(rank, made, step, 2)

    on_all_ranks(train, connect(2).ranks)


def test_gradients_and_named_operations_share_a_communicator(connect):
    """Two of them, enqueued in another order on another rank, can wait for each other for ever."""
    job = connect(2)

    def train(rank):
        made = exchange(rank)
        for step in range(3):
            made.begin()
            handles = []

            def submit(step=step, handles=handles):
                array = rank.memory.lend(np.full(5, rank.rank + 1.0))
                operation = Allreduce(f"loss {step}", array, Sum)
                handles.append(rank.named.submit(operation))

            if rank.rank == 0:
                submit()
            mark_all(rank, made, step)
            if rank.rank == 1:
                submit()
            made.finish()
            check(rank, made, step, 2)
            assert rank.memory.read(handles[0].wait().take()).tolist() == [3.0] * 5

    on_all_ranks(train, job.ranks)
    assert job.node.connected == 2


def test_a_stream_that_is_new_writes_slots_after_they_have_been_read(connect):
    def train(rank):
        made, node, gate = exchange(rank), rank.memory.node, Blocked()
        for step in range(2):  # after the first one the buckets are packed anew
            made.begin()
            if step == 1:
                # The slots are written, and their exchange is not over for now.
                node.push(rank.named.devices._transport.stream.ptr, gate)
            mark_all(rank, made, step)
            made.finish()
        made.begin()
        other = node.new_stream()
        with rank.memory.on(other.ptr):
            for number in range(12):
                made.buckets.slot(number)[...] = gradient(made, number, 2, rank.rank)
        with node.lock:
            for stream in (rank.memory.main, other):
                while node.advance(stream):
                    pass
        gate.complete = True
        check(rank, made, 1, 2)

    on_all_ranks(train, connect(2).ranks)


def test_averages_are_read_before_another_stream_s_step_overwrites_them(connect):
    def train(rank):
        made, memory = exchange(rank), rank.memory
        for step in range(2):  # after the first one the buckets are packed anew
            made.begin()
            mark_all(rank, made, step)
            made.finish()
        seen = [np.empty(made.buckets.parameters[number].shape, np.float32) for number in range(12)]
        for number, copy in enumerate(seen):
            values = made.buckets.result_slot(number).values
            memory.launch(lambda copy=copy, values=values: np.copyto(copy, values))
        made.begin()
        other = memory.node.new_stream()
        with memory.on(other.ptr):
            mark_all(rank, made, 2)
            made.finish()
            memory.node.synchronize(other)
        for number, copy in enumerate(seen):
            check_reduction(copy, [gradient(made, number, 1, r) for r in range(2)], Average)
        with memory.on(other.ptr):
            check(rank, made, 2, 2)

    on_all_ranks(train, connect(2).ranks)


def test_without_the_event_of_a_bucket_old_data_travel(connect, monkeypatch):
    monkeypatch.setattr(DeviceGradientBucket, "_seal", lambda bucket: None)

    def train(rank):
        made = exchange(rank)
        mark_all(rank, made, 0)
        made.finish()
        for _, result in list(rank.named.devices.under_way):
            while not result.work.done():
                pass
        with pytest.raises(AssertionError):
            check(rank, made, 0, 2)

    on_all_ranks(train, connect(2).ranks)


def test_the_host_does_not_wait_for_the_device(connect, monkeypatch):
    monkeypatch.setattr(lanes, "_WATCH_SECONDS", 100.0)
    job = connect(2)
    for rank in (0, 1):
        job.block(rank)

    def train(rank):
        made = exchange(rank)
        mark_all(rank, made, 0)
        return made.finish()

    assert on_all_ranks(train, job.ranks) == [[True] * 12] * 2
    assert "allReduce" not in job.node.executed
    for rank in job.ranks:
        rank.named.devices.abort("the test is over")


def test_an_asynchronous_error_on_one_rank_ends_all(connect):
    job = connect(3)
    communicators = job.node.communicators
    marked = threading.Barrier(3)  # no rank is late, and refused before it waits

    def train(rank):
        made = exchange(rank)
        mark_all(rank, made, 0)
        made.finish()
        check(rank, made, 0, 3)
        made.begin()
        mark_all(rank, made, 1)
        marked.wait(60)
        if rank.rank == 1:
            communicators[1].async_error = "the network is down"
        # Those who have met before are told of it in the step that follows.
        with pytest.raises(HorovodInternalError, match=r"network is down|has ended|earlier fail"):  # noqa: PT012
            made.finish()
            mark_all(rank, made, 2)
            made.finish()

    on_all_ranks(train, job.ranks)
    assert [communicators[rank].aborts for rank in range(3)] == [1, 1, 1]


def test_ranks_that_disagree_on_the_device(connect):
    def train(rank):
        made = exchange(rank, memory=rank.rank == 0)
        with pytest.raises(MismatchError, match="device is cuda on rank 0, cpu on rank 1"):
            made.finish()

    on_all_ranks(train, connect(2).ranks)


def test_replicas_that_differ(connect):
    def train(rank):
        made = exchange(rank)
        weights = {"p0": np.float32(rank.rank == 2)}
        values = [(weight_label("p0"), lambda: weights["p0"])]
        replica = ReplicaCheck(list, lambda: values, "broadcast()")
        made = GradientExchange(
            rank,
            "model",
            made.buckets.parameters,
            Compression.none,
            Reduction(),
            memory=rank.memory,
            check=replica,
        )
        for step in range(5):
            made.begin()
            mark_all(rank, made, step)
            if step == 1:
                with pytest.raises(MismatchError, match=r"'p0' is .* on ranks 0, 1, .* on rank 2;"):
                    made.finish()
                weights["p0"] = np.float32(0)
                continue
            made.finish()
            check(rank, made, step, 3)

    on_all_ranks(train, connect(3).ranks)


@ranks(1, 2, 3)
def test_processes_without_nccl_go_through_the_host(size):
    """Each has a fake device of its own, and they meet by the real transports."""
    hvd.init()
    memory = FakeMemory(FakeCuda(FakeNode(), version=0))
    engine = runtime.engine()
    rank = SimpleNamespace(
        rank=hvd.rank(),
        gradients=engine.gradients,
        named=engine.named,
        settings=engine.settings,
        memory=memory,
    )
    made = exchange(rank, dtypes=["float32", "bfloat16"])
    for step in range(3):
        made.begin()
        mark_all(rank, made, step)
        made.finish()
        check(rank, made, step, size)
    operation = Allreduce("x", memory.lend(np.full(5, hvd.rank() + 1.0)), hvd.Sum)
    found = memory.read(engine.named.run(operation).take())
    assert found.tolist() == [size * (size + 1) / 2] * 5
    hvd.shutdown()  # a job's next test has another fake
