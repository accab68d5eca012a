"""The watch over mpirun, with small programs instead of mpirun."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from hvdlite.errors import StartError
from hvdlite.launch import job
from hvdlite.launch.mpirun import OpenMPI
from hvdlite.launch.server import Server
from hvdlite.observe import protocol


class Program(OpenMPI):
    """A program in mpirun's place, which starts no ranks."""

    def arguments(self, num_proc, hosts, command, exported=(), more=()):
        return command[command.index(sys.executable, 1) :]


def of(*command, quiet_end=signal.SIGTERM):
    """A job whose mpirun is another program."""
    program = Program("mpirun", "5.0")
    program.quiet_end = quiet_end
    return job.Job(program, [], True, [sys.executable, *command], dict(os.environ))


def run(script, server, **options):
    """Return the exit code and the text about the job's end."""
    end = job.run(of("-u", "-c", script, **options), server)
    assert not end.state
    return end[:2]


@pytest.fixture
def server():
    with Server() as opened:
        yield opened


@pytest.fixture
def report(server):
    """A function by which a rank reports its exit code, and may ask for the job's end."""
    with contextlib.ExitStack() as stack:

        def send(rank, code, end=False):
            channel = protocol.connect(server.address, rank, {})
            stack.callback(channel.close)
            channel.send(protocol.REPORT, f"{code}".encode(), f"rank {rank} failed".encode())
            if end:
                channel.send(protocol.END_JOB)

        yield send


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (5, 5), (-9, 137)])
def test_without_a_report_the_code_is_that_of_mpirun(server, code, expected):
    end = f"sys.exit({code})" if code >= 0 else f"os.kill(os.getpid(), {-code})"
    how = {0: "", 5: "mpirun exited with code 5", -9: "mpirun was killed by signal 9 (SIGKILL)"}
    assert run(f"import os, sys; {end}", server) == (expected, how[code])


def test_the_first_report_wins_even_if_it_is_read_after_the_end(server, report):
    report(1, 3)
    while server._messages.empty():
        time.sleep(0.01)
    report(0, 4)
    assert run("raise SystemExit(1)", server) == (3, "rank 1 failed")


def test_mpirun_is_ended_quietly_when_a_rank_asks_for_it(server, report):
    report(1, 3, end=True)
    started = time.monotonic()
    assert run("import time; time.sleep(60)", server)[0] == 3
    assert time.monotonic() - started < 30


def test_mpirun_is_ended_when_it_does_not_notice_a_failure(server, report, monkeypatch):
    monkeypatch.setattr(job, "_FAILED", ((0.2, signal.SIGTERM), (0.4, signal.SIGKILL)))
    report(1, 3)
    ignore = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    started = time.monotonic()
    assert run(ignore, server, quiet_end=None)[0] == 3
    assert 0.4 <= time.monotonic() - started < 30


@pytest.mark.slow
def test_the_state_is_there_until_all_ranks_have_it_and_from_when_they_hand_it_over(server):
    def end(code):
        ended = job.run(of("-c", f"raise SystemExit({code})"), server)
        assert ended.code == code
        return ended.state

    given = server.state = [b"state"]
    with contextlib.closing(protocol.connect(server.address, 0, {})) as channel:
        channel.send(protocol.ASK)
        assert channel.receive(10) == (protocol.TASK, given)
        assert end(255) is given
        channel.send(protocol.KEEP)
        assert channel.receive(10)[0] == protocol.SEEN
        assert not end(1)
        channel.send(protocol.KEEP, b"another")
        assert channel.receive(10)[0] == protocol.SEEN
        assert [end(0), end(1)] == [[b"another"]] * 2


def test_without_a_rank_that_is_left_the_last_death_counts(capsys):
    with Server(ranks=2, spares=1) as server, contextlib.ExitStack() as stack:
        for rank, code in ((1, 137), (0, 3), (2, 1)):  # the spare's is a consequence
            channel = stack.enter_context(
                contextlib.closing(protocol.connect(server.address, rank, {}))
            )
            channel.send(protocol.DEATH, f"{code}".encode(), f"rank {rank} died".encode())
            while len(server.deaths) == 0 or server.deaths[-1].rank != rank:
                server.serve(0.01)
        channel.send(protocol.END_JOB)
        assert run("import time; time.sleep(60)", server) == (3, "no rank is left")
    told = ["rank 1 died; the other ranks go on", "rank 0 died; the other ranks go on"]
    assert capsys.readouterr().err.splitlines() == [
        *(f"hvdliterun: {line}" for line in [*told, "rank 2 died"])
    ]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_to_the_launcher(server, number, code):
    previous = signal.getsignal(number)
    # A rank's later report is a consequence, not the reason.
    script = f"""
import signal, sys, time
sys.path.append({os.path.dirname(protocol.__file__)!r})
import protocol
channel = protocol.connect({server.address!r}, 0, {{}})
def end(*_):
    channel.send(protocol.REPORT, b"1", b"rank 0 failed")
    sys.exit(1)
signal.signal(15, end)
time.sleep(60)
"""
    started = time.monotonic()
    later = f"sleep 0.3; kill -{int(number)} {os.getpid()}"
    with subprocess.Popen(["sh", "-c", later]):
        assert run(script, server) == (code, "")
    assert time.monotonic() - started < 30
    assert signal.getsignal(number) is previous


def test_mpirun_that_cannot_be_started(server):
    missing = job.Job(OpenMPI("/no/mpirun", "5.0"), [], True, ["true"], {})
    with pytest.raises(StartError, match="/no/mpirun: No such file") as caught:
        job.run(missing, server)
    assert caught.value.code == 126
