from __future__ import annotations

import random
import re
import threading
import time

import ml_dtypes
import numpy as np
import pytest

import hvdlite as hvd
from hvdlite import collectives
from hvdlite.engine import runtime
from tests.harness import ranks
from tests.references import Digest, cases, check_reduction, dtype_of, sample, samples
from tests.simulation import on_all_ranks

ALL = ranks(1, 2, 3, 4)
TWO = ranks(2)


def still_works():
    """Assert that the ranks are not out of step."""
    size = hvd.size()
    total = hvd.allreduce(np.arange(3.0) + hvd.rank(), op=hvd.Sum)
    np.testing.assert_array_equal(total, size * np.arange(3.0) + size * (size - 1) / 2)


class TestAllreduce:
    @ALL
    def test_every_reduction_of_every_dtype_and_shape(self):
        hvd.init()
        digest = Digest()
        for dtype, op in cases():
            for shape in ((), (0,), (5,), (2, 3, 4), (3, 0, 2)):
                arrays = samples(hvd.size(), dtype, shape)
                result = hvd.allreduce(arrays[hvd.rank()], op=op)
                check_reduction(result, arrays, op)
                digest.add(result)
        assert len(set(hvd.allgather_object(digest.value()))) == 1

    @TWO
    def test_a_foreign_byte_order_on_one_rank(self):
        hvd.init()
        kind = ">i4" if hvd.rank() else "<i4"
        array = np.array([1, 2, 300]).astype(kind)
        assert hvd.allreduce(array, op=hvd.Sum).tolist() == [2, 4, 600]
        assert hvd.broadcast(array, root_rank=1).tolist() == [1, 2, 300]
        assert hvd.allgather(array).tolist() == [1, 2, 300] * 2

    @TWO
    def test_lists_scalars_and_read_only_arrays(self):
        hvd.init()
        rank = hvd.rank()
        assert hvd.allreduce([1, 2 + rank], op=hvd.Sum).tolist() == [2, 5]
        assert hvd.allreduce(0.5 + rank) == 1.0
        assert hvd.allreduce(True, op=hvd.Min)
        assert hvd.allreduce(np.float32(rank), op=hvd.Max).dtype == np.float32
        frozen = np.arange(3.0)
        frozen.flags.writeable = False
        result = hvd.allreduce(frozen, op=hvd.Sum)
        assert result.tolist() == [0.0, 2.0, 4.0]
        result += 1  # It is the caller's own.
        for dtype in ("float16", "uint8"):
            frozen = np.ones(3, dtype)
            frozen.flags.writeable = False
            assert hvd.allreduce(frozen, op=hvd.Sum).tolist() == [2, 2, 2]
            assert hvd.allgather(frozen).tolist() == [1] * 6
            assert hvd.broadcast(frozen, 0).tolist() == [1] * 3

    @ALL
    def test_factors(self):
        hvd.init()
        size = hvd.size()
        for dtype in ("int32", "int8", "float16", "bfloat16", "float32", "float64", "complex64"):
            array = np.array([2, 4, 6]).astype(dtype_of(dtype))
            for op, by in ((hvd.Sum, size), (hvd.Average, 1)):
                result = hvd.allreduce(array, op=op, prescale_factor=0.5, postscale_factor=3.0)
                assert result.dtype == array.dtype
                np.testing.assert_array_equal(result.astype(complex), [3 * by, 6 * by, 9 * by])
            assert array.astype(complex).tolist() == [2, 4, 6]
        largest = hvd.allreduce(np.array([1.0, -1.0]), op=hvd.Max, prescale_factor=-2.0)
        assert largest.tolist() == [-2.0, 2.0]

    @ranks(1, 2, 3)
    def test_factors_on_integers_that_no_result_can_hold(self):
        """Refused on all ranks, and communication goes on; and sums are not cut before."""
        hvd.init()
        size, rank = hvd.size(), hvd.rank()
        full = np.full(2 * size, 100, np.int8)
        # A sum that is out of range is not, once it is scaled.
        scale = {"op": hvd.Sum, "postscale_factor": 1 / size}
        for call in (hvd.allreduce, hvd.reducescatter):
            assert set(call(full, **scale).tolist()) == {100}
            assert set(call(full).tolist()) == {100}
            for factor in (1e30, -129, "2", b"2", float("nan"), float("inf"), None, 1j):
                for name in ("prescale_factor", "postscale_factor"):
                    with pytest.raises(ValueError, match=f"{name}="):
                        call(full, **{name: factor})
            mine = np.full(2 * size, 100 if rank == size - 1 else 0, np.int8)
            for name in ("prescale_factor", "postscale_factor"):
                with pytest.raises(hvd.GradientError, match="beyond the range of int8"):
                    call(mine, op=hvd.Sum, **{name: 2.0})
            assert set(call(mine, op=hvd.Sum, prescale_factor=np.float32(0.5)).tolist()) == {50}
        both = hvd.grouped_allreduce([full, full[:1]], **scale)
        assert [set(each.tolist()) for each in both] == [{100}, {100}]
        with pytest.raises(hvd.GradientError):
            hvd.grouped_allreduce([full, full[:1]], op=hvd.Sum, prescale_factor=2.0)
        assert hvd.allreduce(full, compression=hvd.Compression.fp16).tolist() == full.tolist()

    @TWO
    def test_integers_are_scaled_in_float64_and_half_floats_in_float32(self):
        hvd.init()
        array = np.array([300000007, -300000007])
        scaled = hvd.allreduce(array, op=hvd.Max, prescale_factor=0.5)
        assert scaled.tolist() == [150000003, -150000003]
        # 60000 + 60000 is beyond a float16 unless it is scaled before it is rounded.
        half = hvd.allreduce(np.float16([60000]), op=hvd.Sum, postscale_factor=0.5)
        assert half.tolist() == [60000]

    @ALL
    def test_out(self):
        hvd.init()
        size = hvd.size()
        for dtype in ("float32", "bfloat16", "uint8"):
            array = np.full((2, 3), hvd.rank() + 1).astype(dtype_of(dtype))
            expected = np.full((2, 3), size * (size + 1) / 2).astype(array.dtype)
            out = np.zeros_like(array)
            assert hvd.allreduce(array, op=hvd.Sum, out=out) is out
            np.testing.assert_array_equal(out, expected)
            assert (array == hvd.rank() + 1).all()
            view = array.reshape(-1)
            assert hvd.allreduce(array, op=hvd.Sum, out=array) is array
            np.testing.assert_array_equal(array, expected)
            assert np.shares_memory(view, array)

    @TWO
    def test_out_in_place_with_factors(self):
        hvd.init()
        for dtype in ("float32", "float16", "int64"):
            array = np.full(3, 4 + 2 * hvd.rank()).astype(dtype)
            hvd.allreduce(array, op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0, out=array)
            assert array.tolist() == [10, 10, 10]
        scalar = np.array(1.0)
        hvd.allreduce(scalar, op=hvd.Sum, out=scalar)
        assert scalar == 2.0

    @TWO
    def test_an_array_in_place_that_a_strategy_refuses_stays_as_it_is(self):
        hvd.init()
        array = np.array([1, np.nan if hvd.rank() else 2], np.float32)
        before = array.tobytes()
        with pytest.raises(hvd.GradientError, match="not finite on rank 1"):
            hvd.allreduce(
                array, prescale_factor=2.0, compression=hvd.Compression.TopK(0.5), out=array
            )
        assert array.tobytes() == before

    @TWO
    def test_a_factor_of_0_does_not_hide_a_nan(self):
        hvd.init()
        array = np.array([1, np.nan], np.float32)
        for compression in (hvd.Compression.none, hvd.Compression.fp16):
            for factors in ({"prescale_factor": 0.0}, {"postscale_factor": 0.0}):
                found = hvd.allreduce(array, op=hvd.Sum, compression=compression, **factors)
                np.testing.assert_array_equal(found, [0, np.nan])

    @TWO
    def test_an_out_that_would_lose_the_result_is_refused(self):
        hvd.init()
        array = np.ones((2, 3), np.float32)
        frozen = array.copy()
        frozen.flags.writeable = False
        for out in (array.T, np.ones((3, 2), np.float32), np.ones((2, 3)), frozen, [[1.0]]):
            with pytest.raises(ValueError, match=r"out must be .* float32\[2, 3\]"):
                hvd.allreduce(array, out=out)
            with pytest.raises(ValueError, match=r"out must be .* float32\[2, 3\]"):
                hvd.broadcast_async(array, 0, out=out)
        still_works()

    @TWO
    def test_average_is_deprecated(self):
        hvd.init()
        array = np.array([1.0 + hvd.rank()])
        for average, expected in ((True, 1.5), (False, 3.0)):
            for call in (hvd.allreduce, hvd.allreduce_async, hvd.grouped_allreduce):
                given = [array] if call is hvd.grouped_allreduce else array
                with pytest.warns(DeprecationWarning, match=r"use op=hvd\.Average") as caught:
                    found = call(given, average)
                assert [each.filename for each in caught] == [__file__]
                found = hvd.synchronize(found) if call is hvd.allreduce_async else found
                assert np.ravel(found).tolist() == [expected]

    @TWO
    def test_bad_arguments_are_refused_at_once(self):
        hvd.init()
        array = np.ones(3)
        with pytest.raises(ValueError, match="op= or average="):
            hvd.allreduce(array, average=True, op=hvd.Sum)
        with pytest.raises(ValueError, match="is not a reduction"):
            hvd.allreduce(array, op=9)
        with pytest.raises(ValueError, match="Min is not defined for dtype complex128"):
            hvd.allreduce(array + 1j, op=hvd.Min)
        with pytest.raises(ValueError, match="cannot be reduced"):
            hvd.allreduce(np.array(["a"]))
        with pytest.raises(ValueError, match=r"broadcast_object\(\)"):
            hvd.allreduce(np.array([None]))
        with pytest.raises(TypeError, match="is no compression"):
            hvd.allreduce(array, compression="fp16")
        with pytest.raises(ValueError, match="compression needs"):
            hvd.allreduce(array, op=hvd.Max, compression=hvd.Compression.fp16)
        still_works()

    @TWO
    def test_warnings_about_overflow_are_not_errors(self):
        hvd.init()
        with np.errstate(all="raise"):
            assert np.isinf(hvd.allreduce(np.float16([60000]), op=hvd.Sum))
            assert np.isinf(hvd.allreduce(np.float32([3e38]), op=hvd.Sum, postscale_factor=9.0))
            compressed = hvd.allreduce([1e6], op=hvd.Sum, compression=hvd.Compression.fp16)
            assert np.isinf(compressed)
        still_works()

    @ALL
    def test_compression(self):
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
        for strategy, rough in ((hvd.Compression.fp16, 1e-3), (hvd.Compression.bf16, 1e-2)):
            arrays = samples(size, "float32", (4, 5))
            for op in (hvd.Sum, hvd.Average):
                expected = np.sum(arrays, axis=0, dtype=np.float64)
                expected /= size if op == hvd.Average else 1
                result = hvd.allreduce(arrays[rank], op=op, compression=strategy)
                assert (result.dtype, result.shape) == (np.float32, (4, 5))
                np.testing.assert_allclose(result, expected, rtol=rough, atol=rough * size)
                assert len(set(hvd.allgather_object(result.tobytes()))) == 1
            # Integers travel as they are.
            exact = hvd.allreduce(np.array([2**40 + 1]), op=hvd.Sum, compression=strategy)
            assert exact.tolist() == [size * (2**40 + 1)]
            scaled = hvd.allreduce(
                np.ones((), np.float32), op=hvd.Sum, compression=strategy, postscale_factor=0.5
            )
            assert scaled == size / 2


