"""hvdliterun as a program, for the tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hvdlite.launch.server import Server

ROOT = Path(__file__).resolve().parents[2]
# A job of a few ranks takes seconds, and many on a busy machine.
TIMEOUT = 240.0
_REPORT_SECONDS = 20.0
EXTRA: dict[str, str] = {}
"""Variables for all runs: which MPI to use."""

# The launcher is to find these out by itself; and unbuffered lines of several ranks mix.
_NOT_INHERITED = ("OMPI_", "PRTE_", "PMIX_", "HVDLITE_", "HOROVOD_", "PYTHONUNBUFFERED")

# What libevent in Open MPI's mpirun says, once in thousands of jobs, as a busy machine's job ends.
_OF_MPIRUN = re.compile(r"^\[warn\] Epoll MOD.* Bad file descriptor\n", re.MULTILINE)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a user who has set nothing about MPI."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)
    }
    return {**kept, **EXTRA, **(extra or {})}


def command(*arguments: object) -> list[str]:
    """The command line of the launcher."""
    return [sys.executable, "-m", "hvdlite.launch", *map(str, arguments)]


def hvdliterun(
    *arguments: object,
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    **options: object,
) -> subprocess.CompletedProcess[str]:
    """Run the launcher to its end.

    Raises:
        AssertionError: It takes longer; with what has been printed, and what the ranks wait for.
    """
    with subprocess.Popen(
        command(*arguments),
        cwd=ROOT,
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        **options,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGQUIT)
            try:
                stdout, stderr = process.communicate(timeout=_REPORT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                stdout, stderr = process.communicate()
            text = f"{process.args} took more than {timeout:g} s; see below\n{stdout}{stderr}"
            raise AssertionError(text) from None
        except BaseException:
            process.kill()
            raise
    stderr = _OF_MPIRUN.sub("", stderr)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@contextlib.contextmanager
def running(*arguments: object, stdin: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[str]]:
    """The launcher while it runs, in a process group of its own as a shell would have it."""
    # A launcher that is killed cannot remove its temporary folder.
    folder = tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True)
    with (
        folder as tmpdir,
        subprocess.Popen(
            command(*arguments),
            cwd=ROOT,
            env=environment({"TMPDIR": tmpdir}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=stdin,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = path.read_text().rpartition(")")[2].split()[1]
            parents[int(path.parent.name)] = int(parent)
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {pid})


def survivors(pids: list[int], seconds: float = 5.0) -> list[int]:
    """Those of the processes that are still there after a while."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if _alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def serve_until(server: Server, condition: Callable[[], object]) -> None:
    """Have a server take messages until a condition holds, which it must do soon."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        server.serve(0.01)
    assert condition()


def _alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"
