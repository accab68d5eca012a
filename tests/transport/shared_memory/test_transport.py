from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time

import numpy as np
import pytest

from hvdlite.base.reduction import Adasum, Average, Max, Min, Product, Scaling, Sum
from hvdlite.transport.shared_memory import barrier, futex
from hvdlite.transport.shared_memory import transport as shared_memory
from hvdlite.transport.shared_memory.barrier import LARGEST_CHUNK, Barrier
from hvdlite.transport.shared_memory.chunked import slice_of
from hvdlite.transport.shared_memory.transport import SharedMemoryTransport
from tests.harness import ranks
from tests.references import Digest, cases, check_reduction, dtype_of, sample, samples
from tests.simulation import on_all_ranks
from tests.transport import checks
from tests.transport.worlds import connected, placed, threads

pytestmark = pytest.mark.skipif(not futex.is_supported(), reason="needs Linux on x86-64")

SIZES = (0, 1, 7, 1023)
OPS = (Sum, Min, Max, Product, Adasum)
PLACES = list(itertools.product(("private", "segment"), repeat=2))


@contextlib.contextmanager
def transport(chunk=None):
    with connected() as made:
        assert isinstance(made, SharedMemoryTransport)
        made.chunk = chunk or made.chunk
        yield made


def always_in_slices(monkeypatch):
    monkeypatch.setattr(shared_memory, "_FEW_RANKS", 0)
    monkeypatch.setattr(shared_memory, "_SMALL", 0)


def reduced(made, arrays, op, places=("private", "private"), scaling=None):
    send = placed(made, arrays[made.rank], places[0])
    result = placed(made, arrays[made.rank], places[1])
    result.view(np.uint8)[...] = 0xAA if arrays[0].dtype != bool else 0
    with np.errstate(all="ignore"):
        checks.allreduce(made, send, result, op, scaling or Scaling())
    assert send.tobytes() == arrays[made.rank].tobytes()
    return result


def wild(size, dtype, count):
    """Values whose sum depends on the order of its terms."""
    exponents = (-4, 5) if dtype in ("float16",) else (-6, 7)
    found = []
    for rank in range(count):
        generator = np.random.default_rng([rank, size])
        values = generator.standard_normal(size) * 10.0 ** generator.integers(*exponents, size)
        found.append(values.astype(dtype_of(dtype)))
    return found


class TestPromises:
    @ranks(2, 3)
    def test_ranks_learn_that_one_has_left(self):
        with transport() as made:
            checks.leave(made)

    @ranks(2, 3, 4)
    @pytest.mark.parametrize("check", checks.EVERYTHING, ids=lambda check: check.__name__)
    def test_all(self, check):
        with transport() as made:
            check(made)

    @pytest.mark.slow
    @ranks(3)
    @pytest.mark.parametrize("check", checks.EVERYTHING, ids=lambda check: check.__name__)
    def test_all_where_now_and_then_a_rank_is_slow_to_read(self, check, monkeypatch):
        """Data must not be overwritten before it has read them, whichever call wrote them."""

        def and_linger(call):
            def call_and_linger(*arguments):
                result = call(*arguments)
                if random.random() < 0.05:
                    time.sleep(0.002)
                return result

            return call_and_linger

        monkeypatch.setattr(Barrier, "wait", and_linger(Barrier.wait))
        monkeypatch.setattr(Barrier, "arrive", and_linger(Barrier.arrive))
        with transport(chunk=301) as made:
            random = np.random.default_rng(made.rank)
            check(made)
            monkeypatch.setattr(shared_memory, "_SMALL", 0)
            check(made)

    @ranks(2)
    @pytest.mark.parametrize("check", checks.EVERYTHING, ids=lambda check: check.__name__)
    def test_all_with_tiny_chunks(self, check, monkeypatch):
        with transport(chunk=67) as made:
            # Large enough to be instructive, small enough for so many meetings.
            monkeypatch.setattr(SharedMemoryTransport, "piece", 67)
            if check is checks.arrays_of_its_own:
                made.chunk = 6700
            check(made)

    @ranks(3)
    @pytest.mark.parametrize("check", checks.EVERYTHING, ids=lambda check: check.__name__)
    def test_all_in_slices(self, check, monkeypatch):
        always_in_slices(monkeypatch)
        with transport(chunk=1000) as made:
            check(made)

    @pytest.mark.parametrize("check", checks.EVERYTHING, ids=lambda check: check.__name__)
    @pytest.mark.parametrize("size", [1, 4])
    def test_all_among_threads(self, check, size):
        on_all_ranks(check, threads(size))

    @ranks(2, 3, 4)
    def test_every_reduction_of_every_dtype_is_right_and_repeatable(self):
        with transport() as made:
            first = checks.reductions(made, SIZES)
        with transport() as made:
            assert checks.reductions(made, SIZES) == first

    @ranks(2, 4)
    def test_large_reductions_are_right_and_repeatable(self):
        with transport() as made:
            assert checks.large_reductions(made) == checks.large_reductions(made)