class TestAllgather:
    @ALL
    def test_uneven_rows(self):
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
        for dtype in ("float32", "bfloat16", "uint8", "bool", "complex128"):
            for rows in (lambda r: r, lambda r: size - r, lambda r: 3, lambda r: 0):
                arrays = [sample(other, dtype, (rows(other), 2, 3)) for other in range(size)]
                whole = hvd.allgather(arrays[rank])
                assert whole.dtype == dtype_of(dtype)
                np.testing.assert_array_equal(whole, np.concatenate(arrays))

    @ALL
    def test_scalars_count_as_rows(self):
        hvd.init()
        expected = list(range(hvd.size()))
        assert hvd.allgather(np.int64(hvd.rank())).tolist() == expected
        assert hvd.allgather(hvd.rank()).tolist() == expected
        assert hvd.allgather([hvd.rank()]).tolist() == expected

    @TWO
    def test_rows_without_elements(self):
        hvd.init()
        assert hvd.allgather(np.zeros((hvd.rank() + 1, 0, 4))).shape == (3, 0, 4)

    @TWO
    def test_the_handle_gives_the_array_and_where_asked_the_rows_of_each_rank(self):
        hvd.init()
        array = np.arange(2 * hvd.rank() + 1)
        assert hvd.synchronize(hvd.allgather_async(array)).tolist() == [0, 0, 1, 2]
        whole, rows, own = runtime.engine().run(
            "allgather",
            None,
            lambda name: collectives.describe_allgather(array, name, with_rows=True),
        )
        assert (rows, own) == ([1, 3], hvd.rank())
        assert whole.tolist() == [0, 0, 1, 2]

    @TWO
    def test_other_than_numbers(self):
        hvd.init()
        assert hvd.allgather(np.array(["one", "two"])).tolist() == ["one", "two"] * 2
        days = np.array(["2024-02-29"], "M8[D]")
        assert hvd.allgather(days).tolist() == days.tolist() * 2


