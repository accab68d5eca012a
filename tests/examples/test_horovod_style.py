"""A script for Horovod under hvdlite; `tests/launch/test_horovod.py` has the launcher's option."""

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


@pytest.mark.slow
def test_with_mpirun():
    done = subprocess.run(
        mpirun.command(2, "-m", "hvdlite.horovod", SCRIPT, "--epochs", "2", "--fp16-allreduce"),
        env=mpirun.environment(),
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    *reports, last = done.stdout.splitlines()
    first, second = (float(line.rpartition(" ")[2]) for line in reports)
    assert second < first
    assert last == "2 processes, equal weights: True"


def test_horovod_is_not_there_otherwise():
    done = subprocess.run(
        [sys.executable, SCRIPT], env=launcher.environment(), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "No module named 'horovod'" in done.stderr
