from __future__ import annotations

import contextlib
import hashlib
import itertools

import numpy as np
import pytest

from hvdlite.base.reduction import Scaling, Sum
from hvdlite.errors import HorovodInternalError
from hvdlite.transport import NoRoomError
from hvdlite.transport import mpi as mpi_transport
from hvdlite.transport.mpi import MPITransport
from hvdlite.world import mpi
from tests.harness import ranks
from tests.transport import checks

SIZES = (0, 1, 7, 1023)


@contextlib.contextmanager
def transport():
    MPI = mpi.load()
    made = MPITransport(MPI, MPI.COMM_WORLD)
    yield made
    made.close()


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("check", checks.EVERYTHING, ids=lambda check: check.__name__)
def test_it_keeps_every_promise(check):
    with transport() as made:
        check(made)


@ranks(2, 3, fresh=True)
def test_ranks_learn_that_one_has_left():
    checks.leave(MPITransport(mpi.load(), mpi.load().COMM_WORLD))


@ranks(1, 2, 3)
@pytest.mark.parametrize("count", [1, 5])
def test_a_lack_of_memory_is_met_before_the_other_ranks_are(monkeypatch, count):
    def no_room(*_):
        raise MemoryError("no room")

    with transport() as made:
        sends = [np.full(n, made.rank + 1.0, np.float32) for n in range(1, count + 1)]
        results = [np.empty_like(send) for send in sends]
        total = made.size * (made.size + 1) / 2
        if made.rank == 0:
            with monkeypatch.context() as patch:
                patch.setattr(np, "empty", no_room)
                with pytest.raises(NoRoomError, match="no room"):
                    made.meet([bytes(16)], checks.on_wait, sends)
        assert made.meet([bytes(16)], checks.on_wait, sends) == 1
        with monkeypatch.context() as patch:
            patch.setattr(np, "empty", no_room)
            made.allreduce_all(sends, results, Sum, Scaling())  # which allocates nothing any more
        for result in results:
            assert set(result.tolist()) == {total}


@ranks(1, 2, 3, 4)
def test_every_reduction_of_every_dtype_is_right_and_repeatable():
    with transport() as made:
        checks.reductions(made, SIZES[:-1])
        assert checks.reductions(made, SIZES[-1:]) == checks.reductions(made, SIZES[-1:])


@ranks(1, 2, 3, 4)
def test_large_reductions_are_right_and_repeatable():
    with transport() as made:
        assert checks.large_reductions(made) == checks.large_reductions(made)


@ranks(3, 4)
@pytest.mark.parametrize("length", [1, 7, 1000, 1023, 100_003, 1_000_000])
def test_sums_of_floats_have_the_same_bits_on_all_ranks(length):
    """MPI only recommends this; checked on values whose sum depends on the order."""
    with transport() as made:
        for dtype, seed in itertools.product(("float32", "float64"), range(3)):
            generator = np.random.default_rng([seed, made.rank])
            array = generator.standard_normal(length) * 10.0 ** generator.integers(-6, 6, length)
            array = array.astype(dtype)
            total = np.empty_like(array)
            made.allreduce(array, total, Sum, Scaling())
            checks.agree(made, hashlib.sha256(total.tobytes()).digest())


@ranks(1, 2, 3)
def test_pieces_when_an_array_is_beyond_the_limit(monkeypatch):
    with transport() as made:
        whole = checks.reductions(made, (7, 100))
        # Of 16 bytes, so that there is one complex128 to a piece, and odd rests elsewhere.
        monkeypatch.setattr(mpi_transport, "_MAX_BYTES", 16)
        assert checks.reductions(made, (7, 100)) == whole
        for check in (checks.alltoall, checks.allgather, checks.broadcast):
            check(made)


@ranks(2)
def test_transports_of_one_world_do_not_mix():
    with transport() as first, transport() as second:
        ones, tens = np.ones(5), np.full(5, 10.0)
        sums = [np.empty(5), np.empty(5)]
        first.allreduce(ones, sums[0], Sum, Scaling())
        second.allreduce(tens, sums[1], Sum, Scaling())
        assert sums[0].tolist() == [2.0] * 5
        assert sums[1].tolist() == [20.0] * 5


@ranks(2)
def test_a_wait_that_is_abandoned_leaves_mpi_its_memory():
    def end(elapsed):
        raise InterruptedError

    with transport() as made:
        before = len(mpi_transport._abandoned)
        other = MPITransport(mpi.load(), mpi.load().COMM_WORLD)
        if made.rank == 0:
            with pytest.raises(InterruptedError):
                made.meet([bytes(16)], end)
            request, (offer, least), _ = mpi_transport._abandoned[before]
            checks.agree(other, b"")
            checks.agree(other, b"")
            request.Wait()
            assert not least[:2].any()
            half = offer.nbytes // 2
            assert offer.tobytes() == bytes(half) + b"\xff" * half
        else:
            checks.agree(other, b"")
            with pytest.raises(HorovodInternalError, match="rank 0 has ended"):
                made.meet([bytes(16)], checks.on_wait)
            checks.agree(other, b"")
        other.close()
