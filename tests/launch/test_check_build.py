from __future__ import annotations

import subprocess
import sys

from hvdlite.launch import check_build, cli
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


def test_check_build(capsys):
    assert cli.main(["--check-build"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("hvdlite v")
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")][1:]
    assert titles == [
        "Available Frameworks:",
        "Available Controllers:",
        "Available MPI Libraries:",
        "Available Launchers:",
    ]
    assert [line for line in lines if line.startswith("    [X] MPI: mpi4py")]
    assert [line for line in lines if line.startswith("    [X] mpirun: ")]


def test_check_build_where_everything_is_missing():
    result = subprocess.run(
        [sys.executable, "-c", _WITHOUT_ANYTHING],
        cwd=ROOT,
        env=environment({"HVDLITE_MPIRUN": "/no/mpirun", "MPI4PY_LIBMPI": "/no/libmpi.so"}),
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
    rows = [line.strip() for line in result.stdout.splitlines() if line.startswith(" ")]
    assert all(row.startswith("[ ]") for row in rows)
    assert {"[ ] PyTorch", "[ ] TensorFlow", "[ ] Keras", "[ ] MPI"} <= set(rows)
    assert "[ ] mpirun: HVDLITE_MPIRUN=/no/mpirun is not a program" in rows


def test_a_crash_of_the_library_is_a_remark():
    code = "import os; os.kill(os.getpid(), 11)"
    assert check_build.ask([sys.executable, "-c", code]) == (False, "exit code -11")
