from __future__ import annotations

import numpy as np
import pytest

import hvdlite as hvd
from tests.harness import ranks
from tests.references import DTYPES, Digest, cases, check_reduction, sample, samples

ALL = ranks(1, 2, 3, 4)
SEVERAL = ranks(2, 3)


def still_works():
    assert hvd.alltoall(np.full(hvd.size(), hvd.rank()))[0].tolist() == list(range(hvd.size()))


class TestAlltoall:
    @ALL
    def test_every_dtype_and_shape(self, size):
        hvd.init()
        rank = hvd.rank()
        for dtype in DTYPES:
            for row in ((), (3,), (2, 0), (2, 3)):
                arrays = samples(size, dtype, (2 * size, *row))
                result, splits = hvd.alltoall(arrays[rank])
                expected = np.concatenate([array[2 * rank : 2 * rank + 2] for array in arrays])
                assert result.dtype == arrays[0].dtype
                np.testing.assert_array_equal(result, expected)
                assert (splits.dtype, splits.tolist()) == (np.int32, [2] * size)

    @ALL
    @pytest.mark.parametrize("scale", [1, 100_000])
    def test_splits_that_differ(self, size, scale):
        hvd.init()
        rank = hvd.rank()

        def splits_of(sender):
            return [scale * ((sender + receiver) % 3) for receiver in range(size)]

        def rows_of(sender):
            return sample(sender, "float32", (sum(splits_of(sender)), 2))

        result, received = hvd.alltoall(rows_of(rank), splits_of(rank))
        parts = []
        for sender in range(size):
            start = sum(splits_of(sender)[:rank])
            parts.append(rows_of(sender)[start : start + splits_of(sender)[rank]])
        np.testing.assert_array_equal(result, np.concatenate(parts))
        assert received.tolist() == [len(part) for part in parts]

    @ALL
    def test_all_to_one_and_nothing_at_all(self, size):
        hvd.init()
        rank = hvd.rank()
        splits = np.zeros(size, np.int32)
        splits[size - 1] = 3
        result, received = hvd.alltoall(np.full((3, 2), rank), splits)
        if rank == size - 1:
            assert result[:, 0].tolist() == [r for r in range(size) for _ in range(3)]
            assert received.tolist() == [3] * size
        else:
            assert result.shape == (0, 2)
            assert received.tolist() == [0] * size
        result, received = hvd.alltoall(np.empty((0, 4), np.int8), [0] * size)
        assert (result.shape, result.dtype, received.tolist()) == ((0, 4), np.int8, [0] * size)

    @ALL
    def test_layouts_and_asynchronous_calls(self, size):
        hvd.init()
        rank = hvd.rank()
        base = np.arange(4.0 * size).reshape(2, 2 * size).T + 100 * rank
        handle = hvd.alltoall_async(base, name="transposed")
        result, received = hvd.synchronize(handle)
        expected = np.concatenate(
            [base[2 * rank : 2 * rank + 2] - 100 * rank + 100 * r for r in range(size)]
        )
        np.testing.assert_array_equal(result, expected)
        assert list(received) == [2] * size

    @SEVERAL
    def test_splits_that_do_not_fit(self, size):
        hvd.init()
        rows = np.ones(size + 1)
        for splits, message in (
            (None, f"{size + 1} rows cannot be dealt evenly to {size} ranks"),
            ([1] * (size + 1), f"splits must be {size} integers"),
            ([1] * size, f"add up to the {size + 1} rows"),
            ([-1, size + 2] + [0] * (size - 2), "must not be negative"),
            ([1.5] * size, f"splits must be {size} integers"),
            ([[size + 1] + [0] * (size - 1)], f"splits must be {size} integers"),
        ):
            with pytest.raises(ValueError, match=message):
                hvd.alltoall(rows, splits)
            still_works()
        with pytest.raises(ValueError, match="found a scalar"):
            hvd.alltoall(np.float32(1))
        still_works()

    @SEVERAL
    def test_one_rank_is_refused_and_the_others_can_go_on(self, size):
        hvd.init()
        if hvd.rank() == 0:
            with pytest.raises(ValueError, match="splits"):
                hvd.alltoall(np.ones(size), [size + 1] * size, name="again")
        result, _ = hvd.alltoall(np.ones(size), name="again")
        assert result.tolist() == [1] * size


class TestReducescatter:
    @ALL
    def test_every_reduction_of_every_dtype_and_shape(self, size):
        hvd.init()
        rank = hvd.rank()
        for dtype, op in cases([hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product]):
            for shape in ((0,), (1,), (2 * size + 1,), (size, 3), (size + 1, 2, 0)):
                arrays = samples(size, dtype, shape)
                result = hvd.reducescatter(arrays[rank], op=op)
                base, longer = divmod(shape[0], size)
                start = rank * base + min(rank, longer)
                stop = start + base + (rank < longer)
                check_reduction(result, [array[start:stop] for array in arrays], op)

    @ALL
    def test_it_is_a_part_of_an_allreduce_to_the_bit(self, size):
        hvd.init()
        digest = Digest()
        for dtype in ("float32", "float16", "bfloat16", "float64", "int8"):
            own = sample(hvd.rank(), dtype, (300_001,))
            part = hvd.reducescatter(own, op=hvd.Sum)
            whole = hvd.allgather(part)
            digest.add(whole)
            if size <= 2:  # MPI sums more in an order of its own
                np.testing.assert_array_equal(whole, hvd.allreduce(own, op=hvd.Sum))
        assert len(set(hvd.allgather_object(digest.value()))) == 1

    @ALL
    def test_factors_and_compression(self, size):
        hvd.init()
        own = np.full(size, 2.0, np.float32)
        for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
            result = hvd.reducescatter(
                own,
                op=hvd.Sum,
                prescale_factor=0.5,
                postscale_factor=3.0,
                compression=compression,
            )
            assert (result.dtype, result.tolist()) == (np.float32, [3.0 * size])
            # The sum of the largest float16 would overflow, their average does not.
            large = hvd.reducescatter(np.full(size, 60000.0, np.float32), compression=compression)
            np.testing.assert_allclose(large, 60000.0, rtol=1e-2)
        assert own.tolist() == [2.0] * size
        rounded = hvd.reducescatter(np.full(size, 1 / 3), compression=hvd.Compression.fp16)
        np.testing.assert_allclose(
            rounded, np.float16(1 / 3 / size).astype(float) * size, rtol=1e-3
        )
        assert rounded[0] != 1 / 3
        handle = hvd.reducescatter_async(own, name="later", op=hvd.Sum)
        assert hvd.synchronize(handle).tolist() == [2.0 * size]

    @SEVERAL
    def test_what_is_refused(self, size):
        hvd.init()
        with pytest.raises(ValueError, match="Adasum is not defined for pieces") as caught:
            hvd.reducescatter(np.ones(size), op=hvd.Adasum)
        assert isinstance(caught.value, NotImplementedError)
        with pytest.raises(ValueError, match="found a scalar"):
            hvd.reducescatter(np.float32(1))
        with pytest.raises(ValueError, match="op=9 is not a reduction"):
            hvd.reducescatter(np.ones(size), op=9)
        assert hvd.reducescatter(np.ones(size), op=hvd.Sum) == [size]
