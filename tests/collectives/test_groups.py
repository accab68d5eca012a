from __future__ import annotations

import numpy as np
import pytest

import hvdlite as hvd
from tests.collectives.test_collectives import still_works
from tests.harness import ranks
from tests.references import Digest, cases, check_reduction, dtype_of, samples

ALL = ranks(1, 2, 3, 4)
SEVERAL = ranks(2, 3)
SHAPES = [(), (0,), (5,), (2, 3, 4), (70_000,), (300_000,)]


class TestAllreduce:
    @ALL
    def test_every_reduction_of_every_dtype(self):
        hvd.init()
        digest = Digest()
        for dtype, op in cases():
            shapes = SHAPES if dtype in ("float32", "float16") else SHAPES[:4]
            arrays = [samples(hvd.size(), dtype, shape, seed=i) for i, shape in enumerate(shapes)]
            own = [array[hvd.rank()] for array in arrays]
            results = hvd.grouped_allreduce(own, op=op)
            for result, given in zip(results, arrays, strict=True):
                check_reduction(result, given, op)
                digest.add(result)
        assert len(set(hvd.allgather_object(digest.value()))) == 1

    @ALL
    def test_dtypes_together_in_place_and_scaled(self, size):
        hvd.init()
        arrays = [np.full(3, hvd.rank(), dtype) for dtype in ("int32", "float64", "float32")]
        arrays += [np.full(2, hvd.rank(), dtype_of("bfloat16"))]
        results = hvd.grouped_allreduce(
            arrays, op=hvd.Sum, outs=arrays, prescale_factor=2.0, postscale_factor=0.5
        )
        for array, result in zip(arrays, results, strict=True):
            assert result is array
            np.testing.assert_array_equal(array.astype(float), size * (size - 1) / 2)

    @ALL
    def test_asynchronous_groups_come_in_any_order(self, size):
        hvd.init()
        names = [f"group {n}" for n in range(12)]
        order = names if hvd.rank() % 2 else names[::-1]
        handles = {
            name: hvd.grouped_allreduce_async(
                [np.ones(4), np.ones(1, np.int64)], name=name, op=hvd.Sum
            )
            for name in order
        }
        for name in names:
            first, second = hvd.synchronize(handles[name])
            assert (first.tolist(), second.tolist()) == ([size] * 4, [size])

    @ALL
    def test_compression(self, size):
        hvd.init()
        own = [np.full(5, hvd.rank() + 1.0, np.float32), np.arange(3, dtype=np.int32)]
        first, second = hvd.grouped_allreduce(own, compression=hvd.Compression.fp16, op=hvd.Sum)
        np.testing.assert_array_equal(first, size * (size + 1) / 2)
        np.testing.assert_array_equal(second, size * np.arange(3))

    @SEVERAL
    def test_arguments_that_have_no_meaning(self):
        hvd.init()
        with pytest.raises(ValueError, match="needs one array at least"):
            hvd.grouped_allreduce([])
        with pytest.raises(ValueError, match="Min is not defined for dtype complex64"):
            hvd.grouped_allreduce([np.ones(1), np.ones(1, np.complex64)], op=hvd.Min)
        with pytest.raises(ValueError, match="out must be"):
            hvd.grouped_allreduce([np.ones(1)], outs=[np.ones(2)])
        still_works()


class TestAllgather:
    @ALL
    def test_rows_that_differ(self, size):
        hvd.init()
        rank = hvd.rank()
        own = [np.full((rank, 2), rank), np.full(1 + rank % 2, rank, np.float16), np.array(rank)]
        first, second, third = hvd.grouped_allgather(own)
        assert first.tolist() == [[r, r] for r in range(size) for _ in range(r)]
        assert second.tolist() == [r for r in range(size) for _ in range(1 + r % 2)]
        assert third.tolist() == list(range(size))
        handle = hvd.grouped_allgather_async([own[2]])
        assert hvd.synchronize(handle)[0].tolist() == list(range(size))


class TestReducescatter:
    @ALL
    def test_rows_are_dealt(self, size):
        hvd.init()
        rank = hvd.rank()
        own = [np.arange(2.0 * size + 1) + rank, np.ones((size, 2), np.int32)]
        first, second = hvd.grouped_reducescatter(own, op=hvd.Sum)
        whole = size * np.arange(2.0 * size + 1) + size * (size - 1) / 2
        bounds = [0, *(3 + 2 * r for r in range(size))]
        np.testing.assert_array_equal(first, whole[bounds[rank] : bounds[rank + 1]])
        assert second.tolist() == [[size, size]]
        handle = hvd.grouped_reducescatter_async(own[:1])
        np.testing.assert_allclose(hvd.synchronize(handle)[0], first / size)
