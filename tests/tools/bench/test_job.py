"""The processes that keep cores busy while a benchmark measures."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdlite.tools.bench.job import computing

NODE = SimpleNamespace(rank=0, Barrier=lambda: None)
HOLD = """
import time
from types import SimpleNamespace
from hvdlite.tools.bench.job import computing
with computing(SimpleNamespace(rank=0, Barrier=lambda: print("begun", flush=True)), 2):
    time.sleep(60)
"""


def children(process):
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


def seconds(process):
    """Return the processor time of a process; None: it has ended."""
    try:
        numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if numbers[0] == "Z" else int(numbers[11]) / os.sysconf("SC_CLK_TCK")


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_processes_compute_until_the_end(count):
    before = children(os.getpid())
    with computing(NODE, count):
        own = [each for each in children(os.getpid()) if each not in before]
        assert len(own) == count
        for each in own:
            wait_until(lambda process=each: seconds(process) > 0.1)
    assert [each for each in own if seconds(each) is not None] == []


def test_one_rank_of_a_node_starts_them():
    before = children(os.getpid())
    with computing(SimpleNamespace(rank=1, Barrier=NODE.Barrier), 2):
        assert children(os.getpid()) == before


def test_they_end_with_a_rank_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE) as rank:
        assert rank.stdout.readline() == b"begun\n"
        own = children(rank.pid)
        assert len(own) == 2
        rank.send_signal(signal.SIGKILL)
    wait_until(lambda: all(seconds(each) is None for each in own))
