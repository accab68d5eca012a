"""Virtual ranks: the same bits for any number of processes, and however parts are shared out."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest

from hvdlite.base.reduction import Average, Max, Scaling, Sum
from hvdlite.errors import HorovodInternalError
from hvdlite.transport.loopback import Loopback
from hvdlite.virtual.transport import VirtualRanks, add_up, largest_nodes
from tests.simulation import Simulation, on_all_ranks
from tests.transport import checks

# Who plays which virtual ranks.
PLAYERS = {
    "one": [[0]],
    "one process": [[0, 1, 2, 3, 4]],
    "as many processes": [[0], [1], [2]],
    "two processes": [[0, 1, 2], [3, 4]],
    "after a death": [[0, 1, 4], [2, 3]],
    "three processes": [[0, 3], [1], [2, 4, 5]],
    "played twice": [[0, 1], [1, 2], [3, 4, 1]],
    "nothing of its own": [[0, 1], [1], [2]],
}
PROMISES = [
    checks.gather,
    checks.narrow_integers_wrap,
    checks.scaling,
    checks.means_of_integers,
    checks.nan_passes_through,
    checks.booleans,
    checks.alltoall,
    checks.allgather,
    checks.broadcast,
    checks.again_and_again,
    checks.several_at_once,
]


def run(players, work):
    """Run a function for all virtual ranks; return the results by virtual rank."""

    results = {}

    def keep(virtual):
        results[virtual.rank] = work(virtual)

    on_all_ranks(
        lambda transport: VirtualRanks(transport, players).run(keep),
        Simulation(len(players)).transports,
    )
    return results


@pytest.mark.parametrize("players", PLAYERS.values(), ids=PLAYERS)
@pytest.mark.parametrize("check", PROMISES, ids=lambda check: check.__name__)
def test_it_keeps_every_promise(check, players):
    run(players, check)


@pytest.mark.parametrize("players", PLAYERS.values(), ids=PLAYERS)
def test_reductions(players):
    digests = run(players, functools.partial(checks.reductions, sizes=(0, 1, 7)))
    assert len(set(digests.values())) == 1


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("op", "scaling"), [(Sum, Scaling()), (Average, Scaling(1.0, 5))])
def test_bits_do_not_depend_on_processes(dtype, op, scaling):
    generator = np.random.default_rng(1)
    sends = (
        generator.standard_normal((5, 1001)) * 10.0 ** generator.integers(-3, 3, (5, 1))
    ).astype(dtype)

    def reduce(transport):
        result = np.empty(1001, dtype)
        transport.allreduce(sends[transport.rank], result, Sum, scaling)
        return result.tobytes()

    shares = [
        [[0, 1, 2, 3, 4]],
        [[0], [1], [2], [3], [4]],
        [[0, 1, 2], [3, 4]],
        [[3, 4], [0, 1, 2]],
        [[0, 4], [1, 3], [2]],
        [[0, 1, 2, 3], [2, 3, 4]],
    ]
    found = {result for players in shares for result in run(players, reduce).values()}
    assert len(found) == 1
    exact = sends.astype(np.float64).sum(0) / (5 if op is Average else 1)
    tolerance = {"float16": 2e-2, "float32": 1e-4, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(
        np.frombuffer(found.pop(), dtype), exact, rtol=0, atol=tolerance * 300
    )


def test_sums_follow_the_tree():
    # (a + b) + (c + d) is 0 in float32, and ((a + b) + c) + d is 2.
    sends = np.array([[1e8], [1], [-1e8], [1]], np.float32)

    def reduce(transport):
        result = np.empty(1, np.float32)
        transport.allreduce(sends[transport.rank], result, Sum, Scaling())
        return float(result[0])

    for players in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1, 2], [3]], [[0, 3], [1, 2]]):
        assert set(run(players, reduce).values()) == {0.0}


def test_parts_of_the_tree():
    assert largest_nodes(range(8), 0, 8) == [(0, 8)]
    assert largest_nodes([0, 1, 2], 0, 8) == [(0, 2), (2, 3)]
    assert largest_nodes([3, 4, 5], 0, 8) == [(3, 4), (4, 6)]
    assert largest_nodes([], 0, 8) == []
    leaves = {(number, number + 1): np.array([2.0**number]) for number in range(5)}
    kept = {node: array.copy() for node, array in leaves.items()}
    assert add_up(leaves, 0, 5).tolist() == [31.0]
    assert leaves == kept
    assert add_up({(0, 2): np.array([3.0]), (2, 5): np.array([28.0])}, 0, 5).tolist() == [31.0]


def test_one_virtual_rank_runs_at_a_time():
    running = threading.Lock()

    def work(transport):
        for _ in range(3):
            assert running.acquire(blocking=False)
            assert len(threading.enumerate()) > 1
            running.release()
            transport.gather(b"")
        return transport.rank

    assert run([[0, 1, 2, 3]], work) == {0: 0, 1: 1, 2: 2, 3: 3}


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_an_error_ends_all_virtual_ranks(failing):
    ranks, gathered = VirtualRanks(Loopback(), [[0, 1, 2, 3]]), []

    def work(transport):
        transport.gather(b"")
        if transport.rank == failing:
            raise ArithmeticError(f"of {failing}")
        transport.gather(b"")

    with pytest.raises(ArithmeticError, match=f"^of {failing}$"):
        ranks.run(work)
    ranks.run(lambda transport: gathered.append(transport.gather(b"%d" % transport.rank)))
    assert gathered == [[b"0", b"1", b"2", b"3"]] * 4


def test_after_an_error_the_others_run_on_to_their_next_collective():
    """Else it would depend on the threads what a strategy has remembered."""
    ran = []

    def work(transport):
        transport.gather(b"")
        ran.append(transport.rank)
        if transport.rank == 0:
            raise ArithmeticError
        transport.gather(b"")
        ran.append("further")

    for _ in range(50):
        with pytest.raises(ArithmeticError):
            VirtualRanks(Loopback(), [[0, 1, 2, 3]]).run(work)
    assert sorted(ran) == sorted([0, 1, 2, 3] * 50)


def test_a_thread_that_cannot_be_started_ends_the_others(monkeypatch):
    ranks = VirtualRanks(Loopback(), [[0, 1, 2, 3]])
    start, ran = threading.Thread.start, []

    def start_or_fail(thread):
        if thread.name == "hvdlite-virtual-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_or_fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            ranks.run(lambda transport: ran.append(transport.rank))
    assert not ran
    assert not [each for each in threading.enumerate() if "hvdlite-virtual" in each.name]
    ranks.run(lambda transport: ran.append(transport.rank))
    assert sorted(ran) == [0, 1, 2, 3]


def test_virtual_ranks_that_differ():
    ranks = VirtualRanks(Loopback(), [[0, 1]])

    def work(transport):
        if transport.rank:
            transport.gather(b"")
        else:
            transport.allreduce(np.zeros(1), np.zeros(1), Max, Scaling())

    with pytest.raises(HorovodInternalError, match=r"allreduce \(0\), gather \(1\)"):
        ranks.run(work)


def test_errors_of_all_are_those_of_the_first():
    def work(transport):
        transport.gather(b"")
        raise ArithmeticError(str(transport.rank))

    with pytest.raises(ArithmeticError, match=r"^0$"):
        VirtualRanks(Loopback(), [[0, 1, 2]]).run(work)


def test_numpy_stays_as_quiet_as_in_a_lane():
    def work(transport):
        return np.float32(1e38) * np.float32(10) + transport.rank

    with np.errstate(all="raise"):
        assert run([[0, 1]], work) == {0: np.inf, 1: np.inf}