class TestBroadcast:
    @ALL
    def test_from_every_root(self):
        hvd.init()
        for root in range(hvd.size()):
            for dtype in ("float64", "float16", "bfloat16", "int8", "bool", "complex64"):
                for shape in ((), (0,), (7,), (2, 3)):
                    mine = sample(hvd.rank(), dtype, shape)
                    result = hvd.broadcast(mine, root)
                    assert (result.dtype, result.shape) == (mine.dtype, mine.shape)
                    np.testing.assert_array_equal(result, sample(root, dtype, shape))
                    assert result is not mine
                    np.testing.assert_array_equal(mine, sample(hvd.rank(), dtype, shape))

    @TWO
    def test_out(self):
        hvd.init()
        for root in range(2):
            array = np.full((2, 2), hvd.rank())
            out = np.zeros_like(array)
            assert hvd.synchronize(hvd.broadcast_async(array, root, out=out)) is out
            assert (out == root).all()
            assert (array == hvd.rank()).all()
            hvd.synchronize(hvd.broadcast_async(array, root, out=array))
            assert (array == root).all()

    @TWO
    def test_a_root_that_does_not_exist_is_refused_and_the_ranks_stay_in_step(self):
        hvd.init()
        for root in (2, -1):
            for call in (hvd.broadcast, hvd.broadcast_async, hvd.broadcast_object):
                with pytest.raises(
                    ValueError, match=f"root_rank={root} is not .* ranks are 0 to 1"
                ):
                    call(np.ones(2), root)
        still_works()


