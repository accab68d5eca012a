"""Ranks that wait are told for whom, and no wait is without an end."""

import logging
import time

import pytest

import hvdlite as hvd
from tests.harness import ranks


def collect_warnings(monkeypatch):
    messages = []
    log = logging.getLogger("hvdlite")
    monkeypatch.setattr(log, "warning", lambda text, *args: messages.append(text % args))
    return messages


@ranks(3, fresh=True, env={"HVDLITE_STALL_CHECK_TIME_SECONDS": "0.5"})
def test_a_late_rank_is_named_and_only_delays(monkeypatch):
    hvd.init()
    hvd.barrier()
    messages = collect_warnings(monkeypatch)
    if hvd.rank() == 1:
        time.sleep(2.5)
    assert hvd.allreduce(1.0, name="loss", op=hvd.Sum) == 3
    if hvd.rank() == 1:
        assert not messages
    else:
        assert messages
        assert all("s for rank 1 in 'loss'" in message for message in messages), messages
        assert len(messages) <= 5


@ranks(3, fresh=True, env={"HVDLITE_STALL_CHECK_TIME_SECONDS": "0.5"})
def test_ranks_that_wait_in_different_operations_are_named(monkeypatch):
    """Rank 0 submits a, the others b; the other one comes late."""
    hvd.init()
    hvd.barrier()
    messages = collect_warnings(monkeypatch)
    first, second = ("a", "b") if hvd.rank() == 0 else ("b", "a")
    handle = hvd.allreduce_async(1.0, name=first, op=hvd.Sum)
    time.sleep(1.5)
    other = hvd.allreduce_async(1.0, name=second, op=hvd.Sum)
    assert hvd.synchronize(handle) == hvd.synchronize(other) == 3
    if hvd.rank() == 0:
        assert any("'a' (missing on ranks 1, 2)" in message for message in messages), messages


@ranks(
    3,
    fresh=True,
    env={
        "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "1",
        "HVDLITE_SHUTDOWN_TIMEOUT_SECONDS": "2",
    },
)
def test_a_wait_that_is_too_long_is_an_error_on_all_ranks():
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 2:
        time.sleep(3)
    expected = "ended" if hvd.rank() == 2 else r"waited 1 s for rank 2 in 'loss'"
    with pytest.raises(hvd.HorovodInternalError, match=expected):
        hvd.allreduce(1.0, name="loss")
    with pytest.raises(hvd.HorovodInternalError, match="an earlier failure ended communication"):
        hvd.allreduce(1.0, name="loss")


@ranks(3, fresh=True, env={"HVDLITE_SHUTDOWN_TIMEOUT_SECONDS": "0.5"})
def test_a_rank_that_left_long_ago_is_noticed():
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 0:
        hvd.shutdown()
        return
    time.sleep(2)
    with pytest.raises(hvd.HorovodInternalError, match="rank 0 has ended"):
        hvd.allreduce(1.0, name="loss")
