from __future__ import annotations

import threading
import time

import pytest

from hvdlite.errors import HorovodInternalError
from tests.simulation import Simulation, on_all_ranks
from tests.transport import checks


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "check", [*checks.EVERYTHING, checks.some_reductions], ids=lambda check: check.__name__
)
def test_it_keeps_every_promise(check, size):
    on_all_ranks(check, Simulation(size).transports)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_learn_that_one_has_left(size):
    on_all_ranks(checks.leave, Simulation(size).transports)


def test_it_tells_what_was_called():
    simulation = Simulation(2)
    on_all_ranks(checks.meet, simulation.transports)
    assert set(simulation.calls[0]) == {"meet"}
    assert simulation.calls[0] == simulation.calls[1]


def test_a_rank_that_is_held_enters_nothing():
    simulation = Simulation(2)
    done = threading.Event()

    def gather(transport):
        assert transport.gather(b"%d" % transport.rank) == [b"0", b"1"]
        done.set()

    with simulation.holding(1):
        threads = [
            threading.Thread(target=gather, args=(transport,), daemon=True)
            for transport in simulation.transports
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        assert simulation.calls[1] == []
        assert not done.is_set()
    assert done.wait(5)


def test_different_collectives_are_an_error_on_all_ranks():
    def confuse(transport):
        with pytest.raises(HorovodInternalError, match="different collectives"):
            transport.gather(b"") if transport.rank else transport.broadcast(bytearray(1), 0)

    on_all_ranks(confuse, Simulation(2).transports)


def test_who_waits_can_look_who_is_missing():
    transports = Simulation(3).transports
    seen = []

    def look(elapsed):
        seen.append(transports[0].absent())
        raise InterruptedError

    assert transports[0].absent() == []
    with pytest.raises(InterruptedError):
        transports[0].meet([bytes(16)], look)
    assert seen == [[1, 2]]


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(HorovodInternalError, match=r"no sign of ranks \[1, 2\] in gather"):
        Simulation(3, timeout=0.05).transports[0].gather(b"")


def test_on_wait_may_end_a_wait():
    def end(elapsed):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        Simulation(2).transports[0].meet([bytes(16)], end)