class TestObjects:
    @ALL
    def test_broadcast(self):
        hvd.init()
        for root in range(hvd.size()):
            for thing in ({"a": [1, None]}, "text", None, np.arange(4), b"", b"x" * 100000):
                mine = (hvd.rank(), thing)
                source, found = hvd.broadcast_object(mine, root)
                assert source == root
                np.testing.assert_equal(found, thing)

    @TWO
    def test_broadcast_ignores_what_the_others_bring(self):
        hvd.init()
        mine = {"rank": 0} if hvd.rank() == 0 else threading.Lock()
        assert hvd.broadcast_object(mine) == {"rank": 0}

    @ALL
    def test_allgather(self):
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
        found = hvd.allgather_object({"rank": rank, "text": "x" * (1000 * rank)})
        assert [entry["rank"] for entry in found] == list(range(size))
        assert [len(entry["text"]) for entry in found] == [1000 * rank for rank in range(size)]
        assert hvd.allgather_object(None) == [None] * size

    @ALL
    def test_what_cannot_be_pickled_on_one_rank_is_an_error_on_all(self):
        hvd.init()
        guilty = hvd.size() - 1
        mine = threading.Lock() if hvd.rank() == guilty else "fine"
        for call in (
            lambda: hvd.allgather_object(mine),
            lambda: hvd.broadcast_object(mine, root_rank=guilty),
            lambda: hvd.allgather_object(mine, name="named"),
        ):
            with pytest.raises(
                hvd.HorovodInternalError, match=r"the lock cannot be pickled: .*pickle"
            ) as caught:
                call()
            if hvd.size() > 1:
                assert str(caught.value).startswith(f"rank {guilty}: ")
        assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))

    @TWO
    def test_what_cannot_be_unpickled_is_the_receivers_error_alone(self):
        hvd.init()
        mine = Picky() if hvd.rank() == 0 else None
        if hvd.rank() == 0:
            assert hvd.broadcast_object(mine) is mine
        else:
            with pytest.raises(ZeroDivisionError):
                hvd.broadcast_object(mine)
        still_works()