class TestPlaces:
    @ranks(2, 4)
    def test_wherever_arrays_lie_the_bits_are_the_same(self, size):
        with transport(chunk=64 if size == 2 else 2**20) as made:
            digests = {places: Digest() for places in PLACES}
            for (dtype, op), size in itertools.product(cases(OPS), (0, 1, 7, 200)):
                arrays = samples(made.size, dtype, size, seed=size)
                for places, digest in digests.items():
                    result = reduced(made, arrays, op, places)
                    with np.errstate(all="ignore"):
                        check_reduction(result, arrays, op)
                    digest.add(result)
            values = {digest.value() for digest in digests.values()}
            assert len(values) == 1
            checks.agree(made, values.pop())

    @ranks(3, 4)
    @pytest.mark.parametrize("place", ["private", "segment"])
    def test_in_place_by_two_views_of_one_array(self, place):
        with transport() as made:
            arrays = samples(made.size, "int64", 1000)
            array = placed(made, arrays[made.rank], place)
            made.allreduce(array[:], array[:], Sum, Scaling())
            np.testing.assert_array_equal(array, sum(arrays))

    @ranks(2, 3)
    def test_parts_of_a_segment_at_any_place(self):
        with transport() as made:
            whole, others = (made.empty(1000, np.dtype(np.uint8)) for _ in range(2))
            for start, size, dtype in ((0, 11, "f4"), (4, 10, "f4"), (40, 9, "f8"), (3, 7, "i1")):
                arrays = samples(made.size, dtype, size)
                nbytes = arrays[0].nbytes
                whole[...] = others[...] = 255
                send = whole[start : start + nbytes].view(dtype)
                result = others[2 * start : 2 * start + nbytes].view(dtype)
                send[...] = arrays[made.rank]
                made.allreduce(send, result, Sum, Scaling())
                check_reduction(result, arrays, Sum)
                rest = np.delete(others, np.s_[2 * start : 2 * start + nbytes])
                assert (rest == 255).all()

    @ranks(2, 3, 4)
    def test_averages_wherever_they_lie(self):
        with transport(chunk=100) as made:
            for dtype, places in itertools.product(
                ("int8", "uint64", "float16", "bfloat16", "float32", "complex64"), PLACES
            ):
                arrays = samples(made.size, dtype, 333)
                result = reduced(made, arrays, Sum, places, Scaling(1.0, made.size))
                with np.errstate(all="ignore"):
                    check_reduction(result, arrays, Average)

    @ranks(2, 3)
    def test_many_arrays_take_few_maps_and_no_descriptors(self):
        with transport() as made:
            before = len(os.listdir("/proc/self/fd"))
            kept = []
            for number in range(200):
                send, result = (made.empty(1000 * (number + 1), np.dtype("f4")) for _ in range(2))
                send[...] = 1
                made.allreduce(send, result, Sum, Scaling())
                assert (result == made.size).all()
                kept += send, result
            assert len(os.listdir("/proc/self/fd")) == before
            made.gather(b"")
            for slot in made.barrier.others:
                assert len(slot.peer._regions) <= 4


