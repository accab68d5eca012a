"""A script for Horovod under hvdlite, in both ways in which it can be started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import mpirun
from tests.launch import launcher

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(180)

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "horovod_style.py"


def output(command, environment):
    done = subprocess.run(
        list(map(str, command)),
        env=environment,
        cwd=launcher.ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def check(lines, epochs):
    losses = [float(line.rpartition(" ")[2]) for line in lines[:-1]]
    assert len(losses) == epochs
    assert losses[-1] < losses[0]
    assert lines[-1] == "2 processes, equal weights: True"


@pytest.mark.slow
def test_with_hvdliterun():
    command = launcher.command("--horovod", "-np", 2, sys.executable, SCRIPT, "--epochs", 2)
    check(output(command, {**launcher.environment(), "OMP_NUM_THREADS": "1"}), epochs=2)


@pytest.mark.slow
def test_with_mpirun():
    options = ["--epochs", "2", "--fp16-allreduce"]
    command = mpirun.command(2, "-m", "hvdlite.horovod", SCRIPT, *options)
    check(output(command, mpirun.environment()), epochs=2)


def test_horovod_is_not_there_otherwise():
    done = subprocess.run(
        [sys.executable, SCRIPT], env=launcher.environment(), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "No module named 'horovod'" in done.stderr
