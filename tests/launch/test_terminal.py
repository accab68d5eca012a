"""hvdliterun at a terminal: lines that go on appear at once, and no other line is in them."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from tests.launch.launcher import ROOT, TIMEOUT, command, environment

# The ranks wait in the middle for a file, which the test makes when it has seen what they printed.
JOB = """
import os, sys, time
import hvdlite as hvd
hvd.init()
for step in hvd.progress(range(4), "epoch", unit="steps"):
    time.sleep(0.3)  # for another picture
    if step == 2:
        if hvd.rank() == 1:
            print("a line of rank 1", flush=True)
            print("a question? ", end="", flush=True)
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
if hvd.rank() == 1:
    print("an answer", flush=True)
hvd.barrier()
sys.exit(3 * hvd.rank())
"""


def screen(received):
    """The lines of a terminal that has received a text."""
    lines, column = [""], 0
    for piece in re.findall(r"\r|\n|\x1b\[K|\x1b\[\w+|[^\r\n\x1b]+", received):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            lines.append("")
            column = 0
        elif piece == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column] + piece + lines[-1][column + len(piece) :]
            column += len(piece)
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.timeout(2 * TIMEOUT)
def test_a_bar_is_live_and_whole(tmp_path):
    script, seen = tmp_path / "job.py", tmp_path / "seen"
    script.write_text(JOB)
    terminal, of_job = pty.openpty()
    job = subprocess.Popen(
        command("-np", 2, sys.executable, script, seen),
        cwd=ROOT,
        env=environment(),
        stdin=of_job,
        stdout=of_job,
        stderr=of_job,
        start_new_session=True,
    )
    os.close(of_job)
    received, deadline = b"", time.monotonic() + TIMEOUT
    try:
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 0.1)[0]:
                continue
            try:
                received += os.read(terminal, 1 << 16)
            except OSError:
                break  # the job has ended
            if b"50%" in received and b"a line of rank 1" in received and not seen.exists():
                before = received
                seen.touch()
        assert seen.exists(), received
        assert job.wait(TIMEOUT) == 3
    finally:
        job.kill()
        job.wait()
        os.close(terminal)
    assert b"100%" not in before
    lines = screen(received.decode())
    assert sorted(line for line in lines if "epoch" not in line) == [
        "a line of rank 1",
        "a question? an answer",
        next(line for line in lines if line.startswith("hvdliterun: rank 1 on host")),
    ]
    (bar,) = [line for line in lines if "epoch" in line]
    assert re.fullmatch(r"epoch 100% \|█+\| .* steps/s, in 00:\d\d, exchange \d+%", bar)
