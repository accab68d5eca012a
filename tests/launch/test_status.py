"""SIGUSR2 has hvdliterun say what each rank does; SIGQUIT ends the job after that."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from hvdlite.launch import status
from hvdlite.observe.status import Pending
from tests.harness import mpirun
from tests.launch.launcher import descendants, hvdliterun, running, survivors

SCRIPT = """
import ctypes, time
import hvdlite as hvd

hvd.init()

def forward():
    if hvd.rank() == 1:
        time.sleep(60)
    if hvd.rank() == 2:
        print("here", flush=True)
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):  # deadlock, with the interpreter's lock held
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)

for step in range(3):
    hvd.allreduce(1.0, name="loss")
print("here", flush=True)
forward()
hvd.allreduce(1.0, name="accuracy")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "pending jobs" / "script.py"  # as the line with the answer begins
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


_HEADER = re.compile(r"^ranks? (.*), most recent call first:\n", re.M)
_WAITING = r"hvdliterun: ranks 0, 3: \d+ s in 'accuracy', missing on rank 1, no answer from rank 2"
_NO_ANSWER = r"rank 2 \(process \d+\): no answer from Python within 2 s: in compiled .*"


def ask(process):
    """Ask what the four ranks do; return what is known of operations, and the stacks by rank."""
    process.send_signal(signal.SIGUSR2)
    text = ""
    while len(re.findall(r"\d+", " ".join(_HEADER.findall(text)))) < 4 or not text.endswith(
        " in <module>\n"
    ):
        line = process.stderr.readline()
        assert line, text
        assert "(no stack)" not in line, text + line
        text += line
    known, *parts = _HEADER.split(text)
    return known.splitlines(), dict(zip(parts[::2], parts[1::2], strict=True))


def ask_until_they_wait(process):
    """Ask again until ranks 0 and 3 wait for rank 1, and rank 2 holds the interpreter."""
    for _ in range(5):
        assert process.stdout.readline() == "here\n"
    return ask_again(process)


def ask_again(process):
    while True:
        lines, stacks = ask(process)
        # They get there some time after their lines, on a busy machine more; and one of them may
        # just look whether the others live.
        is_there = re.fullmatch(_WAITING, lines[0]) and re.fullmatch(_NO_ANSWER, lines[-1])
        if is_there and "0, 3" in stacks:
            return lines, stacks


def test_a_rank_that_has_not_answered_is_not_said_to_be_there():
    def wait(*members):
        return [Pending("named: x", "'x'", 4.0, members)]

    def lines(*answers):
        return status._waiting(dict(enumerate(answers)))

    two, three = wait(0, 1), wait(0, 1, 2)
    assert lines(two, None) == ["rank 0: 4 s in 'x', no answer from rank 1"]
    assert lines(two) == ["rank 0: 4 s in 'x', no answer from rank 1"]  # on another host
    assert lines(two, two) == ["ranks 0, 1: 4 s in 'x', there on all ranks"]
    assert lines(three, [], None) == [
        "rank 0: 4 s in 'x', missing on rank 1, no answer from rank 2",
        "rank 1: no operation of hvdlite",
    ]


def test_all_ranks_are_asked_and_go_on(script):
    with running("-np", "4", sys.executable, script) as process:
        for how in ask_until_they_wait, ask_again:
            lines, stacks = how(process)
            assert re.fullmatch(_WAITING, lines[0])
            assert lines[1] == "rank 1: no operation of hvdlite"
            assert re.fullmatch(_NO_ANSWER, lines[2])
            assert list(stacks) == ["0, 3", "1", "2"]
            assert f'"{script}", line 9 in forward' in stacks["1"].splitlines()[0]
            assert f'"{script}", line 14 in forward' in stacks["2"].splitlines()[0]
            assert f'"{script}", line 20 in <module>' in stacks["0, 3"].splitlines()[-1]
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("how", ["to the launcher", "at a terminal"])
def test_the_job_ends_after_the_report(script, how):
    controller, terminal = os.openpty()
    stdin = terminal if how == "at a terminal" else subprocess.DEVNULL
    with running("-np", "4", sys.executable, script, stdin=stdin) as process:
        ask_until_they_wait(process)
        started = time.monotonic()
        if how == "at a terminal":
            os.killpg(process.pid, signal.SIGQUIT)
            ranks = descendants(process.pid)
        else:
            ranks = descendants(process.pid)
            process.send_signal(signal.SIGQUIT)
        assert process.wait(20) == 128 + signal.SIGQUIT
        assert time.monotonic() - started < 15
        text = process.stderr.read()
        assert "missing on rank 1, no answer from rank 2\nrank 1: no operation of hvdlite\n" in text
        assert f'"{script}", line 9 in forward' in text
        assert survivors(ranks) == []
    os.close(controller)
    os.close(terminal)


def test_a_stall_that_ends_the_job_is_explained(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    variables = {"HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "1"}
    done = hvdliterun("-np", 2, sys.executable, script, env=variables)
    assert done.returncode == 1
    told = r"^hvdliterun: rank 0: \d s in 'accuracy', missing on rank 1\n"
    assert re.search(told, done.stderr, re.M)
    assert done.stderr.count(f'"{script}", line 9 in forward') == 1
    assert re.search(r"waited \d s for rank 1 in 'accuracy'", done.stderr)


def test_a_rank_that_has_not_written_its_process_yet(tmp_path):
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / "status").touch()
    assert status.report(str(tmp_path)).startswith("no rank on this host has called hvd.init() yet")


@pytest.mark.parametrize("own", [True, False])
def test_without_hvdliterun(own):
    """The report goes to standard error; a handler of the program is left alone."""
    handler = "signal.signal(signal.SIGUSR2, lambda *_: print('own'))" if own else ""
    code = (
        f"import os, signal, hvdlite as hvd\n{handler}\nhvd.init()\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\nhvd.shutdown()\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\nhvd.init(); print(hvd.allreduce(2.0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=mpirun.environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0
    if own:
        assert (done.stdout, done.stderr) == ("own\nown\n2.0\n", "")
    else:
        assert done.stdout == "2.0\n"
        assert "line 4 in <module>\n" in done.stderr
        assert "line 6 in <module>\n" in done.stderr
        assert done.stderr.count("hvdlite: rank 0 waits for: no operation\n") == 1