class Picky:
    def __reduce__(self):
        return divmod, (1, 0)


class TestBarrier:
    @ranks(2, 3)
    def test_nobody_leaves_before_the_last_has_come(self):
        hvd.init()
        for last in range(hvd.size()):
            time.sleep(0.05 if hvd.rank() == last else 0)
            came = time.monotonic()
            hvd.barrier()
            left = time.monotonic()
            times = hvd.allgather_object((came, left))
            assert max(came for came, _ in times) <= min(left for _, left in times)


class TestHandles:
    @TWO
    def test_poll_and_synchronize(self):
        hvd.init()
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(np.ones(3), name="a", op=hvd.Sum)
            assert not hvd.poll(handle)
            assert hvd.broadcast_object("go") == "go"
        else:
            hvd.broadcast_object(None)
            handle = hvd.allreduce_async(np.ones(3), name="a", op=hvd.Sum)
        assert hvd.synchronize(handle).tolist() == [2.0] * 3
        assert hvd.poll(handle)
        assert hvd.synchronize(handle).tolist() == [2.0] * 3

    @ranks(1, 2, 3, 4)
    def test_200_operations_in_another_order_on_each_rank_from_several_threads(self):
        hvd.init()
        rank, size, count = hvd.rank(), hvd.size(), 200
        order = list(range(count))
        random.Random(rank).shuffle(order)
        threads = 2 + rank % 3

        def submit(thread):
            return {number: start(number, rank) for number in order[thread::threads]}

        handles = {}
        for part in on_all_ranks(submit, range(threads)):
            handles.update(part)
        for number in range(count):
            result = hvd.synchronize(handles[number])
            if number % 3 == 0:
                total = size * number + size * (size - 1) // 2
                assert result.tolist() == [total] * (number % 5)
            elif number % 3 == 1:
                assert result.tolist() == [other for other in range(size) for _ in range(other)]
            else:
                assert result.tolist() == [number % size]

    @TWO
    def test_the_result_of_an_unnamed_call_belongs_to_that_call(self):
        hvd.init()
        handles = [hvd.allreduce_async(np.array([float(n)]), op=hvd.Sum) for n in range(50)]
        assert [hvd.synchronize(handle)[0] for handle in handles] == [2.0 * n for n in range(50)]


def start(number, rank):
    """The same kinds of operations on all ranks, by number."""
    name = f"mixed {number}"
    if number % 3 == 0:
        return hvd.allreduce_async(np.full(number % 5, number + rank), name=name, op=hvd.Sum)
    if number % 3 == 1:
        return hvd.allgather_async(np.full(rank, rank), name=name)
    return hvd.broadcast_async(np.array([rank]), number % hvd.size(), name=name)


