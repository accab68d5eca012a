from __future__ import annotations

import signal
import threading
import time

import pytest

from hvdlite.engine import Handle
from tests.simulation import on_all_ranks


@pytest.fixture
def handle():
    return Handle("a")


def test_only_the_first_end_counts(handle):
    handle.finish(1)
    handle.finish(2)
    handle.finish(error=ValueError("late"))
    assert handle.wait() == 1


def test_an_error_is_not_replaced_by_a_result(handle):
    handle.finish(error=ValueError("first"))
    handle.finish(2)
    assert handle.done()
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            handle.wait()


def test_a_result_may_be_none(handle):
    assert not handle.done()
    handle.finish()
    assert handle.done()
    assert handle.wait() is None


def test_many_threads_wait_and_all_of_them_go_on(handle):
    def wait(number):
        if number == 0:
            time.sleep(0.05)
            handle.finish("result")
        return handle.wait()

    assert on_all_ranks(wait, range(8)) == ["result"] * 8
    assert handle.wait() == "result"


def test_a_wait_uses_no_processor(handle):
    threading.Timer(0.5, handle.finish).start()
    before = time.thread_time()
    handle.wait()
    assert time.thread_time() - before < 0.05


def test_a_signal_ends_a_wait_and_the_next_one_gets_the_result(handle):
    def stop(*_):
        raise InterruptedError("stop")

    previous = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(InterruptedError, match="stop"):
            handle.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert not handle.done()
    threading.Timer(0.05, handle.finish, args=(7,)).start()
    assert handle.wait() == 7


def test_an_ended_handle_is_waited_for_without_its_lock(handle):
    """In a thread that is interrupted between taking and returning it, nobody else may hang."""
    threading.Timer(0.05, handle.finish, args=(7,)).start()
    handle.wait()
    assert handle._ended.acquire(timeout=1)
    assert handle.wait() == 7
