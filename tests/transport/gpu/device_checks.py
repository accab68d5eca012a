"""Checks of all that a device transport must do, fake or real; each is collective.

A check gets a `Rank`: the transport, and ways to bring numpy arrays to its device and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.base.reduction import Adasum, Average, Max, Min, Product, Scaling, Sum
from hvdlite.transport.gpu.base import FlatArray
from tests.references import INTEGERS, Digest, cases, check_reduction, dtype_of, sample, samples
from tests.transport import checks
from tests.transport.checks import agree


@dataclass
class Rank:
    """One rank of a check.

    Attributes:
        transport: under test.
        control: by which the ranks compare their results.
        upload: returns a device array of the bits of a numpy array (bfloat16 as uint16).
        download: returns the bits of a device array, of a dtype, once its work is done.
    """

    transport: Any
    control: Any
    upload: Any
    download: Any

    @property
    def rank(self):
        return self.transport.rank

    @property
    def size(self):
        return self.transport.size

    def run(self, exchange):
        work = self.transport.enqueue(exchange)
        work.wait()
        assert work.done()


def allreduce(rank, array, op, scaling=Scaling()):  # noqa: B008 - it is frozen
    """Reduce out of place, check that the input stays, and that in place is the same."""
    kind = array.dtype
    send, result = rank.upload(array), rank.upload(np.zeros_like(array))
    arrays = FlatArray(send, kind), FlatArray(result, kind)
    rank.run(lambda: checks.allreduce(rank.transport, *arrays, op, scaling))
    assert rank.download(send, kind).tobytes() == array.tobytes()
    found = rank.download(result, kind)
    rank.run(lambda: checks.allreduce(rank.transport, arrays[0], arrays[0], op, scaling))
    assert rank.download(send, kind).tobytes() == found.tobytes()
    return found


def reductions(rank, sizes=(0, 1, 7)):
    digest = Digest()
    for dtype, op in cases((Sum, Min, Max, Product, Adasum)):
        for size in sizes:
            arrays = samples(rank.size, dtype, size, seed=size)
            with np.errstate(all="ignore"):
                result = allreduce(rank, arrays[rank.rank], op)
                check_reduction(result, arrays, op)
            digest.add(result)
    agree(rank.control, digest.value())


def averages(rank):
    for dtype in ("int8", "uint16", "int64", "float16", "bfloat16", "float32", "complex64"):
        array = np.full(5, rank.rank + 1).astype(dtype_of(dtype))
        result = allreduce(rank, array, Sum, Scaling(1.0, rank.size))
        mean = np.array((rank.size + 1) / 2).astype(dtype_of(dtype))
        np.testing.assert_array_equal(result, np.full(5, mean))
        doubled = allreduce(rank, array, Sum, Scaling(2.0, rank.size))
        np.testing.assert_allclose(doubled.astype(np.complex128), rank.size + 1, rtol=1e-2)
    # Beyond what float64 holds, and cut towards zero.
    large = np.array([2**62 + 1, -(2**62) - 1, -7, 7]) if rank.rank == 0 else np.zeros(4, int)
    found = allreduce(rank, large, Sum, Scaling(1.0, 3)).tolist()
    assert found == [(2**62 + 1) // 3, -((2**62 + 1) // 3), -2, 2]
    for dtype in INTEGERS:  # the sum is out of range
        arrays = [np.full(7, np.iinfo(dtype).max, dtype) for _ in range(rank.size)]
        found = allreduce(rank, arrays[0], Sum, Scaling(1.0, rank.size))
        check_reduction(found, arrays, Average)


def sixteen_bit_floats_are_added_in_float32(rank):
    """Each addend is lost if the sum is rounded on the way."""
    for dtype, large, small in (("float16", 2048, 1), ("bfloat16", 256, 1)):
        array = np.full(rank.size, large if rank.rank == 0 else small).astype(dtype_of(dtype))
        result = allreduce(rank, array, Sum)
        expected = np.array(large + small * (rank.size - 1)).astype(dtype_of(dtype))
        np.testing.assert_array_equal(result, np.full(rank.size, expected))
    # The sum is beyond a float16, the average is not.
    array = np.full(3, 60000, np.float16)
    found = allreduce(rank, array, Sum, Scaling(1.0, rank.size))
    np.testing.assert_array_equal(found, array)


def narrow_integers_wrap(rank):
    for dtype, value in (("uint8", 200), ("int8", 100), ("uint16", 65000), ("int16", -32000)):
        result = allreduce(rank, np.full(33, value, dtype), Sum)
        expected = np.array(value * rank.size).astype(dtype)
        np.testing.assert_array_equal(result, np.full(33, expected))


def nan_passes_through(rank):
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        for op in (Min, Max, Sum, Product):
            for source in range(rank.size):
                array = np.full(7, 1.0 + rank.rank).astype(dtype_of(dtype))
                if source == rank.rank:
                    array[3] = np.nan
                result = allreduce(rank, array, op).astype(np.float64)
                assert np.flatnonzero(np.isnan(result)).tolist() == [3], (dtype, op, source)


def alltoall(rank):
    """Pieces of all lengths, some of them empty."""

    def piece(source, target, scale):
        return sample(source, "uint8", (3 * source + 5 * target) % 7 * scale, seed=target)

    for scale in (0, 1, 1000):
        pieces = [rank.upload(piece(rank.rank, to, scale)) for to in range(rank.size)]
        expected = [piece(source, rank.rank, scale) for source in range(rank.size)]
        result = [rank.upload(np.zeros_like(array)) for array in expected]
        rank.run(lambda: rank.transport.alltoall(pieces, result))  # noqa: B023
        for found, wanted in zip(result, expected, strict=True):
            np.testing.assert_array_equal(rank.download(found, np.uint8), wanted)


def allgather(rank):
    """Pieces of different and of equal lengths, in one array and in several."""
    for length in (lambda r: 0, lambda r: r, lambda r: 1000 * r + 1, lambda r: 64):
        expected = [sample(r, "uint8", length(r)) for r in range(rank.size)]
        piece = rank.upload(expected[rank.rank])
        bounds = np.cumsum([0, *map(len, expected)])
        whole = rank.upload(np.zeros(bounds[-1], np.uint8))
        together = [whole[bounds[r] : bounds[r + 1]] for r in range(rank.size)]
        scattered = [rank.upload(np.zeros_like(array)) for array in expected]
        for result in (together, scattered):
            rank.run(lambda: rank.transport.allgather(piece, result))  # noqa: B023
            for found, wanted in zip(result, expected, strict=True):
                np.testing.assert_array_equal(rank.download(found, np.uint8), wanted)


def broadcast(rank):
    for size in (0, 1, 1023):
        for root in range(rank.size):
            array = rank.upload(sample(rank.rank, "uint8", size))
            rank.run(lambda: rank.transport.broadcast(array, root))  # noqa: B023
            found = rank.download(array, np.uint8)
            np.testing.assert_array_equal(found, sample(root, "uint8", size))


def reducescatter(rank):
    for dtype, op in (("float32", Sum), ("bfloat16", Sum), ("int16", Max), ("float64", Min)):
        arrays = samples(rank.size, dtype, 10 * rank.size)
        kind = dtype_of(dtype)
        bounds = np.cumsum([0, *range(rank.size)])
        send = rank.upload(arrays[rank.rank])
        pieces = [FlatArray(send[bounds[r] : bounds[r + 1]], kind) for r in range(rank.size)]
        result = rank.upload(np.zeros(rank.rank, kind))
        target = FlatArray(result, kind)
        rank.run(lambda: rank.transport.reducescatter(pieces, target, op, Scaling()))  # noqa: B023
        mine = slice(bounds[rank.rank], bounds[rank.rank + 1])
        check_reduction(rank.download(result, kind), [array[mine] for array in arrays], op)


EVERYTHING = (
    reductions,
    averages,
    sixteen_bit_floats_are_added_in_float32,
    narrow_integers_wrap,
    nan_passes_through,
    alltoall,
    allgather,
    broadcast,
    reducescatter,
)