class TestOrder:
    @ranks(2, 3, 4)
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
    def test_sums_go_through_the_ranks_in_their_order(self, dtype, monkeypatch):
        """By chunks, by slices and in segments, so all of them give these bits."""
        with transport() as made:
            for size in (1, 7, 1000, 50_001):
                arrays = wild(size, dtype, made.size)
                wide = np.float32 if dtype in ("float16", "bfloat16") else arrays[0].dtype
                with np.errstate(all="ignore"):
                    expected = functools.reduce(np.add, [array.astype(wide) for array in arrays])
                    expected = expected.astype(arrays[0].dtype)
                for chunk, places in itertools.product((1 << 13, 1 << 20), PLACES):
                    made.chunk = chunk
                    assert reduced(made, arrays, Sum, places).tobytes() == expected.tobytes()
                with monkeypatch.context() as patch:
                    always_in_slices(patch)
                    assert reduced(made, arrays, Sum).tobytes() == expected.tobytes()
                    made.chunk = 1 << 13
                    assert reduced(made, arrays, Sum).tobytes() == expected.tobytes()

    @ranks(3)
    @pytest.mark.parametrize("chunk", [100, 2**20])
    def test_arrays_reduced_together_have_the_bits_of_each_alone(self, chunk):
        """Timing decides which ones are fused."""
        with transport(chunk) as made:
            for dtype in ("float16", "bfloat16", "float32", "float64"):
                arrays = [wild(size, dtype, made.size) for size in (5, 1000, 0, 77, 4000, 1)]
                sends = [ranks[made.rank] for ranks in arrays]
                results = [np.empty_like(send) for send in sends]
                with np.errstate(all="ignore"):
                    made.allreduce_all(sends, results, Sum, Scaling(1.0, 3))
                for result, array in zip(results, arrays, strict=True):
                    alone = reduced(made, array, Sum, scaling=Scaling(1.0, 3))
                    assert result.tobytes() == alone.tobytes()

    def test_the_values_of_that_test_depend_on_the_order(self):
        for dtype in ("float32", "float64"):
            a, b, c = wild(1000, dtype, 3)
            assert ((a + b) + c != a + (b + c)).any()


class TestMovement:
    @ranks(2, 3)
    @pytest.mark.parametrize("end", ["complete", "confirm"])
    def test_what_is_announced_takes_two_generations_in_all(self, end):
        float32, size = np.dtype(np.float32), 30_011
        with transport() as made:
            pairs = [(made.empty(size, float32), made.empty(size, float32)) for _ in range(4)]
            for turn in range(3):
                for number, (send, result) in enumerate(pairs):
                    send[...], result[...] = made.rank + number, turn
                before = made.barrier.last
                made.announce(pairs)
                made.meet([bytes(16)], checks.on_wait)
                for send, result in pairs:
                    made.allreduce(send, result, Sum, Scaling())
                getattr(made, end)()
                assert made.barrier.last == before + 2
                for number, (_, result) in enumerate(pairs):
                    assert (result == sum(range(made.size)) + number * made.size).all()

    @ranks(2, 3, 4)
    @pytest.mark.parametrize("chunk", [64, 67, 1000])
    def test_bytes_in_many_rounds(self, chunk):
        with transport(chunk) as made:
            for check in (checks.alltoall, checks.allgather, checks.broadcast, checks.gather):
                check(made)
            long = sample(0, "uint8", 5000).tobytes()
            assert made.gather(long if made.rank else b"") == [b"", *[long] * (made.size - 1)]

    @ranks(2, 3)
    def test_all_at_random_in_one_stream(self):
        """Whatever follows whatever: nobody reads what is written for another generation."""
        with transport() as made:
            generator = np.random.default_rng(5)  # the same on all ranks
            for step in range(400):
                made.chunk = int(generator.integers(16, 3000))
                kind, size = generator.integers(5), int(generator.integers(0, 2000))
                arrays = samples(made.size, "float32", size, seed=step)
                if kind == 0:
                    assert made.meet([bytes([step % 256]) * 16] * 3, checks.on_wait) == 3
                elif kind == 1:
                    messages = [array.tobytes() for array in arrays]
                    assert made.gather(messages[made.rank]) == messages
                elif kind == 2:
                    root = int(generator.integers(made.size))
                    array = arrays[made.rank].copy().view(np.uint8)
                    made.broadcast(array, root)
                    assert array.tobytes() == arrays[root].tobytes()
                else:
                    places = PLACES[int(generator.integers(4))]
                    check_reduction(reduced(made, arrays, Sum, places), arrays, Sum)


