from __future__ import annotations

import logging

import pytest

from hvdlite.base.settings import Settings
from hvdlite.engine.agreement import BOUND, LIKELY
from hvdlite.engine.stall import StallInspector
from hvdlite.errors import HorovodInternalError


def policy(**settings):
    return StallInspector(Settings(**settings), lambda: "'loss'")


def wait(waiting, seconds, step=0.01):
    for number in range(int(seconds / step) + 1):
        waiting.check(number * step)


def test_a_report_comes_in_time_and_again(caplog):
    waiting = policy(stall_check_time_seconds=1.0)
    with caplog.at_level(logging.WARNING, "hvdlite"):
        wait(waiting, 0.99)
        assert caplog.messages == []
        wait(waiting, 3.5)
    assert len(caplog.messages) == 3
    assert caplog.messages[0] == f"waited 1 s for other ranks in 'loss'; {LIKELY}{BOUND}"


def test_every_wait_begins_anew_although_its_first_look_comes_late(caplog):
    waiting = policy(stall_check_time_seconds=1.0)
    with caplog.at_level(logging.WARNING, "hvdlite"):
        for elapsed in (0.5, 1.5, 0.3, 1.1):
            waiting.check(elapsed)
    assert [message[:11] for message in caplog.messages] == ["waited 2 s ", "waited 1 s "]


def test_reports_can_be_switched_off(caplog):
    with caplog.at_level(logging.WARNING, "hvdlite"):
        wait(policy(stall_check_time_seconds=1.0, stall_check_disable=True), 5.0)
    assert caplog.messages == []


def test_a_report_names_the_ranks_that_are_absent_where_they_are_known(caplog):
    settings = Settings(stall_check_time_seconds=1.0, stall_shutdown_time_seconds=1.5)
    waiting = StallInspector(settings, lambda: "'loss'", lambda: [1, 3])
    with caplog.at_level(logging.WARNING, "hvdlite"):
        wait(waiting, 1.2)
    assert caplog.messages[0].startswith("waited 1 s for ranks 1, 3 in 'loss'")
    with pytest.raises(HorovodInternalError, match="waited 2 s for ranks 1, 3 in 'loss'"):
        waiting.check(1.6)


@pytest.mark.parametrize("first_report", [1.0, 60.0])
def test_it_gives_up_when_it_is_told_to(first_report):
    waiting = policy(stall_check_time_seconds=first_report, stall_shutdown_time_seconds=2.0)
    wait(waiting, 2.0)
    with pytest.raises(HorovodInternalError, match="waited 2 s for other ranks in 'loss'"):
        waiting.check(2.1)


def test_by_default_it_never_gives_up():
    policy(stall_check_disable=True).check(1e6)


def test_an_abandoned_wait_ends():
    waiting = policy()
    waiting.check(1.0)
    waiting.abandon()
    with pytest.raises(HorovodInternalError, match=r"shut down while waiting .* in 'loss'"):
        waiting.check(1.0)
