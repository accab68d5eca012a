from __future__ import annotations

import mmap
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from hvdlite.transport.shared_memory import futex
from hvdlite.transport.shared_memory.futex import Futex
from hvdlite.transport.shared_memory.segment import Arena
from tests.harness.mpirun import environment

pytestmark = pytest.mark.skipif(not futex.is_supported(), reason="needs Linux on x86-64")


@pytest.fixture
def word():
    return Futex.from_buffer(mmap.mmap(-1, 4096), 64)


def wait_for(word, seen, seconds):
    """Wait as its users do, who know that it may wake for no reason."""
    deadline = time.monotonic() + seconds
    while word.value == seen and (left := deadline - time.monotonic()) > 0:
        word.wait(seen, left)
    return word.value


def test_it_has_32_bits(word):
    word.value = 2**32 + 5
    assert word.value == 5
    word.value = 2**32 - 1
    assert word.value == 2**32 - 1
    start = time.monotonic()
    word.wait(2**32 - 1, 0.05)
    assert time.monotonic() - start > 0.03


def test_a_word_that_has_changed_is_not_waited_for(word):
    word.value = 3
    start = time.monotonic()
    word.wait(2, 10.0)
    assert time.monotonic() - start < 1.0


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.2, 1.1])
def test_a_wait_ends_in_time_without_an_error(word, seconds):
    start = time.monotonic()
    assert wait_for(word, 0, seconds) == 0
    assert seconds <= time.monotonic() - start < seconds + 0.5


@pytest.mark.parametrize("waiting", [1, 3])
def test_all_waiters_are_woken(word, waiting):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(wait_for(word, 0, 10.0)), daemon=True)
        for _ in range(waiting)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.05)  # a wait that begins later finds the word changed
    assert found == []
    start = time.monotonic()
    word.value = 9
    word.wake()
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - start < 1.0
    assert found == [9] * waiting


def test_a_wait_uses_no_processor(word):
    before = time.thread_time()
    wait_for(word, 0, 0.5)
    assert time.thread_time() - before < 0.05


def test_a_signal_is_served_while_its_thread_waits(word):
    def stop(*_):
        raise InterruptedError("stop")

    previous = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        start = time.monotonic()
        with pytest.raises(InterruptedError, match="stop"):
            wait_for(word, 0, 10.0)
        assert time.monotonic() - start < 2.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_another_process_wakes_a_wait():
    arena = Arena()
    word = Futex.from_buffer(arena.empty(4096, np.dtype(np.uint8)), 128)
    code = (
        "import os, time; from hvdlite.transport.shared_memory.futex import Futex;"
        "import numpy as np; from hvdlite.transport.shared_memory.segment import Peer;"
        f"memory = Peer(os.getppid(), {arena.key}).view(0, 4096, np.dtype(np.uint8));"
        "word = Futex.from_buffer(memory, 128);"
        "time.sleep(0.1); word.value = 77; word.wake()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], env=environment())
    try:
        assert wait_for(word, 0, 20.0) == 77
    finally:
        child.wait(20)


def test_what_the_system_refuses_is_an_error():
    word = Futex.from_address(64)  # nothing is mapped there
    with pytest.raises(OSError, match="futex"):
        word.wait(0, 0.01)
