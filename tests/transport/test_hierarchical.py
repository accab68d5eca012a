"""Several nodes on one machine: the ranks of each share memory, all are joined by MPI."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest

from hvdlite.base.reduction import Max, Min, Product, Scaling, Sum
from hvdlite.transport.hierarchical import HierarchicalTransport
from hvdlite.transport.registry import connect
from hvdlite.transport.shared_memory import futex
from hvdlite.world import mpi
from hvdlite.world.world import World
from tests.harness import ranks
from tests.references import Digest, cases, dtype_of, samples
from tests.transport import checks, worlds
from tests.transport.worlds import connected

pytestmark = pytest.mark.skipif(not futex.is_supported(), reason="needs Linux on x86-64")

PLACES = list(itertools.product(("private", "segment"), repeat=2))
OPS = (Sum, Min, Max, Product)


@contextlib.contextmanager
def transport(local_size, chunk=None):
    with connected(local_size) as made:
        assert isinstance(made, HierarchicalTransport)
        made._node.chunk = chunk or made._node.chunk
        yield made


def reduced(made, arrays, op, places):
    send = worlds.placed(made, arrays[made.rank], places[0])
    result = worlds.placed(made, np.zeros_like(send), places[1])
    with np.errstate(all="ignore"):
        made.allreduce(send, result, op, Scaling())
    assert send.tobytes() == arrays[made.rank].tobytes()
    return result


CHECKS = [pytest.param(check, id=check.__name__) for check in checks.EVERYTHING]


class Promises:
    """Tests for any number of ranks on a node."""

    local_size: int

    @pytest.mark.parametrize("check", CHECKS)
    def test_all(self, check):
        with transport(self.local_size) as made:
            check(made)

    @pytest.mark.parametrize("check", CHECKS)
    def test_all_with_small_chunks(self, check):
        with transport(self.local_size, chunk=1001) as made:
            check(made)

    def test_every_reduction_of_every_dtype_is_right_and_repeatable(self):
        with transport(self.local_size) as made:
            checks.reductions(made, (0, 1, 7))
            assert checks.reductions(made, (1023,)) == checks.reductions(made, (1023,))

    @pytest.mark.slow
    def test_large_reductions_are_right_and_repeatable(self):
        with transport(self.local_size) as made:
            assert checks.large_reductions(made) == checks.large_reductions(made)

    @pytest.mark.slow
    def test_the_bits_depend_neither_on_chunks_nor_on_places(self):
        """For two nodes: the order of two terms does not matter."""
        with transport(self.local_size) as made:
            digests = {case: Digest() for case in itertools.product((100, 2**20), PLACES)}
            for (dtype, op), size in itertools.product(cases(OPS), (0, 1, 7, 100)):
                arrays = samples(made.size, dtype, size, seed=size)
                for (chunk, places), digest in digests.items():
                    made._node.chunk = chunk
                    digest.add(reduced(made, arrays, op, places))
            values = {digest.value() for digest in digests.values()}
            assert len(values) == 1
            checks.agree(made, values.pop())

    def test_sums_of_16_bit_floats_are_rounded_once(self):
        """Digits that a node's sum needs and the total does not: 2048 + 1 - 2048."""
        with transport(self.local_size) as made:
            large = {"float16": 2048.0, "bfloat16": 256.0}
            for dtype, places in itertools.product(large, PLACES):
                value = {0: large[dtype], 1: 1.0, made.size - 1: -large[dtype]}.get(made.rank, 0.0)
                array = worlds.placed(made, np.full(9, value).astype(dtype_of(dtype)), places[0])
                result = worlds.placed(made, np.zeros_like(array), places[1])
                made.allreduce(array, result, Sum, Scaling())
                assert result.astype(np.float32).tolist() == [1.0] * 9, (dtype, places)


@pytest.mark.slow
@ranks(3)
class TestTwoAndOne(Promises):
    local_size = 2


@ranks(4)
class TestTwoAndTwo(Promises):
    local_size = 2


@pytest.mark.slow
@ranks(4)
class TestThreeAndOne(Promises):
    local_size = 3


@ranks(3, 4, fresh=True)
def test_ranks_learn_that_one_has_left():
    MPI = mpi.load()
    made = connect(MPI, World.split(MPI, MPI.COMM_WORLD.Dup(), 2))
    assert isinstance(made, HierarchicalTransport)
    checks.leave(made)


@ranks(4)
@pytest.mark.parametrize("local_size", [2, 3])
def test_sums_of_floats_have_the_same_bits_on_all_ranks(local_size):
    with transport(local_size) as made:
        for size, dtype in itertools.product((1, 7, 1000, 300_003), ("float32", "float64")):
            generator = np.random.default_rng([size, made.rank])
            array = generator.standard_normal(size) * 10.0 ** generator.integers(-6, 7, size)
            array = array.astype(dtype)
            result = np.empty_like(array)
            made.allreduce(array, result, Sum, Scaling())
            digest = Digest()
            digest.add(result)
            checks.agree(made, digest.value())