CALLS = {
    "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum),
    "allreduce_async": lambda x: hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum)),
    "grouped_allreduce": lambda x: hvd.grouped_allreduce([x], op=hvd.Sum),
    "allgather": hvd.allgather,
    "broadcast": lambda x: hvd.broadcast(x, 0),
    "alltoall": hvd.alltoall,
    "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum),
    "allgather_object": hvd.allgather_object,
    "broadcast_object": lambda x: hvd.broadcast_object(x, 0),
}


class TestCallsWithoutAName:
    @ranks(2, 3)
    @pytest.mark.parametrize("call", CALLS)
    def test_those_that_cross_fail_on_all_ranks(self, call):
        hvd.init()
        self.cross(CALLS[call])
        still_works()

    @ranks(3)
    def test_those_of_a_process_set_that_cross(self):
        hvd.init()
        part = hvd.add_process_set([0, 2])
        if part.included():
            self.cross(lambda x: hvd.allreduce(x, process_set=part))
        hvd.remove_process_set(part)
        still_works()

    def cross(self, call):
        array = np.ones(hvd.size())

        def first():
            call(array)

        def second():
            call(array)

        one, other = (first, second) if hvd.rank() == 0 else (second, first)
        one()
        with pytest.raises(hvd.MismatchError, match=r"cross, .*test_collectives\.py:\d+"):
            other()

    @ranks(2, 3)
    def test_barriers_may_be_anywhere(self):
        """Each rank in turn does something before the others."""
        hvd.init()
        for rank in range(hvd.size()):
            if hvd.rank() != rank:
                hvd.barrier()
            if hvd.rank() == rank:
                hvd.barrier()
        still_works()


class TestDisagreement:
    @ranks(2, 3)
    def test_every_kind_is_an_error_on_all_ranks_and_the_next_call_works(self):
        hvd.init()
        last = hvd.size() - 1
        odd = hvd.rank() == last
        ones = np.ones((2, 3), np.float32)
        firsts = "rank 0" if last == 1 else "ranks 0, 1"
        kinds = [
            (
                lambda: hvd.allreduce(np.ones((3, 2), np.float32) if odd else ones, name="loss"),
                f"shape is (2, 3) on {firsts}, (3, 2) on rank {last}",
            ),
            (
                lambda: hvd.allreduce(ones.astype("float64") if odd else ones, name="loss"),
                f"dtype is float32 on {firsts}, float64 on rank {last}",
            ),
            (
                lambda: hvd.allreduce(ones, name="loss", op=hvd.Sum if odd else hvd.Average),
                f"op is Average on {firsts}, Sum on rank {last}",
            ),
            (
                lambda: hvd.allreduce(ones, name="loss", prescale_factor=2 if odd else 1),
                f"prescale_factor is 1.0 on {firsts}, 2.0 on rank {last}",
            ),
            (
                lambda: hvd.allreduce(ones, name="loss", postscale_factor=2 if odd else 1),
                f"postscale_factor is 1.0 on {firsts}, 2.0 on rank {last}",
            ),
            (
                lambda: hvd.allreduce(
                    ones,
                    name="loss",
                    compression=hvd.Compression.fp16 if odd else hvd.Compression.none,
                ),
                f"compression is none on {firsts}, fp16 on rank {last}",
            ),
            (
                lambda: hvd.broadcast(ones, root_rank=1 if odd else 0, name="loss"),
                f"root_rank is 0 on {firsts}, 1 on rank {last}",
            ),
            (
                lambda: hvd.broadcast(ones[:1] if odd else ones, root_rank=0, name="loss"),
                f"shape is (2, 3) on {firsts}, (1, 3) on rank {last}",
            ),
            (
                lambda: hvd.broadcast_object(1, root_rank=1 if odd else 0, name="loss"),
                f"root_rank is 0 on {firsts}, 1 on rank {last}",
            ),
            (
                lambda: hvd.allgather(np.ones((2, 4), np.float32) if odd else ones, name="loss"),
                f"the shape after its first axis is (3,) on {firsts}, (4,) on rank {last}",
            ),
            (
                lambda: hvd.allgather(ones.astype("int8") if odd else ones, name="loss"),
                f"dtype is float32 on {firsts}, int8 on rank {last}",
            ),
            (
                lambda: hvd.alltoall(np.ones((6, 4 if odd else 3)), name="loss"),
                f"the shape after its first axis is (3,) on {firsts}, (4,) on rank {last}",
            ),
            (
                lambda: hvd.alltoall(np.ones(6, np.int16 if odd else np.int8), name="loss"),
                f"dtype is int8 on {firsts}, int16 on rank {last}",
            ),
            (
                lambda: hvd.reducescatter(np.ones(7 if odd else 6), name="loss"),
                f"shape is (6,) on {firsts}, (7,) on rank {last}",
            ),
            (
                lambda: hvd.reducescatter(ones, op=hvd.Min if odd else hvd.Max, name="loss"),
                f"op is Max on {firsts}, Min on rank {last}",
            ),
            (
                lambda: hvd.grouped_allreduce([ones, ones[odd:]], name="loss"),
                f"shape of array 1 is (2, 3) on {firsts}, (1, 3) on rank {last}",
            ),
            (
                lambda: hvd.grouped_allreduce([ones] * (2 if odd else 3), name="loss"),
                f"the number of arrays is 3 on {firsts}, 2 on rank {last}",
            ),
            (
                lambda: hvd.allgather(ones, name="loss") if odd else hvd.barrier(name="loss"),
                f"the operation is barrier on {firsts}, allgather on rank {last}",
            ),
            (
                lambda: collectives.agree_on("loss", ["a", 2 if odd else 1]),
                f"entry 1 is 1 on {firsts}, 2 on rank {last}",
            ),
            (
                lambda: collectives.agree_on("loss", ["a"] * (2 if odd else 1)),
                f"entry 1 a on rank {last}",
            ),
        ]
        for call, says in kinds:
            with pytest.raises(hvd.MismatchError) as caught:
                call()
            assert str(caught.value).startswith("the ranks disagree on 'loss': ")
            assert says in str(caught.value)
            still_works()

    @TWO
    def test_bfloat16_is_not_taken_for_another_type_of_16_bits(self):
        hvd.init()
        kind = ml_dtypes.bfloat16 if hvd.rank() else np.float16
        with pytest.raises(hvd.MismatchError, match="float16 on rank 0, bfloat16 on rank 1"):
            hvd.allreduce(np.ones(2, kind), name="a")

    @TWO
    def test_agree_on_is_quiet_when_all_agree(self):
        hvd.init()
        collectives.agree_on("names", ["a", (1, 2)])
        collectives.agree_on("nothing", [])