class TestDataWithDigests:
    """Data that come with the digests need not be written again."""

    @pytest.mark.parametrize("size", [2, 3, 4])
    @pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
    def test_data_beside_the_digests_are_reduced(self, size, dtype, monkeypatch):
        always_in_slices(monkeypatch)
        counts = (1, 2, size - 1, 1023, 2**12 + 1)  # in chunks of 4 KiB, the first one brought

        def run(made):
            made.chunk = 2**12
            for count in counts:
                arrays = samples(size, dtype, count)
                for copy in range(2):
                    made.barrier.own.chunk(copy, LARGEST_CHUNK, np.dtype(np.uint8))[:] = 0xAA
                assert made.meet([bytes(16)], checks.on_wait, [arrays[made.rank]]) == 1
                if count == 1023:  # the others read none of this rank's slice
                    own = slice_of(made.rank, count, size)
                    brought = made.barrier.own.chunk(made._brought, count, dtype_of(dtype))
                    assert (brought[own].view(np.uint8) == 0xAA).all()
                result = np.empty_like(arrays[0])
                made.allreduce(arrays[made.rank], result, Sum, Scaling())
                check_reduction(result, arrays, Sum)

        on_all_ranks(run, threads(size))

    @pytest.mark.parametrize("size", [2, 3, 4])
    @pytest.mark.parametrize("sliced", [True, False])
    def test_ranks_that_bring_more_than_others(self, size, sliced, monkeypatch):
        """All ranks have the first array; one of them lacks the second."""
        if sliced:
            always_in_slices(monkeypatch)

        def run(made):
            made.chunk = 2**12
            for count in (1, 5, 300, 1023, 2000):
                first, second = samples(size, "float32", count), samples(size, "float32", 40)
                both = [first[made.rank], second[made.rank]]
                mine = both[:1] if made.rank == size - 1 else both
                digests = [bytes([number]) * 16 for number in range(len(mine))]
                assert made.meet(digests, checks.on_wait, mine) == 1
                result = np.empty_like(first[0])
                made.allreduce_all([first[made.rank]], [result], Sum, Scaling())
                check_reduction(result, first, Sum)

        on_all_ranks(run, threads(size))

    @pytest.mark.parametrize("size", [2, 3, 4])
    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_ranks_that_bring_small_and_large_arrays(self, size, dtype):
        """From 64 KiB on an array is not small; several that are small together need not be."""
        lists = (
            (10, 16_000),
            (16_000, 10, 10),
            (40_000, 10),
            (10, 40_000, 10),
            (0, 10),
            (10, 600_000),
        )

        def run(made):
            for counts in lists:
                for common in range(1, len(counts) + 1):
                    arrays = [samples(size, dtype, count) for count in counts]
                    own = [each[made.rank] for each in arrays]
                    mine = own if made.rank else own[:common]
                    digests = [bytes([number]) * 16 for number in range(len(mine))]
                    assert made.meet(digests, checks.on_wait, mine) == common
                    results = [np.empty_like(array) for array in own[:common]]
                    made.allreduce_all(own[:common], results, Sum, Scaling())
                    for result, each in zip(results, arrays, strict=False):
                        check_reduction(result, each, Sum)

        on_all_ranks(run, threads(size))


class TestWaiting:
    @ranks(2, 3)
    def test_who_sleeps_is_woken_by_whoever_comes(self, monkeypatch):
        """One that is not woken would sleep for 20 seconds."""
        monkeypatch.setattr(barrier, "_LONGEST_SPIN", 0.0)
        monkeypatch.setattr(barrier, "_SHORTEST_SPIN", 0.0)
        monkeypatch.setattr(barrier, "_CHECK_SECONDS", 20.0)
        with transport(chunk=64) as made:
            array = np.ones(16 * 3000, np.float32)
            start = time.monotonic()
            made.allreduce(array, array, Sum, Scaling())
            assert time.monotonic() - start < 15
            assert (array == made.size).all()


LARGE = "HVDLITE_TEST_LARGE_ARRAYS"


@pytest.mark.skipif(LARGE not in os.environ, reason=f"takes long and much memory; set {LARGE}=1")
class TestLargeArrays:
    @ranks(2, timeout=300)
    @pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "MPI"])
    def test_more_than_two_to_the_31_bytes(self, shared_memory):
        size = 2**31 + 3
        with connected(shared_memory=shared_memory) as made:
            array = np.ones(size, np.int8)
            array[-3:] = 10, 20, made.rank
            if made.rank == 0:
                array[2**31 - 1] = 50
            made.allreduce(array, array, Sum, Scaling())
            assert array[-5:].tolist() == [2, 51, 20, 40, 1]
            assert np.count_nonzero(array == 2) == size - 4
            array[...] = 5 if made.rank else 7
            array[-1] = made.rank
            made.broadcast(array.view(np.uint8), 1)
            assert np.count_nonzero(array == 5) == size - 1
            assert array[-1] == 1

    @ranks(2, timeout=300)
    def test_more_than_two_to_the_31_bytes_in_a_segment(self):
        size = 2**31 + 3
        with transport() as made:
            array = made.empty(size, np.dtype(np.int8))
            array[...] = 1
            array[-1] = made.rank
            made.allreduce(array, array, Sum, Scaling())
            assert np.count_nonzero(array == 2) == size - 1
            assert array[-1] == 1
