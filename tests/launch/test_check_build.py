from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np

from hvdlite.launch import cli
from hvdlite.launch.programs import ask
from hvdlite.version import __version__
from tests.launch.launcher import ROOT, environment

_WITHOUT_ANYTHING = """
import importlib.metadata, importlib.util, sys
missing = ("torch", "tensorflow", "keras", "mpi4py")
found = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in missing else found(name)
def version(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = version
from hvdlite.launch.cli import main
sys.exit(main(["--check-build"]))
"""


def rows(printed):
    """Return the printed table as a dictionary."""
    return {line[:12].strip(): line[12:] for line in printed.splitlines()}


def test_check_build(capsys):
    assert cli.main(["--check-build"]) == 0
    found = rows(capsys.readouterr().out)
    assert found["hvdlite"] == __version__
    assert found["numpy"] == np.__version__
    assert {"PyTorch", "TensorFlow", "Keras", "MPI library", "mpirun"} < found.keys()
    assert "MPI" in found["mpirun"]


def test_check_build_where_everything_is_missing():
    result = subprocess.run(
        [sys.executable, "-c", _WITHOUT_ANYTHING],
        cwd=ROOT,
        env=environment({"HVDLITE_MPIRUN": "/no/mpirun", "MPI4PY_LIBMPI": "/no/libmpi.so"}),
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
    found = rows(result.stdout)
    assert {found[name] for name in ("PyTorch", "TensorFlow", "Keras", "mpi4py")} == {
        "not installed"
    }
    assert found["MPI library"].startswith("none: ")
    assert found["mpirun"] == "none: HVDLITE_MPIRUN=/no/mpirun is not a program"


def test_a_crash_of_the_library_is_a_remark():
    code = "import os; os.kill(os.getpid(), 11)"
    assert ask([sys.executable, "-c", code]) == (False, "exit code -11")


def test_a_program_that_does_not_start_is_named(tmp_path):
    (tmp_path / "ssh").touch(0o644)
    assert ask([str(tmp_path / "ssh")]) == (False, f"{tmp_path / 'ssh'}: Permission denied")
    assert ask(["no-such-program"]) == (False, "there is no no-such-program here")


def test_a_program_that_leaves_another_behind_has_answered(tmp_path):
    """As an ssh that stays for later connections (ControlPersist), and keeps its output open."""
    (tmp_path / "ssh").write_text("#!/bin/sh\nsleep 30 &\necho $! >&2\nexit $1\n")
    (tmp_path / "ssh").chmod(0o755)
    began = time.monotonic()
    assert ask([str(tmp_path / "ssh"), "0"], 20.0) == (True, "exit code 0")
    works, child = ask([str(tmp_path / "ssh"), "3"], 20.0)
    assert not works
    assert time.monotonic() - began < 15
    os.kill(int(child), signal.SIGKILL)