class TestUnnamed:
    @ranks(2, 3)
    def test_they_stay_paired_after_an_error_on_one_rank(self):
        hvd.init()
        array = np.ones(2)
        refused_and_valid = [
            (lambda: hvd.allreduce(array, average=True, op=hvd.Sum), hvd.allreduce_async),
            (lambda: hvd.allreduce_async(array, average=True, op=hvd.Sum), hvd.allreduce_async),
            (lambda: hvd.allreduce(array, op=17), hvd.allreduce_async),
            (
                lambda: hvd.allreduce(array, op=hvd.Max, compression=hvd.Compression.fp16),
                hvd.allreduce_async,
            ),
            (lambda: hvd.allreduce(array + 1j, op=hvd.Max), hvd.allreduce_async),
            (lambda: hvd.allreduce(array, prescale_factor="x"), hvd.allreduce_async),
            (lambda: hvd.allreduce(array, out=np.ones(3)), hvd.allreduce_async),
            (lambda: hvd.allgather(np.array([None])), hvd.allgather_async),
            (lambda: hvd.broadcast(array, 99), lambda array: hvd.broadcast_async(array, 0)),
            (lambda: hvd.broadcast([None], 0), lambda array: hvd.broadcast_async(array, 0)),
        ]
        pending = []
        for refused, valid in refused_and_valid:
            if hvd.rank() == 0:
                with pytest.raises(ValueError):
                    refused()
            else:
                pending.append(valid(array))
        for step in range(3):
            mine = np.array([10 * step + hvd.rank()])
            everybodys = [10 * step + rank for rank in range(hvd.size())]
            assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [sum(everybodys)]
            assert hvd.allgather(mine).tolist() == everybodys
            assert hvd.broadcast(mine, 1).tolist() == [10 * step + 1]
        hvd.shutdown()
        for handle in pending:
            with pytest.raises(hvd.HorovodInternalError, match="rank 0 shut down without submit"):
                hvd.synchronize(handle)


