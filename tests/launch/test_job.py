"""The watch over mpirun, with small programs in its place."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdlite.launch import job
from hvdlite.launch.errors import LaunchError
from hvdlite.launch.rank import END_JOB


def run(script, box, quiet_end=signal.SIGTERM):
    return job.run([sys.executable, "-u", "-c", script], dict(os.environ), box, quiet_end)


@pytest.fixture
def box():
    with job.inbox() as opened:
        yield opened


def tell(box, *messages):
    with open(box.path, "w") as fifo:
        fifo.write("".join(f"{message}\n" for message in messages))


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (5, 5), (-9, 137)])
def test_without_a_report_the_code_is_that_of_mpirun(box, capfd, code, expected):
    end = f"sys.exit({code})" if code >= 0 else f"os.kill(os.getpid(), {-code})"
    assert run(f"import os, sys; {end}", box) == expected
    how = {
        0: "",
        5: "hvdliterun: mpirun exited with code 5\n",
        -9: "hvdliterun: mpirun was killed by signal 9 (SIGKILL)\n",
    }
    assert capfd.readouterr().err == how[code]


def test_the_first_report_wins_even_if_it_is_read_after_the_end(box, capfd):
    tell(box, "3 rank 1 exited with code 3", "4 rank 0 exited with code 4")
    assert run("raise SystemExit(1)", box) == 3
    assert capfd.readouterr().err == "hvdliterun: rank 1 exited with code 3\n"


def test_mpirun_is_ended_quietly_when_a_rank_asks_for_it(box):
    tell(box, "3 rank 1 exited with code 3", END_JOB)
    started = time.monotonic()
    assert run("import time; time.sleep(60)", box) == 3
    assert time.monotonic() - started < 3


def test_mpirun_is_ended_when_it_does_not_notice_a_failure(box, monkeypatch):
    monkeypatch.setattr(job, "_FAILED", ((0.2, signal.SIGTERM), (0.4, signal.SIGKILL)))
    tell(box, "3 rank 1 exited with code 3")
    ignore = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    started = time.monotonic()
    assert run(ignore, box, quiet_end=None) == 3
    assert 0.4 <= time.monotonic() - started < 3


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_to_the_launcher(box, capfd, number, code):
    previous = signal.getsignal(number)
    # What a rank reports after that is a consequence, not the reason.
    script = f"""
import signal, sys, time
def end(*_):
    with open({box.path!r}, "w") as fifo:
        fifo.write("1 rank 0 exited with code 1\\n")
    sys.exit(1)
signal.signal(15, end)
time.sleep(60)
"""
    started = time.monotonic()
    later = f"sleep 0.3; kill -{int(number)} {os.getpid()}"
    with subprocess.Popen(["sh", "-c", later]):
        assert run(script, box) == code
    assert time.monotonic() - started < 4
    assert signal.getsignal(number) is previous
    assert capfd.readouterr().err == ""


def test_mpirun_that_cannot_be_started(box):
    with pytest.raises(LaunchError, match="/no/mpirun: No such file") as caught:
        job.run(["/no/mpirun"], {}, box, None)
    assert caught.value.code == 126


def test_a_folder_that_cannot_be_removed_does_not_change_the_end(monkeypatch):
    """Processes that a rank has left running may write into its folder while it is removed."""
    remove = os.rmdir

    def refuse(path, **options):
        if path == "rank.0":
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        remove(path, **options)

    with job.inbox() as opened:
        folder = Path(opened.path).parent
        (folder / "rank.0").mkdir()
        monkeypatch.setattr(os, "rmdir", refuse)
    monkeypatch.undo()
    assert [entry.name for entry in folder.iterdir()] == ["rank.0"]
    shutil.rmtree(folder)


def test_reports_that_come_in_pieces(box):
    writer = os.open(box.path, os.O_WRONLY)
    try:
        os.write(writer, b"one\ntw")
        assert box.wait(1) == ["one"]
        os.write(writer, b"o\n")
        assert box.wait(1) == ["two"]
        assert box.wait(0) == []
    finally:
        os.close(writer)
