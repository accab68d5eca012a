"""A rank may die at any point of the protocol by which the others go on."""

from __future__ import annotations

import pytest

from hvdlite.elastic import recovery
from tests import simulated_mpi
from tests.elastic import crash_points
from tests.simulated_mpi import Comm, Crash, HangError

# The threads of a rank that dies end by a SystemExit; any other failure of theirs ends the run.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

# All of them: python -m tests.campaigns.crash_points --orders 3
_SHARE = 60


def _share(seed: int | None, share: int) -> None:
    for crash in crash_points.crashes(seed)[::share]:
        assert crash_points.check([crash], seed) == crash_points.RANKS - 1, crash


def test_order_of_calls_is_always_the_same():
    assert crash_points.crashes(1) == crash_points.crashes(1)


def test_every_rank_can_die_in_each_of_its_turns():
    found = {(crash.rank, crash.turn) for crash in crash_points.crashes()}
    turns = [[turn for rank, turn in found if rank == wanted] for wanted in range(3)]
    assert all(sorted(each) == list(range(1, len(each) + 1)) for each in turns)
    assert min(map(len, turns)) > 100


@pytest.mark.parametrize("seed", [None, 1])
def test_others_go_on(seed):
    _share(seed, _SHARE)


@pytest.mark.parametrize("seed", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_others_get_a_process_set(seed):
    for crash in crash_points.crashes(seed, adds=True)[::20]:
        assert crash_points.check_adding([crash], seed) == crash_points.RANKS - 1, crash


@pytest.mark.slow
@pytest.mark.parametrize(("delivers", "turn"), [(False, 5), (True, 2)])
def test_simulation_finds_a_mistake_in_the_protocol(delivers, turn, monkeypatch):
    crash = next(each for each in crash_points.crashes() if each[1:] == (turn, True, "last"))
    monkeypatch.setattr(recovery, "is_delivered", lambda own, states: delivers)
    monkeypatch.setattr(simulated_mpi, "_MAX_TURNS", 2_000)
    with pytest.raises(AssertionError):
        crash_points.check([crash])


def test_hang_is_found(monkeypatch):
    monkeypatch.setattr(simulated_mpi, "_MAX_TURNS", 2_000)
    monkeypatch.setattr(Comm, "iprobe", lambda self, *_: self.turn("iprobe", lambda: False))
    with pytest.raises(HangError, match=r"turns; the ranks are in \{1: '\w+', 2: '\w+'\}"):
        crash_points.check([Crash(0, 1)])