@ranks(2)
@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_arrays_that_are_not_contiguous(monkeypatch, shared_memory):
    """Every kind of stride, in every operation; communication goes on, whatever the transport."""
    hvd.shutdown()
    monkeypatch.setenv("HVDLITE_SHARED_MEMORY", shared_memory)
    hvd.init()
    whole = np.arange(24.0).reshape(2, 3, 4) + 1
    views = [
        lambda whole: whole.reshape(-1)[::2],
        lambda whole: whole.reshape(-1)[::-1],
        lambda whole: whole.T,
        lambda whole: whole[:, ::2, 1:3],
        lambda whole: np.broadcast_to(whole[0, 0], (2, 4)),  # of which numpy lets nobody write
        lambda whole: np.asfortranarray(whole[0]),
        lambda whole: whole[0, :, ::-2],
        lambda whole: whole[1, :, 2],
        lambda whole: whole.astype(whole.dtype.newbyteorder(">")),
        lambda whole: whole[0, 0, 0, ...],
        lambda whole: whole[0, 0, 0],
    ]
    for dtype in (np.float64, np.float16, np.int8):
        for view in views:
            array = view(whole.astype(dtype))
            mine = view((whole * (1 + hvd.rank())).astype(dtype))
            before = mine.copy()
            assert (hvd.allreduce(mine, op=hvd.Sum) == 3 * array).all()
            assert (hvd.broadcast(mine, 1) == 2 * array).all()
            if dtype is not np.int8:
                # Of equal arrays the adaptive sum is their average.
                assert np.allclose(hvd.allreduce(array, op=hvd.Adasum), array)
                scaled = hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.fp16)
                assert np.allclose(scaled, 3 * array)
            (grouped,) = hvd.grouped_allreduce([mine], op=hvd.Max)
            assert (grouped == 2 * array).all()
            if array.ndim:
                assert (hvd.allgather(mine) == np.concatenate([array, 2 * array])).all()
                parts = np.array_split(array, 2)
                own = parts[hvd.rank()]
                assert (hvd.reducescatter(mine, op=hvd.Sum) == 3 * own).all()
                received = hvd.alltoall(mine, splits=[len(part) for part in parts])[0]
                assert (received == np.concatenate([own, 2 * own])).all()
            assert (mine == before).all()
    hvd.shutdown()
    monkeypatch.undo()
    hvd.init()


@TWO
def test_arguments_of_a_wrong_kind_are_refused_at_once():
    hvd.init()
    ones = np.ones(4)
    for call, words in (
        (lambda: hvd.allreduce(ones, name=5), "name=5 is of type int; expected a string"),
        (lambda: hvd.allreduce(ones, name=["a"]), "is of type list; expected a string"),
        (lambda: hvd.grouped_allreduce([ones], name=5), "name=5 is of type int"),
        (lambda: hvd.allgather(ones, name=5), "name=5 is of type int"),
        (lambda: hvd.broadcast(ones, "0"), "root_rank='0' is of type str; expected an integer"),
        (lambda: hvd.broadcast(ones, 1.0), "root_rank=1.0 is of type float"),
        (lambda: hvd.broadcast_object(1, root_rank="0"), "root_rank='0' is of type str"),
        (lambda: hvd.remove_process_set(5), "process_set=5 is of type int; expected what"),
        (lambda: hvd.alltoall(ones, splits=[[1], [2, 1]]), "splits must be 2 integers"),
        (lambda: hvd.alltoall(ones, splits="ab"), "splits must be 2 integers"),
        (lambda: hvd.alltoall(ones, splits=[2.0, 2.0]), "splits must be 2 integers"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            call()
    assert hvd.broadcast(ones * hvd.rank(), np.int64(1)).tolist() == [1] * 4
